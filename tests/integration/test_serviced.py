"""`gpu-dra-driver serviced` as a process, with a running driver."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from dra_driver.cli.serviced import serviced_gpu
from dra_driver.errors import RetryableError, StateError
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, received
from tests.integration.test_process import call

Serviced = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def serviced(node: Node) -> Serviced:
    return lambda *words: call("serviced", *words, *node.machine_flags)


def is_kept(node: Node, xid: int) -> bool:
    kept = node.plugin_dir / "health.json"
    return kept.exists() and f'"value":"{xid}"' in kept.read_text()


def tainted(node: Node) -> dict[str, list[str]]:
    return {
        one["name"]: [taint["key"] for taint in one["taints"]] for one in node.devices() if one.get("taints")
    }


def test_serviced_gpu_loses_its_xid_where_the_driver_reports_no_recovery_action(
    node: Node, serviced: Serviced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.health.book._WRITE_AGAIN_S", 0.05)
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 0.05)
    node.machine.unload_driver()
    node.machine.load_driver("535.183.01")
    eventually(lambda: node.driver.health.monitor.book.driver_version == "535.183.01")
    node.wait_devices(8)
    eventually(lambda: received(node.driver) == 8)
    names = [device["name"] for device in node.devices()]
    gpu = next(one for one in node.machine.current().present if names[3].endswith(one.uuid[4:12]))
    none = serviced(names[3])
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == (
        f"gpu-dra-driver: GPU {gpu.uuid} has no health reason that waits for a reset; gpu-dra-driver reports the GPU "
        "as healthy\n"
    )
    node.machine.raise_xid(gpu.uuid, 119)
    eventually(lambda: tainted(node) == {names[3]: ["gpu.nvidia.com/xid"]})
    eventually(lambda: is_kept(node, 119))
    unknown = serviced("gpu-00000000")
    assert (unknown.returncode, "there is no GPU 'gpu-00000000'" in unknown.stderr) == (2, True)
    assert "waits for a reset" in serviced(names[4]).stderr
    done = serviced(names[3])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"GPU {gpu.uuid}: cleared: Xid 119: the GPU's system processor does not answer\n"
    eventually(lambda: tainted(node) == {})
    node.machine.raise_xid(gpu.uuid, 62)
    eventually(lambda: is_kept(node, 62))
    node.driver.stop()
    stopped = serviced(gpu.bus_id)
    assert (stopped.returncode, "gpu-dra-driver is not running on this node" in stopped.stderr) == (1, True)


def test_serviced_without_the_id_of_the_boot_says_so_and_writes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin would take what is written for that of another boot."""
    monkeypatch.setattr("dra_driver.cli.serviced._TIMEOUT_S", 0.5)
    eventually(lambda: received(node.driver) == 8)
    node.machine.raise_xid(2, 95)
    eventually(lambda: is_kept(node, 95))
    monkeypatch.setattr("dra_driver.host.sysfs.Sysfs.boot_id", lambda _: None)
    with pytest.raises(StateError, match="cannot read the ID of this boot"):
        serviced_gpu(node.settings, node.machine.gpu(2).uuid)
    assert not (node.plugin_dir / "serviced.json").exists()


def test_serviced_says_what_keeps_a_reason_that_does_not_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.cli.serviced._TIMEOUT_S", 0.5)
    eventually(lambda: received(node.driver) == 8)
    node.machine.set_recovery_action(2, 1)
    node.machine.raise_xid(2, 95)
    eventually(lambda: is_kept(node, 95))
    with pytest.raises(RetryableError, match=r"still reports .* NVML requests no action"):
        serviced_gpu(node.settings, node.machine.gpu(2).uuid)
