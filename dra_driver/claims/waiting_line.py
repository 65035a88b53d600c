"""Waiting for devices that other claims are about to release, and for what the NVIDIA driver refuses for now.

A Prepare whose device is held goes through these states. It holds locks only in the first one:

    trying ──held──▶ asking ──a holder stays──▶ refused, the holder is named
      ▲  │             │ each is on its way out
      │  ├─busy────┐   ▼
      │  └─refused─┴▶ waiting ──the call or a time limit ends──▶ failed for now; the kubelet calls again
      └──────────────────┘
        a holder's record changed or is gone, an attempt ahead has left, or it is time to ask or try again

| Where | A crash there leaves | Undo |
|---|---|---|
| asking, waiting | nothing: the place in line and what the API server said are in memory only | none |
| waiting after a refusal | a record in `preparing`, with what was made before the refusal | Unprepare |
| between the release and the next try | the device free; the next attempt gets it | none |
| after the try | what Prepare itself leaves: a record | Unprepare |

So a call that fails loses only its place in line: the kubelet's next call goes on.

*In line*: claims that want the same device get it in the order in which they began to wait. For an attempt, every claim
ahead of it counts as if it held the device already. An attempt leaves the line when its call ends, whatever the
outcome, and when its claim is unprepared. The other instance of a rolling update has its own line. The order does not
hold between the two, but both share records and locks, so a device is still given out only once.

A holder is *on its way out* in three cases. Its Unprepare is under way in this process. Or the API server shows that
the claim lets go (`claims.rules.release`). Or the kubelet called Unprepare, but that could not be finished: then the
waiting attempt finishes it, because the kubelet's next call may come late. If the API server does not answer, Prepare
does not wait: it takes the holder to stay. An earlier answer of the API server counts for `doubt_s` seconds, and a
final one for good. Where a device is only full, as with MPS, other holders may stay: Prepare waits as long as as many
are on their way out as must go.

*Refused for now*: the NVIDIA driver refuses a try for a reason that passes by itself. The try keeps what it has made,
and the next try goes on from there. An attempt that gives up takes it back (`claims.attempt`). Without these tries
the claim would wait for the kubelet, which calls again only after a minute or more. Claims that want the same silicon
wait behind this one, because it may still get it.

The end of each Unprepare in this process *wakes* the waiting attempts. To notice an Unprepare in the other instance, an
attempt looks at the holder's record ten times a second while it waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from dra_driver.claims.attempt import CallsUnderWay, PrepareAttempt
from dra_driver.claims.device_users import DeviceUsers
from dra_driver.claims.fetch import ClaimLookup
from dra_driver.claims.reconciler import Reconciler
from dra_driver.claims.rules.conflicts import Conflict, DeviceHeldError
from dra_driver.claims.rules.release import release_reason
from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DraDriverError,
    NvmlTransientError,
    RetryableError,
)
from dra_driver.journal.records import RecordStore
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

WAITED_FOR = (DeviceHeldError, DeviceBusyError, NvmlTransientError)
"""The errors of a try after which the attempt should call `WaitingLine.wait`."""
WAITS_LONGER = "waits for it for longer"
"""Why an attempt must wait for a claim that does not have the device yet, but came first."""


@dataclass(frozen=True, slots=True)
class WaitTimeouts:
    """Time limits of waiting, in seconds.

    An attempt looks for changes every `poll_s`, and tries again after `ask_again_s`. A question to the API server takes
    at most `ask_s`; its answer counts for `doubt_s` while the API server does not answer again. `busy_s` limits the
    waiting for a device that no claim holds: the process that uses it may be a monitor, which never ends. The attempt
    tries again every `busy_pause_s`. It asks NVML which processes use a device only while at least `users_s` are left.
    `stop_s` is how long an attempt still waits after the driver was told to stop.

    When the NVIDIA driver refuses for now, the attempt tries again after `refused_pause_s`, then after twice as long
    each time up to `refused_pause_most_s`, for `refused_s` in all, and only while at least `try_s` are left.
    """

    poll_s: float = 0.1
    ask_again_s: float = 3.0
    ask_s: float = 3.0
    doubt_s: float = 10.0
    busy_s: float = 10.0
    busy_pause_s: float = 0.5
    refused_s: float = 20.0
    refused_pause_s: float = 0.5
    refused_pause_most_s: float = 4.0
    try_s: float = 3.0
    users_s: float = 2.0
    stop_s: float = 5.0


class WaitingLine:
    """The attempts that wait for devices, in the order in which they began to wait. For many threads."""

    def __init__(
        self,
        under_way: CallsUnderWay,
        lookup: ClaimLookup,
        records: RecordStore,
        driver: str,
        reconciler: Reconciler,
        users: DeviceUsers,
        timeouts: WaitTimeouts = WaitTimeouts(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """When an attempt begins to wait for a holder to let go, the `reconciler` looks at that holder soon."""
        self._under_way = under_way
        self._lookup = lookup
        self._records = records
        self._driver = driver
        self._reconciler = reconciler
        self._users = users
        self._timeouts = timeouts
        self._clock = clock
        self._numbers = 0
        self._stop_by: float | None = None

    def stop(self) -> None:
        """The driver is being stopped: each waiting attempt has a few seconds more, then fails for now."""
        with self._under_way.changed:
            self._stop_by = self._clock() + self._timeouts.stop_s
            self._under_way.notify()

    @property
    def waiting(self) -> list[str]:
        """UIDs of the claims that wait for holders, in their order."""
        with self._under_way.changed:
            return [attempt.ref.uid for attempt in self._under_way.line if attempt.waits_since is not None]

    @contextmanager
    def trying(self, attempt: PrepareAttempt) -> Iterator[None]:
        """Within it the attempt is under way. It joins the line when it first has to wait, and leaves it at the end."""
        try:
            with self._under_way.trying(attempt.ref.uid):
                yield
        finally:
            with self._under_way.changed:
                if attempt in self._under_way.line:
                    self._under_way.line.remove(attempt)
                    self._under_way.notify()
        if attempt.refused_since is not None:
            seconds = round(self._clock() - attempt.refused_since, 1)
            _log.info(
                "nvml_refusal_passed",
                claim_uid=attempt.ref.uid,
                refusals=attempt.refusals,
                duration_s=seconds,
            )

    def ahead_of(self, attempt: PrepareAttempt) -> list[ClaimRecord]:
        """For each attempt ahead in line, a record as if its claim held what it wants."""
        with self._under_way.changed:
            return [
                ClaimRecord(other.claim, "preparing", "", other.wanted, ())
                for other in self._under_way.line
                if other.ref.uid != attempt.ref.uid
                and (attempt.number is None or other.number is None or other.number < attempt.number)
            ]

    def waited_s(self, attempt: PrepareAttempt) -> float | None:
        """Seconds since the attempt first had to wait; None if it did not wait."""
        return None if attempt.waits_since is None else self._clock() - attempt.waits_since

    def wait(
        self, attempt: PrepareAttempt, error: DeviceHeldError | DeviceBusyError | NvmlTransientError
    ) -> None:
        """Wait until the attempt should try again.

        Raises: ClaimRefusedError if a holder stays; RetryableError, or `error` itself, if no time is left.
        """
        if isinstance(error, NvmlTransientError):
            self._wait_for_driver(attempt, error)
            return
        attempt.refused_since, attempt.refusals = None, 0
        if isinstance(error, DeviceHeldError):
            attempt.wanted = error.wanted
            self._wait_for_holders(attempt, error)
        else:
            self._wait_for_idle(attempt, error)

    def _wait_for_holders(self, attempt: PrepareAttempt, error: DeviceHeldError) -> None:
        self._join(attempt)
        if self._is_released(error.conflicts):
            return
        leaving = self._leaving(attempt, error)
        if not leaving:
            return
        conflict, why = leaving[0]
        if attempt.waits_since is None:
            self._begin(attempt, str(conflict.holder.ref), why)
        elif self._end(attempt) - self._clock() > self._timeouts.users_s:
            # Not in the first round: most holders are gone by the second, so most attempts need not wait for NVML.
            holder = conflict.holder
            attempt.users = None if self._is_undecided(holder) else self._users.told(holder)
        until = self._clock() + self._timeouts.ask_again_s
        while True:
            seen, is_withdrawn = self._seen(attempt)
            if is_withdrawn or self._is_released(error.conflicts):
                return
            now, end = self._clock(), self._end(attempt)
            if now >= end:
                raise _in_vain(attempt, conflict, why, now, is_full=error.enough < len(error.conflicts))
            if now >= until:
                return
            self._sleep(seen, min(self._timeouts.poll_s, until - now, end - now))

    def _wait_for_idle(self, attempt: PrepareAttempt, error: DeviceBusyError) -> None:
        """No record shows when a process lets go of a device, so the attempt tries again at a fixed pause."""
        now = self._clock()
        if attempt.busy_since is None:
            attempt.busy_since = now
            if attempt.waits_since is None:
                self._begin(attempt, "a process", str(error))
        with self._under_way.changed:
            seen = self._under_way.changes
        end = min(attempt.busy_since + self._timeouts.busy_s, self._end(attempt))
        if now >= end:
            raise error
        self._sleep(seen, min(self._timeouts.busy_pause_s, end - now))

    def _wait_for_driver(self, attempt: PrepareAttempt, error: NvmlTransientError) -> None:
        """Nothing shows when the NVIDIA driver is ready, so the attempt tries again at growing pauses."""
        timeouts, now = self._timeouts, self._clock()
        if attempt.refused_since is None:
            attempt.refused_since = now
            _log.warning("nvml_refuses", claim_uid=attempt.ref.uid, reason=str(error))
        self._join(attempt)
        due = now + min(timeouts.refused_pause_s * 2**attempt.refusals, timeouts.refused_pause_most_s)
        attempt.refusals += 1
        while True:
            seen, is_withdrawn = self._seen(attempt)
            if is_withdrawn or self._clock() >= due:
                return
            if due > min(attempt.refused_since + timeouts.refused_s, self._end(attempt) - timeouts.try_s):
                raise _given_up(attempt, error, self._clock())
            self._sleep(seen, due - self._clock())

    def _seen(self, attempt: PrepareAttempt) -> tuple[int, bool]:
        """The number of changes until now, for `_sleep`, and whether the claim was unprepared since the last call."""
        with self._under_way.changed:
            is_withdrawn, attempt.withdrawn = attempt.withdrawn, False
            return self._under_way.changes, is_withdrawn

    def _end(self, attempt: PrepareAttempt) -> float:
        """The time of the clock until which the attempt may wait."""
        with self._under_way.changed:
            return (
                attempt.call.deadline if self._stop_by is None else min(attempt.call.deadline, self._stop_by)
            )

    def _begin(self, attempt: PrepareAttempt, holder: str, why: str) -> None:
        attempt.waits_since = self._clock()
        _log.info("prepare_waits", claim_uid=attempt.ref.uid, holder=holder, reason=why)

    def _sleep(self, seen: int, seconds: float) -> None:
        """Sleep until the number of changes is not `seen` any more, but at most `seconds`."""
        with self._under_way.changed:
            self._under_way.changed.wait_for(
                lambda: self._under_way.changes != seen, timeout=max(0.0, seconds)
            )

    def _join(self, attempt: PrepareAttempt) -> None:
        with self._under_way.changed:
            if attempt.number is None:
                self._numbers += 1
                attempt.number = self._numbers
                self._under_way.line.append(attempt)

    def _is_released(self, conflicts: tuple[Conflict, ...]) -> bool:
        """Whether one of the holders now holds something else, or nothing."""
        return any(not self._holds(conflict.holder) for conflict in conflicts)

    def _holds(self, holder: ClaimRecord) -> bool:
        if _is_in_line(holder):
            with self._under_way.changed:
                return any(other.claim == holder.claim for other in self._under_way.line)
        if _is_lost(holder):
            return True
        return self._records.get(holder.ref.uid) == holder

    def _is_undecided(self, holder: ClaimRecord) -> bool:
        """Whether the holder only wants the devices: its Prepare in this process tries or waits. A record in
        `preparing` that comes from the other instance, or from before a crash, does hold them."""
        if _is_in_line(holder):
            return True
        return holder.phase == "preparing" and self._under_way.is_trying(holder.ref.uid)

    def _leaving(self, attempt: PrepareAttempt, error: DeviceHeldError) -> list[tuple[Conflict, str]]:
        """As many conflicts as must end, with why each holder is on its way out; none if a holder is gone meanwhile.

        Raises: ClaimRefusedError if too many holders stay.
        """
        conflicts = error.conflicts
        may_stay = len(conflicts) - error.enough
        is_full = may_stay > 0
        if is_full:
            conflicts = tuple(sorted(conflicts, key=lambda one: self._turn_to_be_asked(attempt, one.holder)))
        ask_until = self._clock() + self._timeouts.ask_s
        leaving: list[tuple[Conflict, str]] = []
        for conflict in conflicts:
            ask_s = ask_until - self._clock() if is_full else self._timeouts.ask_s
            try:
                leaving.append((conflict, self._why_leaving(attempt, conflict, ask_s)))
            except ClaimRefusedError:
                if not may_stay:
                    raise
                may_stay -= 1
            if self._is_released(error.conflicts):  # the API server may have taken long
                return []
            if len(leaving) == error.enough:
                break
        return leaving

    def _turn_to_be_asked(self, attempt: PrepareAttempt, holder: ClaimRecord) -> int:
        """First who is known to leave, then who only wants the device: the others cost a question each."""
        uid = holder.ref.uid
        if self._under_way.is_unpreparing(uid) or self._under_way.unfinished(uid) or uid in attempt.leaving:
            return 0
        return 1 if self._is_undecided(holder) else 2

    def _why_leaving(self, attempt: PrepareAttempt, conflict: Conflict, ask_s: float) -> str:
        """Why the holder is on its way out. The API server has `ask_s` to tell.

        Raises: ClaimRefusedError that names the holder if it stays.
        """
        holder = conflict.holder
        if self._is_undecided(holder):
            return WAITS_LONGER
        if self._under_way.is_unpreparing(holder.ref.uid):
            return "is being unprepared"
        if self._under_way.unfinished(holder.ref.uid) is not None:
            return "could not be unprepared yet"
        if _is_lost(holder):
            raise ClaimRefusedError(conflict.text)
        told, holds_until = attempt.leaving.get(holder.ref.uid, ("", 0.0))
        if holds_until == math.inf:
            return told
        seconds = min(ask_s, attempt.call.deadline - self._clock())
        try:
            now = self._lookup.look(holder.ref, max(0.05, seconds))
        except DraDriverError as error:
            if told and self._clock() < holds_until:
                return told
            raise ClaimRefusedError(
                f"{conflict.text}; whether that claim is about to end is not known: {error}"
            ) from error
        found = release_reason(holder, now, self._driver, conflict.held.device)
        if found is None:
            raise ClaimRefusedError(conflict.text)
        if not told:
            self._reconciler.look_soon(holder.ref)
        attempt.leaving[holder.ref.uid] = (
            found.why,
            math.inf if found.is_final else self._clock() + self._timeouts.doubt_s,
        )
        return found.why


def _given_up(attempt: PrepareAttempt, error: NvmlTransientError, now: float) -> NvmlTransientError:
    """The last refusal, with the number of refusals and the seconds that they took until `now`, the clock's time."""
    if attempt.refused_since is None or attempt.refusals < 2:
        return error
    seconds = now - attempt.refused_since
    return NvmlTransientError(
        f"{error}; refused {attempt.refusals} times in {seconds:.0f} s; the kubelet tries again"
    )


def _in_vain(
    attempt: PrepareAttempt, conflict: Conflict, why: str, now: float, *, is_full: bool
) -> RetryableError:
    """The error of an attempt that has waited in vain until `now`, the clock's time; `why` is why the holder lets
    go. `is_full` says that the device has other holders, which may stay."""
    waited = 0.0 if attempt.waits_since is None else now - attempt.waits_since
    if is_full:
        return RetryableError(
            f"{conflict.text}: claim {conflict.holder.ref} {why}; waited {waited:.0f} s; the kubelet tries again"
        )
    if why == WAITS_LONGER:
        return RetryableError(
            f"device {conflict.held.device} is not free yet, and claim {conflict.holder.ref} has waited for it for "
            f"longer; waited {waited:.0f} s; the kubelet tries again"
        )
    users = "" if attempt.users is None else f", but {attempt.users}: end that process on the node"
    return RetryableError(
        f"device {conflict.held.device} is still being torn down for claim {conflict.holder.ref}, which {why}"
        f"{users}; waited {waited:.0f} s; the kubelet tries again"
    )


def _is_in_line(holder: ClaimRecord) -> bool:
    """Whether the record is not one on disk, but stands for an attempt in line; see `ahead_of`."""
    return holder.phase == "preparing" and not holder.boot_id and not holder.steps


def _is_lost(holder: ClaimRecord) -> bool:
    """Whether the record stands for a claim whose record on disk was lost."""
    return not holder.claim.results
