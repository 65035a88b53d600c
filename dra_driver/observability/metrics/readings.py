"""Asks other parts of the driver at each scrape, in limited time.

A part that fails or does not answer in time is counted and left out of this scrape; the scrape shows all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_log = structlog.get_logger(__name__)

_WITHIN_S = 1.0
CAUSES = ("error", "timeout")

Read = Callable[[], Iterable[Metric]]


class Readings(Collector):
    """Sources by name. `failed` is called for each answer that is left out, with the name of the source and one of
    `CAUSES`."""

    def __init__(self, failed: Callable[[str, str], None], *, within_s: float = _WITHIN_S) -> None:
        """`within_s` is how long a scrape waits for all sources together."""
        self._failed = failed
        self._within_s = within_s
        self._from_memory: dict[str, Read] = {}
        self._waiting: list[_WaitingSource] = []

    def add(self, name: str, read: Read, *, waits: bool) -> None:
        """Call `read` at each scrape. `waits` says that it reads files or asks another process."""
        if waits:
            self._waiting.append(_WaitingSource(name, read))
        else:
            self._from_memory[name] = read

    def collect(self) -> Iterator[Metric]:
        """The answers of all sources that answer in time."""
        deadline = time.monotonic() + self._within_s
        asked = [(source.name, source.ask()) for source in self._waiting.copy()]
        for name, read in self._from_memory.copy().items():
            answer = _Answer()
            answer.fill(name, read)
            yield from self._told(name, answer)
        for name, answer in asked:
            answer.wait_until(deadline)
            yield from self._told(name, answer)

    def _told(self, name: str, answer: _Answer) -> Sequence[Metric]:
        if answer.families is None:
            self._failed(name, "error" if answer.ended.is_set() else "timeout")
            return ()
        return answer.families


class _Answer:
    """One call of a source, under way or ended; `families` stays None if it failed."""

    def __init__(self) -> None:
        self.families: tuple[Metric, ...] | None = None
        self.ended = threading.Event()
        self._is_overdue = False

    def fill(self, name: str, read: Read) -> None:
        """Ask. The call counts as ended whatever happens."""
        try:
            self.families = tuple(read())
        except Exception as error:  # noqa: BLE001  one source must not break the scrape
            _log.debug("metrics_not_read", source=name, reason=str(error))
        finally:
            self.ended.set()

    def wait_until(self, deadline: float) -> None:
        """Wait for the end. If an earlier scrape has waited for this call already, do not wait again."""
        timeout = 0.0 if self._is_overdue else max(0.0, deadline - time.monotonic())
        self._is_overdue = not self.ended.wait(timeout)


class _WaitingSource:
    """A source that is asked in a thread, which ends with the answer. It is never asked twice at a time, so a source
    that hangs takes one thread."""

    def __init__(self, name: str, read: Read) -> None:
        self.name = name
        self._read = read
        self._lock = threading.Lock()
        self._answer: _Answer | None = None

    def ask(self) -> _Answer:
        """The call that is under way, or a new one."""
        with self._lock:
            if self._answer is None or self._answer.ended.is_set():
                self._answer = _Answer()
                self._start(self._answer)
            return self._answer

    def _start(self, answer: _Answer) -> None:
        name = f"metrics-{self.name}"
        try:
            threading.Thread(target=answer.fill, args=(self.name, self._read), name=name, daemon=True).start()
        except RuntimeError:
            answer.ended.set()
