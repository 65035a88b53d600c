"""Threads: calls that may hang, repeated background work, and tasks that run in parallel."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import structlog

from dra_driver.errors import DraDriverError, RetryableError

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_AFTER_CRASH_S = 10.0


_MAX_SPARE = 2
_spare: list[SimpleQueue[tuple[str, Callable[[], object]]]] = []


def start_thread(name: str, work: Callable[[], object]) -> None:
    """Run `work` in a daemon thread named `name` and in a new context.

    Two idle threads are kept, because starting and ending a thread costs up to half a millisecond. Raises:
    RuntimeError, MemoryError.
    """
    try:
        queue = _spare.pop()
    except IndexError:
        queue = SimpleQueue()
        threading.Thread(target=_run_all, args=(queue,), name=name, daemon=True).start()
    queue.put((name, work))


def _run_all(queue: SimpleQueue[tuple[str, Callable[[], object]]]) -> None:
    thread = threading.current_thread()
    while True:
        thread.name, work = queue.get()
        Context().run(work)
        del work  # it may hold large objects
        thread.name = "spare"
        if len(_spare) >= _MAX_SPARE:
            return
        _spare.append(queue)


class NotAnsweredError(RetryableError):
    """A call hangs. `answer` completes if the call returns later."""

    def __init__(self, message: str, answer: Future[Any]) -> None:
        super().__init__(message)
        self.answer = answer


def bounded(what: str, read: Callable[[], T], wait_s: float) -> T:
    """Return the result of `read`, called in a new thread with a copy of the caller's context.

    Raises: the errors of `read`; NotAnsweredError after `wait_s`: the hanging call is left behind.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:  # noqa: BLE001  raised where the answer is awaited
            answer.set_exception(error)

    start_thread(f"ask {what}", partial(copy_context().run, ask))
    try:
        return answer.result(wait_s)
    except FutureTimeout:
        raise NotAnsweredError(f"{what} has not answered for more than {wait_s:g} s", answer) from None


class BoundedCall(Generic[T]):
    """Calls `read` in background threads, one call at a time. Not thread-safe."""

    def __init__(self, what: str, read: Callable[[], T]) -> None:
        self._what = what
        self._read = read
        self._ended: threading.Event | None = None
        self._value: T | None = None
        self._problem: str | None = None

    @property
    def is_running(self) -> bool:
        return self._ended is not None and not self._ended.is_set()

    def start(self) -> None:
        if not self.is_running:
            ended = threading.Event()
            try:
                start_thread(f"ask {self._what}", partial(self._run, ended))
                self._ended = ended
            except RuntimeError as error:
                self._value, self._problem = None, f"{self._what} could not be queried: {error}"

    def result(self, wait_s: float) -> tuple[T | None, str | None]:
        """Return the last result (None after a failure), and the error, after at most `wait_s`.

        If a call takes longer, this returns the result of the previous call.
        """
        if self._ended is not None:
            self._ended.wait(wait_s)
        if self.is_running:
            return self._value, f"{self._what} has not answered for more than {wait_s:g} s"
        return self._value, self._problem

    def _run(self, ended: threading.Event) -> None:
        value: T | None = None
        problem: str | None = None
        try:
            value = self._read()
        except DraDriverError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001  an unexpected error must not cost the caller its other results
            problem = f"{self._what} failed unexpectedly: {error!r}"
        self._value, self._problem = value, problem
        ended.set()


class BackgroundWorker:
    """Calls `work` repeatedly in a daemon thread, from `start` until `stop`.

    `work` returns the seconds to pause before the next call; math.inf pauses until `wake`. After an exception,
    `on_crash` returns the pause.
    """

    join_s = 5.0

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        on_crash: Callable[[Exception], float] = lambda _: _AFTER_CRASH_S,
    ) -> None:
        self._work = work
        self._on_crash = on_crash
        # Free when `wake` was called. An Event takes twice the time for a pause.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """End the current pause, or the next one if `work` is running."""
        with suppress(RuntimeError):  # it is free
            self._wake.release()

    def pause(self, seconds: float) -> bool:
        """Pause inside `work`; `wake` has no effect. Returns True if the worker is being stopped."""
        return self._stopping.wait(seconds)

    def stop(self) -> bool:
        """Make no more calls; return whether a call in progress has ended within `join_s`."""
        self.retire()
        return self.wait_ended(self.join_s)

    def retire(self) -> None:
        self._stopping.set()
        self.wake()

    def wait_ended(self, wait_s: float) -> bool:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.acquire(blocking=False)
            if (
                self._stopping.is_set()
            ):  # checked after that, because `retire` sets `_stopping` before it wakes
                return
            try:
                seconds = self._work()
            except Exception as error:  # noqa: BLE001  the thread must survive to do its next work
                _log.exception("worker_failed", worker=self._thread.name)
                seconds = self._on_crash(error)
            self._wake.acquire(timeout=-1 if math.isinf(seconds) else max(0.0, seconds))


def run_in_parallel(
    tasks: Sequence[Callable[[], T]], max_threads: int, wait_s: float | None = None
) -> list[Future[T]]:
    """Run the tasks in the caller's context, `max_threads` at a time; returns one future per task, in order.

    Without `wait_s`, the caller's thread runs tasks too, and all futures are done on return. With `wait_s`, a task that
    hangs is left behind, the futures of tasks that have not started are cancelled, and no task runs if no thread can
    start.
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
            except BaseException as error:  # noqa: BLE001  stored in the future
                future.set_exception(error)

    started = 0
    try:
        for _ in range(min(max_threads, len(tasks)) - (wait_s is None)):
            start_thread("side-by-side", partial(copy_context().run, work))
            started += 1
    except (RuntimeError, MemoryError) as error:
        # Raising here would release the caller's locks while the started threads still run.
        _log.warning("threads_not_started", started=started, reason=str(error))
    if wait_s is None:
        work()
    wait(futures, wait_s if started else 0)
    for future in futures:
        future.cancel()
    return futures
