"""Two facts of the cluster: the UID of a node, and the release of the API server."""

from __future__ import annotations

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import ApiClient, path_segment


def node_uid(client: ApiClient, name: str) -> str:
    """The UID of node `name`, for owner references. It changes only when the node is registered anew.

    Raises: ApiRejectedError (404: the node name is wrong), ApiUnavailableError.
    """
    action = f"get node {name}"
    node = client.request("GET", f"/api/v1/nodes/{path_segment(name)}", action=action)
    uid = (node.get("metadata") or {}).get("uid")
    if not uid:
        raise ApiRejectedError(f"{action}: the answer has no metadata.uid", status=200)
    return str(uid)


def server_version(client: ApiClient) -> str:
    """The release of the API server as it tells it, such as `v1.36.0-gke.1`; empty if it does not.

    Raises: ApiRejectedError, ApiUnavailableError.
    """
    answer = client.request("GET", "/version", action="ask for the API server's version")
    return str(answer.get("gitVersion") or "")
