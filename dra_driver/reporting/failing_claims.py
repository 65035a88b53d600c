"""Claims whose Prepare or Unprepare fails: since when, how often, and why.

    (unknown) ── a call fails ──▶ failing ── it fails again ──▶ counted up
        ▲                            │
        ├── a call succeeds ─────────┤
        └── the API server says that no pod here can want the claim any more

The kubelet repeats a failed Prepare every 60 to 90 seconds for as long as the pod exists, and does not say
when the pod is gone. So the plugin looks up a claim in the API server if the kubelet has not asked for longer.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from typing import Literal

import structlog

from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimNow, ClaimRef
from dra_driver.model.problems import FailingClaim, NodeProblem
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_MAX_CLAIMS = 256
_LONGEST_ERROR = 1000
_PROBLEM_AFTER_S = 10
"""A failure that the next call mends is no problem of the node."""
_ASKED_AGAIN_WITHIN_S = 180
_LOOK_EVERY_S = 60.0
_LOOKS_AT_ONCE = 2
_REQUEST_S = 5.0
_SLOW_S = 10.0


@dataclass(eq=False)
class FailingClaims(BackgroundWorker):
    """Remembers them. Every method may be called from any thread, and none waits.

    `pool` has the names of this node's driver and pool. `look` returns a claim as the API server has it now, None if it
    does not exist; it raises a DraDriverError if the API server does not say. `slow` is called once for each Prepare
    that takes long, with the seconds so far. `record` returns the record of a claim by its UID: another instance may
    have prepared the claim since.
    """

    pool: tuple[str, str]
    look: Callable[[ClaimRef, float], ClaimNow | None]
    slow: Callable[[ClaimRef, float], None]
    record: Callable[[str], ClaimRecord | None]
    _: KW_ONLY
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: dict[str, FailingClaim] = {}  # by claim UID, the one that failed last at the end
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[ClaimRef, float]] = {}  # by the number of the call and claim
        self._reported: set[int] = set()
        self._looked_at: dict[str, float] = {}
        super().__init__("failing-claims", self.turn)

    def all(self) -> tuple[FailingClaim, ...]:
        """All of them; the one that failed last is the last."""
        with self._lock:
            return tuple(self._failing.values())

    @contextmanager
    def preparing(self, claims: Iterable[ClaimRef]) -> Iterator[None]:
        """A Prepare of these claims is under way."""
        calls = {next(self._numbers): (ref, time.monotonic()) for ref in claims}
        with self._lock:
            self._under_way |= calls
        if calls:
            self.wake()
        try:
            yield
        finally:
            with self._lock:
                for number in calls:
                    del self._under_way[number]
                self._reported -= calls.keys()

    def failed(self, operation: Literal["prepare", "unprepare"], ref: ClaimRef, error: str) -> None:
        """A call for the claim failed."""
        now = int(self.clock())
        with self._lock:
            before = self._failing.pop(ref.uid, None)
            if before is None or before.operation != operation:
                before = FailingClaim(ref, operation, now, now, 0, "")
            found = replace(before, last_at=now, count=before.count + 1, error=error[:_LONGEST_ERROR])
            self._failing[ref.uid] = found
            while len(self._failing) > _MAX_CLAIMS:
                del self._failing[next(iter(self._failing))]
        self.wake()

    def succeeded(self, ref: ClaimRef) -> None:
        """A call for the claim succeeded."""
        with self._lock:
            self._failing.pop(ref.uid, None)

    def restore(self, kept: Iterable[FailingClaim]) -> None:
        """Take over what an earlier instance knew of claims that this one has not heard of."""
        with self._lock:
            self._failing = {one.ref.uid: one for one in kept} | self._failing
        self._forget_prepared()
        self.wake()

    def problems(self) -> Sequence[NodeProblem]:
        """One for each claim that has failed twice, or for ten seconds."""
        now = self.clock()
        return [
            NodeProblem("claims-failing", _sentence(one), f"{one.ref.namespace}/{one.ref.name}")
            for one in self.all()
            if one.count > 1 or now - one.since >= _PROBLEM_AFTER_S
        ]

    def turn(self) -> float:
        """Report what takes long, and look up claims that the kubelet no longer asks about. Returns the pause until the
        next turn, in seconds."""
        pause = self._report_slow()
        if self._failing:
            self._forget_prepared()
            self._look_up()
            pause = min(pause, _LOOK_EVERY_S)
        return pause

    def _forget_prepared(self) -> None:
        """Forget claims that another instance has prepared after they failed last."""
        for one in self.all():
            try:
                record = self.record(one.ref.uid) if one.operation == "prepare" else None
            except DraDriverError:
                continue
            if (
                record is not None
                and record.phase == "prepared"
                and _seconds(record.prepared_at) >= one.last_at
            ):
                self._forget(one)

    def _forget(self, one: FailingClaim) -> None:
        with self._lock:
            if self._failing.get(one.ref.uid) == one:
                del self._failing[one.ref.uid]

    def _report_slow(self) -> float:
        now = time.monotonic()
        with self._lock:
            waiting = {call: entry for call, entry in self._under_way.items() if call not in self._reported}
            late = {call: entry for call, entry in waiting.items() if now - entry[1] >= _SLOW_S}
            self._reported |= late.keys()
        for ref, began in late.values():
            self.slow(ref, now - began)
        return min(
            (began + _SLOW_S - now for call, (_, began) in waiting.items() if call not in late),
            default=math.inf,
        )

    def _look_up(self) -> None:
        """Forget claims that no pod on this node can want any more. A claim stays if the API server does not answer.
        Only a few at a time, the longest unchecked first, so that slow Prepares are still reported in time."""
        now = time.monotonic()
        self._looked_at = {uid: at for uid, at in self._looked_at.items() if uid in self._failing}
        due = [
            one
            for one in self.all()
            if self.clock() - one.last_at >= _ASKED_AGAIN_WITHIN_S
            and now - self._looked_at.get(one.ref.uid, -math.inf) >= _LOOK_EVERY_S
        ]
        due.sort(key=lambda one: self._looked_at.get(one.ref.uid, -math.inf))
        for one in due[:_LOOKS_AT_ONCE]:
            self._looked_at[one.ref.uid] = now
            try:
                found = self.look(one.ref, _REQUEST_S)
            except DraDriverError as error:
                _log.debug("failing_claim_unknown", claim_uid=one.ref.uid, reason=str(error))
                continue
            if not self._may_be_wanted(one.ref, found):
                self._forget(one)

    def _may_be_wanted(self, ref: ClaimRef, now: ClaimNow | None) -> bool:
        """Whether a pod on this node may still want the claim. It may have been allocated on another node since."""
        if now is None or now.uid != ref.uid or not now.is_reserved:
            return False
        return any((driver, pool) == self.pool for driver, pool, _ in now.allocated or ())


def _seconds(time_of_record: str | None) -> float:
    """Seconds since 1970; 0 for a record without a time."""
    try:
        return datetime.fromisoformat(time_of_record).timestamp() if time_of_record else 0.0
    except ValueError:
        return 0.0


def _sentence(one: FailingClaim) -> str:
    tries = "1 try" if one.count == 1 else f"{one.count} tries"
    return (
        f"Claim {one.ref.namespace}/{one.ref.name} cannot be {one.operation}d ({tries} failed): {one.error}"
    )
