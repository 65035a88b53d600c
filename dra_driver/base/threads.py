"""Work in other threads: a call that may hang, work that is repeated, and several tasks side by side."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import structlog

from dra_driver.errors import DraDriverError, RetryableError

_log = structlog.get_logger(__name__)

T = TypeVar("T")
_AFTER_CRASH_S = 10.0


class NotAnsweredError(RetryableError):
    """What was asked hangs. `answer` is there when it has ended after all."""

    def __init__(self, message: str, answer: Future[Any]) -> None:
        super().__init__(message)
        self.answer = answer


def bounded(what: str, read: Callable[[], T], wait_s: float) -> T:
    """What `read` answers, called in a thread that is left behind if it hangs, in a copy of the caller's context;
    `what` begins the sentence on that.

    Raises: what `read` raises, and NotAnsweredError after `wait_s` seconds.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:  # noqa: BLE001  it is raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=copy_context().run, args=(ask,), name=f"ask {what}", daemon=True).start()
    try:
        return answer.result(wait_s)
    except FutureTimeout:
        raise NotAnsweredError(f"{what} has not answered for more than {wait_s:g} s", answer) from None


class BoundedCall(Generic[T]):
    """Calls `read` in threads of its own, one at a time; one that hangs is left behind when the process ends.

    `what` begins the sentences on what went wrong. For callers in one thread.
    """

    def __init__(self, what: str, read: Callable[[], T]) -> None:
        self._what = what
        self._read = read
        self._thread: threading.Thread | None = None
        self._value: T | None = None
        self._problem: str | None = None

    @property
    def is_asking(self) -> bool:
        """Whether a call is under way."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self) -> None:
        """Begin a call, unless one is under way."""
        if not self.is_asking:
            thread = threading.Thread(target=self._run, name=f"ask {self._what}", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:
                self._value, self._problem = None, f"{self._what} could not be asked: {error}"

    def answer(self, wait_s: float) -> tuple[T | None, str | None]:
        """What the last call brought, None if it failed, and what is wrong with it; waits no longer than told.

        While a call takes longer, the answer of the call before stands.
        """
        if self._thread is not None:
            self._thread.join(wait_s)
        if self.is_asking:
            return self._value, f"{self._what} has not answered for more than {wait_s:g} s"
        return self._value, self._problem

    def _run(self) -> None:
        value: T | None = None
        problem: str | None = None
        try:
            value = self._read()
        except DraDriverError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001  a surprise costs this part of the answer, not the rest
            problem = f"{self._what} answered with a surprise: {error!r}"
        self._value, self._problem = value, problem


class BackgroundWorker:
    """Calls `work` in a daemon thread named `name`, from `start` to `stop`.

    `work` answers how many seconds to pause before the next call, math.inf for as long as nobody wakes it. Whatever it
    raises is a mistake of ours: it is logged with its traceback, and `on_crash` answers the pause then. `wake` ends the
    pause; a wake during the work counts for the pause after it. A part that has a thread of its own is such a worker.
    """

    join_s = 5.0
    """How long `stop` waits."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        on_crash: Callable[[Exception], float] = lambda _: _AFTER_CRASH_S,
    ) -> None:
        self._work = work
        self._on_crash = on_crash
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called: long work ends early then."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Begin with the first call of `work`."""
        self._thread.start()

    def wake(self) -> None:
        """Have `work` called soon."""
        self._wake.set()

    def pause(self, seconds: float) -> bool:
        """Pause within the work, whatever wakes it; True if the worker is being stopped."""
        return self._stopping.wait(seconds)

    def stop(self) -> bool:
        """Have no more calls; waits a few seconds at most for one that is under way. Harmless before `start`.

        False if that call is still under way.
        """
        self.retire()
        return self.wait_ended(self.join_s)

    def retire(self) -> None:
        """Have no more calls, without a wait for one that is under way."""
        self._stopping.set()
        self._wake.set()

    def wait_ended(self, wait_s: float) -> bool:
        """Whether no call is under way, after `wait_s` seconds at most."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._stopping.is_set():  # looked at last: `retire` wakes after it
                return
            try:
                seconds = self._work()
            except Exception as error:  # noqa: BLE001  a thread that ended would do nothing any more
                _log.exception("worker_failed", worker=self._thread.name)
                seconds = self._on_crash(error)
            self._wake.wait(None if math.isinf(seconds) else max(0.0, seconds))


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
