"""The lanes of GPUs: one operation at a time on each, and nothing waits for a GPU that it does not need."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.base.deadline import time_left, until
from dra_driver.base.file_lock import LockBusyError
from dra_driver.journal import locks
from dra_driver.journal.lanes import GpuUnresponsiveError, Lanes, Operation, only_writes
from dra_driver.journal.locks import ClaimLocks, GpuLocks
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S

A, B = "GPU-a", "GPU-b"


class Work:
    """An operation that lasts until `let`."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let = threading.Event()

    def __call__(self, _operation: Operation) -> str:
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        return "done"


@pytest.fixture
def lanes(tmp_path: Path) -> Lanes:
    locks = GpuLocks(tmp_path / "locks")
    locks.open()
    return Lanes(locks)


def at_once(_operation: Operation) -> str:
    return "done"


def test_operations_on_one_gpu_run_in_their_order_and_others_next_to_them(lanes: Lanes) -> None:
    first, done = Work(), []
    one = lanes.submit({A}, "the first", first)
    assert first.begun.wait(PATIENCE_S)
    more = [lanes.submit({A}, "more", lambda _operation, n=n: done.append(n)) for n in range(5)]  # type: ignore[misc]
    assert lanes.submit({B}, "elsewhere", at_once).result(PATIENCE_S) == "done"
    assert done == []
    first.let.set()
    assert one.result(PATIENCE_S) == "done"
    for future in more:
        future.result(PATIENCE_S)
    assert done == [0, 1, 2, 3, 4]


def test_operation_on_several_gpus_keeps_none_of_them_while_it_waits_for_another(lanes: Lanes) -> None:
    hangs = Work()
    lanes.submit({B}, "what hangs", hangs)
    assert hangs.begun.wait(PATIENCE_S)
    both = lanes.submit({A, B}, "both", at_once)
    assert lanes.submit({A}, "one", at_once).result(PATIENCE_S) == "done"
    assert not both.done()
    hangs.let.set()
    assert both.result(PATIENCE_S) == "done"
    assert lanes.under_way() == {}


def test_operation_that_no_one_wants_any_more_never_begins(lanes: Lanes) -> None:
    first, done = Work(), []
    lanes.submit({A}, "the first", first)
    assert first.begun.wait(PATIENCE_S)
    assert lanes.submit({A}, "given up", lambda _operation: done.append(1)).cancel()
    last = lanes.submit({A}, "the last", at_once)
    first.let.set()
    assert (last.result(PATIENCE_S), done) == ("done", [])


def test_gpu_is_unresponsive_until_the_operation_ends(lanes: Lanes) -> None:
    hangs = Work()
    operation = lanes.submit({A}, "the creation of a MIG device", hangs)
    assert hangs.begun.wait(PATIENCE_S)
    lanes.refuse_unresponsive({A, B})
    with pytest.raises(GpuUnresponsiveError) as caught:
        lanes.refuse_unresponsive({A, B}, after_s=0.0)
    began = r"GPU GPU-a does not respond: the creation of a MIG device began at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC "
    assert re.match(began, str(caught.value)), "a hang may last for days"
    assert "if this lasts, drain and reboot the node" in str(caught.value)
    assert lanes.hanging().keys() == {A}
    hangs.let.set()
    operation.result(PATIENCE_S)
    lanes.refuse_unresponsive({A, B}, after_s=0.0)
    assert lanes.hanging() == {}


def test_gpu_on_which_the_other_instance_hangs_is_unresponsive(lanes: Lanes, tmp_path: Path) -> None:
    other, hangs = Lanes(GpuLocks(tmp_path / "locks")), Work()
    operation = other.submit({A, B}, "the start of an MPS daemon", hangs)
    assert hangs.begun.wait(PATIENCE_S)
    waits = lanes.submit({A}, "what waits for the other instance", at_once)
    found = lanes.uses()
    assert found == other.uses()
    assert lanes.hanging() == dict.fromkeys((A, B), ("the start of an MPS daemon", found[A].began))
    text = f"GPU GPU-b does not respond: the start of an MPS daemon began at {found[B].since} UTC"
    with pytest.raises(GpuUnresponsiveError, match=text):
        lanes.refuse_unresponsive({B}, after_s=0.0)
    hangs.let.set()
    assert (operation.result(PATIENCE_S), waits.result(PATIENCE_S)) == ("done", "done")
    assert lanes.hanging() == {}


def test_operation_that_closes_nvml_starts_during_a_hang_only_if_that_is_a_kernel_write(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance of the hang and the other one see the same."""
    monkeypatch.setattr("dra_driver.journal.lanes.UNRESPONSIVE_AFTER_S", 0.0)
    writes, ends = Work(), Work()

    def work(operation: Operation) -> str:
        with only_writes():
            writes(operation)
        return ends(operation)

    requested = lanes.submit({A}, "the binding to vfio", work)
    assert writes.begun.wait(PATIENCE_S)
    both = lanes, Lanes(GpuLocks(tmp_path / "locks"))
    for one in both:
        one.refuse_other_hangs(B)
        with pytest.raises(GpuUnresponsiveError):
            one.refuse_unresponsive({A})
    writes.let.set()
    assert ends.begun.wait(PATIENCE_S)
    for one in both:
        with pytest.raises(GpuUnresponsiveError):
            one.refuse_other_hangs(B)
        one.refuse_other_hangs(A)
    ends.let.set()
    assert requested.result(PATIENCE_S) == "done"


def test_other_instance_sees_which_step_of_an_operation_is_running(lanes: Lanes, tmp_path: Path) -> None:
    second, let = threading.Event(), threading.Event()

    def steps(operation: Operation) -> str:
        operation.set_step("the start of the MPS daemon")
        second.set()
        assert let.wait(PATIENCE_S)
        return "done"

    requested = lanes.submit({A, B}, "the creation of a MIG device", steps)
    assert second.wait(PATIENCE_S)
    found = lanes.uses()
    assert {uuid: use.what for uuid, use in found.items()} == dict.fromkeys(
        (A, B), "the start of the MPS daemon"
    )
    assert {use.gpu_uuid: use for use in GpuLocks(tmp_path / "locks").uses()} == found
    let.set()
    assert requested.result(PATIENCE_S) == "done"
    assert GpuLocks(tmp_path / "locks").uses() == []


@tabled("content")
def test_content_of_a_killed_instances_lock_file_is_ignored(
    lanes: Lanes, tmp_path: Path, content: str
) -> None:
    (tmp_path / "locks/GPU-a.lock").write_text(content)
    (tmp_path / "locks/claims-01.lock").write_text(content)
    assert lanes.hanging() == {}
    lanes.refuse_unresponsive({A, B}, after_s=0.0)
    assert lanes.submit({A}, "the next", at_once).result(PATIENCE_S) == "done"


def test_failure_is_reported_and_frees_the_lane(lanes: Lanes) -> None:
    def fail(_operation: Operation) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lanes.submit({A}, "a bug", fail).result(PATIENCE_S)
    assert lanes.submit({A}, "the next", at_once).result(PATIENCE_S) == "done"


def test_operation_has_the_deadline_of_who_asked_unless_it_bears_a_name(lanes: Lanes) -> None:
    def left(_operation: Operation) -> float:
        return time_left(100.0)

    with until(time.monotonic() + 50):
        assert lanes.submit({A}, "ours", left).result(PATIENCE_S) <= 50
        assert lanes.submit({A}, "its own", left, once="its own").result(PATIENCE_S) == 100


def test_the_other_instance_of_a_rolling_update_is_waited_for(lanes: Lanes, tmp_path: Path) -> None:
    with GpuLocks(tmp_path / "locks").hold({A}, 1):
        with pytest.raises(LockBusyError, match="GPU GPU-a is busy"):
            lanes.submit({A}, "too late", at_once, 0.05).result(PATIENCE_S)
        waiting = lanes.submit({A}, "in time", at_once)
    assert waiting.result(PATIENCE_S) == "done"


def test_caller_does_the_work_when_no_thread_starts(
    lanes: Lanes, threads_that_start: Callable[[str, int], None]
) -> None:
    threads_that_start("lane", 0)
    own = lanes.submit({A}, "here", lambda _operation: threading.current_thread())
    assert own.result(0) is threading.current_thread()


def test_an_operation_that_requests_more_does_not_wait_for_itself(lanes: Lanes) -> None:
    inner = lanes.submit({A}, "outer", lambda _operation: lanes.submit({A}, "inner", at_once)).result(
        PATIENCE_S
    )
    assert inner.result(PATIENCE_S) == "done"


def test_listing_running_operations_opens_no_file_of_claims(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = ClaimLocks(tmp_path / "locks")
    for number in range(20):
        with claims.hold(f"claim-{number}", 5.0) as guard:
            guard.note_prepared(0)
    opened: list[str] = []
    hangs = Work()
    operation = lanes.submit({A}, "the creation of a MIG device", hangs)
    assert hangs.begun.wait(PATIENCE_S)
    monkeypatch.setattr(
        locks, "open_plain", lambda path, flags: opened.append(path.name) or os.open(path, flags)
    )
    assert lanes.hanging().keys() == {A}
    assert opened == [f"{A}.lock"]
    monkeypatch.undo()
    hangs.let.set()
    operation.result(PATIENCE_S)


def test_named_operation_is_queued_once_for_the_same_gpus(lanes: Lanes) -> None:
    hangs, begun = threading.Event(), []

    def work(operation: Operation) -> None:
        begun.append(operation.what)
        hangs.wait(PATIENCE_S)

    first = lanes.submit({A}, "first", work)
    named = [lanes.submit({A}, "named", work, once="name") for _ in range(2)]
    others = [
        lanes.submit({A, B}, "both", work, once="name"),
        lanes.submit({A}, "another", work, once="another"),
    ]
    assert named[0] is named[1]
    assert len({first, *named, *others}) == 4
    hangs.set()
    for future in (first, *named, *others):
        future.result(PATIENCE_S)
    assert sorted(begun) == ["another", "both", "first", "named"]
    assert lanes.submit({A}, "named again", work, once="name").result(PATIENCE_S) is None
    assert begun[-1] == "named again"
