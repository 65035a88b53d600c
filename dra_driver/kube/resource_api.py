"""Requests to the group resource.k8s.io in version v1, which Kubernetes serves from 1.34 on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import JSON, ApiClient, WatchStream, path_segment

GROUP = "resource.k8s.io"
GROUP_VERSION = f"{GROUP}/v1"


class ResourceApi:
    """The group of one server. Safe for many threads."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client

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
        """One request. Raises: as ApiClient.request."""
        path = _path(plural, namespace, name, subresource)
        with _group_is_served():
            return self.client.request(
                method,
                path,
                action=action,
                query=query,
                body=body,
                content_type=content_type,
                timeout_s=timeout_s,
            )

    def watch(
        self, plural: str, *, action: str, query: Mapping[str, str], idle_timeout_s: float
    ) -> WatchStream:
        """Start a watch over a cluster-scoped collection."""
        with _group_is_served():
            path = _path(plural, None)
            return self.client.watch(path, action=action, query=query, idle_timeout_s=idle_timeout_s)

    def check(self) -> None:
        """Ask whether the server has the group. Raises: ApiUnavailableError, ApiRejectedError (404 if it has not)."""
        with _group_is_served():
            self.client.request("GET", f"/apis/{GROUP_VERSION}", action=f"ask for {GROUP_VERSION}")


def _path(plural: str, namespace: str | None, *rest: str | None) -> str:
    """URL path of a collection, object or subresource. Raises: ApiRejectedError for an impossible name."""
    inside = ["namespaces", path_segment(namespace)] if namespace is not None else []
    named = [path_segment(part) for part in rest if part is not None]
    return "/".join(["/apis", GROUP_VERSION, *inside, plural, *named])


@contextmanager
def _group_is_served() -> Iterator[None]:
    """Raises: PathNotFoundError that says what is missing. It is not the kind of 404 that says that an object does not
    exist."""
    try:
        yield
    except PathNotFoundError as error:
        raise PathNotFoundError(
            f"{error}; the API server does not serve {GROUP_VERSION}, or something before it does not pass it on: use "
            "Kubernetes 1.34 or later",
            status=error.status,
            reason=error.reason,
        ) from error
