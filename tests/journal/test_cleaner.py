"""Claims that end although not everything could be undone, and the pending cleanup."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dra_driver.base.backoff import Backoff
from dra_driver.errors import RetryableError, StateError
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.rules.cleanups import (
    LedgerEntry,
    PendingCleanup,
    counts,
    withholding,
)
from dra_driver.model.claim import ClaimRef
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.mig import Placement
from dra_driver.model.mps import MpsDaemonSpec, MpsMember
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, RunMps, SetTimeSlice, Step, WriteCdiSpec
from tests.fakes.journal import Journaled
from tests.fakes.samples import GPU_0, GPU_1, MIG_1G, MIG_3G, MIXED, claim, hold
from tests.fakes.waiting import PATIENCE_S, eventually

BOOT = "boot-1"
UUID_0, UUID_1 = (MIXED.by_name[name].gpu.uuid for name in (GPU_0, GPU_1))
DEVICE_0, DEVICE_1 = MIXED.by_name[GPU_0], MIXED.by_name[GPU_1]
SLICE = SetTimeSlice(UUID_0, 3)
MPS = RunMps(MpsDaemonSpec(GPU_0, UUID_0, "gpu", UUID_0))
CDI = WriteCdiSpec()


def record(*steps: Step, uid: str = "uid-1", boot_id: str = BOOT) -> ClaimRecord:
    return ClaimRecord(claim(GPU_0, uid=uid), "prepared", boot_id, (hold(GPU_0),), (*steps, CDI), "now")


def refuse_write(*_args: object, **_options: object) -> None:
    raise StateError("the disk is full")


class Tools:
    """What undoes steps; those in `broken` fail, those in `hanging` wait for `let_on`."""

    def __init__(self) -> None:
        self.broken: list[Step] = []
        self.hanging: list[Step] = []
        self.undone: list[Step] = []
        self.done: list[Step] = []
        self.let_on = threading.Event()

    def do(self, step: Step, plan: Plan) -> None:
        self.done.append(step)

    def undo(self, step: Step, ref: ClaimRef) -> None:
        if step in self.hanging:
            assert self.let_on.wait(PATIENCE_S)
        if step in self.broken:
            raise RetryableError(f"nvidia-smi fails for {type(step).__name__}")
        self.undone.append(step)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return True


class Bench(Journaled):
    """The driver over a directory."""

    def __init__(self, directory: Path, boot_id: str = BOOT) -> None:
        self.directory, self.changes, self.unrecorded = directory, 0, set[str]()
        self.open_journal(directory, boot_id)
        self.tools = Tools()
        self.found: object = "as it was"
        self.work_with(self.tools)
        self.cleaner.changed, self.cleaner.tools = self._changed, lambda: self.found

    def without_record(self) -> set[str]:
        return self.unrecorded

    def _changed(self) -> None:
        self.changes += 1

    def prepared(self, made: ClaimRecord) -> ClaimRecord:
        """As Prepare does."""
        self.records.save(made)
        self.executor.change(Plan(made.claim, (), made.steps), made)
        return made

    def end(self, ended: ClaimRecord) -> None:
        """A claim is prepared and unprepared."""
        self.leave(self.prepared(ended))
        self.executor.undo_rest(ended.ref.uid)

    def leave(self, ended: ClaimRecord) -> None:
        """The first half of an Unprepare."""
        self.executor.remove(ended.ref, ended)

    def clean_before(self, device: OfferedDevice) -> None:
        """As a Prepare does."""
        self.cleaner.clean_before(self.ledger.pending_before({device.gpu.uuid}), [device])

    def fail(self, *steps: Step) -> None:
        """A claim ends, and none of these steps can be undone."""
        self.tools.broken = list(steps)
        self.end(record(*steps))

    def clean(self) -> None:
        """Everything works again, and nothing is pending any more."""
        self.tools.broken = []
        assert self.cleaner.clean_all() == []

    def restarted(self, boot_id: str = BOOT) -> Bench:
        return Bench(self.directory, boot_id)

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.directory))
            for path in self.directory.rglob("*.json*")
            if path.is_file()
        )


LEDGER_0 = f"ledger/{UUID_0}.json"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("dra_driver.journal.lanes._OTHER_PROCESS_S", 0.1)
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", 0.2)
    return Bench(tmp_path)


@pytest.mark.parametrize("step", [SLICE, MPS], ids=["time slice", "MPS"])
def test_failed_undo_becomes_a_pending_cleanup_that_the_loop_ends(bench: Bench, step: Step) -> None:
    bench.tools.broken = [step]
    bench.end(record(SLICE, MPS))
    assert bench.files() == [LEDGER_0]
    [cleanup] = bench.cleaner.outstanding()
    assert cleanup.steps == (step,), "the other one is undone"
    assert f"nvidia-smi fails for {type(step).__name__}" in cleanup.text
    [problem] = bench.cleaner.problems()
    assert (problem.code, problem.text, problem.since) == ("cleanup-pending", cleanup.text, cleanup.since)
    assert problem.subject == step.undoing
    assert bench.cleaner.clean_all() != []
    bench.clean()
    assert bench.files() == []
    assert bench.cleaner.problems() == []
    assert bench.changes == 2, "the publisher hears of the beginning and of the end"


def test_step_that_writes_files_has_to_be_undone(bench: Bench) -> None:
    bench.tools.broken = [CDI, MPS]
    with pytest.raises(RetryableError, match="WriteCdiSpec"):
        bench.end(record(MPS))
    assert bench.files() == ["claims/uid-1.json", LEDGER_0]
    assert bench.cleaner.outstanding() == [], "the claim has not ended"


def test_instance_that_starts_knows_what_is_pending_and_why(bench: Bench) -> None:
    bench.tools.broken = [MPS]
    bench.end(record(SLICE, MPS))
    after = bench.restarted()
    [cleanup] = after.cleaner.outstanding()
    assert (cleanup.steps, cleanup.cause) == ((MPS,), "nvidia-smi fails for RunMps")
    assert after.cleaner.clean_all() == []
    assert (after.tools.undone, after.files()) == ([MPS], [])


def test_claim_may_leave_something_twice(bench: Bench) -> None:
    bench.fail(MPS)
    other = RunMps(replace(MPS.spec, device=GPU_1, uuid=UUID_1, gpu_uuid=UUID_1))
    bench.tools.broken = [MPS, other]
    bench.end(record(other))
    [cleanup] = bench.cleaner.outstanding()
    assert (cleanup.name, cleanup.steps) == ("uid-1", (MPS, other))
    bench.clean()
    assert sorted(step.spec.device for step in bench.tools.undone if isinstance(step, RunMps)) == [
        GPU_0,
        GPU_1,
    ]


@pytest.mark.parametrize("uid", ["uid-1", "uid-2"], ids=["the same claim again", "another claim"])
def test_newer_claim_makes_a_cleanup_void(bench: Bench, uid: str) -> None:
    bench.tools.broken = [SLICE, MPS]
    bench.end(record(SLICE, MPS))
    bench.prepared(record(replace(SLICE, interval=1), MPS, uid=uid))
    bench.tools.undone = []
    bench.clean()
    assert bench.tools.undone == [], "the newer claim's pod uses it"
    assert bench.files() == [f"claims/{uid}.json", LEDGER_0]
    assert {entry.claim.uid for entry in bench.ledger.entries()} == {uid}


def test_claim_ends_while_another_process_works_on_its_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.lanes._OTHER_PROCESS_S", PATIENCE_S)
    monkeypatch.setattr("dra_driver.journal.executor._UNDO_WAIT_S", 0.1)
    made = bench.prepared(record(MPS))
    with bench.locks.hold({UUID_0}, 1):
        bench.leave(made)
        bench.executor.undo_rest("uid-1")
        wait = "the wait for another process of gpu-dra-driver on GPU"
        eventually(lambda: [wait in str(one.cause) for one in bench.cleaner.outstanding()] == [True])
        assert bench.tools.undone == [CDI]
    assert bench.cleaner.clean_all() == []


def test_cleanup_whose_first_try_hangs_is_not_as_old_as_its_claim(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.executor._UNDO_WAIT_S", 0.1)
    made = bench.prepared(record(MPS))
    days_later = int(time.time()) + 300_000
    monkeypatch.setattr("time.time", lambda: days_later)
    bench.tools.hanging = [MPS]
    bench.leave(made)
    bench.executor.undo_rest("uid-1")
    monkeypatch.setattr("time.time", lambda: days_later + 60)
    assert [one.since for one in bench.cleaner.outstanding()] == [days_later]
    bench.tools.let_on.set()
    eventually(lambda: not bench.lanes.under_way())


def test_step_is_not_done_that_the_ledger_does_not_take(bench: Bench) -> None:
    shutil.rmtree(bench.directory / "ledger")
    with pytest.raises(StateError, match="ledger"):
        bench.prepared(record(MPS))
    assert bench.tools.done == []


@pytest.mark.parametrize("others", [0, 1], ids=["its last entry", "another stays"])
def test_full_disk_keeps_no_claim_from_ending_and_nothing_is_undone_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    for number in range(others):
        bench.prepared(record(SLICE, uid=f"other-{number}"))
    made = bench.prepared(record(MPS))

    with monkeypatch.context() as patch:
        patch.setattr("dra_driver.base.json_store.write_atomically", refuse_write)
        bench.leave(made)
        bench.executor.undo_rest("uid-1")
        assert bench.tools.undone == [CDI, MPS]
        assert bench.cleaner.clean_all() == []
        assert bool(bench.cleaner._pauses) == bool(others), "the disk is not tried every second"
    bench.clean()
    assert bench.tools.undone == [CDI, MPS]
    assert [entry.claim.uid for entry in bench.restarted().ledger.entries()] == ["other-0"] * others


def test_damaged_ledger_is_written_again_from_the_prepared_claims(bench: Bench) -> None:
    made = bench.prepared(record(SLICE, MPS))
    (bench.directory / LEDGER_0).write_text("{")
    after = bench.restarted()
    assert after.ledger.entries() == []
    assert after.cleaner.clean_all() == []
    after.leave(made)
    after.executor.undo_rest("uid-1")
    assert after.tools.undone == [CDI, MPS, SLICE]
    assert [name.partition(".json")[2][:11] for name in after.files()] == [".unreadable"]


def test_ledger_that_cannot_be_written_is_retried_after_pauses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.prepared(record(SLICE))
    (bench.directory / LEDGER_0).unlink()
    after, now = bench.restarted(), [0.0]
    after.cleaner.clock = lambda: now[0]
    tries: list[object] = []

    def refuse(*given: object, **_options: object) -> None:
        tries.append(given)
        refuse_write()

    monkeypatch.setattr("dra_driver.base.json_store.write_atomically", refuse)
    for _ in range(60):
        after.cleaner._turn()
        eventually(lambda: not after.lanes.under_way())
        now[0] += 1
    assert UUID_0 in after.cleaner._pauses
    assert 1 < len(tries) < 30


def test_ledger_of_a_newer_release_is_not_tried(bench: Bench) -> None:
    bench.prepared(record(SLICE))
    (bench.directory / LEDGER_0).write_text('{"version": 99}')
    asked = list[str]()
    with capture_logs() as logged:
        after = bench.restarted()
        after.cleaner.tools = lambda: asked.append("tools")
        for _ in range(3):
            after.cleaner._turn()
            eventually(lambda: not after.lanes.under_way())
    assert [line["event"] for line in logged] == ["ledger_unreadable"]
    assert "install the newer release again" in logged[0]["remedy"]
    assert (asked, after.cleaner._pauses) == ([], {})
    assert (after.directory / LEDGER_0).read_text() == '{"version": 99}'


def test_claim_without_record_holds_what_the_ledger_says_until_its_spec_is_gone(bench: Bench) -> None:
    made = bench.prepared(record(MPS))
    bench.records.delete("uid-1")
    bench.unrecorded = {"uid-1"}
    assert bench.cleaner.clean_all() == []
    assert bench.tools.undone == []
    bench.unrecorded = set()
    bench.leave(made)
    bench.executor.undo_rest("uid-1")
    assert bench.tools.undone == [CDI, MPS]


def test_mps_daemon_with_other_settings_is_stopped_for_a_claim_that_waits_for_it(bench: Bench) -> None:
    """The record of the new claim says what it wants, and the daemon of the old one is still there."""
    old = bench.prepared(record(MPS))
    wanted = RunMps(replace(MPS.spec, multi_user=True))
    bench.records.save(replace(record(wanted, uid="uid-2"), phase="preparing"))
    bench.leave(old)
    bench.executor.undo_rest("uid-1")
    assert bench.tools.undone == [CDI, MPS]
    assert bench.files() == ["claims/uid-2.json"]


# --- before a Prepare ------------------------------------------------------------------------------


def test_prepare_waits_for_an_undo_that_works_a_moment_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.cleaner._CLEAN_AGAIN_S", 0.02)
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", 20.0)
    bench.fail(MPS)
    works_again = threading.Timer(0.2, bench.tools.broken.clear)
    works_again.start()
    bench.clean_before(DEVICE_0)
    assert bench.files() == []
    works_again.join()


def test_prepare_is_refused_while_an_mps_daemon_is_left(bench: Bench) -> None:
    bench.fail(MPS)
    with pytest.raises(RetryableError) as caught:
        bench.clean_before(DEVICE_0)
    assert str(caught.value) == (
        f"device {DEVICE_0.name} cannot be used yet. Cleanup pending for claim default/claim-uid-1 (UID uid-1): "
        f"stop the MPS daemon of device {GPU_0}: nvidia-smi fails for RunMps; gpu-dra-driver retries; check that "
        "the MPS host (DaemonSet gpu-dra-driver-mps) and nvidia-smi work on the node"
    )
    bench.clean_before(DEVICE_1)


def test_prepare_continues_without_a_time_slice(bench: Bench) -> None:
    bench.fail(SLICE)
    bench.clean_before(DEVICE_0)
    assert bench.files() == [LEDGER_0]


def test_claim_that_is_only_being_prepared_makes_no_cleanup_void(bench: Bench) -> None:
    """It may fail before it has done anything, and then undoes nothing."""
    bench.fail(MPS)
    bench.records.save(replace(record(MPS, uid="uid-2"), phase="preparing"))
    bench.tools.undone = []
    bench.clean()
    assert bench.tools.undone == [MPS]


def test_prepare_that_fails_again_and_again_leaves_one(bench: Bench) -> None:
    bench.tools.broken = [SLICE, MPS]
    for number in range(5):
        bench.end(record(SLICE, MPS, uid=f"uid-{number}"))
    assert len(bench.cleaner.problems()) == 1
    assert len(bench.ledger.entries()) == 2, "nor do ledgers grow"
    [cleanup] = bench.cleaner.clean_all()
    assert cleanup.steps == (SLICE, MPS)
    bench.tools.undone = []
    bench.clean()
    assert bench.tools.undone == [MPS, SLICE]


def test_many_cleanups_are_compared_with_each_other_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = 0
    sets = SetTimeSlice.sets

    def counted(step: SetTimeSlice) -> frozenset[str]:
        nonlocal requested
        requested += 1
        return sets.__get__(step)

    def cost(number: int) -> int:
        nonlocal requested
        bench = Bench(tmp_path / str(number))
        refs = [claim(uid=f"uid-{one}").ref for one in range(number)]
        bench.ledger.change([LedgerEntry(ref, BOOT, SLICE) for ref in refs], ())
        kept = [bench.prepared(record(SetTimeSlice(UUID_1, 1), uid=f"kept-{one}")) for one in range(number)]
        bench.tools.broken, requested = [SLICE], 0
        bench.cleaner._turn()
        eventually(lambda: not bench.lanes.under_way())
        assert (len(bench.cleaner.outstanding()), len(kept)) == (1, number)
        return requested

    monkeypatch.setattr(SetTimeSlice, "sets", property(counted))
    assert cost(80) < 5 * cost(20), "four times as many"


def test_claims_that_end_together_forget_nothing_of_each_other(bench: Bench) -> None:
    bench.tools.broken = [MPS]
    both = [bench.prepared(record(MPS, uid=f"uid-{number}")) for number in range(2)]
    for one in both:
        bench.leave(one)
    assert bench.cleaner.outstanding() == [], "the undos are under way"
    for one in both:
        bench.executor.undo_rest(one.ref.uid)
    assert len(bench.cleaner.outstanding()) == 1, "one thing is undone once"
    bench.clean()
    assert bench.tools.undone == [CDI, CDI, MPS]


def test_cleanup_left_by_two_claims_is_one_problem(bench: Bench) -> None:
    """The plugin was killed before it undid it."""
    for one in [bench.prepared(record(MPS, uid=f"uid-{number}")) for number in range(2)]:
        bench.leave(one)
    after = bench.restarted()
    assert len({problem.subject for problem in after.cleaner.problems()}) == 1
    assert len(after.cleaner.outstanding()) == 2


def test_published_cleanups_exclude_those_being_undone(bench: Bench) -> None:
    bench.tools.hanging = [MPS]
    bench.leave(bench.prepared(record(MPS)))
    ends = threading.Thread(target=lambda: bench.executor.undo_rest("uid-1"))
    ends.start()
    eventually(lambda: bool(bench.lanes.under_way()))
    assert bench.cleaner.withheld()(DEVICE_0) is None
    bench.tools.let_on.set()
    ends.join()
    assert bench.changes == 0


def test_device_stays_withheld_while_the_ledgers_cannot_be_listed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fail(MPS)

    def unreadable() -> None:
        raise StateError("too many open files")

    monkeypatch.setattr(bench.ledger, "pending", unreadable)
    found = bench.cleaner.withheld()(DEVICE_0)
    assert found is not None
    assert found.name == "uid-1"
    assert bench.cleaner.withheld()(DEVICE_1) is None


def test_instance_that_publishes_nothing_is_reported_once(bench: Bench) -> None:
    bench.fail(MPS)
    assert bench.changes == 1
    for _ in range(5):
        bench.cleaner._turn()
    assert bench.changes == 1


def test_claim_of_an_older_boot_makes_no_cleanup_void(bench: Bench) -> None:
    """Its own step did not survive the reboot, so its Unprepare undoes nothing."""
    bench.records.save(record(SLICE, uid="old", boot_id="boot-0"))
    bench.records.load()
    bench.ledger.add(LedgerEntry(claim(uid="old").ref, "boot-0", SLICE))
    bench.fail(SLICE)
    assert len(bench.cleaner.clean_all()) == 1
    bench.clean()
    assert bench.tools.undone == [CDI, SLICE]


def test_mig_device_of_an_ended_claim_is_destroyed_before_another_claim_gets_its_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU was busy when the claim ended. The device may still contain data or processes."""
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", PATIENCE_S)
    made = CreateMig("gpu-0-mig-1g-0", UUID_0, None, 19, "1g.10gb", Placement(0, 1))
    ended = bench.prepared(record(made))
    with bench.locks.hold({UUID_0}, 1):
        bench.leave(ended)
        bench.executor.undo_rest("uid-1")
    [cleanup] = bench.cleaner.outstanding()
    assert cleanup.kinds == ("mig-device",)
    bench.clean_before(DEVICE_0)
    assert bench.tools.undone == [CDI, made]
    assert bench.cleaner.outstanding() == []


def test_mps_daemon_of_a_mig_device_keeps_no_one_from_its_neighbours(bench: Bench) -> None:
    part = RunMps(MpsDaemonSpec(MIG_1G, MIXED.by_name[MIG_1G].uuid, "mig", MIXED.by_name[MIG_1G].gpu.uuid))
    bench.tools.broken = [part]
    bench.end(record(part))
    bench.clean_before(MIXED.by_name[MIG_3G])
    with pytest.raises(RetryableError, match="stop the MPS daemon"):
        bench.clean_before(MIXED.by_name[MIG_1G])


def test_bug_in_one_undo_keeps_no_other_from_being_undone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SetTimeSlice(UUID_1, 1)
    undo = bench.tools.undo

    def buggy(step: Step, ref: ClaimRef) -> None:
        if step == MPS:
            raise ZeroDivisionError("a bug")
        undo(step, ref)

    monkeypatch.setattr(bench.tools, "undo", buggy)
    bench.tools.broken = [other]
    bench.end(record(MPS))
    bench.end(record(other, uid="uid-2"))
    bench.tools.broken = []
    [cleanup] = bench.cleaner.clean_all()
    assert (cleanup.steps, cleanup.cause) == ((MPS,), "a bug")


# --- what others see -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "boot_id", "names"),
    [
        (SLICE, BOOT, set()),
        (MPS, BOOT, {GPU_0}),
        (MPS, "boot-0", set()),
        (RunMps(replace(MPS.spec, device="gpu-0-mig-1g-0", kind="mig")), BOOT, set()),
    ],
    ids=["time slice", "MPS", "MPS of another boot", "MPS of a MIG device"],
)
def test_devices_are_withheld_only_where_the_next_pod_would_suffer(
    step: Step, boot_id: str, names: set[str]
) -> None:
    cleanup = PendingCleanup("uid-1", record(step, boot_id=boot_id), (step,), 1)
    assert {name for name in (GPU_0, GPU_1) if withholding([cleanup], MIXED.by_name[name], BOOT)} == names


def test_cleanup_done_by_a_reboot_is_not_pending() -> None:
    ref = record().ref
    kept = [step for step in (SLICE, MPS) if counts(LedgerEntry(ref, "boot-0", step), BOOT)]
    assert kept == [MPS]


def test_mps_cleanup_of_another_boot_is_tried_once(bench: Bench) -> None:
    bench.fail(MPS)
    after = bench.restarted("boot-2")
    after.tools.broken = [MPS]
    assert after.cleaner.clean_all() == []
    assert after.files() == []


def test_daemon_of_this_boot_withholds_its_gpu_next_to_what_the_claim_left_in_an_older_boot(
    bench: Bench,
) -> None:
    low, high = sorted([DEVICE_0, DEVICE_1], key=lambda device: device.gpu.uuid)
    older, newer = (RunMps(MpsDaemonSpec(one.name, one.gpu.uuid, "gpu", one.gpu.uuid)) for one in (low, high))
    ref = record().ref
    bench.ledger.add(LedgerEntry(ref, "boot-0", older))
    bench.ledger.add(LedgerEntry(ref, BOOT, newer))
    bench.tools.broken = [newer]
    with pytest.raises(RetryableError, match="stop the MPS daemon"):
        bench.clean_before(high)
    bench.clean_before(low)


def test_daemon_that_was_not_started_after_a_reboot_withholds_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MPS host starts later than the plugin, and the daemon of the earlier boot is gone."""

    def no_host(step: Step, plan: Plan) -> None:
        absent = RetryableError("the MPS host is not running on this node")
        absent.has_no_effect = True
        raise absent

    monkeypatch.setattr(bench.tools, "do", no_host)
    wanted = replace(record(MPS), phase="preparing")
    older = LedgerEntry(wanted.ref, "boot-0", MPS)
    bench.ledger.add(older)
    with pytest.raises(RetryableError, match="not running"):
        bench.prepared(wanted)
    # An entry of this boot would withhold the device for a daemon that does not run.
    assert bench.ledger.entries() == bench.restarted().ledger.entries() == [older]
    bench.tools.broken = [MPS]
    bench.leave(wanted)
    bench.executor.undo_rest("uid-1")
    assert (bench.cleaner.problems(), bench.files()) == ([], [])


def test_daemon_of_an_older_boot_is_not_stopped_where_a_claim_has_one_with_other_gpus(bench: Bench) -> None:
    """It did not survive the reboot, and a daemon of several GPUs has the name of the first one."""
    both = RunMps(replace(MPS.spec, others=(MpsMember(GPU_1, UUID_1),)))
    for older, newer in ((MPS, both), (both, MPS)):
        bench.ledger.add(LedgerEntry(claim(uid="old").ref, "boot-0", older))
        made = bench.prepared(record(newer, uid="new"))
        assert bench.cleaner.clean_all() == []
        assert bench.tools.undone == []
        assert [entry.claim.uid for entry in bench.ledger.entries()] == ["new"]
        bench.leave(made)
        bench.executor.undo_rest("new")
        bench.tools.undone = []


# --- the thread of the loop ---------------------------------------------------------------------------


@contextmanager
def running(cleaner: Cleaner) -> Iterator[None]:
    cleaner.start()
    try:
        yield
    finally:
        cleaner.stop()


def test_loop_cleans_up_as_soon_as_the_tool_is_back(bench: Bench) -> None:
    bench.fail(MPS)
    bench.cleaner._turn()
    eventually(lambda: not bench.lanes.under_way())
    bench.cleaner._pauses[UUID_0] = (Backoff(1, 1), float("inf"))
    with running(bench.cleaner):
        time.sleep(0.2)
        assert bench.files() == [LEDGER_0], "not before its time"
        bench.tools.broken = []
        bench.found = "nvidia-smi is back"
        eventually(lambda: not bench.files())


class Keeps:
    """Puts GPUs right; those in `hanging` wait for `let_on`, and those in `broken` stay as they are."""

    what = "the setting of something"

    def __init__(self, *left: str) -> None:
        self.left = list(left)
        self.hanging: list[str] = []
        self.broken: list[str] = []
        self.tried: list[str] = []
        self.let_on = threading.Event()

    def gpus(self) -> list[str]:
        return self.left

    def restore(self, gpu_uuid: str) -> None:
        self.tried.append(gpu_uuid)
        if gpu_uuid in self.hanging:
            assert self.let_on.wait(PATIENCE_S)
        if gpu_uuid in self.broken:
            raise RetryableError("not now")
        self.left.remove(gpu_uuid)


def test_gpu_that_hangs_holds_up_no_cleanup_of_another_gpu(bench: Bench) -> None:
    """Neither the undo of a claim's step, nor what restorers put right."""
    other, keeps = SetTimeSlice(UUID_1, 1), Keeps("GPU-2", "GPU-3")
    bench.tools.broken = [MPS, other]
    bench.end(record(MPS, other))
    bench.tools.broken, bench.tools.hanging, keeps.hanging = [], [MPS], ["GPU-2"]
    cleaner = Cleaner(bench.ledger, bench.lanes, bench.tools, restorers=[keeps])
    for _ in range(3):
        cleaner._turn()
        eventually(lambda: bench.lanes.under_way().keys() == {UUID_0, "GPU-2"})
    eventually(lambda: (keeps.left, sorted(keeps.tried)) == (["GPU-2"], ["GPU-2", "GPU-3"]))
    assert [entry.step for entry in bench.ledger.entries()] == [MPS]
    assert [use.what for uuid, use in bench.lanes.under_way().items() if uuid == "GPU-2"] == [Keeps.what]
    bench.tools.let_on.set()
    keeps.let_on.set()
    eventually(lambda: not bench.lanes.under_way())


def test_failed_keeper_is_retried_after_a_pause(bench: Bench) -> None:
    keeps, now = Keeps("GPU-2"), [0.0]
    keeps.broken = ["GPU-2"]
    cleaner = Cleaner(bench.ledger, bench.lanes, bench.tools, restorers=[keeps], clock=lambda: now[0])
    for _ in range(5):
        cleaner._turn()
        eventually(lambda: not bench.lanes.under_way())
    assert keeps.tried == ["GPU-2"]
    keeps.broken, now[0] = [], 1.0
    cleaner._turn()
    eventually(lambda: not bench.lanes.under_way())
    assert (keeps.left, keeps.tried) == ([], ["GPU-2", "GPU-2"])


def test_bug_of_a_keeper_is_logged_and_keeps_no_claim_from_ending(bench: Bench) -> None:
    """No caller waits for the result of the loop's work in the lanes."""

    class Buggy(Keeps):
        def restore(self, gpu_uuid: str) -> None:
            self.tried.append(gpu_uuid)
            raise ZeroDivisionError("a bug")

    keeps = Buggy(UUID_0)
    made = bench.prepared(record(MPS))
    bench.cleaner.restorers, bench.cleaner.clock = [keeps], lambda: 0.0
    bench.leave(made)
    with capture_logs() as logged:
        bench.executor.undo_rest("uid-1")
        for _ in range(5):
            bench.cleaner._turn()
            eventually(lambda: not bench.lanes.under_way())
    assert bench.tools.undone == [CDI, MPS]
    assert [line["event"] for line in logged if line["log_level"] == "error"] == ["restore_failed"] * 2
    assert keeps.tried == [UUID_0] * 2, "the next try comes after a pause"


def test_loop_removes_again_and_again_what_killed_writers_left(bench: Bench) -> None:
    """Another process, such as the MPS host, may be killed while this one continues."""
    every = count(0.0, 30.0)
    cleaner = Cleaner(
        bench.ledger,
        bench.lanes,
        bench.tools,
        temporary=[(bench.directory, "*/.*.tmp")],
        clock=every.__next__,
    )
    left = bench.directory / "claims/.uid-1.json.1-2.tmp"
    for _ in range(2):
        left.touch()
        cleaner._turn()
        assert not left.exists()


def test_gpus_of_one_prepare_are_cleaned_in_parallel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, eight hanging MPS daemons would use up the time of the call."""
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", 20.0)
    other = RunMps(MpsDaemonSpec(GPU_1, UUID_1, "gpu", UUID_1))
    bench.tools.broken = [MPS, other]
    bench.end(record(MPS))
    bench.end(record(other, uid="uid-2"))
    bench.tools.broken = []
    both, undo = threading.Barrier(2), bench.tools.undo

    def beside(step: Step, of: ClaimRef) -> None:
        both.wait(PATIENCE_S)
        undo(step, of)

    bench.tools.undo = beside  # type: ignore[method-assign]
    pending = bench.ledger.pending_before({UUID_0, UUID_1})
    bench.cleaner.clean_before(pending, [DEVICE_0, DEVICE_1])
    assert bench.cleaner.outstanding() == []


def test_claim_that_is_prepared_during_a_check_does_not_seem_to_have_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.prepared(record(MPS))  # because of this entry, the check reads the records
    real = bench.records.all

    def read_slowly() -> dict[str, ClaimRecord]:
        found = real()
        monkeypatch.undo()
        bench.prepared(record(SLICE, uid="uid-2"))
        return found

    monkeypatch.setattr(bench.records, "all", read_slowly)
    assert bench.ledger.left() == []


def test_entry_that_is_written_again_after_a_full_disk_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = LedgerEntry(claim(GPU_0).ref, BOOT, SLICE)
    bench.prepared(record(MPS, uid="uid-2"))
    bench.ledger.add(entry)
    with monkeypatch.context() as full:
        full.setattr("dra_driver.base.json_store.write_atomically", refuse_write)
        with pytest.raises(StateError, match="disk is full"):
            bench.ledger.change((), [entry])
    bench.ledger.add(entry)
    assert entry in bench.ledger.entries()


def test_end_of_a_claim_next_to_a_damaged_ledger_keeps_the_setting_of_a_running_claim(bench: Bench) -> None:
    bench.prepared(record(SLICE, uid="running"))
    (bench.directory / LEDGER_0).write_text("{")
    after = bench.restarted()
    after.end(record(SLICE, uid="uid-2"))
    assert after.tools.undone == [CDI]


def test_cleanup_of_a_claim_whose_first_unprepare_failed_is_shown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench.prepared(record(MPS))
    with monkeypatch.context() as full:
        full.setattr(bench.records, "delete", refuse_write)
        with pytest.raises(StateError, match="disk is full"):
            bench.leave(made)
    bench.records.delete("uid-1")
    assert [one.name for one in bench.cleaner.outstanding()] == ["uid-1"]
