"""A claim takes a GPU out of service, against a driver at work: what waits, what stays usable, and what comes back."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import pytest

from dra_driver.claims import lifecycle
from dra_driver.claims.waiting import WaitTimeouts
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.scrapes import scraped
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node, opaque, sliced
from tests.integration.test_process import call
from tests.integration.test_serviced import tainted

GPU_RESET = 1


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "WaitTimeouts", partial(WaitTimeouts, last_s=44.0))


def maintenance(node: Node, name: str, *devices: str) -> ClaimRef:
    return node.allocated_by_hand(name, *devices, config=opaque("MaintenanceConfig"), adminAccess=True)


def in_maintenance(node: Node) -> tuple[list[str], ClaimRef]:
    """The names of all devices, and a prepared claim that takes the fourth GPU out of service."""
    before = names(node)
    ref = maintenance(node, "reset", before[3])
    node.ready(ref)
    return before, ref


def states(node: Node) -> dict[str, str]:
    found = node.driver.detachments.maintenances(node.driver.records.all().values())
    return {one.claim.name: one.state for one in found}


def names(node: Node) -> list[str]:
    return [device["name"] for device in node.devices()]


def failure(node: Node, ref: ClaimRef) -> str:
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Failed), outcome
    return outcome.error


def monitored(node: Node) -> int:
    """Of how many GPUs a metric says whether the plugin watches them."""
    return sum(name == "nvidia_dra_gpu_monitored" for name, _ in scraped(node.driver.metrics))


def reset(node: Node, gpu: str) -> Any:
    return call("simulate", "reset", gpu, "--simulator-dir", str(node.settings.simulator_dir))


def test_gpu_with_an_xid_is_reset_by_a_claim_and_its_taint_ends(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.health.rules.state.SETTLE_S", 1)
    before = names(node)
    running, late = node.allocated_by_hand("running", before[1]), node.allocated_by_hand("late", before[2])
    answer = node.ready(running)
    node.machine.set_recovery_action(3, GPU_RESET)
    node.machine.raise_xid(3, 119)
    eventually(lambda: tainted(node).keys() == {before[3]})
    ref = maintenance(node, "reset", before[3])
    prepared = node.ready(ref)
    assert [one.device for one in prepared.devices] == [before[3]]
    assert states(node) == {"reset": "active"}
    assert names(node) == [name for name in before if name != before[3]], "other GPUs stay published"
    assert reset(node, "3").returncode == 0
    error = failure(node, late)
    assert "NVML is closed until 2" in error
    assert "for maintenance claim default/reset; NVML opens again when the claim is released" in error
    assert node.ready(running) == answer
    assert node.ready(ref) == prepared, "the next pod of the Job gets the claim as it is"
    assert states(node) == {"reset": "active"}
    node.must_unprepare(ref)
    assert states(node) == {}
    node.wait_devices(8)
    assert names(node) == before
    eventually(lambda: tainted(node) == {})
    node.ready(late)


def test_maintenance_waits_for_a_running_claim_and_other_claims_stay_away(node: Node) -> None:
    name = names(node)[3]
    running, late = node.allocated_by_hand("running", name), node.allocated_by_hand("late", name)
    node.ready(running)
    ref = maintenance(node, "reset", name)
    error = failure(node, ref)
    assert (
        "waits for the claims on its GPUs: default/running; maintenance starts when their pods are gone"
        in error
    )
    assert states(node) == {"reset": "waiting"}
    eventually(lambda: name not in names(node))
    assert "NVML is closed" not in str(node.driver.problems()), "nothing is closed while it waits"
    node.must_unprepare(running)
    assert f"the GPU of device {name} is in maintenance for claim default/reset" in failure(node, late)
    node.ready(ref)
    assert states(node) == {"reset": "active"}
    node.must_unprepare(ref)
    eventually(lambda: name in names(node))
    node.ready(late)


def test_second_maintenance_claim_waits_for_the_first(node: Node) -> None:
    before = names(node)
    first, second = maintenance(node, "first", before[3]), maintenance(node, "second", before[5])
    node.ready(first)
    assert "for maintenance claim default/first" in failure(node, second)
    assert states(node) == {"first": "active"}
    node.must_unprepare(first)
    eventually(lambda: isinstance(node.prepare(second)[second.uid], Prepared))
    assert states(node) == {"second": "active"}


def test_time_that_is_over_opens_nvml_and_keeps_the_gpu_withdrawn(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(node)
    ref, late = maintenance(node, "reset", before[3]), node.allocated_by_hand("late", before[2])
    prepared = node.ready(ref)
    monkeypatch.setattr(node.driver.detachments, "_clock", lambda: node.driver.detachments.written().until_s)
    eventually(lambda: node.driver.discovery.unavailable() is None)
    assert states(node) == {"reset": "overdue"}
    node.ready(late)
    assert node.ready(ref) == prepared, "and it closes NVML no more"
    assert node.driver.discovery.unavailable() is None
    assert before[3] not in names(node)
    node.must_unprepare(ref)
    eventually(lambda: names(node) == before)


def test_detach_end_opens_nvml_and_detach_names_the_claim(node: Node) -> None:
    before, ref = in_maintenance(node)
    refused = call("detach", before[5], *node.machine_flags)
    assert (refused.returncode, "claims use the GPUs: default/reset" in refused.stderr) == (1, True)
    until = node.driver.detachments.now()
    for duration in ("10s", "2h"):
        forced = call("detach", before[5], "--force", "--for", duration, *node.machine_flags)
        assert (forced.returncode, "for maintenance claim default/reset; NVML opens" in forced.stderr) == (
            1,
            True,
        )
    assert node.driver.detachments.now() == until
    ended = call("detach", "--end", *node.machine_flags)
    assert ended.stdout.startswith("gpu-dra-driver opens NVML again")
    eventually(lambda: node.driver.discovery.unavailable() is None)
    assert states(node) == {"reset": "overdue"}
    assert before[3] not in names(node)
    node.must_unprepare(ref)
    eventually(lambda: names(node) == before)


def test_restart_during_maintenance_keeps_the_slices_and_nvml_closed(node: Node) -> None:
    before = names(node)
    running = node.allocated_by_hand("running", before[1])
    answer = node.ready(running)
    ref = maintenance(node, "reset", before[3])
    prepared = node.ready(ref)
    slices = node.slices()
    node.restart_driver()
    assert node.ready(running) == answer
    assert node.ready(ref) == prepared
    assert states(node) == {"reset": "active"}
    assert not node.driver.detachments.is_nvml_open()
    assert node.slices() == slices
    assert node.driver.is_ready(), "a rolling update goes on"
    assert [one.code for one in node.driver.discovery.problems()] == ["gpus-unavailable"], (
        "no driver is missing"
    )
    node.must_unprepare(ref)
    node.wait_devices(8)


@pytest.mark.parametrize("writer", ["newer release", "damaged"])
def test_gpu_of_a_claim_whose_record_cannot_be_read_stays_withdrawn(node: Node, writer: str) -> None:
    before, ref = in_maintenance(node)
    record = node.driver.records.path(ref.uid)
    document = json.loads(record.read_text())
    document["steps"].append({"kind": "of-a-newer-release"})
    record.write_text("{" if writer == "damaged" else json.dumps(document))
    node.restart_driver()
    node.driver.detachments.end()
    eventually(lambda: node.driver.discovery.unavailable() is None)
    inventory = node.driver.discovery.latest()
    assert inventory is not None
    is_left_out = node.driver.publishing.left_out(dropped=False)
    assert [device.name for device in inventory.devices() if is_left_out(device)] == [before[3]]
    node.must_unprepare(ref)
    node.wait_devices(8)


def test_process_that_stands_by_closes_nvml_for_a_claim_and_opens_it_again(node: Node) -> None:
    before = names(node)
    node.stand_by()
    eventually(lambda: len(node.machine.clients(with_own=True)) == 2)
    ref = maintenance(node, "reset", before[3])
    eventually(lambda: isinstance(node.prepare(ref)[ref.uid], Prepared))
    assert not node.driver.detachments.is_nvml_open()
    assert reset(node, "3").returncode == 0
    node.must_unprepare(ref)
    eventually(lambda: node.driver.discovery.unavailable() is None)
    node.wait_devices(8)
    eventually(lambda: len(node.machine.clients(with_own=True)) == 2)


def test_health_and_time_slices_are_those_of_before_and_nothing_is_made_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("book", "monitor"):
        monkeypatch.setattr(f"dra_driver.health.{place}.FRESH_S", 0.2)
    with node.machine._change() as state:
        state.by_uuid[node.machine.gpu(1).uuid].persistence = 0
    before = names(node)
    sliced_ref = node.allocated_by_hand("sliced", before[1], config=sliced("Long"))
    node.ready(sliced_ref)
    states_before = node.driver.health.book.states()
    assert monitored(node) == 8
    ref = maintenance(node, "reset", before[3])
    node.ready(ref)
    assert node.machine.timeslice(1) == 0, "the NVIDIA driver released the GPU"
    eventually(lambda: not node.driver.health.book.is_fresh(node.machine.gpu(1).uuid))
    assert node.driver.health.problems() == []
    assert node.driver.health.book.states() == states_before
    assert node.driver.health.gpus() is None
    assert monitored(node) == 0, "an unwatched GPU would cause an alert"
    node.must_unprepare(ref)
    eventually(lambda: node.machine.timeslice(1) == 3)
    eventually(lambda: node.driver.health.gpus() is not None)


def test_gpu_returns_only_after_nvml_has_been_read_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    before, ref = in_maintenance(node)
    with monkeypatch.context() as patch:
        patch.setattr(node.driver.discovery, "_read_everything", lambda: True)
        node.must_unprepare(ref)
        node.driver.publishing.publisher._publish_once()
        assert before[3] not in names(node)
    eventually(lambda: names(node) == before)


def test_stale_maintenance_claim_is_released_while_nvml_is_closed(node: Node) -> None:
    """Its pod was force-deleted, or it was deleted while the node was off: no process can be found without NVML."""
    before, _ = in_maintenance(node)
    node.delete_claim("reset")
    reconciler = node.driver.claims.reconciler
    reconciler.check()
    reconciler.clock = lambda: time.monotonic() + reconciler.rhythm.grace_s
    reconciler.check()
    assert states(node) == {}
    eventually(lambda: names(node) == before)
    assert node.driver.detachments.written() is None


def test_slices_that_cannot_be_written_keep_nvml_open(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.inventory.maintenance_step._WITHDRAWING_S", 0.5)
    name = names(node)[3]
    ref, late = maintenance(node, "reset", name), node.allocated_by_hand("late", names(node)[2])
    node.server.faults.fail(10**6, 503, path="resourceslices", method="PUT")
    node.server.faults.fail(10**6, 503, path="resourceslices", method="PATCH")
    assert "the ResourceSlices of this node still have devices" in failure(node, ref)
    assert node.driver.detachments.written() is None
    node.ready(late)
    node.server.faults.clear()
    eventually(lambda: isinstance(node.prepare(ref)[ref.uid], Prepared))


def test_claim_whose_files_cannot_be_removed_does_not_keep_nvml_closed(node: Node) -> None:
    before, ref = in_maintenance(node)
    [spec] = node.cdi.glob("*")
    spec.unlink()
    spec.mkdir()
    assert node.unprepare(ref)[ref.uid] is not None
    eventually(lambda: node.driver.discovery.unavailable() is None)
    assert states(node) == {"reset": "overdue"}
    assert before[3] not in names(node)
    spec.rmdir()
    node.must_unprepare(ref)
    eventually(lambda: names(node) == before)
