"""SELinux: what the containers of a claim share with a daemon bears their label."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.mps_host.daemon_mounts import (
    CONTAINER_FILE,
    KernelMounter,
    MountsWherePossible,
    SelinuxLabels,
    has_selinux,
    is_tmpfs,
)
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S
from tests.mps_host.conftest import Host

IS_ROOT = os.geteuid() == 0


class Attributes:
    """Replaces setxattr(2), which needs root for labels."""

    def __init__(self, error: OSError | None = None) -> None:
        self.set: dict[str, bytes] = {}
        self._error = error

    def __call__(self, path: Path, name: str, value: bytes) -> None:
        if self._error is not None:
            raise self._error
        assert name == "security.selinux"
        self.set[path.name] = value
        if IS_ROOT:
            os.setxattr(path, name, value)


def on_selinux(host: Host, labels: SelinuxLabels) -> None:
    """From now on the host is on a kernel that has SELinux."""
    mounter = MountsWherePossible(host.layout.root, labels)
    host.tools = replace(host.tools, labels=labels, mounter=mounter)


def label_of(path: str) -> str:
    try:
        return os.getxattr(path, "security.selinux").decode()
    except OSError:
        return ""


@tabled("text", "has")
def test_the_kernel_says_whether_it_has_selinux(tmp_path: Path, text: str | None, has: bool) -> None:
    file = tmp_path / "filesystems"
    if text is not None:
        file.write_text(text)
    assert has_selinux(file) is has


def test_pipe_log_and_shared_memory_are_labelled_when_the_kernel_has_selinux(host: Host) -> None:
    attributes = Attributes()
    on_selinux(host, SelinuxLabels(enabled=True, set_attribute=attributes))
    host.supervisor().ensure(host.spec(), PATIENCE_S)
    wanted = CONTAINER_FILE.encode()
    assert attributes.set == {"pipe": wanted, "log": wanted, "shm": wanted}
    if IS_ROOT:
        directories = host.layout.directories("gpu-2")
        for path in (directories.pipe, directories.log, directories.shm):
            assert label_of(path) == "system_u:object_r:container_file_t:s0"


def test_nothing_is_labelled_when_the_kernel_has_no_selinux(host: Host) -> None:
    host.supervisor().ensure(host.spec(), PATIENCE_S)
    directories = host.layout.directories("gpu-2")
    assert [label_of(path) for path in (directories.pipe, directories.log, directories.shm)] == ["", "", ""]


def test_a_failure_is_reported_once_and_stops_no_daemon(host: Host, logs: list[dict[str, object]]) -> None:
    unsupported = Attributes(OSError(errno.ENOTSUP, "Operation not supported"))
    on_selinux(host, SelinuxLabels(enabled=True, set_attribute=unsupported))
    supervisor = host.supervisor()
    for index in (2, 3):
        assert supervisor.ensure(host.spec(index), PATIENCE_S).state == "ready"
    reported = [line for line in logs if line["event"] == "mps_not_labelled"]
    assert [line["label"] for line in reported] == [CONTAINER_FILE]


class Mounting(KernelMounter):
    """Keeps the options of each mount, and answers as a kernel with or without SELinux does."""

    def __init__(self, root: Path, labels: SelinuxLabels, *, knows_context: bool) -> None:
        super().__init__(root, labels)
        self.options: list[str] = []
        self._knows_context = knows_context

    def _mount_tmpfs(self, path: Path, options: str) -> bool:
        self.options.append(options)
        return self._knows_context or "context" not in options


@pytest.mark.parametrize("knows_context", [True, False])
def test_the_tmpfs_is_mounted_with_the_label_when_the_kernel_takes_it(
    tmp_path: Path, logs: list[dict[str, object]], knows_context: bool
) -> None:
    mounter = Mounting(tmp_path, SelinuxLabels(enabled=True), knows_context=knows_context)
    mounter.mount(tmp_path)
    plain = "mode=1777"
    labelled = f'{plain},context="system_u:object_r:container_file_t:s0"'
    assert mounter.options == ([labelled] if knows_context else [labelled, plain])
    assert [line["event"] for line in logs] == ([] if knows_context else ["mps_not_labelled"])


@pytest.mark.skipif(not IS_ROOT, reason="mounting needs root")
def test_the_tmpfs_is_mounted_without_the_label_when_this_kernel_refuses_it(host: Host) -> None:
    on_selinux(host, SelinuxLabels(enabled=True))
    host.supervisor().ensure(host.spec(), PATIENCE_S)
    assert is_tmpfs(Path(host.layout.directories("gpu-2").shm))


def test_labelled_file_is_not_changed(tmp_path: Path) -> None:
    attributes = Attributes()
    labels = SelinuxLabels(enabled=True, set_attribute=attributes)
    labels.label(tmp_path)
    labels.label(tmp_path)
    if IS_ROOT:
        attributes.set.clear()
        labels.label(tmp_path)
        assert attributes.set == {}
