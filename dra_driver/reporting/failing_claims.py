"""Claims whose Prepare or Unprepare fails: since when, how often, and why.

    (unknown) ── a call fails ──▶ failing ── it fails again ──▶ counted
        ▲                            │
        ├── a call succeeds ─────────┤
        └── according to the API server, no pod on this node can need the claim

The kubelet retries every 60 to 90 seconds, but does not report when the pod is gone. So the plugin checks the claim
after three minutes without a retry.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import structlog

from dra_driver.base.threads import BoundedCall
from dra_driver.errors import DraDriverError
from dra_driver.model.claim import ClaimNow, ClaimRef
from dra_driver.model.dataclass import KW_ONLY, dataclass, replace
from dra_driver.model.problems import FailingClaim, NodeProblem
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_MAX_CLAIMS = 256
_LONGEST_ERROR = 1000
_PROBLEM_AFTER_S = 10
_ASKED_AGAIN_WITHIN_S = 180
_CHECK_EVERY_S = 60.0
_LOOKS_AT_ONCE = 2
_REQUEST_S = 5.0
_SLOW_S = 10.0


@dataclass(eq=False)
class FailingClaims:
    """Thread-safe; no method blocks.

    `pool` has this node's driver and pool names. `look` returns a claim from the API server, None if it does not exist,
    or raises a DraDriverError. `slow` is called once for each slow Prepare.
    """

    pool: tuple[str, str]
    look: Callable[[ClaimRef, float], ClaimNow | None]
    slow: Callable[[ClaimRef, float], None]
    record: Callable[[str], ClaimRecord | None]
    _: KW_ONLY
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._failing: dict[str, FailingClaim] = {}  # by claim UID, the most recent failure last
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[ClaimRef, float]] = {}  # by a number for each call and claim
        self._reported: set[int] = set()
        self._looked_at: dict[str, float] = {}
        self._looking = BoundedCall("the API server", self._look_up)

    def all(self) -> tuple[FailingClaim, ...]:
        with self._lock:
            return tuple(self._failing.values())

    @contextmanager
    def preparing(self, claims: Iterable[ClaimRef]) -> Iterator[None]:
        calls = {next(self._numbers): (ref, time.monotonic()) for ref in claims}
        with self._lock:
            self._under_way |= calls
        try:
            yield
        finally:
            with self._lock:
                for number in calls:
                    del self._under_way[number]
                self._reported -= calls.keys()

    def failed(self, operation: Literal["prepare", "unprepare"], ref: ClaimRef, error: str) -> None:
        now = int(self.clock())
        with self._lock:
            before = self._failing.pop(ref.uid, None)
            if before is None or before.operation != operation:
                before = FailingClaim(ref, operation, now, now, 0, "")
            found = replace(before, last_at=now, count=before.count + 1, error=error[:_LONGEST_ERROR])
            self._failing[ref.uid] = found
            while len(self._failing) > _MAX_CLAIMS:
                del self._failing[next(iter(self._failing))]

    def succeeded(self, ref: ClaimRef) -> None:
        with self._lock:
            self._failing.pop(ref.uid, None)

    def restore(self, kept: Iterable[FailingClaim]) -> None:
        """Add the failures of an earlier process, except Prepares of claims that are prepared by now."""
        lasting = {
            one.ref.uid: one for one in kept if one.operation != "prepare" or not self._is_prepared(one.ref)
        }
        with self._lock:
            self._failing = lasting | self._failing

    def problems(self) -> Sequence[NodeProblem]:
        """A claim is a problem if it has failed more than once, or for ten seconds."""
        self._report_slow()
        if self._failing:
            self._looking.start()
        now = self.clock()
        return [
            NodeProblem(
                "claims-failing", _sentence(one), f"{one.ref.namespace}/{one.ref.name}", since=one.since
            )
            for one in self.all()
            if one.count > 1 or now - one.since >= _PROBLEM_AFTER_S
        ]

    def _is_prepared(self, ref: ClaimRef) -> bool:
        try:
            record = self.record(ref.uid)
        except DraDriverError:
            return False
        return record is not None and record.phase == "prepared"

    def _report_slow(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = {call: entry for call, entry in self._under_way.items() if now - entry[1] >= _SLOW_S}
            new = late.keys() - self._reported
            self._reported |= new
        for call in sorted(new):
            ref, began = late[call]
            self.slow(ref, now - began)

    def _look_up(self) -> None:
        """Forget claims that no pod on this node can need, the least recently checked first."""
        now = time.monotonic()
        self._looked_at = {uid: at for uid, at in self._looked_at.items() if uid in self._failing}
        due = [
            one
            for one in self.all()
            if self.clock() - one.last_at >= _ASKED_AGAIN_WITHIN_S
            and now - self._looked_at.get(one.ref.uid, -math.inf) >= _CHECK_EVERY_S
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
                with self._lock:
                    if self._failing.get(one.ref.uid) == one:
                        del self._failing[one.ref.uid]

    def _may_be_wanted(self, ref: ClaimRef, now: ClaimNow | None) -> bool:
        """The claim may have been allocated on another node since it failed."""
        if now is None or now.uid != ref.uid or not now.is_reserved:
            return False
        return any((driver, pool) == self.pool for driver, pool, _ in now.allocated or ())


def _sentence(one: FailingClaim) -> str:
    tries = "1 try" if one.count == 1 else f"{one.count} tries"
    return (
        f"Claim {one.ref.namespace}/{one.ref.name} cannot be {one.operation}d ({tries} failed): {one.error}"
    )
