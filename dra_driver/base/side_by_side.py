"""Work on several things at the same time where each may have to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import TypeVar

import structlog

_log = structlog.get_logger(__name__)

T = TypeVar("T")


def side_by_side(
    tasks: Sequence[Callable[[], T]], at_most: int, wait_s: float | None = None
) -> list[Future[T]]:
    """Run the tasks in the caller's context, `at_most` at a time; one future for each, in their order.

    Without `wait_s` all futures are done at the return. With it the call returns after that many seconds at the latest:
    a task that hangs is left behind in its thread, and one that has not begun by then never begins (its future is
    cancelled).

    Where a thread cannot start, fewer threads do the work. Without `wait_s` the caller's own thread is always one of
    them. With it, the caller's thread does no work, so without any other thread no task begins.
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

    started = 0
    try:
        for _ in range(min(at_most, len(tasks)) - (wait_s is None)):
            run = copy_context().run
            threading.Thread(target=run, args=(work,), name="side-by-side", daemon=True).start()
            started += 1
    except (RuntimeError, MemoryError) as error:
        # An error here would end the caller, and its locks, while the threads before go on.
        _log.warning("threads_not_started", started=started, reason=str(error))
    if wait_s is None:
        work()
    wait(futures, wait_s if started else 0)
    for future in futures:
        future.cancel()
    return futures
