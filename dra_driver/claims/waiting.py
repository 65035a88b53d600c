"""Waits in a Prepare: for devices that other claims are about to release, and for what is refused for now.

    trying ──not to be had now──▶ who is in the way? ──a holder stays──▶ refused, the holder is named
      ▲                             │
      │                             ▼
      └── a holder's record ──── waiting ──too little time is left, or the kubelet cancels──▶ failed for now
          changed, or a pause
          is over

No lock is held here. A crash leaves what the last try left: nothing, or a record in `preparing`.

A device can be had later if

- the claim that holds it is about to release it: its Unprepare is under way in this process, or the API server shows
  it (`claims.rules.holders`). If the API server does not answer, the holder counts as one that stays, unless an earlier
  answer said otherwise;
- as many claims use it as MPS can serve, and enough of them are about to release it, in the same way;
- a process uses it, such as one of a container that has just stopped, or a monitor;
- the NVIDIA driver refuses for now. The try keeps what it has made, and the next try goes on from there.

In the last two cases nothing shows when that is over, so the attempt tries again after short pauses. Without these
tries the claim would wait for the kubelet, which calls again only after a minute or more.

The end of each Unprepare in this process wakes all attempts that wait. For an Unprepare in the other instance of a
rolling update, they read the holders' records ten times a second. Attempts that wait for the same device have no order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from dra_driver.claims.calls import CallsUnderWay, KubeletCall
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.rules.holders import Conflict, DeviceHeldError, release_reason
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
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

NotNow = DeviceHeldError | DeviceBusyError | NvmlTransientError
NOT_NOW = (DeviceHeldError, DeviceBusyError, NvmlTransientError)
"""The errors of a try after which the attempt should call `Waiter.wait`."""
_ASK_S = 3.0
"""How long the API server may take to answer one question about a holder."""


@dataclass(slots=True, eq=False)
class PrepareAttempt:
    """One attempt to prepare one claim. Every part of Prepare gets this object, from the fetch to the answer.

    `claim` is our part of the claim.

    The other fields belong to `Waiter`: when the attempt first waited, by the waiter's clock; the type of the error
    after which it waited last; how many changes it has seen; by the UID of a holder, why the holder releases its
    devices, by the last answer of the API server; and the holders whose claims are gone, which need not be asked for
    again.
    """

    ref: ClaimRef
    call: KubeletCall
    claim: AllocatedClaim
    waits_since: float | None = None
    waits_after: type[Exception] | None = None
    seen: int = 0
    leaving: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class WaitTimeouts:
    """Times of waiting, in seconds.

    While an attempt waits for a holder, it reads the holder's record every `poll_s`, and after `ask_again_s` it tries
    again, which asks the API server again. While a process uses the device or the NVIDIA driver refuses, it tries again
    every `again_s`. It waits until `last_s` are left of the kubelet's time: a try needs some time, and so does NVML to
    say which process uses the device. `stop_s` is how long it still waits after `stop`.
    """

    poll_s: float = 0.1
    ask_again_s: float = 3.0
    again_s: float = 0.5
    last_s: float = 3.0
    stop_s: float = 5.0


@dataclass(eq=False)
class Waiter:
    """Waits for devices. For many threads."""

    lookup: ClaimClient
    records: RecordStore
    driver: str
    users: GpuProcesses
    calls: CallsUnderWay
    timeouts: WaitTimeouts = WaitTimeouts()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stop_by = math.inf
        self._on_leaving: Callable[[ClaimRef], None] = lambda _ref: None

    def tell_leaving(self, look_soon: Callable[[ClaimRef], None]) -> None:
        """From now on `look_soon` is called with each holder that an attempt waits for and that is about to release its
        devices by the API server: the kubelet may have forgotten it."""
        self._on_leaving = look_soon

    def stop(self) -> None:
        """The driver is being stopped: each attempt that waits has a few seconds more, then fails for now."""
        self._stop_by = self.clock() + self.timeouts.stop_s
        self.calls.wake()

    def waited_s(self, attempt: PrepareAttempt) -> float:
        """Seconds since the attempt first waited."""
        return 0.0 if attempt.waits_since is None else self.clock() - attempt.waits_since

    def wait(self, attempt: PrepareAttempt, error: NotNow) -> None:
        """Wait until the attempt should try again.

        Raises: ClaimRefusedError if too many holders stay; RetryableError if the kubelet cancels the call; the same, or
        an error of the type of `error`, if too little time is left.
        """
        times = self.timeouts
        conflicts = error.conflicts if isinstance(error, DeviceHeldError) else ()
        conflict, why = self._leaving(attempt, error) if isinstance(error, DeviceHeldError) else (None, "")
        self._note(attempt, error, str(error) if conflict is None else f"claim {conflict.holder.ref} {why}")
        due = self.clock() + (times.ask_again_s if conflicts else times.again_s)
        while True:
            now, end = self.clock(), min(attempt.call.deadline - times.last_s, self._stop_by)
            if now >= end:
                raise self._in_vain(attempt, error, conflict, why)
            attempt.call.left()  # raises if the kubelet has cancelled the call
            if now >= due:
                return
            self._sleep(attempt, min(times.poll_s, due - now, end - now))
            if any(self._has_changed(one.holder) for one in conflicts):
                return

    def _note(self, attempt: PrepareAttempt, error: NotNow, reason: str) -> None:
        if attempt.waits_since is None:
            attempt.waits_since = self.clock()
        if attempt.waits_after is not type(error):
            attempt.waits_after = type(error)
            _log.info("prepare_waits", claim_uid=attempt.ref.uid, reason=reason)

    def _sleep(self, attempt: PrepareAttempt, seconds: float) -> None:
        """Sleep until there is a change that the attempt has not seen, but at most `seconds`."""
        attempt.seen = self.calls.wait(attempt.seen, seconds)

    def _has_changed(self, holder: ClaimRecord) -> bool:
        """Whether the holder now holds something else, or nothing."""
        return not _is_lost(holder) and self.records.get(holder.ref.uid) != holder

    def _leaving(self, attempt: PrepareAttempt, error: DeviceHeldError) -> tuple[Conflict, str]:
        """One of the holders that leave, and why it leaves. Raises: ClaimRefusedError if too many stay, or if that is
        not known."""
        may_stay = len(error.conflicts) - error.enough
        leaving: list[tuple[Conflict, str]] = []
        for conflict in sorted(error.conflicts, key=lambda one: not self._is_known_to_leave(attempt, one)):
            why = self._why_leaving(attempt, conflict)
            if why is not None:
                leaving.append((conflict, why))
            elif may_stay > 0:
                may_stay -= 1
            else:
                raise ClaimRefusedError(conflict.text)
            if len(leaving) == error.enough:
                break
        return leaving[0]

    def _is_known_to_leave(self, attempt: PrepareAttempt, conflict: Conflict) -> bool:
        uid = conflict.holder.ref.uid
        return uid in attempt.leaving or self.calls.is_called("unprepare", uid)

    def _why_leaving(self, attempt: PrepareAttempt, conflict: Conflict) -> str | None:
        """Why the holder is about to release the device, None if it is not. Raises: ClaimRefusedError if that is not
        known."""
        holder = conflict.holder
        if self.calls.is_called("unprepare", holder.ref.uid) or self._has_changed(holder):
            return "is being unprepared"
        if _is_lost(holder):
            return None
        known = attempt.leaving.get(holder.ref.uid)
        if holder.ref.uid in attempt.gone:
            return known
        try:
            seconds = min(_ASK_S, attempt.call.deadline - self.clock())
            now = self.lookup.look(holder.ref, max(0.05, seconds))
        except DraDriverError as error:
            if known is not None:
                return known
            raise ClaimRefusedError(
                f"{conflict.text}; whether that claim is about to end is not known: {error}"
            ) from error
        found = release_reason(holder, now, self.driver, conflict.held.device)
        if found is None:
            attempt.leaving.pop(holder.ref.uid, None)
            return None
        if known is None:
            self._on_leaving(holder.ref)
        attempt.leaving[holder.ref.uid] = found
        if now is None or now.uid != holder.ref.uid:
            attempt.gone.add(holder.ref.uid)
        return found

    def _in_vain(
        self, attempt: PrepareAttempt, error: NotNow, conflict: Conflict | None, why: str
    ) -> DraDriverError:
        """The error of an attempt that has waited in vain; `why` is why the holder of the `conflict` leaves."""
        waited = f"waited {self.waited_s(attempt):.0f} s; the kubelet tries again"
        if conflict is None or not isinstance(error, DeviceHeldError):
            kind = NvmlTransientError if isinstance(error, NvmlTransientError) else DeviceBusyError
            return kind(f"{error}; {waited}")
        holder = conflict.holder
        if error.enough < len(error.conflicts):
            return RetryableError(f"{conflict.text}: claim {holder.ref} {why}; {waited}")
        users = self.users.told(holder)
        if users is not None:
            why = f"{why}, but {users}: end that process on the node"
        return RetryableError(
            f"device {conflict.held.device} is still being torn down for claim {holder.ref}, which {why}; {waited}"
        )


def _is_lost(holder: ClaimRecord) -> bool:
    """Whether the record was made for a claim whose record on disk was lost."""
    return not holder.claim.results
