"""The node's own object: slices need its UID for their owner reference."""

from __future__ import annotations

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import ApiClient, path_segment


def node_uid(client: ApiClient, name: str) -> str:
    """The UID of node `name`; ask once, it only changes when the node is registered anew.

    Raises: ApiRejectedError (404: the node name is wrong), ApiUnavailableError.
    """
    action = f"get node {name}"
    node = client.request("GET", f"/api/v1/nodes/{path_segment(name)}", action=action)
    uid = (node.get("metadata") or {}).get("uid")
    if not uid:
        raise ApiRejectedError(f"{action}: the answer has no metadata.uid", status=200)
    return str(uid)
