"""Asking something that may hang, without hanging with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from dra_driver.errors import DraDriverError, RetryableError

T = TypeVar("T")


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
