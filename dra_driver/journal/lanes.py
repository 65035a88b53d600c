"""Runs all changes to a GPU in the GPU's lane, one operation at a time.

The caller holds no lock. An operation for several GPUs blocks none of them before all are idle. A running
operation holds the lock files of its GPUs (`journal.locks`), so a program that cannot be killed keeps its
lane busy until it exits.

After a crash, records and ledgers show what the operation was doing, and every operation can be repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import structlog

from dra_driver.base.deadline import time_left
from dra_driver.base.file_lock import LockBusyError
from dra_driver.base.threads import start_thread
from dra_driver.errors import RetryableError
from dra_driver.journal.locks import GpuLocks
from dra_driver.model.dataclass import dataclass, field

_log = structlog.get_logger(__name__)

T = TypeVar("T")

UNRESPONSIVE_AFTER_S = 60.0
"""After this, other operations stop waiting for the GPU."""
_OTHER_PROCESS_S = 30.0
"""A program of a killed plugin may take half of this."""
_CHECK_OTHERS_S = 0.5
_WAIT = "the wait for another process of gpu-dra-driver"
_OF_OTHERS = "other processes"


class GpuUnresponsiveError(RetryableError):
    has_no_effect = True


@dataclass(slots=True, eq=False)
class Operation:
    """`what` is for messages, and may change while the operation runs.

    `began` (time.monotonic()) and `since`, the same as text, are empty while it waits. Of operations with
    equal `once` and GPUs, only one may wait. `only_writes`: it waits for a write to the kernel, without NVML.
    `is_given_up`: the caller no longer waits.
    """

    gpu_uuids: frozenset[str]
    what: str
    work: Callable[[Operation], Any]
    context: Context
    once: Hashable = None
    future: Future[Any] = field(default_factory=Future)
    began: float = 0.0
    since: str = ""
    only_writes: bool = False
    is_given_up: Callable[[], bool] = lambda: False

    def text(self, gpu_uuid: str) -> str:
        return f"{self.what} on GPU {gpu_uuid} began at {self.since} UTC and has not finished"


_operation: ContextVar[Operation | None] = ContextVar("operation", default=None)


@contextmanager
def only_writes() -> Iterator[None]:
    """Mark the current operation as a write to the kernel: if it hangs, NVML can still be closed and opened
    for other GPUs.
    """
    operation = _operation.get()
    if operation is None:
        yield
        return

    operation.only_writes = True
    try:
        yield
    finally:
        operation.only_writes = False


def refuse_given_up() -> None:
    """Raise RetryableError if the caller no longer waits."""
    operation = _operation.get()
    if operation is not None and operation.is_given_up():
        raise RetryableError("the call for this operation has ended; the kubelet retries")


class Lanes:
    """Thread-safe. A lane without work occupies no thread."""

    def __init__(self, locks: GpuLocks) -> None:
        self._locks = locks
        self._guard = threading.Lock()
        self._waiting: list[Operation] = []
        self._under_way: dict[str, Operation] = {}  # by the UUID of the GPU

    def open(self) -> None:
        """Make each GPU busy on which another process still works. Raises: StateError."""
        self._locks.open()
        for gpu_uuid in self._locks.held():
            self.submit({gpu_uuid}, _WAIT, partial(self._wait_for_others, gpu_uuid), once=_OF_OTHERS)

    def close(self, wait_s: float) -> bool:
        """Start no more operations. Return whether all running ones have ended within `wait_s`."""
        with self._guard:
            waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation.future.cancel()
        running = {operation.future for operation in self.under_way().values()}
        return not wait(running, wait_s).not_done

    def submit(
        self,
        gpu_uuids: Collection[str],
        what: str,
        work: Callable[[Operation], T],
        *,
        once: Hashable = None,
    ) -> Future[T]:
        """Run `work` when the GPUs are idle, in a copy of the caller's context, or in the caller's thread if
        no thread can start.

        If the caller cancels the future before then, `work` never runs. The future raises LockBusyError if
        another process keeps a GPU for too long.

        With `once`, background work runs in a new context, without the caller's deadline. While equal work on
        the same GPUs waits, its future is returned.
        """
        gpus = frozenset(gpu_uuids)
        context = copy_context() if once is None else Context()
        operation = Operation(gpus, what, work, context, once)
        with self._guard:
            for other in self._waiting:
                if once is not None and (other.once, other.gpu_uuids) == (once, gpus):
                    return other.future
            self._waiting.append(operation)
            ready = self._ready()
        self._start(ready)
        return operation.future

    def under_way(self) -> Mapping[str, Operation]:
        with self._guard:
            return dict(self._under_way)

    def hanging(self) -> Mapping[str, tuple[str, float]]:
        """Return descriptions and starts (time.monotonic()) by GPU UUID."""
        return {uuid: (operation.what, operation.began) for uuid, operation in self.under_way().items()}

    def refuse_unresponsive(self, gpu_uuids: Collection[str], after_s: float | None = None) -> None:
        """Raise GpuUnresponsiveError if an operation on one of the GPUs has run for `after_s` seconds."""
        limit = time.monotonic() - (UNRESPONSIVE_AFTER_S if after_s is None else after_s)
        running = self.under_way()
        for uuid in sorted(gpu_uuids & running.keys()):
            if running[uuid].began <= limit:
                raise GpuUnresponsiveError(
                    f"GPU {uuid} does not respond: {running[uuid].what} began at {running[uuid].since} UTC and has not "
                    "finished; if this lasts, drain and reboot the node"
                )

    def refuse_other_hangs(self, gpu_uuid: str) -> None:
        """Raise GpuUnresponsiveError if an operation on another GPU hangs in NVML, which then must not be
        closed.
        """
        needs_nvml = {uuid for uuid, one in self.under_way().items() if not one.only_writes}
        self.refuse_unresponsive(needs_nvml - {gpu_uuid})

    def _wait_for_others(self, gpu_uuid: str, operation: Operation) -> None:
        operation.only_writes = True  # it is no NVML call of this process
        while self._locks.is_held(gpu_uuid):
            time.sleep(_CHECK_OTHERS_S)

    def _ready(self) -> list[Operation]:
        """Return what can start now, in order of submission. The caller holds the guard."""
        ready = []
        for operation in self._waiting.copy():
            if operation.gpu_uuids.isdisjoint(self._under_way):
                self._waiting.remove(operation)
                operation.began = time.monotonic()
                operation.since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
                self._under_way |= dict.fromkeys(operation.gpu_uuids, operation)
                ready.append(operation)
        return ready

    def _start(self, operations: Collection[Operation]) -> None:
        for operation in operations:
            try:
                start_thread("lane", partial(self._work, operation))
            except (RuntimeError, MemoryError) as error:
                _log.warning("gpu_thread_not_started", what=operation.what, reason=str(error))
                self._work(operation)

    def _work(self, operation: Operation | None) -> None:
        while operation is not None:
            complete = self._run(operation)
            with self._guard:
                for uuid in operation.gpu_uuids:
                    del self._under_way[uuid]
                ready = self._ready()
            complete()
            operation = ready.pop(0) if ready else None
            self._start(ready)

    def _run(self, operation: Operation) -> Callable[[], None]:
        future = operation.future
        if not future.set_running_or_notify_cancel():
            return lambda: None
        try:
            result = operation.context.run(self._run_locked, operation)
        except BaseException as error:  # noqa: BLE001  stored in the future
            failure = error
            return lambda: future.set_exception(failure)
        return lambda: future.set_result(result)

    def _run_locked(self, operation: Operation) -> Any:
        _operation.set(operation)
        if operation.once == _OF_OTHERS:
            return operation.work(operation)
        with ExitStack() as held:
            try:
                held.enter_context(self._locks.hold(operation.gpu_uuids, 0.0))
            except LockBusyError:
                what, operation.what = operation.what, _WAIT
                held.enter_context(self._locks.hold(operation.gpu_uuids, time_left(_OTHER_PROCESS_S)))
                operation.what = what
            return operation.work(operation)
