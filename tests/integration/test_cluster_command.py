"""`cluster` as typed, on the API server of a node at work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from tests.cli.test_tables import on_terminal
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, NODE, Node
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
    assert waiting.startswith("claim default/greedy is pending:\n  1 node: ")
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
    eventually(lambda: "gpu-lost" in str([device.get("taints") for device in node.devices()]))
    titles, row = on_terminal(80, *at_work)[:2]
    assert max(len(titles), len(row)) <= 80
    # The GPU is allocated, and counted as tainted all the same.
    assert row.split()[1:6] == ["8", "6", "2", "0", "1"]
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
    assert any(line.endswith(" is pending (pod big):") for line in lines)
    assert f"  the scheduler says: {says}" in lines
    assert "12" in lines[lines.index("pod default/old-way is pending:") + 1]
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
    shown = subprocess.run([program, "-h"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("Usage: kubectl gpus [FLAGS]\n")
    assert "gpu-dra-driver cluster" not in shown


def test_a_cluster_without_the_driver(make_node) -> None:
    node = make_node()
    done = call("cluster", "--kubeconfig", str(node.settings.kubeconfig))
    assert done.returncode == 0
    assert "no node publishes GPUs" in done.stdout


def plugin(node: Node, name: str, place: str, driver: str = DRIVER) -> None:
    """A pod of a plugin on a node."""
    env = [
        {"name": "DRIVER_NAME", "value": driver},
        {"name": "HTTP_ENDPOINT", "value": ":8080"},
        {"name": "NODE_NAME", "valueFrom": {}},
    ]
    labels = {"app.kubernetes.io/component": "node"}
    metadata = {"name": name, "namespace": "gpu-dra-driver", "labels": labels}
    spec = {"nodeName": place, "containers": [{"name": "driver", "env": env}]}
    node.server.add("pods", {"metadata": metadata, "spec": spec})


class Used:
    """A node with two pods, of which one computes; its plugin's metrics are behind the API server's proxy."""

    def __init__(self, node: Node) -> None:
        self.node = node
        names = [device["name"] for device in node.devices()]
        for claim, *devices in (("train", names[0]), ("asleep", *names[1:3])):
            node.ready(node.allocated_by_hand(claim, *devices))
        node.machine.hold_gpu(0, 4711, "python3", utilisation=85)
        node.machine.hold_gpu(1, 4712, "python3", utilisation=0)
        node.server.add("namespaces", {"metadata": {"name": "gpu-dra-driver"}})
        plugin(node, "plugin-1", NODE)
        plugin(node, "other", "node-b", "gpu.example.com")
        self.arguments = ["cluster", "--usage", "--kubeconfig", str(node.settings.kubeconfig)]

    def answers(self, status: int = 200, **more: Any) -> None:
        body = generate_latest(self.node.driver.metrics.registry) if status == 200 else None
        path = "/api/v1/namespaces/gpu-dra-driver/pods/plugin-1:8080/proxy/metrics"
        self.node.server.faults.fail(1, status, path=path, body=more.pop("body", body), **more)

    def rows(self, *arguments: str) -> tuple[list[list[str]], str]:
        done = call(*self.arguments, *arguments)
        assert done.returncode == 0, done.stderr
        table = done.stdout.partition("\n\n")[0]
        return [line.split() for line in table.splitlines()], done.stderr


@pytest.fixture
def used(node: Node) -> Used:
    return Used(node)


def test_use_stands_beside_each_claim_and_who_wastes_most_is_first(used: Used) -> None:
    used.answers()
    (titles, *rows), said = used.rows()
    assert said == ""
    assert titles == [
        "NAMESPACE", "CLAIM", "CLAIMS", "UTIL", "MEMORY", "GiB", "GPUS", "MIG", "SHARES", "NODES",
    ]  # fmt: skip
    assert rows == [
        ["default", "asleep", "1", "0%", "0.5/159", "2", "-", "-", NODE],
        ["default", "train", "1", "85%", "0.5/80", "1", "-", "-", NODE],
    ]
    used.answers()
    found = json.loads(call(*used.arguments, "--by", "claim", "-n", "default", "-o", "json").stdout)
    row, _ = found["rows"]
    assert (row["used"]["wasted_bytes"], row["used"]["memory_total_bytes"]) == (2 * 81559 << 20,) * 2
    assert found["unmeasured"] == []
    used.answers()
    assert [row[:2] for row in used.rows("--by", "pod")[0][1:]] == [
        ["default", "pod-of-asleep"], ["default", "pod-of-train"],
    ]  # fmt: skip


def test_missing_right_to_read_use_is_named(used: Used) -> None:
    used.answers(403, reason="Forbidden")
    rows, said = used.rows()
    assert rows[0] == ["NAMESPACE", "CLAIM", "CLAIMS", "GPUS", "MIG", "SHARES", "NODES"]
    assert said == (
        "gpu-dra-driver: use is not known: this user may not read the metrics of the plugins; ask for a Role with the "
        "verb get for pods/proxy in namespace gpu-dra-driver\n"
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"status": 503, "reason": "ServiceUnavailable"}, "must let the API server reach port 8080"),
        ({"status": 404, "reason": "NotFound"}, "HTTP 404"),
        ({"status": 200, "body": b"# HELP up x\nup 1\n"}, "does not measure use"),
        (
            {"status": 200, "body": b"nvidia_dra_device_processes{ 1\n"},
            "must let the API server reach port 8080",
        ),
    ],
)
def test_node_that_does_not_answer_is_one_line(used: Used, answer: dict[str, Any], expected: str) -> None:
    used.answers(**answer)
    rows, said = used.rows()
    assert len(rows) == 3
    assert len(said.splitlines()) == 1
    assert said.startswith(f"gpu-dra-driver: use is not known: node {NODE}: ")
    assert expected in said


def test_cluster_whose_plugins_serve_no_metrics(at_work: list[str]) -> None:
    done = call(*at_work, "--usage")
    assert (done.returncode, done.stderr) == (
        0,
        f"gpu-dra-driver: use is not known: no pod of driver {DRIVER} serves metrics\n",
    )


def test_mistakes_are_one_sentence(tmp_path) -> None:
    for arguments, said in (
        (["--kubeconfig", str(tmp_path / "none")], str(tmp_path / "none")),
        (["--by", "rack"], "--by 'rack': expected node, product, "),
        (["--usage", "--by", "node"], "--usage has no rows by node"),
    ):
        done = call("cluster", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
