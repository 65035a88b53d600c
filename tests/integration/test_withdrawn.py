"""Unhealthy devices on a whole node where taints keep no pod away: Kubernetes 1.34 and 1.35 as they are by default, and
a scheduler that ignores taints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace

import pynvml
import pytest

from dra_driver.model.health import HealthTarget
from dra_driver.model.record import ClaimRecord
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import Node, poll_all, received
from tests.integration.test_mig import named

MakeNode = Callable[..., Node]


def names(node: Node) -> list[str]:
    return [device["name"] for device in node.devices()]


def until_named(node: Node, expected: Iterable[str]) -> None:
    wanted = list(expected)
    eventually(lambda: names(node) == wanted)


def register_all(node: Node) -> None:
    """NVML reports an Xid only to those that registered for the GPU before."""
    eventually(lambda: received(node.driver) == 8)


def well_again(node: Node) -> None:
    node.machine.restore_gpu(0)
    node.driver.discovery.request_rescan()
    poll_all(node.driver)


@pytest.mark.parametrize(
    ("minor", "settings"), [(34, {}), (35, {}), (36, {"unhealthy_devices": "withdraw"})], ids=str
)
def test_a_lost_gpu_is_withdrawn_if_taints_keep_no_pod_away_and_comes_back(
    make_node: MakeNode, minor: int, settings: dict
) -> None:
    """As the server drops them, or the scheduler ignores them, which only a person knows."""
    node = make_node(minor=minor).running(**settings)
    published = names(node)
    node.machine.lose_gpu(0)
    until_named(node, published[1:])
    if not settings:
        eventually(lambda: node.events("SliceFieldsDropped"))
    well_again(node)
    until_named(node, published)


def test_a_claimed_gpu_stays_until_its_claim_ends(make_node: MakeNode) -> None:
    """A monitor with admin access keeps nothing on offer."""
    node = make_node(minor=35).running()
    published = names(node)
    ref = node.claim("one")
    node.prepare(ref, node.allocated_by_hand("monitor", *published, adminAccess=True))
    register_all(node)
    node.machine.raise_xid(0, 79)
    node.machine.raise_xid(1, 79)
    until_named(node, [published[0], *published[2:]])
    node.unprepare(ref)
    until_named(node, published[2:])


def test_a_claim_that_ends_while_the_pool_is_built_keeps_its_gpu_no_longer(make_node: MakeNode) -> None:
    """Its record was read before, and the GPU judged after."""
    node = make_node(minor=35).running()
    published = names(node)
    ref = node.claim("one")
    node.prepare(ref)
    register_all(node)
    driver = node.driver
    read = driver.records.all
    ended: list[str] = []

    def records() -> Mapping[str, ClaimRecord]:
        found = read()
        if ref.uid in found and any(state.reasons for state in driver.health.monitor.book.states().values()):
            node.unprepare(ref)
            ended.append(ref.uid)
        return found

    driver.publishing._records = SimpleNamespace(all=records)
    node.machine.raise_xid(0, 79)
    until_named(node, published[1:])
    assert ended == [ref.uid]


def test_mig_devices_of_a_lost_gpu_go_with_their_counters(make_node: MakeNode) -> None:
    """Counters are kept, taints are not: one gate of Kubernetes 1.35 is on."""
    node = make_node(minor=35, gates={"DRAPartitionableDevices": True})
    node.start_driver(dynamic_mig=True)
    assert node.driver.publishing.publisher.wait_published(PATIENCE_S)
    published = names(node)
    used = named(node, "1g.10gb", 0)
    gpu = used.partition("-mig-")[0]
    node.prepare(node.allocated_by_hand("small", used))
    register_all(node)
    # The change of its MIG mode ended the GPU's registration, until the monitor's next round.
    eventually(lambda: node.machine.raise_xid(0, 79) or node.driver.health.monitor.book.history.xid_counts())
    until_named(node, [name for name in published if not name.startswith(gpu) or name == used])
    sets = [entry["name"] for part in node.slices() for entry in part["spec"].get("sharedCounters", [])]
    assert len(sets) == 8, "what the claim takes is counted on"


def test_an_older_server_with_the_gate_on_gets_no_more_taints_than_it_takes(make_node: MakeNode) -> None:
    node = make_node(minor=34, gates={"DRADeviceTaints": True}).running()
    node.machine.raise_xid(0, 95)
    node.machine.raise_xid(0, 0, kind=pynvml.nvmlEventTypeDoubleBitEccError)
    node.machine.set_fabric(0, state=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS)
    node.machine.set_remapped_rows(0, pending=1)
    node.machine.set_recovery_action(0, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    poll_all(node.driver)
    gpu = HealthTarget(node.devices()[0]["attributes"]["uuid"]["string"])
    eventually(
        lambda: len({reason.key for reason in node.driver.health.monitor.book.state(gpu).reasons}) == 5
    )
    eventually(lambda: len(node.devices()[0].get("taints", [])) == 4)
    assert not node.driver.publishing.publisher.problem


ELSEWHERE = "delete the pod so that it starts on another GPU"


@tabled("minor", "settings", "advice")
def test_a_prepare_advises_what_helps(make_node: MakeNode, minor: int, settings: dict, advice: str) -> None:
    node = make_node(minor=minor).running(**settings)
    ref = node.claim("one")
    node.machine.lose_gpu(0)
    eventually(lambda: node.driver.discovery.latest().lost_uuids)
    eventually(lambda: advice in str(node.prepare(ref)[ref.uid]))
    assert (f"or {ELSEWHERE}" in str(node.prepare(ref)[ref.uid])) == (ELSEWHERE in advice)
