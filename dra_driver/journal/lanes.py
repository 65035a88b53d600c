"""Runs all changes to a GPU in the GPU's lane, one operation at a time.

    submitted ──every GPU of it is idle──▶ running ──▶ ended; the future has the outcome
     │                                      └─ for a minute: the GPU is unresponsive until the operation ends
     └─ the caller has given up: it never starts

The caller holds no lock and waits as long as it wants. An operation for several GPUs starts when all of them
are idle; until then, it does not block any of them. The other instance of a rolling update has its own lanes, but an
operation holds the file locks of its GPUs, so the two instances never work on one GPU at the same time. The lock files
show each instance which operation the other one is running, and since when.

A program that cannot be killed keeps its lane busy until it exits, because `GpuLocks.hold` waits for the program.

A crash can interrupt an operation. The records and ledgers on disk show what the operation was doing, and every
operation can be repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog

from dra_driver.base.deadline import time_left
from dra_driver.errors import RetryableError
from dra_driver.journal.locks import GpuLocks, LockUse

_log = structlog.get_logger(__name__)

T = TypeVar("T")

UNRESPONSIVE_AFTER_S = 60.0
"""How long an operation may run on a GPU before other operations stop waiting for that GPU."""
_OTHER_INSTANCE_S = 30.0
"""How long an operation waits for the other instance of a rolling update to finish with the GPU."""


class GpuUnresponsiveError(RetryableError):
    """An operation on the GPU takes too long."""

    has_no_effect = True


@dataclass(slots=True, eq=False)
class Operation:
    """An operation that waits or runs. `what` describes it in messages, and may change while the operation runs.

    `began` is its start (time.monotonic()), None while it waits; `since` is the start as text. `once` identifies equal
    operations of which only one may wait; None if any number may. `show` writes the running step into the lock files.
    `only_writes` is as in `LockUse`. `is_given_up` returns whether the caller no longer waits for the operation.
    """

    gpu_uuids: frozenset[str]
    what: str
    work: Callable[[Operation], Any]
    patience_s: float
    context: Context
    once: Hashable = None
    future: Future[Any] = field(default_factory=Future)
    began: float | None = None
    since: str = ""
    only_writes: bool = False
    show: Callable[[Iterable[LockUse]], None] = lambda _uses: None
    is_given_up: Callable[[], bool] = lambda: False

    def set_step(self, what: str) -> None:
        """Show `what` as the running step, in this process and in the lock files. Called by `work`."""
        if what != self.what:
            self.what = what
            self.show(self.uses())

    def uses(self) -> list[LockUse]:
        """Return the lock use for each GPU of the operation; empty before the operation starts."""
        if self.began is None:
            return []
        return [
            LockUse(uuid, self.what, self.began, self.since, self.only_writes)
            for uuid in sorted(self.gpu_uuids)
        ]


_operation: ContextVar[Operation | None] = ContextVar("operation", default=None)


@contextmanager
def only_writes() -> Iterator[None]:
    """Mark the current operation as one that writes to the kernel and does not need NVML.

    If such a write hangs, NVML can still be closed and opened for other GPUs.
    """
    operation = _operation.get()
    if operation is None:
        yield
        return

    def turn(*, is_on: bool) -> None:
        operation.only_writes = is_on
        operation.show(operation.uses())

    turn(is_on=True)
    try:
        yield
    except Exception:
        turn(is_on=False)
        raise
    turn(is_on=False)


def refuse_given_up() -> None:
    """Raise RetryableError if the caller no longer waits for the current operation."""
    operation = _operation.get()
    if operation is not None and operation.is_given_up():
        raise RetryableError("the call for this operation has ended; the kubelet retries")


class Lanes:
    """The lanes of this process. Thread-safe. A lane without work has no thread."""

    def __init__(self, locks: GpuLocks) -> None:
        self._locks = locks
        self._guard = threading.Lock()
        self._waiting: list[Operation] = []
        self._under_way: dict[str, Operation] = {}  # by the UUID of the GPU

    def submit(
        self,
        gpu_uuids: Collection[str],
        what: str,
        work: Callable[[Operation], T],
        patience_s: float = _OTHER_INSTANCE_S,
        *,
        once: Hashable = None,
    ) -> Future[T]:
        """Run `work` when the GPUs are idle, in a copy of the caller's context.

        If the caller cancels the future before then, `work` never runs. The future raises LockBusyError if the other
        instance of a rolling update keeps a GPU for `patience_s` seconds.

        `once` identifies background work: while an equal operation on the same GPUs waits, its future is
        returned. Background work runs in a new context, without the caller's deadline.

        If no thread can start, the work runs in the caller's thread.
        """
        gpus = frozenset(gpu_uuids)
        context = copy_context() if once is None else Context()
        operation = Operation(gpus, what, work, patience_s, context, once)
        with self._guard:
            for other in self._waiting:
                if once is not None and (other.once, other.gpu_uuids) == (once, gpus):
                    return other.future
            self._waiting.append(operation)
            ready = self._ready()
        self._start(ready)
        return operation.future

    def under_way(self) -> Mapping[str, Operation]:
        """Return the operation that runs on each GPU, by UUID."""
        with self._guard:
            return dict(self._under_way)

    def uses(self) -> Mapping[str, LockUse]:
        """Return the lock use of each GPU on which either instance of a rolling update is running an operation."""
        found = {use.gpu_uuid: use for one in self.under_way().values() for use in one.uses()}
        for use in self._locks.uses():
            ours = found.get(use.gpu_uuid)
            # The other instance has the lock, and this process's operation is waiting for it.
            if ours is None or ours.began != use.began:
                found[use.gpu_uuid] = use
        return found

    def hanging(self) -> Mapping[str, tuple[str, float]]:
        """Return the operation on each GPU as its description and start (time.monotonic())."""
        return {uuid: (use.what, use.began) for uuid, use in self.uses().items()}

    def refuse_unresponsive(self, gpu_uuids: Collection[str], after_s: float | None = None) -> None:
        """Raise GpuUnresponsiveError if an operation has run for `after_s` seconds on one of the GPUs. The error names
        the operation.
        """
        limit = time.monotonic() - (UNRESPONSIVE_AFTER_S if after_s is None else after_s)
        uses = self.uses()
        for uuid in sorted(gpu_uuids & uses.keys()):
            if uses[uuid].began <= limit:
                raise GpuUnresponsiveError(_text(uses[uuid]))

    def refuse_other_hangs(self, gpu_uuid: str) -> None:
        """Raise GpuUnresponsiveError if an operation on any other GPU hangs in NVML.

        In that case, an operation that closes NVML must not start.
        """
        needs_nvml = {uuid for uuid, use in self.uses().items() if not use.only_writes}
        self.refuse_unresponsive(needs_nvml - {gpu_uuid})

    def _ready(self) -> list[Operation]:
        """Remove and return the operations that can start now, in order of submission. The caller holds the
        guard.
        """
        ready = []
        for operation in self._waiting.copy():
            if operation.gpu_uuids.isdisjoint(self._under_way):
                self._waiting.remove(operation)
                self._under_way |= dict.fromkeys(operation.gpu_uuids, operation)
                ready.append(operation)
        return ready

    def _start(self, operations: Collection[Operation]) -> None:
        for operation in operations:
            try:
                threading.Thread(target=self._work, args=(operation,), name="lane", daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                _log.warning("lane_has_no_thread", what=operation.what, reason=str(error))
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
        """Run the operation; returns a function that completes its future."""
        future = operation.future
        if not future.set_running_or_notify_cancel():
            return lambda: None
        operation.since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        operation.began = time.monotonic()
        try:
            result = operation.context.run(self._run_locked, operation)
        except BaseException as error:  # noqa: BLE001  stored in the future
            failure = error
            return lambda: future.set_exception(failure)
        return lambda: future.set_result(result)

    def _run_locked(self, operation: Operation) -> Any:
        _operation.set(operation)
        patience_s = time_left(operation.patience_s)
        with self._locks.hold(operation.gpu_uuids, patience_s, uses=operation.uses()) as operation.show:
            return operation.work(operation)


def _text(use: LockUse) -> str:
    """Describe what hangs on which GPU, and what to do."""
    return (
        f"GPU {use.gpu_uuid} does not respond: {use.what} began at {use.since} UTC and has not finished; if this "
        "lasts, drain and reboot the node"
    )
