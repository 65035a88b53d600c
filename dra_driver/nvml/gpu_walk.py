"""Reading the GPUs of a node one after the other, without being held up by one that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")

ANSWERS_WITHIN_S = 15.0
"""A GPU without persistence mode wakes up first, which takes seconds."""
NOT_ANSWERED = f"it has not answered within {ANSWERS_WITHIN_S:.0f} s"
_OTHERS_ANSWER_WITHIN_S = 1.0
"""For the GPUs after one that did not answer. A call that hangs may block all others of the process, and then eight
GPUs must not take eight times as long."""


class GpuWalk:
    """Calls NVML for GPUs by their NVML index, in a thread of its own. For one caller at a time.

    A GPU whose call does not return in time is left behind with that thread, and is not called again until its call has
    returned. So there is at most one outstanding call for each GPU.
    """

    def __init__(self) -> None:
        self._outstanding: dict[int, Future[Any]] = {}

    def each(self, indexes: Sequence[int], read: Callable[[int], T]) -> dict[int, Future[T]]:
        """What `read` returned or raised, by index, as futures that are done. A GPU that does not answer is left out.

        >>> [index for index, answer in GpuWalk().each(range(2), lambda index: index * 10).items()]
        [0, 1]
        """
        self._outstanding = {index: call for index, call in self._outstanding.items() if not call.done()}
        left = [index for index in indexes if index not in self._outstanding]
        answers: dict[int, Future[T]] = {}
        wait_s = ANSWERS_WITHIN_S
        while left:
            calls = _begun(left, read)
            for index in left:
                try:
                    calls[index].exception(wait_s)
                except FutureTimeout:
                    self._outstanding[index] = calls[index]
                    wait_s = _OTHERS_ANSWER_WITHIN_S
                    left = left[left.index(index) + 1 :]
                    for later in left:
                        calls[later].cancel()
                    break
                answers[index] = calls[index]
            else:
                break
        return answers


def _begun(indexes: Sequence[int], read: Callable[[int], T]) -> dict[int, Future[T]]:
    """One thread reads them in this order; it ends at the first call that was cancelled before it began."""
    calls: dict[int, Future[T]] = {index: Future() for index in indexes}

    def run() -> None:
        for index, call in calls.items():
            if not call.set_running_or_notify_cancel():
                return
            try:
                call.set_result(read(index))
            except BaseException as error:  # noqa: BLE001  it is raised where the answer is looked at
                call.set_exception(error)

    threading.Thread(target=run, name="gpu-walk", daemon=True).start()
    return calls
