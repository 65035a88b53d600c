"""The lanes of GPUs: one operation at a time on each, and nothing waits for a GPU that it does not need."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.base.deadline import time_left, until
from dra_driver.base.file_lock import LockBusyError
from dra_driver.journal.lanes import GpuUnresponsiveError, Lanes, Operation, only_writes
from dra_driver.journal.locks import GpuLocks
from tests.fakes.waiting import PATIENCE_S, eventually

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


def test_operation_that_closes_nvml_starts_during_a_hang_only_if_that_is_a_kernel_write(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.lanes.UNRESPONSIVE_AFTER_S", 0.0)
    writes, ends = Work(), Work()

    def work(operation: Operation) -> str:
        with only_writes():
            writes(operation)
        return ends(operation)

    requested = lanes.submit({A}, "the binding to vfio", work)
    assert writes.begun.wait(PATIENCE_S)
    lanes.refuse_other_hangs(B)
    with pytest.raises(GpuUnresponsiveError):
        lanes.refuse_unresponsive({A})
    writes.let.set()
    assert ends.begun.wait(PATIENCE_S)
    with pytest.raises(GpuUnresponsiveError):
        lanes.refuse_other_hangs(B)
    lanes.refuse_other_hangs(A)
    ends.let.set()
    assert requested.result(PATIENCE_S) == "done"


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


def test_operation_waits_for_another_process_and_names_it_when_it_takes_too_long(
    lanes: Lanes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GpuLocks(tmp_path / "locks").hold({A}, 1):
        waiting = lanes.submit({A}, "the MIG device creation", at_once)
        wait = "the wait for another process of gpu-dra-driver"
        eventually(lambda: [one.what for one in lanes.under_way().values()] == [wait])
        with pytest.raises(GpuUnresponsiveError, match=f"GPU GPU-a does not respond: {wait} began at "):
            lanes.refuse_unresponsive({A}, 0.0)
    assert waiting.result(PATIENCE_S) == "done"
    monkeypatch.setattr("dra_driver.journal.lanes._OTHER_PROCESS_S", 0.05)
    with GpuLocks(tmp_path / "locks").hold({A}, 1):
        late = lanes.submit({A}, "the MIG device creation", at_once)
        with pytest.raises(
            LockBusyError, match="another process of gpu-dra-driver still works on GPU GPU-a; "
        ):
            late.result(PATIENCE_S)


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
