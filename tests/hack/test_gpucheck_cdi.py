"""The CDI spec beside the host's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpucheck.compare import check_spec, spec_of_all
from gpucheck.machine import Report, View

from dra_driver.simulator import create_machine
from tests.cdi.cdi_schema import faults
from tests.hack.support import looking_at


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[View]:
    """A machine on which somebody has run nvidia-smi, which makes the capability nodes."""
    monkeypatch.delenv("SIMULATE_HOSTILE")
    create_machine("h100-mig-static", tmp_path / "machine", device_nodes="described", cdi_hook=True)
    with looking_at("h100-mig-static", tmp_path) as found:
        yield found


def checked(view: View, spec: dict) -> Report:
    report = Report()
    check_spec(report, view, spec)
    return report


def test_the_spec_of_all_devices_is_one_that_runtimes_take(view: View) -> None:
    spec = spec_of_all(view)
    assert faults(spec) == []
    assert len(spec["devices"]) == 13


def without_nodes(view: View, sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(view.platform.nodes).read
    monkeypatch.setattr(
        type(view.platform.nodes), "read", lambda self, path: None if sign in path else real(self, path)
    )


def test_every_path_that_is_not_there_is_told(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(view.platform.paths.driver_root)
    spec = spec_of_all(view)
    assert checked(view, spec).differences == []
    assert len(spec["devices"]) == 13
    (root / "usr/lib/x86_64-linux-gnu/libnvidia-ngx.so.580.95.05").unlink()
    (root / "usr/bin/nvidia-cdi-hook").unlink()
    without_nodes(view, "/nvidia5", monkeypatch)
    found = "\n".join(checked(view, spec).differences)
    assert "libnvidia-ngx.so.580.95.05: is not a file or socket on the host" in found
    assert "device node /dev/nvidia5 is not on the host" in found
    assert "nvidia-cdi-hook is not a program on the host" in found


def test_capability_nodes_may_be_missing_but_not_be_others(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of_all(view)
    node = next(n for n in spec["devices"][0]["containerEdits"]["deviceNodes"] if "nvidia-cap" in n["path"])
    node["minor"] += 1
    assert [text.partition(": (")[2] for text in checked(view, spec).differences] != []
    without_nodes(view, "nvidia-caps", monkeypatch)
    assert checked(view, spec).differences == []
