"""Lists and then watches objects in a background thread, and keeps the labels of this node up to date."""

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

_jitter = random.Random()  # noqa: S311  for spreading load, not for security
_WATCH_S = (
    300,
    600,
)  # until the server ends a watch; random, so that nodes do not reconnect at the same time
_IDLE_S = 90.0
"""Bookmarks arrive about once a minute. Without one, the server is dead behind a load balancer that still acknowledges
data."""
_BACKOFF_S = (1.6, 30.0)
"""First and maximum retry delay; half of the first is random, as in client-go, so that 10,000 nodes reconnect over 0.8
s."""
_TRUSTED_S = 40.0
"""How long labels remain valid while the watch fails: longer than the pause between two lists."""


class Follower(BackgroundWorker):
    """Lists the objects at `path` that match `field_selector`, and watches them from that list on, repeatedly.

    `what` describes the objects. `_relist` and `_on_event` run on the worker's thread and must be quick.
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
        self._version = ""  # resource version to watch from; empty: list first
        self._stream: WatchStream | None = None
        self.failing: tuple[float, str] | None = None

    def retire(self) -> None:
        super().retire()
        stream = self._stream
        if stream is not None:
            stream.close()

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """Return the objects, and the version to watch from. Raises: ApiUnavailableError, ApiRejectedError."""
        answer = self._api.request("GET", self._path, query=self._selector, action=f"list {self._what}")
        return list(answer.get("items") or ()), str(
            (answer.get("metadata") or {}).get("resourceVersion") or ""
        )

    def open_watch(self, resource_version: str) -> WatchStream:
        """Return a stream that the caller closes. Raises: WatchExpiredError (list again), ApiUnavailableError,
        ApiRejectedError.
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
        """List and store the objects, and return the list's version. Raises: like `list`."""

    @abstractmethod
    def _on_event(self, event: dict[str, Any]) -> None:
        """Handle an added, changed or deleted object."""

    def _turn(self) -> float:
        """Return the pause until the next turn: what ended a watch may also end the next one, on all nodes at once."""
        failure: Exception | None = None
        # After an outage the server may have another history, for example from a backup. A watch from the old
        # version would stay silent until the server has caught up, so list again after a failure.
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
        """Return the version to resume from, and the error that broke the watch, if any. Raises: WatchExpiredError."""
        started = time.monotonic()
        self._stream = stream = self.open_watch(version)
        self.failing = None
        if self.is_stopping:
            stream.close()
        try:
            for event in stream:
                version = version_after(version, event)
                if event.get("type") != "BOOKMARK":
                    self._on_event(event)
        except ApiUnavailableError as error:
            return version, error
        finally:
            self._backoff.reset(time.monotonic() - started)
            self._stream = None
        return version, None


def version_after(version: str, event: dict[str, Any]) -> str:
    """Raise WatchExpiredError if the event is older than `version`."""
    metadata = event["object"].get("metadata") if isinstance(event.get("object"), dict) else None
    new = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(new, str) or not new:
        return version
    if new.isdecimal() and version.isdecimal() and int(new) < int(version):
        text = f"resource version {new} came after {version} in a watch; the API server's history was reset"
        raise WatchExpiredError(text, status=410, reason="Expired")
    return new


class NodeLabels(Follower):
    """`on_change` is called on the worker's thread. Requires `list` and `watch` on nodes."""

    def __init__(self, api: ApiClient, node: str, on_change: Callable[[], None], **more: Any) -> None:
        super().__init__("node-labels", api, "/api/v1/nodes", f"metadata.name={node}", f"node {node}", **more)
        self._on_change = on_change
        self._labels: Mapping[str, str] | None = None
        self._updated_at: float | None = None  # when the last list or event arrived (time.monotonic())

    def now(self) -> Mapping[str, str] | None:
        """Return the labels; None until they are known, and while the node does not exist.

        Raises: ApiUnavailableError if list or watch fails, and nothing has arrived for a while.
        """
        failing, updated_at = self.failing, self._updated_at
        if failing is not None and (
            updated_at is None or time.monotonic() - max(failing[0], updated_at) >= _TRUSTED_S
        ):
            raise ApiUnavailableError(failing[1])
        return self._labels

    def _relist(self) -> str:
        nodes, version = self.list()
        self._take(nodes[0] if nodes else None)
        return version

    def _on_event(self, event: dict[str, Any]) -> None:
        self._take(None if event.get("type") == "DELETED" else event.get("object"))

    def _take(self, node: Any) -> None:
        self._updated_at = time.monotonic()
        before = self._labels
        self._labels = None if node is None else dict((node.get("metadata") or {}).get("labels") or {})
        if self._labels != before:
            self._on_change()
