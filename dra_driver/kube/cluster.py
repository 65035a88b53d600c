"""Facts of the cluster: the UID of a node, the release of the API server, and what these credentials may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import ApiClient, path_segment


def node_uid(client: ApiClient, name: str) -> str:
    """The UID of node `name`, for owner references. It changes only when the node is registered anew.

    Raises: ApiRejectedError (404: the node name is wrong), ApiUnavailableError.
    """
    uid = (read_node(client, name).get("metadata") or {}).get("uid")
    if not uid:
        raise ApiRejectedError(f"get node {name}: the answer has no metadata.uid", status=200)
    return str(uid)


def read_node(client: ApiClient, name: str) -> dict[str, Any]:
    """The object of node `name`. Raises: ApiRejectedError (404: the node name is wrong), ApiUnavailableError."""
    return client.request("GET", f"/api/v1/nodes/{path_segment(name)}", action=f"get node {name}")


def server_version(client: ApiClient) -> str:
    """The release that the API server reports, such as `v1.36.0-gke.1`; empty if it reports none.

    Raises: ApiRejectedError, ApiUnavailableError.
    """
    answer = client.request("GET", "/version", action="ask for the API server's version")
    return str(answer.get("gitVersion") or "")


@dataclass(frozen=True, slots=True)
class Permission:
    """One thing that an account may be allowed; the plugin can do without an `optional` one, and tells less then."""

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
    """Whether these credentials have the permission. Raises: ApiRejectedError (PathNotFoundError without access
    reviews), ApiUnavailableError."""
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
            action=f"ask whether I may {wanted}",
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
            },
        )
    except PathNotFoundError as error:
        raise PathNotFoundError("this API server has no access reviews", status=404) from error
    return bool((answer.get("status") or {}).get("allowed"))
