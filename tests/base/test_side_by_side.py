"""Work of several threads, also where not all of them can start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from dra_driver.base.side_by_side import side_by_side

Limit = Callable[[str, int], None]
THREADS = "side-by-side"


class Tasks:
    """Tasks that answer their number; the third one fails. In a helper's thread one ends after the caller's tasks."""

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
    futures = side_by_side(tasks.all(6), 4)
    assert sorted(tasks.ended) == [0, 1, 2, 3, 4, 5]
    assert [repr(future.exception() or future.result()) for future in futures] == [
        "0", "1", "ValueError('the third task')", "3", "4", "5",
    ]  # fmt: skip


def test_tasks_with_a_time_limit_end_when_one_thread_starts(threads_that_start: Limit) -> None:
    threads_that_start(THREADS, 1)
    tasks = Tasks()
    futures = side_by_side(tasks.all(2), 2, 20)
    assert [future.result() for future in futures] == tasks.ended == [0, 1]


def test_no_task_with_a_time_limit_begins_when_no_thread_starts(threads_that_start: Limit) -> None:
    """The caller's own thread could hang in it."""
    threads_that_start(THREADS, 0)
    tasks = Tasks()
    futures = side_by_side(tasks.all(2), 2, 20)
    assert ([future.cancelled() for future in futures], tasks.ended) == ([True, True], [])
