"""The driver's token can change its own node's slices and nothing else, in every served API version."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.e2e.conftest import NAMESPACE, Cluster

pytestmark = pytest.mark.cluster

VERSIONS = ("v1", "v1beta2", "v1beta1")
Json = dict[str, Any]


@pytest.fixture
def token(cluster: Cluster) -> str:
    """A token as the driver's pod has it, bound to the pod and so to the node."""
    pod = cluster.driver_pods()[0]["metadata"]["name"]
    bound = ["--bound-object-kind", "Pod", "--bound-object-name", pod]
    return cluster.kubectl("create", "token", "gpu-dra-driver", "-n", NAMESPACE, *bound).strip()


def a_slice(version: str, name: str, *, driver: str = "gpu.nvidia.com", pool: str, where: Json) -> Json:
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
            "devices": [],
            **where,
        },
    }


def denied(cluster: Cluster, token: str, manifest: Json, action: str = "create") -> bool:
    """Whether the API server forbids this to the driver's token; a dry run changes nothing."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    server = config["clusters"][0]["cluster"]
    command = [str(cluster.local.kubectl()), "--kubeconfig=/dev/null", "--token", token]
    command += [
        "--server",
        server["server"],
        "--insecure-skip-tls-verify",
        action,
        "--dry-run=server",
        "-f",
        "-",
    ]
    if action == "create":
        command.append("--validate=false")
    done = subprocess.run(command, input=json.dumps(manifest), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return False
    assert "orbidden" in done.stderr or "denied" in done.stderr, done.stderr
    return True


@pytest.mark.parametrize("version", VERSIONS)
def test_own_nodes_slice_is_allowed(cluster: Cluster, token: str, version: str) -> None:
    mine = a_slice(version, "permission-test", pool=cluster.node, where={"nodeName": cluster.node})
    assert not denied(cluster, token, mine)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "foreign",
    [
        {"pool": "other-node", "where": {"nodeName": "other-node"}},
        {"pool": "everybody", "where": {"allNodes": True}},
        {"pool": "gpu-node", "where": {"nodeName": "gpu-node"}, "driver": "nic.example.com"},
    ],
    ids=["other node", "all nodes", "other driver"],
)
def test_what_is_not_its_own_is_refused(cluster: Cluster, token: str, version: str, foreign: Json) -> None:
    assert denied(cluster, token, a_slice(version, "permission-test", **foreign))


def test_deleting_another_nodes_slice_is_refused(cluster: Cluster, token: str) -> None:
    other = a_slice("v1", "other-nodes-slice", pool="other-node", where={"nodeName": "other-node"})
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(other))
    try:
        assert denied(cluster, token, other, action="delete")
    finally:
        cluster.kubectl("delete", "resourceslice", "other-nodes-slice")


def test_token_reads_no_secrets_and_writes_no_claims(cluster: Cluster) -> None:
    account = f"system:serviceaccount:{NAMESPACE}:gpu-dra-driver"
    for verb, resource in (
        ("get", "secrets"),
        ("list", "pods"),
        ("update", "resourceclaims"),
        ("patch", "nodes"),
    ):
        answer = cluster.kubectl("auth", "can-i", verb, resource, "--as", account, "-A", check=False)
        assert answer.strip() == "no", (verb, resource)
