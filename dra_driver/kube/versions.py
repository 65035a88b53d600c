"""Which version of resource.k8s.io the server speaks, and requests to that group in that version."""

from __future__ import annotations

import threading
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

    The version is discovered at the first call and kept. A path that is no longer served (the cluster was
    upgraded) leads to a new discovery; an object that does not exist does not.
    """

    def __init__(self, client: ApiClient, *, preferred: tuple[str, ...] = VERSIONS) -> None:
        self.client = client
        self._preferred = preferred
        self._lock = threading.Lock()
        self._version: str | None = None

    @property
    def version(self) -> str:
        """The version in use, such as "v1beta2". Raises: as `discover`."""
        return self._version or self.discover()

    def discover(self) -> str:
        """Ask the server, and use the best version from now on.

        Raises: ApiUnavailableError; ApiRejectedError (404) if the server has no version known here.
        """
        with self._lock:
            if self._version is None:
                self._version = self._served()[0]
                log.info("api_version_chosen", version=f"{GROUP}/{self._version}")
            return self._version

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

        def once(version: str) -> dict[str, Any]:
            return self.client.request(
                method,
                self.path(version, plural, namespace, name, subresource),
                action=action,
                query=query,
                body=None if body is None else to_version(body, version),
                content_type=content_type,
                timeout_s=timeout_s,
            )

        return from_version(self._falling_back(once))

    def watch(
        self, plural: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch over a cluster-scoped collection; its objects still need `from_version`."""

        def once(version: str) -> WatchStream:
            path = self.path(version, plural, None)
            return self.client.watch(path, action=action, query=query, idle_timeout_s=idle_timeout_s)

        return self._falling_back(once)

    def _falling_back(self, once: Callable[[str], _T]) -> _T:
        tried = self.version
        try:
            return once(tried)
        except PathNotFoundError as error:
            return self._retry_elsewhere(once, tried, error)

    def _retry_elsewhere(self, once: Callable[[str], _T], tried: str, error: PathNotFoundError) -> _T:
        for version in self._served():
            if version == tried:
                continue
            try:
                result = once(version)
            except PathNotFoundError:
                continue
            with self._lock:
                self._version = version
            log.warning("api_version_changed", version=f"{GROUP}/{version}", before=f"{GROUP}/{tried}")
            return result
        raise error

    def _served(self) -> tuple[str, ...]:
        """The versions that server and driver know, best first; never empty.

        A service account that may not read discovery documents gets all of them, to be tried in turn.
        """
        try:
            group = self.client.request("GET", f"/apis/{GROUP}", action=f"discover the versions of {GROUP}")
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
