"""A tray whose GPUs are not registered with their NVLink fabric yet, through the whole driver: what is published, and
which claims are prepared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dra_driver.app.daemon import Driver
from dra_driver.health import poller
from dra_driver.model.claim import ClaimRef
from dra_driver.nvml.reader import NvmlReader
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import Node
from tests.integration.test_extra_devices import CHANNEL, TRAY, channels

Json = dict[str, Any]
CLUSTER, CLIQUE = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11", 32766
NOT_STARTED, IN_PROGRESS, COMPLETED = 1, 2, 3
COMPLETE = {
    "fabricClusterUUID": {"string": CLUSTER},
    "fabricCliqueID": {"int": CLIQUE},
    "nvlinkDomain": {"string": f"{CLUSTER}.{CLIQUE}"},
    "imexChannels": {"int": 2048},
}
PENDING = ["pending"]
IN_A_WHILE = 1000.0


@pytest.fixture
def tray(make_node: Callable[..., Node]) -> Node:
    return make_node(TRAY)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls of health come often; discovery still reads everything once a minute."""
    monkeypatch.setattr(poller, "_POLL_EVERY_S", 0.05)


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is polled only when something else calls for it."""
    monkeypatch.setattr(poller, "_POLL_EVERY_S", IN_A_WHILE)


def fabric_of(device: Json) -> tuple[list[str], Json]:
    """The values of its `fabric` taint, and its attributes that speak of the fabric."""
    taints = [taint["value"] for taint in device.get("taints", []) if taint["key"] == "gpu.nvidia.com/fabric"]
    attributes = {name: value for name, value in device["attributes"].items() if name in COMPLETE}
    return taints, attributes


def fabrics(node: Node) -> list[tuple[list[str], Json]]:
    return [fabric_of(device) for device in node.devices()]


def published(node: Node) -> Iterator[tuple[list[str], Json]]:
    """Every state of every device that was ever published."""
    for change in node.server.store.changes_after(1):
        if change.resource.plural == "resourceslices" and change.after is not None:
            yield from map(fabric_of, change.after["spec"].get("devices", []))


def has_polled(driver: Driver, node: Node) -> bool:
    return all(driver.health.monitor.book.answered_at(gpu.uuid) for gpu in node.machine.current().present)


def complete(node: Node) -> None:
    eventually(lambda: fabrics(node) == [([], COMPLETE)] * 4)
    assert ([], {}) not in list(published(node)), "published without the taint and without the attributes"


def by_hand(node: Node, name: str, index: int = 0, **more: Any) -> ClaimRef:
    """A claim for a device that its taint would keep a scheduler from."""
    return node.allocated_by_hand(name, node.devices()[index]["name"], **more)


@pytest.mark.usefixtures("often")
def test_a_claim_waits_for_the_fabric_and_then_gets_its_channel(tray: Node) -> None:
    tray.machine.set_fabric(state=IN_PROGRESS)
    tray.running(4, imex_channel=3)
    assert fabrics(tray) == [(PENDING, {})] * 4
    ref = by_hand(tray, "training")
    gpu = tray.devices()[0]["attributes"]["uuid"]["string"]
    tray.refused(
        ref,
        f"GPU {gpu}",
        "is not registered with its NVLink fabric yet: the registration is in progress",
        "the kubelet retries",
        "nvidia-fabricmanager",
    )
    tray.machine.set_fabric(state=COMPLETED)
    complete(tray)
    tray.ready(ref)
    assert channels(tray, ref) == [(f"{CHANNEL}3", 236, 3)]


@pytest.mark.usefixtures("seldom")
def test_a_prepare_that_comes_before_the_next_poll_checks_the_fabric_itself(tray: Node) -> None:
    tray.machine.set_fabric(state=NOT_STARTED)
    driver = tray.running(4, imex_channel=3).driver
    eventually(lambda: has_polled(driver, tray))
    tray.machine.set_fabric(state=COMPLETED)
    ref = by_hand(tray, "training")
    tray.ready(ref)
    assert channels(tray, ref) == [(f"{CHANNEL}3", 236, 3)]
    complete(tray)


@pytest.mark.usefixtures("often")
def test_the_taint_stays_until_discovery_has_read_the_fabric(
    tray: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    tray.machine.set_fabric(state=IN_PROGRESS)
    driver = tray.running(4, imex_channel=3).driver
    eventually(lambda: has_polled(driver, tray))
    may_read, read = threading.Event(), NvmlReader.read_inventory

    def late(reader: NvmlReader) -> Any:
        assert may_read.wait(PATIENCE_S)
        return read(reader)

    monkeypatch.setattr(NvmlReader, "read_inventory", late)
    tray.machine.set_fabric(state=COMPLETED)
    keys = {"fabric"}
    eventually(
        lambda: (
            not any(
                reason.key in keys
                for state in driver.health.monitor.book.states().values()
                for reason in state.reasons
            )
        )
    )
    tray.machine.set_recovery_action(0, 1)  # a later round of the publisher
    eventually(lambda: any(len(device["taints"]) == 2 for device in tray.devices()))
    assert fabrics(tray) == [(PENDING, {})] * 4
    may_read.set()
    complete(tray)


@pytest.mark.parametrize("finds", ["often", "seldom"])
def test_a_fabric_that_is_set_up_again_is_never_published_without_its_taint(
    tray: Node, request: pytest.FixtureRequest, finds: str
) -> None:
    """Whether a health poll or discovery finds it first. Claims prepared before are answered during that."""
    request.getfixturevalue(finds)
    discovery = tray.running(4, imex_channel=3).driver.discovery
    complete(tray)
    ref = by_hand(tray, "training")
    first = tray.ready(ref)
    tray.machine.set_fabric(state=IN_PROGRESS)
    if finds == "seldom":
        discovery.request_rescan()
    eventually(lambda: fabrics(tray) == [(PENDING, {})] * 4)
    assert tray.ready(ref) == first
    assert channels(tray, ref) == [(f"{CHANNEL}3", 236, 3)]
    tray.machine.set_fabric(state=COMPLETED)
    if finds == "seldom":
        discovery.request_rescan()
    complete(tray)


def test_a_fabric_that_fails_for_ever_is_reported_with_what_to_check(tray: Node) -> None:
    reported: list[tuple[Json, str]] = [
        ({"state": NOT_STARTED}, "yet: the registration has not started"),
        ({"state": IN_PROGRESS}, "yet: the registration is in progress"),
        (
            {"status": 999},
            "could not be registered with its NVLink fabric: the registration failed with NVML error 999",
        ),
        (
            {"state": 7},
            "does not report whether it is registered with an NVLink fabric: NVML reports state 7",
        ),
    ]
    for index, (facts, _) in enumerate(reported):
        tray.machine.set_fabric(index, **facts)
    tray.running(4, imex_channel=3)
    refs = [by_hand(tray, f"training-{index}", index) for index in range(4)]
    for ref, (_, said) in zip(refs * 2, reported * 2, strict=True):
        tray.refused(ref, said, "nvidia-fabricmanager", "nvidia-smi -q | grep -A10 Fabric")


def test_a_fabric_that_cannot_be_read_now_is_not_taken_for_none(tray: Node) -> None:
    tray.machine.set_fault("nvmlDeviceGetGpuFabricInfoV", code="unknown", gpu=0)
    tray.running(4, imex_channel=3)
    ref = by_hand(tray, "training")
    tray.refused(ref, "does not report whether", "Unknown Error", "the kubelet retries")
    tray.machine.clear_faults()
    tray.ready(ref)
    assert channels(tray, ref) == [(f"{CHANNEL}3", 236, 3)]
