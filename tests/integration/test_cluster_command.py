"""`cluster` as typed, on the API server of a node at work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_tables import on_terminal
from tests.integration.conftest import NODE, Node, eventually
from tests.integration.test_process import call


@pytest.fixture
def at_work(node: Node) -> list[str]:
    """Arguments that lead to a cluster with a pod that has two GPUs, and a claim that asks for nine."""
    names = [device["name"] for device in node.devices()]
    node.allocated_by_hand("training", names[2], names[3])
    exactly = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 9}
    node.claim("greedy", {"requests": [{"name": "gpu", "exactly": exactly}]}, status={})
    return ["cluster", "--kubeconfig", str(node.settings.kubeconfig)]


def test_nodes_users_and_who_waits(at_work: list[str]) -> None:
    done = call(*at_work)
    assert (done.returncode, done.stderr) == (0, "")
    table, _, waiting = done.stdout.partition("\n\n")
    assert [line.split()[:6] for line in table.splitlines()] == [
        ["NODE", "GPUS", "FREE", "ALLOCATED", "BLOCKED", "TAINTED"],
        ["node-a", "8", "6", "2", "0", "0"],
    ]
    assert waiting.startswith("claim default/greedy has no devices:\n  1 node: ")
    assert "9" in waiting.splitlines()[1]
    assert call(*at_work, "--by", "product").stdout.splitlines()[1].split()[-7:-3] == ["8", "6", "2", "0"]
    assert call(*at_work, "--by", "claim").stdout.splitlines()[1].split()[:4] == [
        "default",
        "training",
        "1",
        "2",
    ]
    assert "nobody uses a GPU here" in call(*at_work, "--by", "namespace", "-n", "other").stdout
    narrow = on_terminal(80, *at_work)[:2]
    assert max(map(len, narrow)) <= 80
    # What adds up to all GPUs stays.
    assert narrow[0].split()[:6] == ["NODE", "GPUS", "FREE", "ALLOCATED", "BLOCKED", "TAINTED"]


def test_taints_stay_on_a_narrow_terminal(at_work: list[str], node: Node) -> None:
    node.machine.lose_gpu(2)
    eventually(lambda: any(device.get("taints") for device in node.devices()))
    titles, row = on_terminal(80, *at_work)[:2]
    assert max(len(titles), len(row)) <= 80
    # The GPU is counted as allocated: nothing else on its row says that it is bad.
    assert row.split()[1:6] == ["8", "6", "2", "0", "0"]
    assert titles.split()[-1] == "TAINTS"
    assert "gpu-lost:" in row


@pytest.mark.parametrize("namespace", ["Bad NS", "", "a.b", "-a", "a" * 64, "a\x1b[2J"])
def test_a_namespace_that_cannot_be_is_refused(namespace: str) -> None:
    done = call("cluster", "--kubeconfig", "/nowhere", f"--namespace={namespace}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"gpu-dra-driver: no namespace can be called {namespace!r}: "
        "a name has lower-case letters, digits and -, at most 63 of them\n"
    )


def test_as_json(at_work: list[str]) -> None:
    shown = json.loads(call(*at_work, "-o", "json", "--by", "workload").stdout)
    assert shown["by"] == "workload"
    assert [(row["namespace"], row["gpus"], row["mig"]) for row in shown["rows"]] == [("default", 2, {})]
    assert [entry["name"] for entry in shown["pending"]] == ["greedy"]


def test_lists_of_many_pages_are_whole(at_work: list[str], node: Node) -> None:
    for number in range(1234):
        metadata = {"name": f"p{number}", "namespace": "default"}
        node.server.add("pods", {"metadata": metadata, "spec": {"nodeName": "n"}})
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "late", "uid": "u", "controller": True}
    node.server.add(
        "pods",
        {
            "metadata": {"name": "pod-of-training", "namespace": "default", "ownerReferences": [owner]},
            "spec": {"nodeName": NODE},
        },
    )
    assert "Job/late" in call(*at_work, "--by", "workload").stdout
    pages = [request.query for request in node.server.requests if request.path == "/api/v1/pods"]
    assert [query["limit"] for query in pages if "fieldSelector" not in query] == ["500"] * 3


def test_a_list_that_the_server_forgets_is_read_in_one_piece(at_work: list[str], node: Node) -> None:
    for number in range(501):
        node.claim(f"c{number}", status={})
    node.server.faults.fail(1, 410, reason="Expired", path="/resourceclaims")
    shown = json.loads(call(*at_work, "-o", "json").stdout)
    assert len(shown["pending"]) == 502


def test_pods_without_a_node_and_what_the_scheduler_says(at_work: list[str], node: Node) -> None:
    says = "0/1 nodes are available: 1 cannot allocate all claims."
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": says}],
    }
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "greedy"}]}
    node.server.add(
        "pods", {"metadata": {"name": "big", "namespace": "default"}, "spec": spec, "status": status}
    )
    limits = {"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "12"}
    spec = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    node.server.add(
        "pods",
        {
            "metadata": {"name": "old-way", "namespace": "default"},
            "spec": spec,
            "status": {"phase": "Pending"},
        },
    )
    lines = call(*at_work).stdout.splitlines()
    assert "  pod big waits for it" in lines
    assert f"  the scheduler says: {says}" in lines
    assert "12" in lines[lines.index("pod default/old-way has no devices:") + 1]
    assert "old-way" not in call(*at_work, "-n", "other").stdout


def test_credentials_that_ended_are_no_missing_right(at_work: list[str], node: Node) -> None:
    node.server.faults.fail(9, 401, reason="Unauthorized", path="/resourceslices")
    done = call(*at_work)
    assert (done.returncode, done.stdout) == (1, "")
    assert "credentials" in done.stderr
    assert "ClusterRole" not in done.stderr


def test_a_right_that_is_missing_is_named(at_work: list[str], node: Node) -> None:
    node.server.faults.fail(1, 403, reason="Forbidden", path="/resourceclaims")
    done = call(*at_work)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gpu-dra-driver: this user may not list resourceclaims.resource.k8s.io in all namespaces; "
        "ask for a ClusterRole with the verb list for resourceclaims.resource.k8s.io\n"
    )
    # Without pods the rest is still true.
    node.server.faults.fail(1, 403, reason="Forbidden", path="/api/v1/pods")
    done = call(*at_work)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].startswith(NODE)
    assert "may not list pods" in done.stderr


def test_of_several_kubeconfigs_those_that_exist_are_read(at_work: list[str], tmp_path: Path) -> None:
    assert (
        call("cluster", KUBECONFIG=f"{tmp_path}/none:{at_work[-1]}", HOME="/").stdout == call(*at_work).stdout
    )


def test_without_a_kubeconfig(tmp_path: Path) -> None:
    done = call("cluster", HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "--kubeconfig" in done.stderr


def test_as_a_plugin_of_kubectl(at_work: list[str]) -> None:
    program = Path(sys.executable).parent / "kubectl-gpus"
    done = subprocess.run([program, *at_work[1:]], capture_output=True, text=True, check=True)
    assert done.stdout == call(*at_work).stdout


def test_a_cluster_without_the_driver(make_node) -> None:
    node = make_node()
    done = call("cluster", "--kubeconfig", str(node.settings.kubeconfig))
    assert done.returncode == 0
    assert "no node publishes GPUs" in done.stdout


def test_mistakes_are_one_sentence(tmp_path) -> None:
    for arguments, said in (
        (["--kubeconfig", str(tmp_path / "none")], str(tmp_path / "none")),
        (["--by", "rack"], "--by 'rack': expected node, product, "),
    ):
        done = call("cluster", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
