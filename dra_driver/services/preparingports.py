"""The locks that preparing a claim needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol


class Locks(Protocol):
    """Locks on physical GPUs."""

    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> AbstractContextManager[None]:
        """Hold all of them."""


class ClaimTurn(Protocol):
    """The right to work on one claim."""

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim ended after the moment."""

    def was_prepared_since(self, moment_ns: int) -> bool:
        """Whether a Prepare of the claim succeeded after the moment, or may have."""

    def note_prepared(self) -> None:
        """Remember that the claim was prepared now."""

    def note_unprepared(self) -> None:
        """Remember that the claim was unprepared now."""


class ClaimLocks(Protocol):
    """Locks on claims."""

    def hold(self, uid: str, timeout_s: float) -> AbstractContextManager[ClaimTurn]:
        """Hold the claim's lock."""
