"""Facts about the cluster, and the permissions of the credentials. Functions raise ApiRejectedError and
ApiUnavailableError.
"""

from __future__ import annotations

from typing import Any

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import ApiClient, path_segment
from dra_driver.model.dataclass import dataclass


def node_uid(client: ApiClient, name: str) -> str:
    """Return the UID of a node, which changes only if the node is registered again."""
    uid = (read_node(client, name).get("metadata") or {}).get("uid")
    if not uid:
        raise ApiRejectedError(f"get node {name}: the response has no metadata.uid", status=200)
    return str(uid)


def read_node(client: ApiClient, name: str) -> dict[str, Any]:
    return client.request("GET", f"/api/v1/nodes/{path_segment(name)}", action=f"get node {name}")


def server_version(client: ApiClient) -> str:
    """Return for example `v1.36.0-gke.1`; empty if the API server reports none."""
    answer = client.request("GET", "/version", action="get the API server's version")
    return str(answer.get("gitVersion") or "")


@dataclass(frozen=True, slots=True)
class Permission:
    """Without an `optional` one, the plugin still works, but reports less."""

    verb: str
    resource: str
    group: str = ""
    subresource: str = ""
    name: str = ""
    optional: bool = False

    def __str__(self) -> str:
        sub = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.resource}{sub}"


def is_allowed(client: ApiClient, wanted: Permission) -> bool:
    """Whether these credentials have the permission. Raises: PathNotFoundError if the server has no access reviews."""
    attributes = {
        "verb": wanted.verb,
        "group": wanted.group,
        "resource": wanted.resource,
        "subresource": wanted.subresource,
        "name": wanted.name,
    }
    try:
        answer = client.request(
            "POST",
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            action=f"check the permission to {wanted}",
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
            },
        )
    except PathNotFoundError as error:
        raise PathNotFoundError("this API server does not support access reviews", status=404) from error
    return bool((answer.get("status") or {}).get("allowed"))
