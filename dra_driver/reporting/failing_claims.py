"""Claims whose Prepare or Unprepare fails: since when, how often, and why.

    (unknown) ── a call fails ──▶ failing ── it fails again ──▶ counted up
        ▲                            │
        ├── a call succeeds ─────────┤
        └── the API server says that no pod here can want the claim any more

The kubelet repeats a Prepare that failed after 60 to 90 seconds for as long as the pod exists, and says nothing when
the pod is gone. So a claim that it has not asked about for longer is looked up in the API server.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import structlog

from dra_driver.concurrency.worker import BackgroundWorker
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimNow, ClaimRef
from dra_driver.model.problems import FailingClaim, NodeProblem

_log = structlog.get_logger(__name__)

_MOST_CLAIMS = 256
_LONGEST_ERROR = 1000
_PROBLEM_AFTER_S = 10
"""A failure that the next call mends is no problem of the node."""
_ASKED_AGAIN_WITHIN_S = 180
_LOOK_EVERY_S = 60.0
_REQUEST_S = 5.0
_SLOW_S = 10.0


@dataclass(eq=False)
class FailingClaims(BackgroundWorker):
    """Remembers them. Every method may be called from any thread, and none waits.

    `look` returns a claim as the API server has it now, None if it does not exist; it raises a DraDriverError if the
    API server does not say. `slow` is called once for each Prepare that takes long, with the seconds so far.
    """

    look: Callable[[ClaimRef, float], ClaimNow | None]
    slow: Callable[[ClaimRef, float], None]
    _: KW_ONLY
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: dict[str, FailingClaim] = {}  # by claim UID, the one that failed last at the end
        self._under_way: dict[str, tuple[ClaimRef, float]] = {}
        self._reported: set[str] = set()
        self._looked_at = -math.inf
        super().__init__(
            "failing-claims", self.turn, crash_event="failing_claims_failed", on_crash=lambda _: _LOOK_EVERY_S
        )

    def all(self) -> tuple[FailingClaim, ...]:
        """All of them; the one that failed last is the last."""
        with self._lock:
            return tuple(self._failing.values())

    @contextmanager
    def preparing(self, claims: Iterable[ClaimRef]) -> Iterator[None]:
        """A Prepare of these claims is under way."""
        refs = {ref.uid: (ref, time.monotonic()) for ref in claims}
        with self._lock:
            is_first = not self._under_way
            self._under_way |= refs
        if is_first:
            self.wake()
        try:
            yield
        finally:
            with self._lock:
                for uid in refs:
                    self._under_way.pop(uid, None)
                self._reported -= refs.keys()

    def failed(self, operation: Literal["prepare", "unprepare"], ref: ClaimRef, error: str) -> None:
        """A call for the claim failed."""
        now = int(self.clock())
        with self._lock:
            is_first = not self._failing
            before = self._failing.pop(ref.uid, None)
            if before is None or before.operation != operation:
                before = FailingClaim(ref, operation, now, now, 0, "")
            found = replace(before, last_at=now, count=before.count + 1, error=error[:_LONGEST_ERROR])
            self._failing[ref.uid] = found
            while len(self._failing) > _MOST_CLAIMS:
                del self._failing[next(iter(self._failing))]
        if is_first:
            self.wake()

    def succeeded(self, ref: ClaimRef) -> None:
        """A call for the claim succeeded."""
        with self._lock:
            self._failing.pop(ref.uid, None)

    def restore(self, kept: Iterable[FailingClaim]) -> None:
        """Take over what an earlier instance knew of claims that this one has not heard of."""
        with self._lock:
            self._failing = {one.ref.uid: one for one in kept} | self._failing
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
        pauses = [self._report_slow()]
        if self._failing:
            if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = time.monotonic()
                self._look_up()
            pauses.append(_LOOK_EVERY_S)
        return min(pauses)

    def _report_slow(self) -> float:
        now = time.monotonic()
        with self._lock:
            waiting = {uid: entry for uid, entry in self._under_way.items() if uid not in self._reported}
            late = {uid: entry for uid, entry in waiting.items() if now - entry[1] >= _SLOW_S}
            self._reported |= late.keys()
        for ref, began in late.values():
            self.slow(ref, now - began)
        return min(
            (began + _SLOW_S - now for uid, (_, began) in waiting.items() if uid not in late),
            default=math.inf,
        )

    def _look_up(self) -> None:
        """Forget claims that no pod here can want any more. One of which the API server says nothing stays."""
        for one in self.all():
            if self.clock() - one.last_at < _ASKED_AGAIN_WITHIN_S:
                continue
            try:
                now = self.look(one.ref, _REQUEST_S)
            except DraDriverError as error:
                _log.debug("failing_claim_unknown", claim_uid=one.ref.uid, reason=str(error))
                return
            is_wanted = now is not None and now.uid == one.ref.uid and now.allocated and now.is_reserved
            if not is_wanted:
                with self._lock:
                    if self._failing.get(one.ref.uid) == one:
                        del self._failing[one.ref.uid]


def _sentence(one: FailingClaim) -> str:
    tries = "1 try" if one.count == 1 else f"{one.count} tries"
    return (
        f"Claim {one.ref.namespace}/{one.ref.name} cannot be {one.operation}d ({tries} failed): {one.error}"
    )
