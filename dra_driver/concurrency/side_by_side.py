"""Work on several things at the same time where each may have to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def side_by_side(
    tasks: Sequence[Callable[[], T]], at_most: int, wait_s: float | None = None
) -> list[Future[T]]:
    """Run the tasks in the caller's context, `at_most` at a time; one future for each, in their order.

    Without `wait_s` all futures are done at the return. With it the call returns after that many seconds at the latest:
    a task that hangs is left behind in its thread, and one that has not begun by then never begins (its future is
    cancelled).
    """
    futures: list[Future[T]] = [Future() for _ in tasks]
    waiting = list(zip(tasks, futures, strict=True))
    waiting.reverse()
    guard = threading.Lock()

    def work() -> None:
        while True:
            with guard:
                if not waiting:
                    return
                task, future = waiting.pop()
                if not future.set_running_or_notify_cancel():
                    continue
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001  whoever asks the future gets it
                future.set_exception(error)

    helpers = min(at_most, len(tasks)) - (wait_s is None)
    threads = [
        threading.Thread(target=copy_context().run, args=(work,), name="side-by-side", daemon=True)
        for _ in range(helpers)
    ]
    for thread in threads:
        thread.start()
    if wait_s is None:
        work()
        for thread in threads:
            thread.join()
    else:
        _wait(futures, wait_s)
        for future in futures:
            future.cancel()
    return futures


def _wait(futures: Sequence[Future[T]], wait_s: float) -> None:
    left = len(futures)
    is_done = threading.Condition()

    def count(_future: Future[T]) -> None:
        nonlocal left
        with is_done:
            left -= 1
            is_done.notify_all()

    for future in futures:
        future.add_done_callback(count)
    with is_done:
        is_done.wait_for(lambda: not left, wait_s)
