"""Asks other parts of the plugin at each scrape, in limited time.

A part that fails or does not answer in time is counted and left out of this scrape; the scrape shows all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait

import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_log = structlog.get_logger(__name__)

_WITHIN_S = 1.0
CAUSES = ("error", "timeout")

Read = Callable[[], Iterable[Metric]]
_Families = tuple[Metric, ...] | None
"""What a source answered; None if it failed."""


class Readings(Collector):
    """Sources by name. `failed` is called for each answer that is left out, with the name of the source and one of
    `CAUSES`."""

    def __init__(self, failed: Callable[[str, str], None], *, within_s: float = _WITHIN_S) -> None:
        """`within_s` is how long a scrape waits for all sources together."""
        self._failed = failed
        self._within_s = within_s
        self._from_memory: dict[str, Read] = {}
        self._waiting: dict[str, Read] = {}
        self._lock = threading.Lock()
        self._answers: dict[str, Future[_Families]] = {}
        self._overdue: set[str] = set()

    def add(self, name: str, read: Read, *, waits: bool) -> None:
        """Call `read` at each scrape. `waits` says that it reads files or asks another process."""
        (self._waiting if waits else self._from_memory)[name] = read

    def collect(self) -> Iterator[Metric]:
        """The answers of all sources that answer in time."""
        deadline = time.monotonic() + self._within_s
        asked = {name: self._ask(name) for name in self._waiting.copy()}
        for name, read in self._from_memory.copy().items():
            yield from self._told(name, _families(name, read))
        for name, answer in asked.items():
            # If an earlier scrape has waited for this call already, do not wait again.
            wait([answer], 0.0 if name in self._overdue else max(0.0, deadline - time.monotonic()))
            if answer.done():
                yield from self._told(name, answer.result())
            else:
                self._overdue.add(name)
                self._failed(name, "timeout")

    def _told(self, name: str, families: _Families) -> tuple[Metric, ...]:
        if families is None:
            self._failed(name, "error")
        return families or ()

    def _ask(self, name: str) -> Future[_Families]:
        """The call of a source that is under way, or a new one in a thread of its own, which ends with the answer. No
        source is asked twice at a time, so one that hangs takes one thread."""
        with self._lock:
            known = self._answers.get(name)
            if known is not None and not known.done():
                return known
            answer = self._answers[name] = Future[_Families]()
            self._overdue.discard(name)

            def ask() -> None:
                answer.set_result(_families(name, self._waiting[name]))

            try:
                threading.Thread(target=ask, name=f"metrics-{name}", daemon=True).start()
            except RuntimeError:
                answer.set_result(None)
            return answer


def _families(name: str, read: Read) -> _Families:
    try:
        return tuple(read())
    except Exception as error:  # noqa: BLE001  one source must not break the scrape
        _log.debug("metrics_not_read", source=name, reason=str(error))
        return None
