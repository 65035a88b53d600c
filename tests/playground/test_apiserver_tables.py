"""What `kubectl get` prints in the playground is what it prints on a cluster."""

from __future__ import annotations

from typing import Any

import pytest
from playground.apiserver.tables import table

ENDED = {"containerStatuses": [{"ready": False, "state": {"terminated": {"reason": "Completed"}}}]}
RUNNING = {"containerStatuses": [{"ready": True, "state": {"running": {}}}]}


@pytest.mark.parametrize(
    ("metadata", "status", "shown"),
    [
        ({}, {}, "Pending"),
        ({}, RUNNING | {"phase": "Running"}, "Running"),
        ({}, ENDED | {"phase": "Succeeded"}, "Completed"),
        ({"deletionTimestamp": "2026-11-29T10:00:00Z"}, RUNNING | {"phase": "Running"}, "Terminating"),
    ],
)
def test_pod_has_the_status_that_kubectl_shows_on_a_cluster(
    metadata: dict[str, Any], status: dict[str, Any], shown: str
) -> None:
    pod = {
        "kind": "Pod",
        "metadata": {"name": "a"} | metadata,
        "spec": {"containers": [{}]},
        "status": status,
    }
    printed = table([pod], {})
    columns = [column["name"] for column in printed["columnDefinitions"]]
    assert printed["rows"][0]["cells"][columns.index("Status")] == shown
