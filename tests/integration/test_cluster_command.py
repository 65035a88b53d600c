"""`cluster` as typed, with the API server of a running node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from tests.cli.test_tables import on_terminal
from tests.integration.conftest import DRIVER, NODE, Node
from tests.integration.test_process import call


@pytest.fixture
def at_work(node: Node) -> list[str]:
    """Arguments for a cluster with a pod with two GPUs, and a claim for nine."""
    names = [device["name"] for device in node.devices()]
    node.allocated_by_hand("training", names[2], names[3])
    exactly = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 9}
    node.claim("greedy", {"requests": [{"name": "gpu", "exactly": exactly}]}, status={})
    return ["cluster", "--kubeconfig", str(node.settings.kubeconfig)]


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.split("\n\n")[1].splitlines()]


def test_gpus_users_and_who_waits(at_work: list[str], node: Node) -> None:
    done = call(*at_work)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("8 GPUs: 6 free, 2 in use, 0 tainted; 1 claim or pod waits\n\n")
    rows = table(done.stdout)
    names = [device["name"] for device in node.devices()]
    assert rows[0] == ["NODE", "DEVICE", "PRODUCT", "CLAIM", "POD", "PROBLEM"]
    assert [row[1] for row in rows[1:9]] == names
    of_claim = [row for row in rows if "default/training" in row]
    assert sorted(row[1] for row in of_claim) == sorted(names[2:4])
    assert of_claim[0][-2] == "pod-of-training"
    assert " ".join(rows[-1]) == "- - - default/greedy - waits: no pod waits for this claim"
    assert "default/" not in call(*at_work, "-n", "other").stdout
    assert len(table(call(*at_work, "--filter", names[2]).stdout)) == 2
    assert max(map(len, on_terminal(80, *at_work))) <= 80


def test_lists_of_many_pages_are_whole_also_if_the_server_forgets_one(at_work: list[str], node: Node) -> None:
    for number in range(501):
        node.claim(f"c{number}", status={})
    assert len(json.loads(call(*at_work, "-o", "json").stdout)["rows"]) == 8 + 502
    for times, limits in ((1, ["500", "500", "500"]), (3, ["500", "500", "500", None])):
        node.server.requests.clear()
        node.server.faults.fail(times, 410, reason="Expired", path="/resourceclaims")
        assert len(json.loads(call(*at_work, "-o", "json").stdout)["rows"]) == 8 + 502
        pages = [one.query for one in node.server.requests if one.path.endswith("/resourceclaims")]
        assert [query.get("limit") for query in pages] == limits


def test_pages_become_smaller_until_they_fit_into_memory(at_work: list[str], node: Node) -> None:
    for number in range(90):
        node.claim(f"c{number}", status={}, annotations={"a": "x" * 150_000})
    assert len(json.loads(call(*at_work, "-o", "json").stdout)["rows"]) == 8 + 91
    pages = [one.query for one in node.server.requests if one.path.endswith("/resourceclaims")]
    assert [query.get("limit") for query in pages] == ["500", "125", "31", "31", "31"]


def test_expired_credentials_are_not_a_missing_right(at_work: list[str], node: Node) -> None:
    node.server.faults.fail(10**6, 401, reason="Unauthorized", path="/resourceslices")
    done = call(*at_work)
    assert (done.returncode, done.stdout) == (1, "")
    assert "credentials" in done.stderr
    assert "ClusterRole" not in done.stderr


def test_a_right_that_is_missing_is_named(at_work: list[str], node: Node) -> None:
    node.server.faults.fail(1, 403, reason="Forbidden", path="/resourceclaims")
    done = call(*at_work)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gpu-dra-driver: this user may not list resourceclaims.resource.k8s.io in the whole cluster; "
        "request a ClusterRole with the verb list for resourceclaims.resource.k8s.io\n"
    )
    # Without pods the rest is still true.
    node.server.faults.fail(1, 403, reason="Forbidden", path="/api/v1/pods")
    done = call(*at_work)
    assert done.returncode == 0
    assert done.stdout.startswith("8 GPUs: ")
    assert "waiting pods are not shown: this user may not list pods" in done.stderr


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


def test_top_of_a_node_is_run_in_the_pod_of_the_plugin(tmp_path: Path) -> None:
    """Through kubectl, which here knows one pod and prints what it would run."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*"get pods"*spec.nodeName=node-a,*) echo gpus/plugin-1 gpus/plugin-2 ;;\n'
        '*exec*) echo "$*" ;;\n'
        "esac\n"
    )
    kubectl.chmod(0o755)
    program = Path(sys.executable).parent / "kubectl-gpus"

    def run(*arguments: str) -> tuple[int, str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        words = [program, "top", *arguments]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path}
        )
        return done.returncode, done.stdout + done.stderr

    assert run("node-a", "--once") == (
        0, "exec --stdin -n gpus plugin-2 -c driver -- gpu-dra-driver top --once\n"
    )  # fmt: skip
    assert run("node-a", "--context", "prod", "--once", "--kubeconfig", "k") == (
        0, "--context prod --kubeconfig k exec --stdin -n gpus plugin-2 -c driver -- gpu-dra-driver top --once\n"
    )  # fmt: skip
    assert run("node-b") == (1, "gpu-dra-driver: no pod of gpu-dra-driver runs on node node-b\n")
    assert run() == (2, "gpu-dra-driver: no node is named; use kubectl gpus top NODE [FLAGS of top]\n")


@pytest.mark.parametrize("namespace", ["Bad NS", "", "a.b", "a\x1b[2J"])
def test_a_namespace_that_cannot_be_is_refused(namespace: str) -> None:
    done = call("cluster", "--kubeconfig", "/nowhere", f"--namespace={namespace}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu-dra-driver: {namespace!r} is not a valid namespace name; check --namespace\n"


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
        path = f"/api/v1/namespaces/gpu-dra-driver/pods/plugin-1:8080/proxy/{more.pop('page', 'metrics')}"
        self.node.server.faults.fail(1, status, path=path, body=more.pop("body", body), **more)

    def look(self, *arguments: str) -> tuple[Any, str]:
        done = call(*self.arguments, "-o", "json", *arguments)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return found["rows"], found["unknown"]


@pytest.fixture
def used(node: Node) -> Used:
    return Used(node)


def test_use_is_next_to_each_claim_and_the_most_wasteful_is_first(used: Used) -> None:
    used.answers()
    rows, unknown = used.look("-n", "default")
    assert unknown == []
    assert [(row["claim"], row["use"]) for row in rows] == [
        ("default/asleep", "0% 0.5/80 GiB"),
        ("default/asleep", "0% 0.0/80 GiB"),
        ("default/train", "85% 0.5/80 GiB"),
    ]


NO_RIGHT = "this user needs a Role with the verb get for pods/proxy in namespace gpu-dra-driver"


def test_node_that_does_not_answer_is_one_line(used: Used) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"status": 403, "reason": "Forbidden"}, NO_RIGHT),
        ({"status": 503, "reason": "ServiceUnavailable"}, "must let the API server reach port 8080"),
        ({"status": 404, "reason": "NotFound"}, "HTTP 404"),
        ({"body": b"# HELP up x\nup 1\n"}, "does not measure usage"),
        ({"body": b"nvidia_dra_device_processes{ 1\n"}, "could not convert"),
    )
    for answer, expected in cases:
        used.answers(**answer)
        rows, [said] = used.look("-n", "default")
        assert [row["use"] for row in rows] == ["-"] * 3
        assert said.startswith(f"usage is not known: node {NODE}: ")
        assert expected in said


def advice(used: Used, *arguments: str) -> tuple[list[str], list[str]]:
    """The claims, and what is unknown."""
    done = call("cluster", "--advise", *used.arguments[2:], "-o", "json", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return [f"{one['node']} {one['name']}" for one in found["advice"]], found["unknown"]


def test_advice_of_all_nodes(used: Used) -> None:
    entries = [
        {"namespace": namespace, "name": name, "uid": name, "end": "ended", "seconds": 600.0, "advice": "idle",
         "text": "idle: kernels did not run", "change": []}
        for namespace, name in (("ml", "a"), ("ml", "b"), ("team", "c"))
    ]  # fmt: skip
    body = json.dumps({"advice": entries}).encode()
    for arguments, names in (
        ((), "abc"),
        (("-n", "ml"), "ab"),
        (("--filter", "DLE: KER"), "abc"),
        (("--filter", "b"), "b"),
    ):
        used.answers(page="advice", body=body)
        assert advice(used, *arguments) == ([f"{NODE} {name}" for name in names], [])
    used.answers(page="advice", body=body)
    done = call("cluster", "--advise", *used.arguments[2:])
    assert done.stdout.splitlines()[:2] == [f"{NODE}  ml/a  ran for 10m", "    idle: kernels did not run"]


def test_node_without_advice_is_named(used: Used) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"status": 404, "reason": "NotFound"}, "the plugin does not serve this page (HTTP 404)"),
        ({"body": b'{"advice": [{}]}'}, "the plugin is of another release than this command"),
        ({"status": 403, "reason": "Forbidden"}, NO_RIGHT),
    )
    for answer, expected in cases:
        used.answers(page="advice", **answer)
        found, [said] = advice(used)
        assert (found, said.startswith(f"advice is not known: node {NODE}: {expected}")) == ([], True)


def test_cluster_whose_plugins_serve_no_metrics(at_work: list[str]) -> None:
    done = call(*at_work, "--usage")
    assert (done.returncode, done.stderr) == (
        0,
        f"gpu-dra-driver: usage is not known: no pod of driver {DRIVER} serves metrics\n",
    )
