"""Listening for what the kernel tells of hardware, so that nobody has to look for it all the time."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

_log = structlog.get_logger(__name__)


class NewsSource(Protocol):
    """Where news come from: the kernel (`host.uevents`) or a simulated machine. Some may get lost."""

    def fileno(self) -> int:
        """A descriptor that is readable while there is something to hear."""
        ...

    def heard(self) -> bool:
        """Take what is there; whether it may concern GPUs. Raises: OSError."""
        ...

    def close(self) -> None:
        """End."""
        ...


class HardwareNews:
    """Calls `on_news`, in a thread of its own, whenever the source tells of GPUs.

    `is_heard` is False where nothing can be heard: whoever relies on news has to look then.
    """

    def __init__(self, source: Callable[[], NewsSource], on_news: Callable[[], None]) -> None:
        """`source` opens it, and raises OSError where that cannot be done."""
        self._open = source
        self._on_news = on_news
        self._source: NewsSource | None = None
        self._stop, self._stopped = -1, False
        self._thread = threading.Thread(target=self._listen, name="hardware-news", daemon=True)

    @property
    def is_heard(self) -> bool:
        """Whether news are heard now."""
        return self._source is not None

    def start(self) -> None:
        """Begin to listen, if that can be done here."""
        try:
            self._source = self._open()
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no right, no descriptor or no thread to be had
            _log.info("hardware_news_not_heard", reason=str(error))
            self._give_up()

    def stop(self) -> None:
        """End; harmless before `start` and twice."""
        if self._stop < 0:
            return
        self._stopped = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._give_up()

    def _give_up(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def _listen(self) -> None:
        source = self._source
        if source is None:
            return
        waiting = select.poll()
        waiting.register(source.fileno(), select.POLLIN)
        waiting.register(self._stop, select.POLLIN)
        try:
            while not self._stopped:
                waiting.poll()
                if not self._stopped and source.heard():
                    self._on_news()
        except Exception:  # noqa: BLE001  the poll that stands behind it goes on
            _log.exception("hardware_news_failed")
        finally:
            self._source = None
            source.close()
