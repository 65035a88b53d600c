"""Which version of resource.k8s.io the server speaks, and requests to that group in that version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import structlog

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import JSON, ApiClient, path_segment
from dra_driver.kube.convert import GROUP, VERSIONS, from_version, to_version
from dra_driver.kube.watch_stream import WatchStream

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
_FORBIDDEN = (401, 403)


class ResourceApi:
    """The resource.k8s.io group of one server; v1 objects in and out. Safe for many threads.

    It begins with the best version. A path that is not served, as on an older cluster, or after an upgrade, leads to
    discovery; an object that does not exist does not. So nobody waits for a discovery that hangs, and no lock is held
    while the server is asked.
    """

    def __init__(self, client: ApiClient, *, preferred: tuple[str, ...] = VERSIONS) -> None:
        self.client = client
        self._preferred = preferred
        self._lock = threading.Lock()
        self._version: str | None = None

    @property
    def version(self) -> str:
        """The version in use, such as "v1beta2"; before the first answer the best one."""
        return self._version or self._preferred[0]

    def discover(self) -> str:
        """Ask the server, and use the best version from now on.

        Raises: ApiUnavailableError; ApiRejectedError (404) if the server has no version known here.
        """
        self._use(self._served()[0])
        return self.version

    def path(self, version: str, plural: str, namespace: str | None, *rest: str | None) -> str:
        """URL path of a collection, object or subresource. Raises: ApiRejectedError for an impossible name."""
        inside = ["namespaces", path_segment(namespace)] if namespace is not None else []
        named = [path_segment(part) for part in rest if part is not None]
        return "/".join(["/apis", GROUP, version, *inside, plural, *named])

    def call(
        self,
        method: str,
        plural: str,
        *,
        action: str,
        namespace: str | None = None,
        name: str | None = None,
        subresource: str | None = None,
        query: Mapping[str, str] | None = None,
        body: dict[str, Any] | None = None,
        content_type: str = JSON,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One request; `body` and answer in v1 shape. Raises: as ApiClient.request."""

        end = None if timeout_s is None else time.monotonic() + timeout_s

        def once(version: str) -> dict[str, Any]:
            return self.client.request(
                method,
                self.path(version, plural, namespace, name, subresource),
                action=action,
                query=query,
                body=None if body is None else to_version(body, version),
                content_type=content_type,
                timeout_s=_left(end),
            )

        return from_version(self._falling_back(once, end))

    def watch(
        self, plural: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch over a cluster-scoped collection; its objects still need `from_version`."""

        def once(version: str) -> WatchStream:
            path = self.path(version, plural, None)
            return self.client.watch(path, action=action, query=query, idle_timeout_s=idle_timeout_s)

        return self._falling_back(once, None)

    def _falling_back(self, once: Callable[[str], _T], end: float | None) -> _T:
        """`end` is when the answer is of no use any more (time.monotonic()); None leaves it to the client."""
        tried = self.version
        try:
            result = once(tried)
        except PathNotFoundError as error:
            return self._retry_elsewhere(once, tried, error, end)
        self._use(tried)
        return result

    def _retry_elsewhere(
        self, once: Callable[[str], _T], tried: str, error: PathNotFoundError, end: float | None
    ) -> _T:
        for version in self._served(end):
            if version == tried:
                continue
            try:
                result = once(version)
            except PathNotFoundError:
                continue
            self._use(version, instead_of=tried)
            return result
        raise error

    def _use(self, version: str, *, instead_of: str | None = None) -> None:
        """Use the version from now on, unless another one is known to be served. That one is given up if it is
        `instead_of`."""
        with self._lock:
            before = self._version
            if before not in (None, instead_of) or before == version:
                return
            self._version = version
        if before is None:
            log.info("api_version_chosen", version=f"{GROUP}/{version}")
        else:
            log.warning("api_version_changed", version=f"{GROUP}/{version}", before=f"{GROUP}/{before}")

    def _served(self, end: float | None = None) -> tuple[str, ...]:
        """The versions that server and driver know, best first; never empty.

        A service account that may not read discovery documents gets all of them, to be tried in turn.
        """
        try:
            group = self.client.request(
                "GET", f"/apis/{GROUP}", action=f"discover the versions of {GROUP}", timeout_s=_left(end)
            )
        except PathNotFoundError as error:
            raise self._none_served("none") from error
        except ApiRejectedError as error:
            if error.status in _FORBIDDEN:
                return self._preferred
            raise
        offered = [str(entry.get("version")) for entry in group.get("versions") or ()]
        known = tuple(version for version in self._preferred if version in offered)
        if not known:
            raise self._none_served(", ".join(offered) or "none")
        return known

    def _none_served(self, offered: str) -> ApiRejectedError:
        wanted = ", ".join(self._preferred)
        # Not the kind of 404 that says an object does not exist.
        return PathNotFoundError(
            f"the API server serves no usable version of {GROUP} (served: {offered}; needed: one of"
            f" {wanted}); use Kubernetes 1.34 or later, or 1.32 and 1.33 with the DynamicResourceAllocation"
            " feature gate and --runtime-config for that group",
            status=404,
            reason="NotFound",
        )


def _left(end: float | None) -> float | None:
    """Seconds until then, never none at all: the client says better than we that the time is over."""
    return None if end is None else max(0.05, end - time.monotonic())
