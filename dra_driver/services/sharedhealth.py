"""Keeping health in one file while two instances of the plugin run side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dra_driver.core.healthmerge import merged
from dra_driver.state.healthstore import KeptHealth


class Store(Protocol):
    """The file. Raises, all: StateError."""

    def load(self) -> KeptHealth | None:
        """What was kept."""

    def save(self, kept: KeptHealth) -> None:
        """Keep it if it is something else."""


class SharedHealth:
    """Writes only in this instance's turn, and knows when it has to be read again: when the turn comes.

    For one thread.
    """

    def __init__(self, store: Store, is_ours: Callable[[], bool]) -> None:
        self._store = store
        self._is_ours = is_ours
        self._was_ours = True
        self._mine: KeptHealth | None = None

    def is_outdated(self) -> bool:
        """Whether another instance may have kept something since; true once after each such time."""
        was_ours, self._was_ours = self._was_ours, self._is_ours()
        return self._was_ours and not was_ours

    def load(self) -> KeptHealth | None:
        """What was kept, with what this instance would have kept meanwhile; that is kept at once.

        Raises: StateError.
        """
        kept, mine = self._store.load(), self._mine
        if mine is None:
            return kept
        if kept is not None and kept.boot_id == mine.boot_id:
            states = merged(mine.states, kept.states)
            mine = KeptHealth(mine.boot_id, mine.driver_version or kept.driver_version, states)
        self.save(mine)
        return mine

    def save(self, kept: KeptHealth) -> None:
        """Keep it if it is something else and our turn. Raises: StateError."""
        self._mine = kept
        if self._is_ours():
            self._store.save(kept)
