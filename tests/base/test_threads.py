from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import pytest
import structlog

from dra_driver.base.threads import BackgroundWorker, run_in_parallel, start_thread
from tests.fakes.waiting import PATIENCE_S, eventually


def worker(
    work: Callable[[], float], on_crash: Callable[[Exception], float] = lambda _: 0.0
) -> BackgroundWorker:
    return BackgroundWorker("test", work, on_crash)


def test_work_is_called_again_when_it_is_woken_and_not_before() -> None:
    calls: list[int] = []
    done = threading.Semaphore(0)

    def work() -> float:
        calls.append(1)
        done.release()
        return math.inf

    one = worker(work)
    one.start()
    assert done.acquire(timeout=PATIENCE_S)
    one.wake()
    assert done.acquire(timeout=PATIENCE_S)
    one.stop()
    assert len(calls) == 2


def test_wake_during_the_work_is_not_lost() -> None:
    seen: list[bool] = []
    again = threading.Event()

    def work() -> float:
        if seen:
            again.set()
        else:
            one.wake()
        seen.append(not one._wake.locked())
        return math.inf

    one = worker(work)
    one.start()
    assert again.wait(PATIENCE_S)
    one.stop()
    assert seen == [True, False]


def test_error_of_a_worker_is_reported_and_the_worker_continues() -> None:
    crashes: list[str] = []
    healed = threading.Event()

    def work() -> float:
        if not crashes:
            raise ValueError("a surprise")
        healed.set()
        return math.inf

    def crashed(error: Exception) -> float:
        crashes.append(str(error))
        return 0.0

    with structlog.testing.capture_logs() as lines:
        one = worker(work, crashed)
        one.start()
        assert healed.wait(PATIENCE_S)
        one.stop()
    assert crashes == ["a surprise"]
    assert [(line["event"], line["log_level"]) for line in lines] == [("worker_failed", "error")]


def test_stop_ends_a_pause_within_the_work_and_may_come_before_the_start() -> None:
    reported: list[bool] = []
    began = threading.Event()

    def work() -> float:
        began.set()
        reported.append(one.pause(60))
        return 0.0

    one = worker(work)
    one.start()
    assert began.wait(PATIENCE_S)
    one.stop()
    assert (reported, one.is_stopping) == ([True], True)
    worker(work).stop()


def test_thread_of_ended_work_does_the_next_work_under_its_name_and_in_a_new_context() -> None:
    state: ContextVar[str] = ContextVar("state", default="new")
    seen: list[tuple[str, str]] = []
    threads = set[threading.Thread]()
    ended = threading.Semaphore(0)

    def work() -> None:
        seen.append((threading.current_thread().name, state.get()))
        threads.add(threading.current_thread())
        state.set("used")
        ended.release()

    for name in ("first", "second", "third", "fourth"):
        start_thread(name, work)
        assert ended.acquire(timeout=PATIENCE_S)
        eventually(lambda: all(thread.name == "spare" for thread in threads))
    assert seen == [(name, "new") for name in ("first", "second", "third", "fourth")]
    assert len(threads) < 4


def test_work_begins_while_all_other_work_hangs_and_few_threads_stay() -> None:
    end, began = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        began.release()
        end.wait(PATIENCE_S)

    for _ in range(6):
        start_thread("hangs", hang)
        assert began.acquire(timeout=PATIENCE_S)
    end.set()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "hangs"])
    eventually(lambda: sum(thread.name == "spare" for thread in threading.enumerate()) <= 2)


Limit = Callable[[str, int], None]
THREADS = "side-by-side"


class Tasks:
    """Tasks that return their number; the third one fails. One task ends in a helper's thread after the
    caller's tasks.
    """

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._caller = threading.current_thread()
        self._caller_has_ended = threading.Event()

    def run(self, number: int) -> int:
        if threading.current_thread() is self._caller:
            self._caller_has_ended.set()
        else:
            self._caller_has_ended.wait(0.2)
            time.sleep(0.05)
        self.ended.append(number)
        if number == 2:
            raise ValueError("the third task")
        return number

    def all(self, count: int) -> list[Callable[[], int]]:
        return [partial(self.run, number) for number in range(count)]


@pytest.mark.parametrize("started", range(4))
def test_every_task_has_ended_with_its_outcome_when_not_all_threads_start(
    threads_that_start: Limit, started: int
) -> None:
    threads_that_start(THREADS, started)
    tasks = Tasks()
    futures = run_in_parallel(tasks.all(6), 4)
    assert sorted(tasks.ended) == [0, 1, 2, 3, 4, 5]
    assert [repr(future.exception() or future.result()) for future in futures] == [
        "0", "1", "ValueError('the third task')", "3", "4", "5",
    ]  # fmt: skip


def test_tasks_with_a_time_limit_end_when_one_thread_starts(threads_that_start: Limit) -> None:
    threads_that_start(THREADS, 1)
    tasks = Tasks()
    futures = run_in_parallel(tasks.all(2), 2, 20)
    assert [future.result() for future in futures] == tasks.ended == [0, 1]


def test_no_task_with_a_time_limit_begins_when_no_thread_starts(threads_that_start: Limit) -> None:
    """The caller's own thread could hang in it."""
    threads_that_start(THREADS, 0)
    tasks = Tasks()
    futures = run_in_parallel(tasks.all(2), 2, 20)
    assert ([future.cancelled() for future in futures], tasks.ended) == ([True, True], [])
