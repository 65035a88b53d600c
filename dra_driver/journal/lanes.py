"""The lane of each GPU: what changes a GPU runs there, one operation at a time, and nowhere else.

    asked ──every GPU of it is idle──▶ under way ──▶ ended; the future has the outcome
      │                                    └─ for a minute: the GPU is unresponsive until it ends
      └─ who asked has given up: it never begins

Whoever asks holds no lock and waits as long as it likes. An operation for several GPUs begins when all of them are
idle; it keeps none of them from other work while it waits for one. The other instance of a rolling update has lanes of
its own: an operation holds the file locks of its GPUs, so the two never work on one GPU at the same time. The lock
files tell each instance which operation of the other one is under way, and since when.

A program that cannot be killed keeps its lane until it ends: the lock of the GPU waits for it (`GpuLocks.hold`).

A crash ends an operation in the middle. The records and the ledgers on disk say what it was about; what runs in a lane
can be done any number of times.
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
"""How long an operation may be under way on a GPU until nobody waits for that GPU any more."""
_OTHER_INSTANCE_S = 30.0
"""How long an operation waits until the other instance of a rolling update has done with the GPU."""


class GpuUnresponsiveError(RetryableError):
    """An operation on the GPU does not end."""

    has_no_effect = True


@dataclass(slots=True, eq=False)
class Operation:
    """What a lane has to do or does; `what` is for people, and may change while it is under way.

    `began` is when it began (time.monotonic()), None while it waits; `since` says the same for people. `once` is its
    name, None if any number of the same may wait. `show` writes what is under way into the lock files. `only_writes` is
    as in `LockUse`.
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

    def turn_to(self, what: str) -> None:
        """Show `what` as the step under way, in this process and in the lock files. Called by `work`."""
        if what != self.what:
            self.what = what
            self.show(self.uses())

    def uses(self) -> list[LockUse]:
        """What it is about, for each of its GPUs; nothing before it begins."""
        if self.began is None:
            return []
        return [
            LockUse(uuid, self.what, self.began, self.since, self.only_writes)
            for uuid in sorted(self.gpu_uuids)
        ]


_operation: ContextVar[Operation | None] = ContextVar("operation", default=None)


@contextmanager
def only_writes() -> Iterator[None]:
    """Inside, the operation that runs in this context waits for writes to the kernel and needs no NVML. If one of them
    hangs, NVML can still be closed and opened for other GPUs."""
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


class Lanes:
    """The lanes of this process. For many threads. A lane without work has no thread."""

    def __init__(self, locks: GpuLocks) -> None:
        self._locks = locks
        self._guard = threading.Lock()
        self._waiting: list[Operation] = []
        self._under_way: dict[str, Operation] = {}  # by the UUID of the GPU

    def ask(
        self,
        gpu_uuids: Collection[str],
        what: str,
        work: Callable[[Operation], T],
        patience_s: float = _OTHER_INSTANCE_S,
        *,
        once: Hashable = None,
    ) -> Future[T]:
        """Have `work` run when the GPUs are idle, in a copy of the caller's context. A future that is cancelled before
        that keeps it from running. The future raises LockBusyError if the other instance of a rolling update keeps a
        GPU for `patience_s` seconds.

        What is to be done in the background bears a name, `once`: while an operation of the same name and GPUs waits,
        its future is returned. It runs in a context of its own, without the caller's deadline.

        Where no thread can start, the caller's runs it.
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
        """What is under way on each GPU, by its UUID."""
        with self._guard:
            return dict(self._under_way)

    def uses(self) -> Mapping[str, LockUse]:
        """For each GPU on which an operation is under way, in either instance of a rolling update, which one."""
        found = {use.gpu_uuid: use for one in self.under_way().values() for use in one.uses()}
        for use in self._locks.uses():
            ours = found.get(use.gpu_uuid)
            # Another operation than ours has the lock, and ours only waits for it.
            if ours is None or ours.began != use.began:
                found[use.gpu_uuid] = use
        return found

    def hanging(self) -> Mapping[str, tuple[str, float]]:
        """The same as what it is, and when it began (time.monotonic())."""
        return {uuid: (use.what, use.began) for uuid, use in self.uses().items()}

    def refuse_unresponsive(self, gpu_uuids: Collection[str], after_s: float | None = None) -> None:
        """Raises: GpuUnresponsiveError that names the operation if one has been under way on a GPU for that long."""
        limit = time.monotonic() - (UNRESPONSIVE_AFTER_S if after_s is None else after_s)
        uses = self.uses()
        for uuid in sorted(gpu_uuids & uses.keys()):
            if uses[uuid].began <= limit:
                raise GpuUnresponsiveError(_text(uses[uuid]))

    def refuse_beside_hang(self, gpu_uuid: str) -> None:
        """As `refuse_unresponsive` of every GPU but this one: what needs NVML closed does not begin while one hangs in
        NVML."""
        needs_nvml = {uuid for uuid, use in self.uses().items() if not use.only_writes}
        self.refuse_unresponsive(needs_nvml - {gpu_uuid})

    def _ready(self) -> list[Operation]:
        """Take out what can begin now, in the order in which it was asked. The caller holds the guard."""
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
            told = self._run(operation)
            with self._guard:
                for uuid in operation.gpu_uuids:
                    del self._under_way[uuid]
                ready = self._ready()
            told()
            operation = ready.pop(0) if ready else None
            self._start(ready)

    def _run(self, operation: Operation) -> Callable[[], None]:
        """Run it; what tells its outcome to whoever waits."""
        future = operation.future
        if not future.set_running_or_notify_cancel():
            return lambda: None
        operation.since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        operation.began = time.monotonic()
        try:
            result = operation.context.run(self._alone, operation)
        except BaseException as error:  # noqa: BLE001  whoever asks the future gets it
            failure = error
            return lambda: future.set_exception(failure)
        return lambda: future.set_result(result)

    def _alone(self, operation: Operation) -> Any:
        _operation.set(operation)
        patience_s = time_left(operation.patience_s)
        with self._locks.hold(operation.gpu_uuids, patience_s, uses=operation.uses()) as operation.show:
            return operation.work(operation)


def _text(use: LockUse) -> str:
    """What hangs on which GPU, and what to do."""
    return (
        f"GPU {use.gpu_uuid} does not react: {use.what} began at {use.since} UTC and has not ended; if that lasts, "
        "drain the node and reboot it"
    )
