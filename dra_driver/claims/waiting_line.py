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

A holder is *on its way out* if its Unprepare is under way in this process, or if the API server shows that the claim
lets go (`claims.rules.release`). If the API server does not answer, Prepare does not wait: it takes the holder to stay.
An earlier answer of the API server counts for `doubt_s` seconds, and a final one for good. Where a device is only full,
as with MPS, other holders may stay: Prepare waits as long as as many are on their way out as must go.

*Refused for now*: the NVIDIA driver refuses a try for a reason that passes by itself. The try keeps what it has made,
and the next try goes on from there. An attempt that gives up takes it back (`claims.prepare`). Without these
tries the claim would wait for the kubelet, which calls again only after a minute or more. Claims that want the same
silicon wait behind this one, because it may still get it.

The end of each Unprepare in this process *wakes* the waiting attempts. To notice an Unprepare in the other instance, an
attempt looks at the holder's record ten times a second while it waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.kubelet_call import Action, KubeletCall
from dra_driver.claims.rules.plan import Conflict, DeviceHeldError
from dra_driver.claims.rules.release import release_reason
from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DraDriverError,
    NvmlTransientError,
    RetryableError,
)
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.record import ClaimRecord, HeldDevice

_log = structlog.get_logger(__name__)

WAITED_FOR = (DeviceHeldError, DeviceBusyError, NvmlTransientError)
"""The errors of a try after which the attempt should call `WaitingLine.wait`."""
WAITS_LONGER = "waits for it for longer"
"""Why an attempt must wait for a claim that does not have the device yet, but came first."""


@dataclass(slots=True, eq=False)
class PrepareAttempt:
    """One attempt to prepare one claim. Every part of Prepare gets this object, from the fetch to the answer.

    `claim` is our part of the claim.

    The other fields belong to the waiting line. `number` is the attempt's number in the line, None before it joins.
    `wanted` has the devices that the claim wants. `waits_since`, `busy_since` and `refused_since` are times of the
    line's clock. `leaving` has, by the UID of a holder, why it lets go of its devices, and until when this answer of
    the API server is good. `users` tells which processes computed on the first holder's devices at the last look.
    """

    ref: ClaimRef
    call: KubeletCall
    claim: AllocatedClaim
    number: int | None = None
    wanted: tuple[HeldDevice, ...] = ()
    waits_since: float | None = None
    busy_since: float | None = None
    refused_since: float | None = None
    refusals: int = 0
    withdrawn: bool = False
    leaving: dict[str, tuple[str, float]] = field(default_factory=dict)
    users: str | None = None


@dataclass(frozen=True, slots=True)
class WaitTimeouts:
    """Time limits of waiting, in seconds.

    An attempt whose holder is gone by now tries again after `again_s`. While it waits it looks for changes every
    `poll_s`, and tries again after `ask_again_s`. A question to the API server takes at most `ask_s`; its answer counts
    for `doubt_s` while the API server does not answer again. `busy_s` limits the waiting for a device that no claim
    holds: the process that uses it may be a monitor, which never ends. The attempt tries again every `busy_pause_s`. It
    asks NVML which processes use a device only while at least `users_s` are left. `stop_s` is how long an attempt still
    waits after the plugin was told to stop.

    When the NVIDIA driver refuses for now, the attempt tries again after `refused_pause_s`, then after twice as long
    each time up to `refused_pause_most_s`, for `refused_s` in all. For this, and for a process that uses a device,
    it tries again only while at least `try_s` are left: a try without time would hide the reason.
    """

    again_s: float = 0.01
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


@dataclass(eq=False)
class WaitingLine:
    """Which claims are being prepared and unprepared in this process, and the attempts that wait for devices, in the
    order in which they began to wait. For many threads.

    `changed` guards the state. It is notified whenever a waiting attempt may be able to go on; `changes` counts these
    notifications.
    """

    lookup: ClaimClient
    records: RecordStore
    driver: str
    users: GpuProcesses
    timeouts: WaitTimeouts = WaitTimeouts()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.changes = 0
        self._attempts: list[PrepareAttempt] = []
        self._numbers = 0
        self._calls: Counter[tuple[Action, str]] = Counter()  # with the claim's UID
        self._stop_by: float | None = None
        self._on_leaving: Callable[[ClaimRef], None] = lambda _ref: None

    def tell_leaving(self, look_soon: Callable[[ClaimRef], None]) -> None:
        """From now on `look_soon` is called with each holder that an attempt waits for and that the API server says is
        on its way out: the kubelet may have forgotten it."""
        self._on_leaving = look_soon

    def stop(self) -> None:
        """The driver is being stopped: each waiting attempt has a few seconds more, then fails for now."""
        with self.changed:
            self._stop_by = self.clock() + self.timeouts.stop_s
            self.notify()

    def notify(self) -> None:
        """Wake every attempt that waits. The caller holds `changed`."""
        self.changes += 1
        self.changed.notify_all()

    @property
    def line(self) -> list[PrepareAttempt]:
        """The attempts that wait or have waited, the first one first."""
        with self.changed:
            joined = [(one.number, one) for one in self._attempts if one.number is not None]
        return [one for _, one in sorted(joined, key=lambda pair: pair[0])]

    @property
    def waiting(self) -> list[str]:
        """UIDs of the claims that wait for holders, in their order."""
        return [attempt.ref.uid for attempt in self.line if attempt.waits_since is not None]

    # --- calls under way -----------------------------------------------------------------------

    @contextmanager
    def calling(self, action: Action, uid: str) -> Iterator[None]:
        """Within it the claim is being prepared, from the fetch on, or unprepared. Attempts that wait for its devices
        go on waiting meanwhile; the end of an Unprepare wakes them."""
        with self.changed:
            self._calls[action, uid] += 1
        try:
            yield
        finally:
            with self.changed:
                self._calls[action, uid] -= 1
                if not self._calls[action, uid]:
                    del self._calls[action, uid]
                if action == "unprepare":
                    for attempt in self._attempts:
                        attempt.withdrawn |= attempt.number is not None and attempt.ref.uid == uid
                    self.notify()

    def is_called(self, action: Action, uid: str) -> bool:
        """Whether such a call is under way for the claim."""
        with self.changed:
            return self._calls[action, uid] > 0

    # --- waiting -------------------------------------------------------------------------------

    @contextmanager
    def trying(self, attempt: PrepareAttempt) -> Iterator[None]:
        """Within it the attempt is under way. It joins the line when it first has to wait, and leaves it at the end."""
        with self.changed:
            self._attempts.append(attempt)
        try:
            yield
        finally:
            with self.changed:
                self._attempts.remove(attempt)
                if attempt.number is not None:
                    self.notify()
        if attempt.refused_since is not None:
            seconds = round(self.clock() - attempt.refused_since, 1)
            _log.info(
                "nvml_refusal_passed",
                claim_uid=attempt.ref.uid,
                refusals=attempt.refusals,
                duration_s=seconds,
            )

    def ahead_of(self, attempt: PrepareAttempt) -> list[ClaimRecord]:
        """For each attempt ahead in line, a record as if its claim held what it wants."""
        return [
            ClaimRecord(other.claim, "preparing", "", other.wanted, ())
            for other in self.line
            if other.ref.uid != attempt.ref.uid
            and (attempt.number is None or other.number is None or other.number < attempt.number)
        ]

    def waited_s(self, attempt: PrepareAttempt) -> float | None:
        """Seconds since the attempt first had to wait; None if it did not wait."""
        return None if attempt.waits_since is None else self.clock() - attempt.waits_since

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
            self._sleep(
                self.changes, self.timeouts.again_s
            )  # a disk that gives two answers must not make it spin
            return
        leaving = self._leaving(attempt, error)
        if not leaving:
            return
        conflict, why = leaving[0]
        if attempt.waits_since is None:
            self._begin(attempt, str(conflict.holder.ref), why)
        elif self._end(attempt) - self.clock() > self.timeouts.users_s:
            # Not in the first round: most holders are gone by the second, so most attempts need not wait for NVML.
            holder = conflict.holder
            attempt.users = None if self._is_undecided(holder) else self.users.told(holder)
        until = self.clock() + self.timeouts.ask_again_s
        while True:
            seen, is_withdrawn = self._seen(attempt)
            if is_withdrawn or self._is_released(error.conflicts):
                return
            now, end = self.clock(), self._end(attempt)
            if now >= end:
                raise _in_vain(attempt, conflict, why, now, is_full=error.enough < len(error.conflicts))
            if now >= until:
                return
            self._sleep(seen, min(self.timeouts.poll_s, until - now, end - now))

    def _wait_for_idle(self, attempt: PrepareAttempt, error: DeviceBusyError) -> None:
        """No record shows when a process lets go of a device, so the attempt tries again at a fixed pause."""
        now = self.clock()
        if attempt.busy_since is None:
            attempt.busy_since = now
            if attempt.waits_since is None:
                self._begin(attempt, "a process", str(error))
        with self.changed:
            seen = self.changes
        end = min(attempt.busy_since + self.timeouts.busy_s, self._end(attempt) - self.timeouts.try_s)
        if now >= end:
            raise error
        self._sleep(seen, min(self.timeouts.busy_pause_s, end - now))

    def _wait_for_driver(self, attempt: PrepareAttempt, error: NvmlTransientError) -> None:
        """Nothing shows when the NVIDIA driver is ready, so the attempt tries again at growing pauses."""
        timeouts, now = self.timeouts, self.clock()
        if attempt.refused_since is None:
            attempt.refused_since = now
            _log.warning("nvml_refuses", claim_uid=attempt.ref.uid, reason=str(error))
        self._join(attempt)
        due = now + min(timeouts.refused_pause_s * 2**attempt.refusals, timeouts.refused_pause_most_s)
        attempt.refusals += 1
        while True:
            seen, is_withdrawn = self._seen(attempt)
            if is_withdrawn or self.clock() >= due:
                return
            if due > min(attempt.refused_since + timeouts.refused_s, self._end(attempt) - timeouts.try_s):
                raise _given_up(attempt, error, self.clock())
            self._sleep(seen, due - self.clock())

    def _seen(self, attempt: PrepareAttempt) -> tuple[int, bool]:
        """The number of changes until now, for `_sleep`, and whether the claim was unprepared since the last call."""
        with self.changed:
            is_withdrawn, attempt.withdrawn = attempt.withdrawn, False
            return self.changes, is_withdrawn

    def _end(self, attempt: PrepareAttempt) -> float:
        """The time of the clock until which the attempt may wait."""
        with self.changed:
            return (
                attempt.call.deadline if self._stop_by is None else min(attempt.call.deadline, self._stop_by)
            )

    def _begin(self, attempt: PrepareAttempt, holder: str, why: str) -> None:
        attempt.waits_since = self.clock()
        _log.info("prepare_waits", claim_uid=attempt.ref.uid, holder=holder, reason=why)

    def _sleep(self, seen: int, seconds: float) -> None:
        """Sleep until the number of changes is not `seen` any more, but at most `seconds`."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != seen, timeout=max(0.0, seconds))

    def _join(self, attempt: PrepareAttempt) -> None:
        with self.changed:
            if attempt.number is None:
                self._numbers += 1
                attempt.number = self._numbers

    def _is_released(self, conflicts: tuple[Conflict, ...]) -> bool:
        """Whether one of the holders now holds something else, or nothing."""
        return any(not self._holds(conflict.holder) for conflict in conflicts)

    def _holds(self, holder: ClaimRecord) -> bool:
        if _is_in_line(holder):
            return any(other.claim == holder.claim for other in self.line)
        if _is_lost(holder):
            return True
        return self.records.get(holder.ref.uid) == holder

    def _is_undecided(self, holder: ClaimRecord) -> bool:
        """Whether the holder only wants the devices: its Prepare in this process tries or waits. A record in
        `preparing` that comes from the other instance, or from before a crash, does hold them."""
        if _is_in_line(holder):
            return True
        if holder.phase != "preparing":
            return False
        with self.changed:
            return any(attempt.ref.uid == holder.ref.uid for attempt in self._attempts)

    def _leaving(self, attempt: PrepareAttempt, error: DeviceHeldError) -> list[tuple[Conflict, str]]:
        """As many conflicts as must end, with why each holder is on its way out; none if a holder is gone meanwhile.

        Raises: ClaimRefusedError if too many holders stay.
        """
        conflicts = error.conflicts
        may_stay = len(conflicts) - error.enough
        is_full = may_stay > 0
        if is_full:
            conflicts = tuple(sorted(conflicts, key=lambda one: self._turn_to_be_asked(attempt, one.holder)))
        ask_until = self.clock() + self.timeouts.ask_s
        leaving: list[tuple[Conflict, str]] = []
        for conflict in conflicts:
            ask_s = ask_until - self.clock() if is_full else self.timeouts.ask_s
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
        if self.is_called("unprepare", uid) or uid in attempt.leaving:
            return 0
        return 1 if self._is_undecided(holder) else 2

    def _why_leaving(self, attempt: PrepareAttempt, conflict: Conflict, ask_s: float) -> str:
        """Why the holder is on its way out. The API server has `ask_s` to tell.

        Raises: ClaimRefusedError that names the holder if it stays.
        """
        holder = conflict.holder
        if self._is_undecided(holder):
            return WAITS_LONGER
        if self.is_called("unprepare", holder.ref.uid):
            return "is being unprepared"
        if _is_lost(holder):
            raise ClaimRefusedError(conflict.text)
        told, holds_until = attempt.leaving.get(holder.ref.uid, ("", 0.0))
        if holds_until == math.inf:
            return told
        seconds = min(ask_s, attempt.call.deadline - self.clock())
        try:
            now = self.lookup.look(holder.ref, max(0.05, seconds))
        except DraDriverError as error:
            if told and self.clock() < holds_until:
                return told
            raise ClaimRefusedError(
                f"{conflict.text}; whether that claim is about to end is not known: {error}"
            ) from error
        found = release_reason(holder, now, self.driver, conflict.held.device)
        if found is None:
            raise ClaimRefusedError(conflict.text)
        if not told:
            self._on_leaving(holder.ref)
        attempt.leaving[holder.ref.uid] = (
            found.why,
            math.inf if found.is_final else self.clock() + self.timeouts.doubt_s,
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
    device, holder = conflict.held.device, conflict.holder.ref
    if is_full:
        text = f"{conflict.text}: claim {holder} {why}"
    elif why == WAITS_LONGER:
        text = f"device {device} is not free yet, and claim {holder} has waited for it for longer"
    else:
        users = "" if attempt.users is None else f", but {attempt.users}: end that process on the node"
        text = f"device {device} is still being torn down for claim {holder}, which {why}{users}"
    return RetryableError(f"{text}; waited {waited:.0f} s; the kubelet tries again")


def _is_in_line(holder: ClaimRecord) -> bool:
    """Whether the record is not one on disk, but stands for an attempt in line; see `ahead_of`."""
    return holder.phase == "preparing" and not holder.boot_id and not holder.steps


def _is_lost(holder: ClaimRecord) -> bool:
    """Whether the record stands for a claim whose record on disk was lost."""
    return not holder.claim.results
