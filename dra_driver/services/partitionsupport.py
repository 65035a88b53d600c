"""Whether the API server can count partitions, and what is published where it cannot.

A MIG device that is made on demand is only safe to offer with counters: a server that drops them would let the
scheduler give one piece of silicon out many times. So the server is asked before the first such device is published.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from dra_driver.model.inventory import Inventory

_log = structlog.get_logger(__name__)

_ASK_AGAIN_S = 3600.0


class Answer(Protocol):
    """What the server said; `reason` is one sentence with the remedy where it cannot."""

    @property
    def supported(self) -> bool:
        """Whether counters survive."""

    @property
    def reason(self) -> str:
        """Why not, and what to do."""


class PartitionSupport:
    """Remembers the server's answer. `tell` gets the reason each time that support is found missing anew.

    `caution` answers what is wrong with counters for these devices on a server that keeps them, if anything; it is
    asked each time that support is found anew, and what it says goes to `warn`.

    For the publisher's thread; `problem` may be read by any.
    """

    def __init__(
        self,
        probe: Callable[[], Answer],
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        caution: Callable[[Inventory], str | None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._probe = probe
        self._tell = tell
        self._clock = clock
        self._caution = caution
        self._warn = warn
        self._lock = threading.Lock()
        self._is_needed = False
        self._supported: bool | None = None
        self._problem: str | None = None
        self._asked_at = 0.0

    @property
    def problem(self) -> str | None:
        """Why MIG devices on demand are not offered; None where they are, or where none could be."""
        return self._problem if self._is_needed else None

    @property
    def ask_at(self) -> float:
        """When the server should be asked again, as the clock tells it; infinity if there is no need."""
        with self._lock:
            waits = self._is_needed and self._supported is False
            return self._asked_at + _ASK_AGAIN_S if waits else math.inf

    def usable(self, inventory: Inventory) -> Inventory:
        """The inventory as this server can take it.

        Raises: as the probe, if the server does not answer; nothing must be published then.
        """
        with self._lock:
            self._is_needed = any(
                gpu.partitioning is not None and gpu.partitioning.possible for gpu in inventory.gpus
            )
            if not self._is_needed:
                return inventory
            overdue = not self._supported and self._clock() - self._asked_at >= _ASK_AGAIN_S
            if self._supported is None or overdue:
                self._ask(inventory)
            return inventory if self._supported else inventory.without_partitions()

    def fields_dropped(self) -> None:
        """The server dropped counters from a slice although it promised to keep them: ask it again."""
        with self._lock:
            self._supported = None

    def _ask(self, inventory: Inventory) -> None:
        answer = self._probe()
        concern = self._caution(inventory) if answer.supported else None
        self._asked_at = self._clock()
        before, self._supported = self._supported, answer.supported
        self._problem = None if answer.supported else answer.reason
        if answer.supported:
            _log.info("partitions_supported")
            if concern is not None:
                _log.warning("scheduler_outdated", reason=concern)
                self._warn(concern)
        elif before is not False:
            _log.warning("partitions_not_supported", reason=answer.reason)
            self._tell(answer.reason)
