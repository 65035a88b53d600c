"""Work whose libraries shall not stay in memory: done by a child process, which takes them along when it ends."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from dra_driver.errors import DraDriverError, FatalError

_Result = TypeVar("_Result")


class Forked(Generic[_Result]):
    """Calls `work` in a child of this process, which must have one thread only, and goes on at once.

    What the work returns or raises has to fit into a pickle; a DraDriverError does. The child closes nothing and
    flushes nothing that it has from its parent.
    """

    def __init__(self, work: Callable[[], _Result]) -> None:
        """Start. Raises: FatalError if no process can be made."""
        try:
            self._pipe, written = os.pipe()
            try:
                self._pid = os.fork()
            except OSError:
                os.close(self._pipe)
                os.close(written)
                raise
        except OSError as error:
            raise FatalError(f"cannot start a process: {error.strerror}") from error
        if self._pid == 0:
            _work(work, written)
        os.close(written)

    def result(self) -> _Result:
        """Wait for it; call this once. Raises: what the work raised, FatalError if the child died."""
        with os.fdopen(self._pipe, "rb") as pipe:
            answer = pipe.read()
        try:
            _, status = os.waitpid(self._pid, 0)
        except ChildProcessError:  # who started us ignores the ends of children
            status = 0
        if status or not answer:
            raise FatalError(f"a process that reads the configuration ended with status {status}")
        found: tuple[_Result, None] | tuple[None, BaseException] = pickle.loads(answer)  # noqa: S301  our own child
        result, error = found
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


def _work(work: Callable[[], object], pipe: int) -> None:
    """In the child. Never returns."""
    try:
        try:
            answer = pickle.dumps((work(), None))
        except DraDriverError as error:
            answer = pickle.dumps((None, error))
        with os.fdopen(pipe, "wb") as file:
            file.write(answer)
    except BaseException as error:  # noqa: BLE001  there is nobody above to tell
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    os._exit(0)
