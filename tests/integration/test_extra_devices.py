"""Additional devices of containers, through the whole driver: IMEX channels, and the host's nodes for RDMA
and storage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from dra_driver.cdi.spec_step import ExtraDeviceFinder
from dra_driver.host import imex
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from dra_driver.model.plan import Plan
from tests.integration.conftest import DRIVER, Node

Json = dict[str, Any]
Make = Callable[..., Node]
TRAY = "gb200-nvl72-tray"
CHANNEL = "/dev/nvidia-caps-imex-channels/channel"
NOT_FOR_HOURS = 0.3


@pytest.fixture
def tray(make_node: Make) -> Node:
    return make_node(TRAY)


def spec_of(node: Node, ref: ClaimRef) -> Json:
    [path] = node.cdi.glob(f"k8s.{DRIVER}-claim_{ref.uid}.yaml")
    return json.loads(path.read_text())


def channels(node: Node, ref: ClaimRef) -> list[tuple[str, int, int]]:
    """Path, major and minor of the channels that containers of the claim get."""
    nodes = spec_of(node, ref)["containerEdits"]["deviceNodes"]
    return [(one["path"], one["major"], one["minor"]) for one in nodes if one["path"].startswith(CHANNEL)]


def beside(node: Node, ref: ClaimRef) -> dict[str, list[str]]:
    """Return the nodes of each device that do not belong to a GPU, by device."""
    return {
        device["name"].removeprefix(f"{ref.uid}-"): [
            one["path"]
            for one in device["containerEdits"]["deviceNodes"]
            if not one["path"].removeprefix("/dev/nvidia").isdigit() and "/dri/" not in one["path"]
        ]
        for device in spec_of(node, ref)["devices"]
    }


# --- IMEX channels ------------------------------------------------------------------------------


@pytest.mark.parametrize(("channel", "numbers"), [(3, [3]), ("all", range(16))])
def test_claims_on_gpus_in_a_fabric_get_the_channel(
    tray: Node, channel: int | str, numbers: Sequence[int]
) -> None:
    tray.machine.set_system(imex="ready", imex_channels=16)
    devices = tray.running(4, imex_channel=channel).devices()
    assert {json.dumps(device["attributes"]["imexChannels"]) for device in devices} == {'{"int": 16}'}
    ref = tray.claim("training")
    tray.ready(ref)
    assert channels(tray, ref) == [(f"{CHANNEL}{number}", 236, number) for number in numbers]
    assert not (tray.machine.host_root / f"{CHANNEL}3".lstrip("/")).exists()  # described, as MIG's nodes are
    tray.must_unprepare(ref)
    assert (tray.specs(), tray.records()) == ([], [])


def test_claims_wait_for_the_daemon_and_no_other_claim_does(
    tray: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    tray.machine.set_system(imex="initializing")
    name = tray.running(4, imex_channel=0).devices()[0]["name"]
    monitor = tray.allocated_by_hand("monitor", name, adminAccess=True)
    training = tray.claim("training")
    for state, said in {
        "initializing": "reports 'INITIALIZING'",
        "hung": "does not answer",
        "killed": "Connection refused",
        "stopped": "its control socket /etc/nvidia-imex/imex_ctrl.sock is missing",
    }.items():
        tray.machine.set_system(imex=state)
        with monkeypatch.context() as patch:
            if state == "hung":
                patch.setattr(imex, "_TIMEOUT_S", NOT_FOR_HOURS)
            outcomes = tray.prepare(training, monitor)
        assert isinstance(outcomes[monitor.uid], Prepared)
        assert said in outcomes[training.uid].error
        assert "systemctl status nvidia-imex" in outcomes[training.uid].error
        assert tray.records() == [f"{monitor.uid}.json"]
    assert channels(tray, monitor) == []
    tray.machine.set_system(imex="ready")
    tray.ready(training)
    assert channels(tray, training) == [(f"{CHANNEL}0", 236, 0)]


def test_a_daemon_that_listens_nowhere_is_reported_how(tray: Node) -> None:
    config = tray.machine.host_root / imex.CONFIG.lstrip("/")
    config.write_text("IMEX_CMD_ENABLED=0\n")
    tray.running(4, imex_channel=0)
    tray.refused(tray.claim("training"), "set IMEX_CMD_ENABLED=1 and IMEX_CMD_UNIX_DOMAIN_PATH=", imex.CONFIG)
    config.unlink()
    tray.refused(tray.claim("more"), f"is not installed: {imex.CONFIG} is missing")


def test_channels_that_vanish_before_the_spec_is_written(tray: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tray.running(4, imex_channel=0).driver
    check = ExtraDeviceFinder.check

    def then_gone(self: ExtraDeviceFinder, plan: Plan) -> None:
        check(self, plan)
        tray.machine.set_system(imex="ready", imex_channels=0)

    monkeypatch.setattr(ExtraDeviceFinder, "check", then_gone)
    tray.refused(tray.claim("training"), "the kernel lists no nvidia-caps-imex-channels")
    monkeypatch.undo()
    tray.machine.set_system(imex="ready", imex_channels=2048)
    driver.discovery.scan_now(10)
    tray.ready(tray.claim("more"))


def test_claim_waits_for_the_daemon_again_after_a_reboot(tray: Node) -> None:
    """The daemon starts with the node, and the claim's record is there before it."""
    driver = tray.running(4, imex_channel=3).driver
    ref = tray.claim("training")
    first = tray.ready(ref)
    driver.stop()
    tray.machine.reboot()
    tray.machine.set_system(imex="initializing")
    tray.running(4, imex_channel=3)
    outcome = tray.prepare(ref)[ref.uid]
    assert isinstance(outcome, Failed)
    assert "reports 'INITIALIZING'" in outcome.error
    tray.machine.set_system(imex="ready")
    assert tray.ready(ref) == first


# --- nodes of the host --------------------------------------------------------------------------


def test_by_configuration_every_claim_gets_what_is_there(make_node: Make) -> None:
    node = make_node()
    node.machine.set_system(host_devices=["mofed", "gds"])
    node.running(host_devices=("gds", "mofed", "gdrcopy", "nvswitch"))
    first, second = node.claim("first"), node.claim("second")
    with structlog.testing.capture_logs() as logs:
        node.ready(first)
        node.ready(second)
    [paths] = beside(node, first).values()
    assert paths == [
        *(f"/dev/nvidia-fs{number}" for number in range(8)),
        *(f"/dev/infiniband/uverbs{number}" for number in range(8)),
        "/dev/infiniband/rdma_cm",
        "/dev/nvidia-nvswitchctl",
        *(f"/dev/nvidia-nvswitch{number}" for number in range(4)),
    ]
    [device] = spec_of(node, first)["devices"]
    # The simulated storage nodes belong to root only; one of another group would not open for other users.
    nodes = device["containerEdits"]["deviceNodes"]
    assert {one["fileMode"] for one in nodes if "nvidia-fs" in one["path"]} == {0o660}
    mounts = {one["containerPath"]: one["hostPath"] for one in device["containerEdits"]["mounts"]}
    root = str(node.machine.host_root)
    assert mounts == {"/run/udev": f"{root}/run/udev", "/etc/cufile.json": f"{root}/etc/cufile.json"}
    [reported] = [
        line for line in logs if line["event"] == "host_devices_missing"
    ]  # once, not for every claim
    assert reported["notes"] == [
        "hostDevices gdrcopy is configured, but this node has no /dev/gdrdrv; `modprobe gdrdrv` on the node, and "
        "start the service gdrcopy"
    ]


def test_paths_of_a_real_host(tmp_path: Path) -> None:
    """A driver container has its own /dev, without the nodes of other modules: those are the host's."""
    from dra_driver.host.device_nodes import HostDeviceFinder
    from dra_driver.model.host import DeviceNode, HostPaths

    class Reader:
        def read(self, path: str) -> DeviceNode | None:
            return DeviceNode(path, "c", 510, 0) if path in ("/dev/gdrdrv", "/x/dev/nvidiactl") else None

    paths = HostPaths(driver_root="/x", host_driver_root="/run/nvidia/driver", host_root=str(tmp_path))
    [node] = HostDeviceFinder(paths, nodes=Reader()).find("gdrcopy").nodes
    assert (node.node.path, node.host_path) == ("/dev/gdrdrv", "/dev/gdrdrv")
    assert replace(node.node, path="") == DeviceNode("", "c", 510, 0)
