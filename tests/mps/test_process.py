"""The command itself, as a child and as a daemon's neighbour: start, adoption, termination, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.inventory.detachment import Detachments
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.child_host import spawn_host
from dra_driver.mps.client import MpsClient
from dra_driver.mps.layout import mps_layout


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


def test_a_host_is_spawned_found_again_and_leaves_its_daemons(host, command, layout, tmp_path):
    log = tmp_path / "log"
    first = spawn_host(command, layout, log=log)
    try:
        client = MpsClient(layout)
        status = client.ensure(host.spec(default_active_thread_percentage=25))
        assert spawn_host(command, layout).pid is None, "one that runs is used"
        memory = Path(f"/proc/{first.pid}/status").read_text().split("VmRSS:")[1].split()[0]
        assert int(memory) < 48_000
        first.stop()
        assert first.has_ended
        assert not layout.socket.exists()
        assert processes.identify(status.pid) is not None
        first = spawn_host(command, layout, log=log)
        assert client.ensure(status.spec).pid == status.pid
        client.stop("gpu-2")
        assert host.left() == []
        assert "mps_daemon_adopted" in log.read_text()
    finally:
        first.stop()


def test_a_host_obeys_the_detachment_of_its_plugin_directory(host, command, layout, tmp_path):
    process = spawn_host(command, layout, log=tmp_path / "log")
    detachments = Detachments(layout.root.parent, processes.boot_id())
    try:
        client = MpsClient(layout)
        detachments.begin(3600)
        with pytest.raises(RetryableError, match="NVML is closed until"):
            client.ensure(host.spec())
        assert host.left() == []
        detachments.end()
        assert client.ensure(host.spec()).state == "ready"
        client.stop("gpu-2")
    finally:
        process.stop()


def test_a_killed_host_is_replaced(host, command, layout, tmp_path):
    log = tmp_path / "log"
    first = spawn_host(command, layout, log=log)
    status = MpsClient(layout).ensure(host.spec())
    os.kill(first.pid, signal.SIGKILL)
    while not first.has_ended:
        time.sleep(0.01)
    second = spawn_host(command, layout, log=log)
    assert MpsClient(layout).ensure(host.spec()).pid == status.pid
    second.stop()


def test_a_host_that_cannot_start_is_an_error(layout):
    with pytest.raises(RetryableError, match="ended while it started"):
        spawn_host(["false"], layout)
    with pytest.raises(RetryableError, match="cannot start the MPS host nonsense"):
        spawn_host(["nonsense"], layout)
    with pytest.raises(RetryableError, match=r"did not answer within 0\.1 s"):
        spawn_host(["sleep", "60"], layout, timeout_s=0.1)


def test_the_daemonset_outlives_updates_and_shows_its_mounts_to_the_host():
    import yaml

    path = Path(__file__).parents[2] / "daemonset/components/mps/daemonset.yaml"
    spec = yaml.safe_load(path.read_text())["spec"]
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert (pod["hostPID"], pod["automountServiceAccountToken"], container["args"]) == (
        True,
        False,
        ["mps-host"],
    )
    plugins = next(mount for mount in container["volumeMounts"] if mount["name"] == "plugins")
    assert plugins["mountPropagation"] == "Bidirectional"
    assert "livenessProbe" not in container


def test_help_says_what_happens_to_daemons(command):
    shown = subprocess.run([*command[:4], "--help"], capture_output=True, text=True, check=True).stdout
    assert "run on when" in shown
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
