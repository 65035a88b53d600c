"""Lets a Prepare wait while its devices will soon be free. No lock is held while waiting. A crash leaves what
the last try left: nothing, or a record in `preparing`.

An attempt waits if

- the claim that holds the device is being unprepared, or will be according to the API server
  (`claims.rules.holders`). If the API server does not answer, the last answer counts; without one, the
  Prepare is refused;
- MPS has its maximum number of clients, and enough of them are about to leave;
- a process uses the device, for example in a container that was just stopped;
- the NVIDIA driver refuses for now. What the try has created is kept.

In the last two cases nothing signals the end, so the attempt retries after short pauses; the kubelet would
retry only after a minute or more. The end of each Unprepare, and of each attempt that removes its record,
wakes all waiting attempts, in no particular order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import structlog

from dra_driver.claims.calls import CallsUnderWay, PrepareAttempt
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
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

NotNow = DeviceHeldError | DeviceBusyError | NvmlTransientError
NOT_NOW = (DeviceHeldError, DeviceBusyError, NvmlTransientError)
"""After these errors, call `Waiter.wait`."""
_CHECK_S = 1.0
"""For checks whether the kubelet has cancelled the call."""
_QUERY_S = 3.0
"""For one query about a holder."""


@dataclass(frozen=True, slots=True)
class WaitTimeouts:
    """While an attempt waits for a holder, it queries the API server every `recheck_s`; otherwise it retries
    every `retry_s`. It stops `last_s` before the deadline, because the last try takes time. `stop_s` is how
    long it still waits after `stop`.
    """

    recheck_s: float = 3.0
    retry_s: float = 0.5
    last_s: float = 3.0
    stop_s: float = 5.0


@dataclass(eq=False)
class Waiter:
    """Thread-safe. `on_leaving` gets each awaited holder that the API server shows as leaving: the kubelet
    may have forgotten it.
    """

    lookup: ClaimClient
    records: RecordStore
    driver: str
    users: GpuProcesses
    calls: CallsUnderWay
    on_leaving: Callable[[ClaimRef], None]
    timeouts: WaitTimeouts
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stop_by = math.inf

    def wake(self) -> None:
        self.calls.wake()

    def stop(self) -> None:
        """Give each attempt a few more seconds, because the plugin is being stopped."""
        self._stop_by = self.clock() + self.timeouts.stop_s
        self.wake()

    def wait(self, attempt: PrepareAttempt, error: NotNow) -> None:
        """Wait until the attempt should retry.

        Raises: ClaimRefusedError if too many holders stay; RetryableError if the kubelet cancels the call;
        RetryableError, or an error of the type of `error`, if too little time is left.
        """
        times = self.timeouts
        conflicts = error.conflicts if isinstance(error, DeviceHeldError) else ()
        conflict, why = self._leaving(attempt, error) if isinstance(error, DeviceHeldError) else (None, "")
        self._note(attempt, error, str(error) if conflict is None else f"claim {conflict.holder.ref} {why}")
        due = self.clock() + (times.recheck_s if conflicts else times.retry_s)
        while True:
            now, end = self.clock(), min(attempt.call.deadline - times.last_s, self._stop_by)
            if now >= end:
                raise self._timed_out(attempt, error, conflict, why)
            attempt.call.left()  # raises if the kubelet has cancelled the call
            if now >= due:
                return
            self._sleep(attempt, min(due, end, now + _CHECK_S) - now)
            if any(self._has_changed(one.holder) for one in conflicts):
                return

    def _note(self, attempt: PrepareAttempt, error: NotNow, reason: str) -> None:
        if attempt.waits_since is None:
            attempt.waits_since = self.clock()
        if attempt.waits_after is not type(error):
            attempt.waits_after = type(error)
            _log.info("prepare_waits", claim_uid=attempt.ref.uid, reason=reason)

    def _sleep(self, attempt: PrepareAttempt, seconds: float) -> None:
        attempt.seen = self.calls.wait(attempt.seen, seconds)

    def _has_changed(self, holder: ClaimRecord) -> bool:
        return not _is_lost(holder) and self.records.get(holder.ref.uid) != holder

    def _leaving(self, attempt: PrepareAttempt, error: DeviceHeldError) -> tuple[Conflict, str]:
        """Return a holder that is about to release the device, and why.

        Raises: ClaimRefusedError if too many holders stay, or that is unknown.
        """
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
        return uid in attempt.leaving or self.calls.is_in_progress("unprepare", uid)

    def _why_leaving(self, attempt: PrepareAttempt, conflict: Conflict) -> str | None:
        """Raise ClaimRefusedError if it is unknown whether the holder is leaving."""
        holder = conflict.holder
        if self.calls.is_in_progress("unprepare", holder.ref.uid) or self._has_changed(holder):
            return "is being unprepared"
        if _is_lost(holder):
            return None
        known = attempt.leaving.get(holder.ref.uid)
        if holder.ref.uid in attempt.gone:
            return known
        try:
            seconds = min(_QUERY_S, attempt.call.deadline - self.clock())
            now = self.lookup.current(holder.ref, max(0.05, seconds))
        except DraDriverError as error:
            if known is not None:
                return known
            raise ClaimRefusedError(
                f"{conflict.text}; gpu-dra-driver cannot find out whether claim {holder.ref} is ending: {error}"
            ) from error
        found = release_reason(holder, now, self.driver, conflict.held.device)
        if found is None:
            attempt.leaving.pop(holder.ref.uid, None)
            return None
        if known is None:
            self.on_leaving(holder.ref)
        attempt.leaving[holder.ref.uid] = found
        if now is None or now.uid != holder.ref.uid:
            attempt.gone.add(holder.ref.uid)
        return found

    def _timed_out(
        self, attempt: PrepareAttempt, error: NotNow, conflict: Conflict | None, why: str
    ) -> DraDriverError:
        waited = f"waited {self.clock() - (attempt.waits_since or 0.0):.0f} s; the kubelet retries"
        if conflict is None or not isinstance(error, DeviceHeldError):
            kind = NvmlTransientError if isinstance(error, NvmlTransientError) else DeviceBusyError
            return kind(f"{error}; {waited}")
        holder = conflict.holder
        if error.enough < len(error.conflicts):
            return RetryableError(f"{conflict.text}: claim {holder.ref} {why}; {waited}")
        users = self.users.describe(holder)
        if users is not None:
            why = f"{why}, but {users} (end the programs on the node)"
        return RetryableError(
            f"cleanup of device {conflict.held.device} has not finished for claim {holder.ref}, which {why}; {waited}"
        )


def _is_lost(holder: ClaimRecord) -> bool:
    """Whether only the CDI spec shows what the holder has."""
    return not holder.claim.results
