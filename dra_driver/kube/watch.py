"""A list of objects that is watched from there on, in a thread of its own; and the labels of this node, kept so."""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.api_errors import WatchExpiredError
from dra_driver.kube.client import ApiClient, WatchStream

_log = structlog.get_logger(__name__)

_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security
_WATCH_S = (300, 600)  # the server ends a watch after that long; spread, so that not all nodes return at once
_IDLE_S = 90.0
"""Bookmarks come about once a minute. When one is missing, the server is dead, and a balancer acknowledges in its
place. Until then the plugin misses changes."""
_BACKOFF_S = (1.6, 30.0)
"""The first wait, half of which is left to chance, is that of client-go's informers: 10,000 nodes whose watches end in
the same moment come back over 0.8 s."""
_TRUSTED_S = 40.0
"""How long the labels of the node count while the watch fails: longer than the pause between two lists."""


class Follower(BackgroundWorker):
    """Lists the objects at `path` that `field_selector` chooses, and watches them from that list on, again and again.

    `what` are these objects in words. A subclass gets each list in `_relist` and each event in `_happened`, on the
    worker's thread; both must be quick. Idle it sleeps in one socket read.
    """

    def __init__(
        self,
        name: str,
        api: ApiClient,
        path: str,
        field_selector: str,
        what: str,
        *,
        idle_timeout_s: float = _IDLE_S,
        backoff_s: tuple[float, float] = _BACKOFF_S,
    ) -> None:
        super().__init__(name, self._turn, self._wait_s)
        self._api, self._path, self._what = api, path, what
        self._selector = {"fieldSelector": field_selector}
        self._idle_timeout_s = idle_timeout_s
        self._backoff = Backoff(*backoff_s, spread=(0.5, 1.0))
        self._version = ""  # to watch from; empty: list first
        self._stream: WatchStream | None = None
        self.failing: tuple[float, str] | None = None
        """Since when (time.monotonic()) list and watch have failed without a success in between, and why."""

    def retire(self) -> None:
        """Have no more events; the watch under way ends."""
        super().retire()
        stream = self._stream
        if stream is not None:
            stream.close()

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """Asks the server: (objects, resource version to watch from). Raises: ApiUnavailableError, ApiRejectedError."""
        answer = self._api.request("GET", self._path, query=self._selector, action=f"list {self._what}")
        return list(answer.get("items") or ()), str(
            (answer.get("metadata") or {}).get("resourceVersion") or ""
        )

    def open_watch(self, resource_version: str) -> WatchStream:
        """A raw stream of events after `resource_version`; the caller closes it.

        Raises: WatchExpiredError (list again), ApiUnavailableError, ApiRejectedError; while it is read also
        ApiUnavailableError for a connection that broke or 90 s of silence, after which the server is dead.
        """
        query = self._selector | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(int(_jitter.uniform(*_WATCH_S))),
        }
        action = f"watch {self._what}"
        return self._api.watch(self._path, query=query, action=action, idle_timeout_s=self._idle_timeout_s)

    @abstractmethod
    def _relist(self) -> str:
        """List and take what is there; the version of the list. Raises: as `list`."""

    @abstractmethod
    def _happened(self, event: dict[str, Any]) -> None:
        """Something of it was added, changed or deleted."""

    def _turn(self) -> float:
        """Follow until the watch ends. Whatever ended it may end the next one at once, and the watches of all other
        nodes too, so there is always a pause."""
        failure: Exception | None = None
        # A server that was away may come back with another history, as after a restored backup: a watch from our
        # version would then stay silent for as long as it takes to catch up. So a failure makes it list again.
        version, self._version = self._version, ""
        try:
            version = version or self._relist()
            self._version, failure = self._follow(version)
        except (ApiUnavailableError, ApiRejectedError) as error:
            failure = error
        wait_s = self._wait_s(failure)
        if isinstance(failure, WatchExpiredError):
            _log.info("watch_expired", what=self._what, resource_version=version, retry_s=round(wait_s, 2))
        elif failure is not None and not self.is_stopping:
            _log.warning("watch_failed", what=self._what, error=str(failure), retry_s=round(wait_s, 2))
        return wait_s

    def _wait_s(self, failure: Exception | None) -> float:
        if failure is not None:
            self.failing = (time.monotonic() if self.failing is None else self.failing[0], str(failure))
        return self._backoff.next(failure.retry_after_s if isinstance(failure, ApiUnavailableError) else None)

    def _follow(self, version: str) -> tuple[str, ApiUnavailableError | None]:
        """Pass events on until the watch ends; (version to resume from, what broke it, None if it ended in order).

        Raises: WatchExpiredError also for an event from before `version`: the history was set back.
        """
        started = time.monotonic()
        self._stream = stream = self.open_watch(version)
        self.failing = None
        if self.is_stopping:
            stream.close()
        try:
            for event in stream:
                version = version_after(version, event)
                if event.get("type") != "BOOKMARK":
                    self._happened(event)
        except ApiUnavailableError as error:
            return version, error
        finally:
            self._backoff.reset(time.monotonic() - started)
            self._stream = None
        return version, None


def version_after(version: str, event: dict[str, Any]) -> str:
    """The version after this event. Raises: WatchExpiredError if that is an earlier one."""
    metadata = event["object"].get("metadata") if isinstance(event.get("object"), dict) else None
    new = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(new, str) or not new:
        return version
    if new.isdecimal() and version.isdecimal() and int(new) < int(version):
        text = f"version {new} came after {version} in a watch; the server's history was set back"
        raise WatchExpiredError(text, status=410, reason="Expired")
    return new


class NodeLabels(Follower):
    """The labels of the own node. `on_change` is called when they are others than before, on the worker's thread.

    It needs `list` and `watch` on nodes, and asks for this node alone.
    """

    def __init__(self, api: ApiClient, node: str, on_change: Callable[[], None], **more: Any) -> None:
        """`more` is for the Follower."""
        super().__init__("node-labels", api, "/api/v1/nodes", f"metadata.name={node}", f"node {node}", **more)
        self._on_change = on_change
        self._labels: Mapping[str, str] | None = None
        self._heard: float | None = None  # when the last list or event came (time.monotonic())

    def now(self) -> Mapping[str, str] | None:
        """None until they are known, and while the node does not exist.

        Raises: ApiUnavailableError if list or watch fails, and no list has come for a while.
        """
        failing, heard = self.failing, self._heard
        if failing is not None and (heard is None or time.monotonic() - max(failing[0], heard) >= _TRUSTED_S):
            raise ApiUnavailableError(failing[1])
        return self._labels

    def _relist(self) -> str:
        nodes, version = self.list()
        self._take(nodes[0] if nodes else None)
        return version

    def _happened(self, event: dict[str, Any]) -> None:
        self._take(None if event.get("type") == "DELETED" else event.get("object"))

    def _take(self, node: Any) -> None:
        self._heard = time.monotonic()
        before = self._labels
        self._labels = None if node is None else dict((node.get("metadata") or {}).get("labels") or {})
        if self._labels != before:
            self._on_change()
