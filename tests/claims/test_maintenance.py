"""A claim that takes GPUs out of service: what it may request, what it waits for, and what a failed try leaves."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.file_lock import UseMark
from dra_driver.claims.rules.holders import DeviceHeldError
from dra_driver.errors import ClaimRefusedError, DeviceLostError, RetryableError
from dra_driver.inventory.detachment import LOCK_FILE
from dra_driver.inventory.maintenance_step import MaintenanceSteps
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, Failed, Prepared
from dra_driver.model.maintenance import Detachment
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord, Phase
from dra_driver.model.steps import StartMaintenance, WriteCdiSpec
from tests.claims.test_plan_mig import NODE_, ONE_0
from tests.fakes.kindnode import KINDS, KindNode, RecordedMpsHost, Site, maintenance_parameters
from tests.fakes.preparing import Node, error_of, maintenance_steps
from tests.fakes.samples import (
    DRIVER,
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    claim,
    hold,
    plan,
    record,
    result,
    uuid,
)
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.inventory.test_detachment import unreadable

UID = "uid-1"


def config(*requests: str, **fields: Any) -> DeviceConfig:
    return DeviceConfig("FromClaim", requests, DRIVER, maintenance_parameters(**fields))


def maintenance(*devices: str, uid: str = UID, **fields: Any) -> AllocatedClaim:
    results = [result(device, admin_access=True) for device in devices]
    return claim(*results, uid=uid, configs=(config(**fields),))


def in_maintenance(*names: str, uid: str = "uid-reset", phase: Phase = "prepared") -> ClaimRecord:
    held = [hold(name, admin_access=True) for name in names]
    gpus = tuple(sorted({one.gpu_uuid for one in held}))
    return replace(record(*held, uid=uid, phase=phase), steps=(StartMaintenance(gpus, "Wait", 900),))


# --- what is planned -----------------------------------------------------------------------------


def test_plan_has_each_gpu_once_and_locks_it() -> None:
    made = plan(maintenance(GPU_1, MIG_1G, MIG_3G, policy="Refuse", timeout="90s"))
    assert made.steps == (StartMaintenance((uuid(1), uuid(2)), "Refuse", 90), WriteCdiSpec())
    assert (made.used_gpus, made.waits_for) == ({uuid(1), uuid(2)}, ())


@pytest.mark.parametrize(
    ("configs", "inventory", "device", "text"),
    [
        (
            (config("one"),),
            MIXED,
            GPU_1,
            "all requests of a maintenance claim need the same MaintenanceConfig",
        ),
        ((config("one"), config("two", timeout="1h")), MIXED, GPU_1, "need the same MaintenanceConfig"),
        ((config("one"), config("two", policy="Refuse")), MIXED, GPU_1, "need the same MaintenanceConfig"),
        ((config(),), NODE_, ONE_0, "is created on demand, so it cannot have a MaintenanceConfig"),
    ],
)
def test_claim_that_is_not_for_maintenance_of_existing_devices_alone_is_refused(
    configs: tuple[DeviceConfig, ...], inventory: Any, device: str, text: str
) -> None:
    wanted = claim(
        result(GPU_0, "one", admin_access=True), result(device, "two", admin_access=True), configs=configs
    )
    with pytest.raises(ClaimRefusedError, match=text):
        plan(wanted, found=inventory)


OTHERS = (
    record(hold(GPU_0), uid="uid-user"),
    record(hold(MIG_1G, admin_access=True), uid="uid-monitor"),
    record(hold(GPU_1), uid="uid-elsewhere"),
    in_maintenance(GPU_0, phase="preparing"),
    in_maintenance(MIG_1G, uid="uid-overdue"),
)


def test_claims_on_the_gpus_are_waited_for_also_those_that_only_look() -> None:
    made = plan(maintenance(GPU_0, MIG_3G), *OTHERS)
    users = ("default/claim-uid-monitor", "default/claim-uid-overdue", "default/claim-uid-user")
    assert made.waits_for == users
    assert plan(maintenance(GPU_1), *OTHERS[:2], OTHERS[3]).waits_for == ()


def test_policy_refuse_names_the_claims_on_the_gpus() -> None:
    with pytest.raises(ClaimRefusedError, match="claims use the GPUs: default/claim-uid-user; delete their"):
        plan(maintenance(GPU_0, policy="Refuse"), *OTHERS)


@pytest.mark.parametrize("wanted", [claim(MIG_1G), claim(result(MIG_1G, admin_access=True))])
def test_new_claim_on_a_gpu_in_maintenance_is_refused(wanted: AllocatedClaim) -> None:
    with pytest.raises(DeviceHeldError, match=f"the GPU of device {MIG_1G} is in maintenance for claim"):
        plan(wanted, in_maintenance(MIG_3G))
    assert plan(wanted, in_maintenance(GPU_0)).devices


def test_claim_with_a_record_is_prepared_again_and_the_maintenance_claim_waits_for_it() -> None:
    """After a reboot both are prepared again; neither must wait for the other forever."""
    known = record(hold(GPU_0), uid=UID, phase="preparing")
    assert plan(claim(GPU_0), in_maintenance(GPU_0), known=known).devices
    assert plan(maintenance(GPU_0), known).waits_for == ("default/claim-uid-1",)


@pytest.mark.parametrize("known_phase", ["preparing", "prepared"])
def test_claim_with_a_record_that_is_allocated_a_gpu_in_maintenance_is_refused(known_phase: Phase) -> None:
    known = record(hold(GPU_1), uid=UID, phase=known_phase)
    with pytest.raises(DeviceHeldError, match=f"the GPU of device {GPU_0} is in maintenance for claim"):
        plan(claim(GPU_0), in_maintenance(GPU_0), known=known)


def test_lost_gpu_is_for_maintenance_but_for_no_other_claim() -> None:
    lost = replace(MIXED, lost=tuple(gpu for gpu in MIXED.gpus if gpu.uuid == uuid(0)))
    lost = replace(lost, gpus=tuple(gpu for gpu in MIXED.gpus if gpu.uuid != uuid(0)))
    assert plan(maintenance(GPU_0), found=lost).steps[0] == StartMaintenance((uuid(0),), "Wait", 900)
    with pytest.raises(DeviceLostError):
        plan(claim(result(GPU_0, admin_access=True)), found=lost)


# --- what is done --------------------------------------------------------------------------------


@pytest.fixture
def steps(node: Node, monkeypatch: pytest.MonkeyPatch) -> MaintenanceSteps:
    monkeypatch.setattr("dra_driver.inventory.maintenance_step._WITHDRAWING_S", 0.0)
    monkeypatch.setattr("dra_driver.inventory.maintenance_step._CLOSING_S", 0.3)
    found = node.runner.runners[StartMaintenance]
    assert isinstance(found, MaintenanceSteps)
    node.devices.detachments = found.detachments
    return found


@contextmanager
def nvml_open(node: Node) -> Iterator[None]:
    """Another process of the plugin does not close NVML."""
    mark = UseMark(node.directory / LOCK_FILE)
    mark.hold()
    try:
        yield
    finally:
        mark.release()


def phase(node: Node) -> str | None:
    found = node.records.get(UID)
    return None if found is None else found.phase


def test_failed_try_keeps_the_record_unless_the_failure_is_permanent(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = maintenance(GPU_0)
    steps.is_offered = lambda _gpus: True
    assert f"still have devices of GPU {uuid(0)}" in error_of(node.prepare(wanted))
    assert (phase(node), steps.detachments.written()) == ("preparing", None)
    steps.is_offered = lambda _gpus: False
    with nvml_open(node):
        assert "has not closed NVML within" in error_of(node.prepare(wanted))
    assert (phase(node), steps.detachments.written()) == ("preparing", None)
    node.steps.on_do = refuse
    assert "not this one" in error_of(node.prepare(wanted))
    assert (phase(node), steps.detachments.written()) == (None, None)


def refuse(_plan: Plan) -> None:
    raise ClaimRefusedError("not this one")


def test_record_of_a_refused_try_is_removed_though_another_try_wrote_it(
    node: Node, steps: MaintenanceSteps
) -> None:
    wanted = maintenance(GPU_0, policy="Refuse")
    steps.is_offered = lambda _gpus: True
    assert isinstance(node.prepare(wanted), Failed)
    assert phase(node) == "preparing"
    node.records.save(record(hold(GPU_0), uid="uid-user"))
    assert "claims use the GPUs" in error_of(node.prepare(wanted))
    assert phase(node) is None


def test_unprepare_ends_a_closing_that_is_under_way(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.inventory.maintenance_step._CLOSING_S", PATIENCE_S)
    wanted, answers = maintenance(GPU_0), []
    with nvml_open(node):
        thread = threading.Thread(target=lambda: answers.append(node.prepare(wanted)))
        thread.start()
        eventually(lambda: steps.detachments.now() is not None)
        assert node.unprepare(wanted) is None
        assert steps.detachments.written() is None
        thread.join()
    assert isinstance(answers[0], Failed)
    assert (phase(node), steps.detachments.written()) == (None, None)


def test_instance_without_devices_begins_the_closing_again_that_a_dead_one_left(
    node: Node, steps: MaintenanceSteps
) -> None:
    wanted = maintenance(GPU_0)
    steps.detachments.begin(900, wanted.ref)
    node.devices.inventory, node.devices.hidden, node.devices.problem = None, MIXED, "NVML is closed"
    assert isinstance(node.prepare(wanted), Prepared)
    assert steps.detachments.now() is not None


# --- calls and instances at the same time -----------------------------------------------------------


def after_closing(
    steps: MaintenanceSteps, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call `then` once, in the lane, right after NVML was closed and before the claim is answered."""
    wait, due = steps.detachments.wait_closed, [then]

    def wait_closed(made: Detachment, timeout_s: float) -> None:
        wait(made, timeout_s)
        if due:
            due.pop()()

    monkeypatch.setattr(steps.detachments, "wait_closed", wait_closed)


def is_closed_for(node: Node, steps: MaintenanceSteps, wanted: AllocatedClaim) -> bool:
    now = steps.detachments.now()
    return now is not None and now.claim == wanted.ref and not steps.detachments.is_nvml_open()


def test_overlapping_call_does_not_open_nvml_under_a_call_that_is_closing_it(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, answers = maintenance(GPU_0), []
    second = threading.Thread(target=lambda: answers.append(node.prepare(wanted)))

    def overlap() -> None:
        node.devices.problem = "NVML is closed"
        second.start()
        second.join(PATIENCE_S)

    after_closing(steps, overlap, monkeypatch)
    first = node.prepare(wanted)
    second.join(PATIENCE_S)
    assert isinstance(first, Prepared), first
    assert "NVML is closed" in error_of(answers[0])
    assert (phase(node), is_closed_for(node, steps, wanted)) == ("prepared", True)


@pytest.mark.parametrize("begins_again", [False, True])
def test_instance_that_starts_while_nvml_is_closed_for_a_claim_makes_the_call_retry(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch, begins_again: bool
) -> None:
    """The starting instance may have NVML open, and may already be closing it for the same claim."""
    wanted, other = maintenance(GPU_0), UseMark(node.directory / LOCK_FILE)

    def start() -> None:
        newer = maintenance_steps(node.restarted(), node.directory)
        newer.open()
        other.hold()
        if begins_again:
            newer.detachments.begin(900, wanted.ref)

    after_closing(steps, start, monkeypatch)
    monkeypatch.setattr("dra_driver.inventory.maintenance_step._STILL_CLOSED_S", 0.1)
    assert "NVML is not closed any more" in error_of(node.prepare(wanted))
    assert (phase(node), steps.detachments.written()) == ("preparing", None)
    other.release()
    assert isinstance(node.prepare(wanted), Prepared)
    assert is_closed_for(node, steps, wanted)


def late_step(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch, wanted: AllocatedClaim
) -> threading.Event:
    """Prepare the claim until the call gives up; the event lets its step continue before the step's own deadline."""
    monkeypatch.setattr("dra_driver.journal.executor._FINISH_S", 17.5)
    began, go_on = threading.Event(), threading.Event()

    def is_offered(_gpus: object) -> bool:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return False

    steps.is_offered = is_offered
    assert isinstance(node.prepare(wanted, 20.0), Failed)
    assert began.is_set()
    return go_on


def test_step_whose_call_has_given_up_does_not_close_nvml(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = maintenance(GPU_0)
    late_step(node, steps, monkeypatch, wanted).set()
    eventually(lambda: not node.lanes.under_way())
    assert (phase(node), steps.detachments.written()) == ("preparing", None)
    assert isinstance(node.prepare(wanted), Prepared)
    assert is_closed_for(node, steps, wanted)


def test_step_opens_nvml_again_if_its_call_could_not_when_it_gave_up(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's lock was taken when the call gave up."""
    monkeypatch.setattr("dra_driver.journal.executor._FINISH_S", 17.5)
    monkeypatch.setattr("dra_driver.inventory.maintenance_step._CLOSING_S", 20.0)
    monkeypatch.setattr("dra_driver.claims.prepare._LOCK_S", 0.1)
    wanted, answers = maintenance(GPU_0), []
    call = threading.Thread(target=lambda: answers.append(node.prepare(wanted, 20.0)))
    with nvml_open(node):
        call.start()
        eventually(lambda: steps.detachments.now() is not None)
        with node.records.locks.hold(UID, 5):
            call.join(PATIENCE_S)
        assert isinstance(answers[0], Failed)
        assert steps.detachments.now() is not None
    eventually(lambda: not node.lanes.under_way())
    assert (phase(node), steps.detachments.written()) == ("preparing", None)


def test_next_call_opens_nvml_that_a_failed_call_could_not_open(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's lock is busy from the end of the step until the call has given up."""
    monkeypatch.setattr("dra_driver.claims.prepare._LOCK_S", 0.1)
    wanted = maintenance(GPU_0)
    with ExitStack() as busy:
        after_closing(steps, lambda: busy.enter_context(node.records.locks.hold(UID, 1)), monkeypatch)
        assert isinstance(node.prepare(wanted), Failed)
        assert (phase(node), is_closed_for(node, steps, wanted)) == ("preparing", True)
    node.devices.inventory, node.devices.hidden, node.devices.problem = None, MIXED, "NVML is closed"
    assert isinstance(node.prepare(wanted), Prepared)
    assert is_closed_for(node, steps, wanted)


def test_call_that_fails_after_nvml_was_closed_opens_nvml_and_keeps_the_record(
    node: Node, steps: MaintenanceSteps
) -> None:
    """Its files cannot be written now."""
    wanted = maintenance(GPU_0)
    node.steps.on_do = not_now
    assert "not today" in error_of(node.prepare(wanted))
    assert (phase(node), steps.detachments.written()) == ("preparing", None)


def not_now(_plan: Plan) -> None:
    raise RetryableError("not today")


# --- what is over --------------------------------------------------------------------------------


def test_claim_that_had_its_time_is_answered_and_closes_nothing(node: Node, steps: MaintenanceSteps) -> None:
    wanted = maintenance(GPU_0)
    answer = node.prepare(wanted)
    assert isinstance(answer, Prepared)
    steps.detachments.end()
    ended = steps.detachments.written()
    assert ended is not None
    assert node.prepare(wanted) == answer
    assert (steps.detachments.written(), steps.detachments.now()) == (ended, None)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_claim_that_is_gone_is_reclaimed_in_each_state(
    node: Node, steps: MaintenanceSteps, is_waiting: bool
) -> None:
    wanted = maintenance(GPU_0)
    steps.is_offered = lambda _gpus: is_waiting
    assert isinstance(node.prepare(wanted), Failed if is_waiting else Prepared)
    known = node.records.get(UID)
    assert known is not None
    assert node.unpreparer.reclaim(wanted.ref, known, time.monotonic_ns())
    assert (phase(node), steps.detachments.written()) == (None, None)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("state", ["never prepared", "maintenance", "other"])
def test_claim_ends_while_the_detach_file_cannot_be_read(
    node: Node, steps: MaintenanceSteps, monkeypatch: pytest.MonkeyPatch, logs: list, state: str, code: int
) -> None:
    wanted = claim(GPU_0, uid=UID) if state == "other" else maintenance(GPU_0)
    if state != "never prepared":
        assert isinstance(node.prepare(wanted), Prepared)
    written = steps.detachments.written()
    with monkeypatch.context() as patch:
        unreadable(patch, "detach.json", code)
        for _ in range(2):
            assert node.unprepare(wanted) is None
            assert (phase(node), node.cleaner._ending) == (None, set())
    assert any(line["event"] == "maintenance_not_ended" and "detach.json" in line["reason"] for line in logs)
    assert steps.detachments.written() == written
    assert node.unprepare(wanted) is None
    assert steps.detachments.written() is None


@pytest.mark.parametrize("is_kept", [False, True])
def test_file_of_a_claim_whose_record_is_unreadable_is_kept(node: Node, is_kept: bool) -> None:
    wanted = maintenance(GPU_0)
    steps = maintenance_steps(node, node.directory)
    steps.detachments.begin(900, wanted.ref)
    if is_kept:
        (node.directory / "claims" / f"{UID}.json").write_text("torn")
        node.records.load()
    steps.open()
    assert (steps.detachments.now() is not None) == is_kept


def test_mps_daemon_that_an_ended_claim_left_is_waited_for(
    site: Site, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CLEAN_BEFORE_S", "UNDO_S"):
        monkeypatch.setattr(f"dra_driver.journal.cleaner.{limit}", 0.1)
    site.reset()
    node = KindNode(site, memory_path / "node")
    served = KINDS["MPS settings"].wanted(site)
    wanted = maintenance(site.whole(3), uid="uid-reset")
    assert isinstance(node.prepare(served), Prepared)
    with monkeypatch.context() as patch:
        patch.setattr(RecordedMpsHost, "stop", fail)
        assert node.unprepare(served) is None
        error = error_of(node.prepare(wanted, 3.5))
        assert (
            f"maintenance starts after the cleanup of its GPUs. Cleanup pending for claim {served.ref}"
            in error
        )
    assert isinstance(node.prepare(wanted), Prepared)
    assert node.unprepare(wanted) is None


def fail(*_given: object) -> None:
    raise RetryableError("not today")
