"""Waiting for devices that other claims are about to let go of, and for what the NVIDIA driver refuses for now.

A Prepare whose device is held goes through these states; no lock is held in any but the first:

    trying ──held──▶ asking ──a holder stays──▶ refused, the holder is named
      ▲  │             │ each is on its way out
      │  ├─busy────┐   ▼
      │  └─refused─┴▶ waiting ──the call or the patience is over──▶ failed for now; the kubelet asks again
      └──────────────────┘
        a holder's record is another one or gone, who was ahead has left, or it is time to ask or try again

| Where | A crash there leaves | Undo |
|---|---|---|
| asking, waiting | nothing: the place in line and what the API server said are in memory only | none |
| waiting after a refusal | a record in `preparing`, with what was made before the refusal | Unprepare |
| between the release and the next try | the device free; who asks next gets it | none |
| after the try | what Prepare itself leaves: a record | Unprepare |

So a call that ended in vain loses nothing but its place: the kubelet's next one goes on.

*In line*: claims that want one device are served in the order in which they began to wait. Who comes later finds those
before it as if they held the device already. A place is given up when the call ends, whatever its outcome, and when
the waiting claim is unprepared. The other instance of a rolling update has a line of its own: order is not kept
between the two, but a device is still given out once, because records and locks are shared.

*On its way out* is a claim whose Unprepare is under way in this process, or of which the API server says so
(`core.staleness`), or which the kubelet wanted unprepared though that could not be finished: then whoever waits
finishes it, as the kubelet's next try may be long in coming. If the API server says nothing, a holder is taken to
stay: nobody waits in doubt. Where it said so a moment ago, or for good, that holds.

*Refused for now*: a try that the driver refuses for a reason that passes by itself keeps what it made before, and the
next goes on with that; who gives up takes it back (`services.begun`). The kubelet would try only after a minute or
more. Who wants the same silicon waits behind: whether the claim gets it is not known yet.

*Woken* by the end of each Unprepare here. An Unprepare in the other instance is noticed by looking at the holder's
record, ten times a second, only while somebody waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import structlog

from dra_driver.core.holding import Conflict, DeviceHeldError
from dra_driver.core.staleness import departure
from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DraDriverError,
    PassingRefusalError,
)
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef
from dra_driver.model.record import ClaimRecord
from dra_driver.services.places import WAITS_LONGER, Patience, Place

__all__ = ["WAITED_FOR", "Holders", "Patience", "Place", "Records", "Releases"]

_log = structlog.get_logger(__name__)

WAITED_FOR = (DeviceHeldError, DeviceBusyError, PassingRefusalError)
"""The errors of a try after which `Releases.wait` is worth calling."""


class Holders(Protocol):
    """The claims in the API server."""

    def look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """The claim that bears the name now, None if there is none. Raises: DraDriverError if that is not sure."""


class Records(Protocol):
    """The claim records."""

    def get(self, uid: str) -> ClaimRecord | None:
        """One claim's record."""


def _nobody(_holder: ClaimRef) -> None:
    pass


def _nothing(_holder: ClaimRecord) -> None:
    pass


class Releases:
    """Who waits for which device, and which Unprepares are under way in this process. For many threads."""

    def __init__(
        self,
        holders: Holders,
        records: Records,
        driver: str,
        *,
        on_wait: Callable[[ClaimRef], None] = _nobody,
        users: Callable[[ClaimRecord], str | None] = _nothing,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_wait` hears of a holder for whose release somebody begins to wait; it must neither block nor raise.
        `users` answers what still computes on a holder's devices, None if nothing is known to; it must not raise, and
        take two seconds at most."""
        self._holders = holders
        self._records = records
        self._driver = driver
        self._on_wait = on_wait
        self._users = users
        self._patience = patience or Patience()
        self._clock = clock
        self._changed = threading.Condition()
        self._changes = 0
        self._numbers = 0
        self._line: list[Place] = []
        self._unpreparing: Counter[str] = Counter()
        self._preparing: Counter[str] = Counter()
        self._trying: Counter[str] = Counter()
        self._unfinished: dict[str, int] = {}
        self._stop_by: float | None = None

    def stop(self) -> None:
        """The driver is being stopped: whoever waits gets a few seconds more, then fails for now."""
        with self._changed:
            self._stop_by = self._clock() + self._patience.stop_s
            self._notify()

    # --- what is under way ---------------------------------------------------------------------

    @contextmanager
    def unpreparing(self, uid: str) -> Iterator[None]:
        """The claim is being unprepared: those who wait for its devices wait on, and are woken at the end."""
        try:
            with self._counted(self._unpreparing, uid):
                yield
        finally:
            with self._changed:
                for place in self._line:
                    place.withdrawn |= place.claim.ref.uid == uid
                self._notify()

    @contextmanager
    def preparing(self, uid: str) -> Iterator[None]:
        """The claim is being prepared, or waits to be."""
        with self._counted(self._preparing, uid):
            yield

    def is_preparing(self, uid: str) -> bool:
        """Whether a Prepare of the claim is under way in this process."""
        with self._changed:
            return self._preparing[uid] > 0

    def note_unprepared(self, uid: str, unfinished_since_ns: int | None = None) -> None:
        """The kubelet's Unprepare of a claim ended; with a moment (time.monotonic_ns()) it began then and could not be
        finished now, so that whoever waits for the claim's devices may finish it."""
        with self._changed:
            self._unfinished.pop(uid, None)
            if unfinished_since_ns is not None:
                self._unfinished[uid] = unfinished_since_ns

    def note_prepared(self, uid: str) -> None:
        """The kubelet's Prepare of a claim succeeded: an Unprepare before it is not to be finished any more."""
        with self._changed:
            self._unfinished.pop(uid, None)

    def unfinished(self, uid: str) -> int | None:
        """When the Unprepare of a claim began that could not be finished; None if there is none."""
        with self._changed:
            return self._unfinished.get(uid)

    @property
    def waiting(self) -> list[str]:
        """UIDs of the claims that wait for holders, in their order."""
        with self._changed:
            return [place.claim.ref.uid for place in self._line if place.began is not None]

    @contextmanager
    def _counted(self, under_way: Counter[str], uid: str) -> Iterator[None]:
        with self._changed:
            under_way[uid] += 1
        try:
            yield
        finally:
            with self._changed:
                under_way[uid] -= 1
                if not under_way[uid]:
                    del under_way[uid]

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    # --- the line ------------------------------------------------------------------------------

    @contextmanager
    def place(self, claim: AllocatedClaim, deadline: float) -> Iterator[Place]:
        """A Prepare of the claim that has to end by `deadline`; it stands in line once it has to wait."""
        place = Place(claim, deadline)
        try:
            with self._counted(self._trying, claim.ref.uid):
                yield place
        finally:
            with self._changed:
                if place in self._line:
                    self._line.remove(place)
                    self._notify()
        if place.refused_since is not None:
            seconds = round(self._clock() - place.refused_since, 1)
            _log.info(
                "nvml_refusal_passed", claim_uid=claim.ref.uid, refusals=place.refusals, duration_s=seconds
            )

    def ahead_of(self, place: Place) -> list[ClaimRecord]:
        """What the claims that wait for longer want, as if they held it."""
        with self._changed:
            return [
                ClaimRecord(other.claim, "preparing", "", other.wanted, ())
                for other in self._line
                if other.claim.ref.uid != place.claim.ref.uid
                and (place.number is None or other.number is None or other.number < place.number)
            ]

    def waited_s(self, place: Place) -> float | None:
        """How long the Prepare has waited since it first had to; None if it did not."""
        return None if place.began is None else self._clock() - place.began

    def wait(self, place: Place, error: DeviceHeldError | DeviceBusyError | PassingRefusalError) -> None:
        """Wait until it is worth trying again.

        Raises: ClaimRefusedError if a holder stays; RetryableError, or the error itself, if there is no time left.
        """
        if isinstance(error, PassingRefusalError):
            self._wait_for_driver(place, error)
            return
        place.refused_since, place.refusals = None, 0
        if isinstance(error, DeviceHeldError):
            place.wanted = error.wanted
            self._wait_for_holders(place, error)
        else:
            self._wait_for_idle(place, error)

    def _wait_for_holders(self, place: Place, error: DeviceHeldError) -> None:
        self._join(place)
        if self._is_released(error.conflicts):
            return
        reasons: list[str] = []
        for conflict in error.conflicts:
            reasons.append(self._why_leaving(place, conflict))
            if self._is_released(error.conflicts):  # an API server that hangs makes the asking long
                return
        if place.began is None:
            self._begin(place, str(error.conflicts[0].holder.ref), reasons[0])
        elif self._end(place) - self._clock() > self._patience.users_s:
            # Not in the first round: most holders are gone by now, and nobody has to wait for NVML.
            holder = error.conflicts[0].holder
            place.users = None if self._is_undecided(holder) else self._users(holder)
        until = self._clock() + self._patience.ask_again_s
        while True:
            seen, is_withdrawn = self._seen(place)
            if is_withdrawn or self._is_released(error.conflicts):
                return
            now, end = self._clock(), self._end(place)
            if now >= end:
                raise place.in_vain(error.conflicts[0], reasons[0], now)
            if now >= until:
                return
            self._sleep(seen, min(self._patience.poll_s, until - now, end - now))

    def _wait_for_idle(self, place: Place, error: DeviceBusyError) -> None:
        """No record tells when a process lets go of a device, so it is tried again and again."""
        now = self._clock()
        if place.busy_since is None:
            place.busy_since = now
            if place.began is None:
                self._begin(place, "a process", str(error))
        with self._changed:
            seen = self._changes
        end = min(place.busy_since + self._patience.busy_s, self._end(place))
        if now >= end:
            raise error
        self._sleep(seen, min(self._patience.busy_pause_s, end - now))

    def _wait_for_driver(self, place: Place, error: PassingRefusalError) -> None:
        """Nothing tells when the driver would do it, so it is tried again, at growing pauses."""
        patience, now = self._patience, self._clock()
        if place.refused_since is None:
            place.refused_since = now
            _log.warning("nvml_refuses", claim_uid=place.claim.ref.uid, reason=str(error))
        self._join(place)
        due = now + min(patience.refused_pause_s * 2**place.refusals, patience.refused_pause_most_s)
        place.refusals += 1
        while True:
            seen, is_withdrawn = self._seen(place)
            if is_withdrawn or self._clock() >= due:
                return
            if due > min(place.refused_since + patience.refused_s, self._end(place) - patience.try_s):
                raise place.given_up(error, self._clock())
            self._sleep(seen, due - self._clock())

    def _seen(self, place: Place) -> tuple[int, bool]:
        """The changes until now, for `_sleep`, and whether the claim was unprepared since this was asked last."""
        with self._changed:
            is_withdrawn, place.withdrawn = place.withdrawn, False
            return self._changes, is_withdrawn

    def _end(self, place: Place) -> float:
        """Until when (the clock's time) a Prepare may wait."""
        with self._changed:
            return place.deadline if self._stop_by is None else min(place.deadline, self._stop_by)

    def _begin(self, place: Place, holder: str, why: str) -> None:
        place.began = self._clock()
        _log.info("prepare_waits", claim_uid=place.claim.ref.uid, holder=holder, reason=why)

    def _sleep(self, seen: int, seconds: float) -> None:
        """Sleep until something changed since `seen` was read, but no longer than told."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout=max(0.0, seconds))

    def _join(self, place: Place) -> None:
        with self._changed:
            if place.number is None:
                self._numbers += 1
                place.number = self._numbers
                self._line.append(place)

    def _is_released(self, conflicts: tuple[Conflict, ...]) -> bool:
        """Whether one of the holders holds something else by now, or nothing."""
        return any(not self._holds(conflict.holder) for conflict in conflicts)

    def _holds(self, holder: ClaimRecord) -> bool:
        if _is_in_line(holder):
            with self._changed:
                return any(other.claim == holder.claim for other in self._line)
        if _is_lost(holder):
            return True
        return self._records.get(holder.ref.uid) == holder

    def _is_undecided(self, holder: ClaimRecord) -> bool:
        """Whether it only wants the devices: its Prepare tries, or waits. A record in `preparing` of one in the other
        instance, or of one that died, holds them."""
        if _is_in_line(holder):
            return True
        with self._changed:
            return holder.phase == "preparing" and self._trying[holder.ref.uid] > 0

    def _why_leaving(self, place: Place, conflict: Conflict) -> str:
        """Why a holder is on its way out. Raises: ClaimRefusedError that names it if it stays."""
        holder = conflict.holder
        if self._is_undecided(holder):
            return WAITS_LONGER
        with self._changed:
            if self._unpreparing[holder.ref.uid] > 0:
                return "is being unprepared"
            if holder.ref.uid in self._unfinished:
                return "could not be unprepared yet"
        if _is_lost(holder):
            raise ClaimRefusedError(conflict.text)
        told, holds_until = place.leaving.get(holder.ref.uid, ("", 0.0))
        if holds_until == math.inf:
            return told
        seconds = min(self._patience.ask_s, place.deadline - self._clock())
        try:
            now = self._holders.look(holder.ref, max(0.05, seconds))
        except DraDriverError as error:
            if told and self._clock() < holds_until:
                return told
            raise ClaimRefusedError(
                f"{conflict.text}; whether it is on its way out cannot be told: {error}"
            ) from error
        found = departure(holder, now, self._driver, conflict.held.device)
        if found is None:
            raise ClaimRefusedError(conflict.text)
        if not told:
            self._on_wait(holder.ref)
        place.leaving[holder.ref.uid] = (
            found.why,
            math.inf if found.is_final else self._clock() + self._patience.doubt_s,
        )
        return found.why


def _is_in_line(holder: ClaimRecord) -> bool:
    """Whether it is no record but stands for a claim in line; see `ahead_of`."""
    return holder.phase == "preparing" and not holder.boot_id and not holder.steps


def _is_lost(holder: ClaimRecord) -> bool:
    """Whether it stands for a claim whose record was lost."""
    return not holder.claim.results
