"""What the kubelet and its plugins owe each other on one node: the real driver and a kubelet of data, over sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playground.kubelet_client import KubeletError

from dra_driver.errors import StateError
from dra_driver.health.kubelet_stream import HealthStream
from dra_driver.kubelet.plugin import KubeletPlugin
from dra_driver.model.claim import Failed, Prepared, PreparedDevice
from dra_driver.model.sharing import SharingRule, share_all
from tests.conformance.conftest import OTHER_DRIVER, ConformanceNode
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, NODE, result
from tests.kubelet.support import FakeClaims

SHARE_IDS = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(2)]

MakeNode = Callable[..., ConformanceNode]


def test_c01_registration(make_node: MakeNode) -> None:
    """The plugin registers, though GetInfo fails at first, and again after a restart of the kubelet or of its own."""
    node = make_node()
    node.kubelet.inject("GetInfo", "connection refused", times=3)
    driver = node.start_driver()
    assert [call.error for call in node.kubelet.calls("GetInfo")[:4]] == ["connection refused"] * 3 + [None]
    node.wait_devices(8)
    ref = node.claim("one")
    answer = node.prepare(ref)
    node.kubelet.restart()
    node.kubelet.wait_registered(DRIVER)
    assert node.prepare(ref) == answer
    driver.stop()
    node.kubelet.wait_registered(DRIVER, count=0)
    node.start_driver()
    assert node.prepare(ref) == answer


def test_c03_hanging_and_failing_calls(node: ConformanceNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs or fails leaves the pod waiting; the next one succeeds, after a kubelet restart as well."""
    ref = node.claim("one")
    node.server.faults.slow("resourceclaims", 30.0)
    outcome = node.kubelet.prepare(DRIVER, [ref], timeout_s=2.2)[ref.uid]
    assert isinstance(outcome, Failed), "the answer with the reason comes before the kubelet hangs up"
    node.server.faults.clear()
    node.kubelet.inject("NodePrepareResources", "deadline exceeded", after=True)
    with pytest.raises(KubeletError):
        node.prepare(ref)
    assert isinstance(node.prepare(ref)[ref.uid], Prepared), "the answer was lost, so the kubelet asks again"
    node.kubelet.inject("NodeUnprepareResources", "deadline exceeded", after=True)
    with pytest.raises(KubeletError):
        node.unprepare(ref)
    node.take_back(ref)
    assert node.is_clean()
    node.server.faults.fail(20, 403, reason="Forbidden", path="resourceclaims")
    assert isinstance(node.prepare(ref)[ref.uid], Failed)
    node.server.faults.clear()
    node.kubelet.restart()
    node.kubelet.wait_registered(DRIVER)
    answer = node.prepare(ref)
    assert isinstance(answer[ref.uid], Prepared)

    def refuse(_uid: str) -> None:
        raise StateError("cannot remove the record: the file system is read-only")

    with monkeypatch.context() as broken:
        broken.setattr(node.driver.records, "delete", refuse)
        assert isinstance(node.unprepare(ref)[ref.uid], Failed)
    node.kubelet.restart()
    node.kubelet.wait_registered(DRIVER)
    node.take_back(ref)
    assert node.is_clean()


def test_c04_unprepare_of_deleted_pods(node: ConformanceNode) -> None:
    """Unprepare needs no claim in the API server, no memory of the kubelet, and no Prepare before it."""
    ref, never = node.claim("gone"), node.claim("never")
    node.ready(ref)
    for name in ("gone", "never"):
        node.delete_claim(name)
    node.kubelet.restart()
    node.kubelet.wait_registered(DRIVER)
    asked = len(node.server.requests)
    node.take_back(ref, never)
    assert node.is_clean()
    read = [request.path for request in node.server.requests[asked:] if request.method == "GET"]
    assert [path for path in read if "resourceclaims" in path] == []
    assert isinstance(node.prepare(never)[never.uid], Failed), "a late Prepare of it gets nothing"
    assert node.is_clean()


def test_c06_one_connection(node: ConformanceNode) -> None:
    """Calls and the health stream share one connection."""
    kubelet = node.use_kubelet(health="v1")
    [instance] = kubelet.wait_registered(DRIVER)
    eventually(lambda: kubelet.health(DRIVER))
    node.wait_devices(8)
    ref = node.claim("one")
    for _ in range(3):
        node.prepare(ref)
        node.unprepare(ref)
        assert len(_accepted(instance.endpoint)) == 1


def _accepted(socket: Path) -> list[str]:
    """The open connections that this socket accepted.

    The kernel keeps the name under which a socket was bound, which was a hidden one in the same directory; the
    listening socket itself has another state. The plugin's directory has no other socket.
    """
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    connected = "03"
    return [
        row[7] for row in rows if row[5] == connected and row[7:] and Path(row[7]).parent == socket.parent
    ]


def test_c07_two_drivers_in_one_claim(
    node: ConformanceNode, other_driver: Callable[[ConformanceNode, FakeClaims], KubeletPlugin]
) -> None:
    """While another driver of the claim fails or restarts, our part stays prepared, and ends when the kubelet asks."""
    claims = FakeClaims()
    claims.on_prepare = lambda refs: {ref.uid: Failed("no link") for ref in refs}
    plugin = other_driver(node, claims)
    ours = node.devices()[0]["name"]
    theirs = result("eth1", "nic") | {"driver": OTHER_DRIVER}
    ref = node.allocated_by_hand("mixed", theirs, ours)
    answer = node.prepare(ref)
    assert [device.device for device in answer[ref.uid].devices] == [ours]
    assert node.kubelet.prepare(OTHER_DRIVER, [ref]) == {ref.uid: Failed("no link")}
    plugin.stop()
    assert node.prepare(ref) == answer, "the kubelet asks all drivers of the claim again"
    claims = FakeClaims()
    other_driver(node, claims)
    node.restart_driver()
    assert node.prepare(ref) == answer
    assert isinstance(node.kubelet.prepare(OTHER_DRIVER, [ref])[ref.uid], Prepared)
    assert node.records() == [f"{ref.uid}.json"]
    claims.on_unprepare = lambda refs: {ref.uid: Failed("link is busy") for ref in refs}
    for outcome in (Failed("link is busy"), None):
        assert node.kubelet.unprepare(OTHER_DRIVER, [ref]) == {ref.uid: outcome}
        assert node.unprepare(ref) == {ref.uid: None}, "the kubelet tells all drivers of the claim again"
        assert node.is_clean()
        claims.on_unprepare = FakeClaims().on_unprepare


@pytest.mark.parametrize("version", ["v1alpha1", "v1"])
def test_c10_health_of_devices(node: ConformanceNode, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health turns bad and good again with a message, and goes to one stream only, which ends with the plugin."""
    streams: list[int] = []
    ended: list[int] = []
    watch = HealthStream.watch

    def counted(self: HealthStream, request: Any, context: Any) -> Iterator[Any]:
        streams.append(1)
        yield from watch(self, request, context)
        ended.append(1)

    monkeypatch.setattr(HealthStream, "watch", counted)
    monkeypatch.setattr("dra_driver.health.poller._POLL_EVERY_S", 0.05)
    node.driver.stop()
    kubelet = node.use_kubelet(health=version, health_retry_s=0.05)
    driver = node.start_driver()
    node.wait_devices(8)
    key = (NODE, node.devices()[2]["name"])

    def shown() -> tuple[str, str]:
        return kubelet.health(DRIVER).get(key, ("", ""))

    eventually(lambda: shown()[0] == "HEALTHY")
    refs = [node.claim(f"claim-{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(
            isinstance(answer[ref.uid], Prepared)
            for ref, answer in zip(refs, pool.map(node.prepare, refs), strict=True)
        )
    node.machine.set_recovery_action(2, 1)
    eventually(lambda: shown()[0] == "UNHEALTHY" and "reset" in shown()[1])
    assert {state for name, (state, _) in kubelet.health(DRIVER).items() if name != key} == {"HEALTHY"}
    node.machine.set_recovery_action(2, 0)
    eventually(lambda: shown()[0] == "HEALTHY")
    assert (streams, ended) == ([1], [])
    driver.stop()
    eventually(lambda: ended == [1])
    assert streams == [1], "the stream ends with the driver"


@pytest.mark.parametrize("shares", [0, 1, 2])
def test_c11_share_ids(make_node: MakeNode, shares: int) -> None:
    """The answer carries the ID of each share of a device, and none for a device that is not shared."""
    node = make_node()
    node.start_driver(**({"sharing": share_all(SharingRule("shares", 4))} if shares else {}))
    device = node.wait_devices(8)[0]["name"]
    results = [result(device, shareID=share) for share in SHARE_IDS[:shares]] or [device]
    ref = node.allocated_by_hand("shares", *results)
    answer = node.ready(ref)
    told: list[tuple[str, str | None]] = [(entry.device, entry.share_id) for entry in answer.devices]
    assert told == [(device, share) for share in (SHARE_IDS[:shares] or [None])]
    assert all(isinstance(entry, PreparedDevice) and entry.cdi_ids for entry in answer.devices)
    node.take_back(ref)
    assert node.is_clean()
