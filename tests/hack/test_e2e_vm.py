"""hack/e2e_vm.py on machines where it cannot run; elsewhere `make e2e-vm` tests it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import e2e_vm
import pytest
from localcluster.shell import ClusterError

NOT_DEBIAN = "kernel and QEMU are Debian packages, and this machine does not run Debian"


def _fails(*_arguments: Any) -> Any:
    raise ClusterError("apt-get update failed:\nCould not resolve deb.debian.org")


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        (e2e_vm.debian, "is_debian", lambda: False, NOT_DEBIAN),
        (e2e_vm.shell, "find_program", {"apt-get": "apt-get", "gcc": "gcc"}.get, "make is not installed"),
        (e2e_vm, "_fetch", _fails, "apt-get update failed: Could not resolve deb.debian.org"),
    ],
    ids=["no Debian", "no make", "no network"],
)  # fmt: skip
def test_machine_that_cannot_have_the_guest_is_skipped_with_one_line(
    module: Any,
    name: str,
    value: Callable[..., Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(e2e_vm.os, "uname", lambda: type("Machine", (), {"machine": "x86_64"}))
    monkeypatch.setattr(e2e_vm.debian, "is_debian", lambda: True)
    monkeypatch.setattr(e2e_vm.shell, "find_program", str)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sys, "argv", ["e2e_vm.py"])
    assert e2e_vm.main() == 0
    assert capsys.readouterr().out == f"e2e-vm: skipped: {reason}\n"
