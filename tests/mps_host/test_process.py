"""The command itself, as a process: start, adoption, termination, leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playground.node import MpsHostProcess

from dra_driver.errors import RetryableError
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.detachment import Detachments
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.host_files import MpsHostFiles, mps_layout


@pytest.fixture
def command(host):
    plugins = host.layout.root.parent / "plugins"
    return [
        sys.executable, "-m", "dra_driver.cli.main", "mps-host",
        "--kubelet-plugins-directory-path", str(plugins),
        "--nvidia-driver-root", str(host.machine.host_root),
        "--container-driver-root", "/nonexistent",
        *([] if os.geteuid() == 0 else ["--allow-plain-shm"]),
    ]  # fmt: skip


@pytest.fixture
def layout(host):
    layout = mps_layout(host.layout.root.parent / "plugins" / "gpu.nvidia.com")
    host.layout = layout
    return layout


def test_a_host_leaves_its_daemons_and_the_next_one_takes_them_over(host, command, layout, tmp_path):
    log = tmp_path / "log"
    first = MpsHostProcess(command, layout, log)
    try:
        client = MpsHostFiles(layout)
        status = client.ensure(host.spec(default_active_thread_percentage=25))
        memory = Path(f"/proc/{first.process.pid}/status").read_text().split("VmRSS:")[1].split()[0]
        assert int(memory) < 48_000
        first.stop()
        assert layout.lock.read_bytes() == b""
        assert processes.identify(status.pid) is not None
        first = MpsHostProcess(command, layout, log)
        assert client.ensure(status.spec).pid == status.pid
        client.stop("gpu-2")
        assert host.left() == []
        assert "mps_daemon_adopted" in log.read_text()
    finally:
        first.stop()


def test_a_host_obeys_the_detachment_of_its_plugin_directory(host, command, layout, tmp_path):
    process = MpsHostProcess(command, layout, tmp_path / "log")
    detachments = Detachments(layout.root.parent, Sysfs().this_boot())
    try:
        client = MpsHostFiles(layout)
        detachments.begin(3600)
        with pytest.raises(RetryableError, match="NVML is closed until"):
            client.ensure(host.spec())
        assert host.left() == []
        detachments.end()
        assert client.ensure(host.spec()).state == "ready"
        client.stop("gpu-2")
    finally:
        process.stop()


def test_help_says_what_happens_to_daemons(command):
    shown = subprocess.run([*command[:4], "--help"], capture_output=True, text=True, check=True).stdout
    assert "continues when" in shown
    assert "--allow-plain-shm" in shown


def test_the_driver_root_may_appear_after_the_host_has_started(tmp_path: Path):
    """Neither directory is there while the NVIDIA driver is not: it will be where the container sees the host."""
    from dra_driver.cli.mps_host import _driver_root

    host, inside = tmp_path / "run/nvidia/driver", tmp_path / "driver-root/run/nvidia/driver"
    assert _driver_root(str(host), str(inside)) == str(inside)
    host.mkdir(parents=True)
    assert _driver_root(str(host), str(inside)) == str(host), "outside a container"
    inside.mkdir(parents=True)
    assert _driver_root(str(host), str(inside)) == str(inside)
