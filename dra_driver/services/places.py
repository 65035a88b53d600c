"""One Prepare that may have to wait, and how long is waited for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from dra_driver.core.holding import Conflict
from dra_driver.errors import PassingRefusalError, RetryableError
from dra_driver.model.claim import AllocatedClaim
from dra_driver.model.record import HeldDevice

WAITS_LONGER = "waits for it for longer"
"""Why a holder keeps others waiting that has nothing yet, but was before them."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for what, in seconds. `busy_s` bounds the waiting for a device that no claim holds: what uses
    it may be a monitor, which never lets go; `users_s` must be left for looking what computes on a device; `stop_s` is
    how long a driver that is being stopped still waits.

    What the NVIDIA driver refused for now is tried again after `refused_pause_s`, then after twice as long each time up
    to `refused_pause_most_s`, for `refused_s` in all; `try_s` must be left for a try.
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


@dataclass(slots=True, eq=False)
class Place:
    """One Prepare of one claim; its number is its place in line, None as long as it stands in none."""

    claim: AllocatedClaim
    deadline: float
    number: int | None = None
    wanted: tuple[HeldDevice, ...] = ()
    began: float | None = None
    busy_since: float | None = None
    refused_since: float | None = None
    refusals: int = 0
    withdrawn: bool = False
    leaving: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By the UID of a holder: why it lets go, and until when (the clock's time) that holds without asking."""
    users: str | None = None
    """What computed on the first holder's devices when that was asked last."""

    def given_up(self, error: PassingRefusalError, now: float) -> PassingRefusalError:
        """The last refusal, with how often and how long (until the clock's `now`) it was tried."""
        if self.refused_since is None or self.refusals < 2:
            return error
        seconds = now - self.refused_since
        return PassingRefusalError(
            f"{error}; refused {self.refusals} times in {seconds:.0f} s, it is tried again"
        )

    def in_vain(self, conflict: Conflict, why: str, now: float) -> RetryableError:
        """What is told when a holder, which lets go because of `why`, was waited for until the clock's `now`."""
        waited = 0.0 if self.began is None else now - self.began
        if why == WAITS_LONGER:
            return RetryableError(
                f"device {conflict.held.device} cannot be had yet, and claim {conflict.holder.ref} waits for it for "
                f"longer; waited {waited:.0f} s, it is tried again"
            )
        users = "" if self.users is None else f", but {self.users}: end that on the node"
        return RetryableError(
            f"device {conflict.held.device} is still being torn down for claim {conflict.holder.ref}, which {why}"
            f"{users}; waited {waited:.0f} s, it is tried again"
        )
