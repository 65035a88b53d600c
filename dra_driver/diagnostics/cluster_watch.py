"""A cluster that is followed: listed once, then watched, so that a large one costs its API server little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from dra_driver.concurrency.backoff import Backoff
from dra_driver.diagnostics.cluster_lists import ClusterLists, ClusterReader, Listed
from dra_driver.errors import ApiRejectedError, ApiUnavailableError, FatalError
from dra_driver.kube.api_errors import WatchExpiredError
from dra_driver.kube.watch_stream import WatchStream

_BACKOFF_S = (1.0, 30.0)
_JOIN_S = 1.0


class ClusterWatch:
    """One thread a resource, from `with` to its end. `tell` hears of an API server that is away.

    Who may list a resource but not watch it gets it listed again every `poll_s`.
    """

    def __init__(self, reader: ClusterReader, tell: Callable[[str], object], *, poll_s: float) -> None:
        self._reader = reader
        self._tell = tell
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._streams: dict[str, WatchStream] = {}
        self._unread = {listed.name for listed in (*reader.needed, reader.waiting)}
        self._lacking: list[str] = []
        self._fatal: Exception | None = None
        self._news = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(listed,), name=f"cluster-watch-{listed.name}", daemon=True
            )
            for listed in (*reader.needed, reader.waiting)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        with self._lock:
            streams = [*self._streams.values()]
        for stream in streams:
            stream.close()
        until = time.monotonic() + _JOIN_S  # a list may be under way; nothing is lost with it
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def next(self) -> ClusterLists:
        """How the cluster looks once all of it was read and something changed since the call before.

        Raises: FatalError that names the right that is missing.
        """
        while True:
            self._news.wait()
            self._news.clear()
            if self._fatal is not None:
                raise self._fatal
            with self._lock:
                if not self._unread:
                    return self._reader.lists([*self._lacking])

    def _run(self, listed: Listed) -> None:
        try:
            self._read_and_follow(listed)
        except Exception as error:  # noqa: BLE001  raised again where somebody hears of it
            self._fatal = error
            self._news.set()

    def _read_and_follow(self, listed: Listed) -> None:
        backoff = Backoff(*_BACKOFF_S)
        version = ""
        while not self._stop.is_set():
            try:
                if not version:
                    version = listed.read()
                    self._has_read(listed)
                version, asked_s = self._follow(listed, version, backoff)
                wait_s = backoff.next(asked_s)
            except FatalError as error:
                self._may_not(listed, error)
                return
            except (ApiRejectedError, ApiUnavailableError) as error:
                # A server that was away may come back with another history.
                version = ""
                if isinstance(error, ApiRejectedError) and error.status in (401, 403):
                    wait_s = self._poll_s  # `read` tells of a right to list that is missing
                else:
                    wait_s = backoff.next(getattr(error, "retry_after_s", None))
                    self._failed(error)
            self._stop.wait(wait_s)

    def _follow(self, listed: Listed, version: str, backoff: Backoff) -> tuple[str, float | None]:
        """Take events in until the watch ends; (version to go on from, which survives a connection that breaks; seconds
        that the server asks to wait first)."""
        started = time.monotonic()
        stream = listed.watch(version)
        with self._lock:
            self._streams[listed.name] = stream
        if self._stop.is_set():
            stream.close()
        try:
            for event in stream:
                version = listed.take(event) or version
                if event.get("type") != "BOOKMARK":
                    self._news.set()
        except ApiUnavailableError as error:
            return version, error.retry_after_s
        finally:
            backoff.reset(time.monotonic() - started)
            with self._lock:
                del self._streams[listed.name]
        return version, None

    def _has_read(self, listed: Listed) -> None:
        with self._lock:
            self._unread.discard(listed.name)
        self._news.set()

    def _may_not(self, listed: Listed, error: FatalError) -> None:
        if listed is self._reader.waiting:
            with self._lock:
                self._lacking.append(str(error))
            self._has_read(listed)
        else:
            self._fatal = error
            self._news.set()

    def _failed(self, error: Exception) -> None:
        if not (self._stop.is_set() or isinstance(error, WatchExpiredError)):
            self._tell(f"{error}; looking again")
