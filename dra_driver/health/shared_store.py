"""Keeping health in one file while two instances of the plugin run side by side."""

from __future__ import annotations

from collections.abc import Callable

from dra_driver.health.rules.merge import merged
from dra_driver.health.store import HealthStore, KeptHealth


class SharedHealth:
    """Writes only while it is this instance's turn; reads again when the turn comes.

    For one thread.
    """

    def __init__(self, store: HealthStore, is_ours: Callable[[], bool]) -> None:
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
