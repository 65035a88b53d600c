"""`cluster` as typed, on the API server of a node at work."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_tables import on_terminal
from tests.integration.conftest import Node
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
    assert max(map(len, on_terminal(80, *at_work)[:2])) <= 80


def test_as_json(at_work: list[str]) -> None:
    shown = json.loads(call(*at_work, "-o", "json", "--by", "workload").stdout)
    assert shown["by"] == "workload"
    assert [(row["namespace"], row["gpus"], row["mig"]) for row in shown["rows"]] == [("default", 2, {})]
    assert [entry["name"] for entry in shown["pending"]] == ["greedy"]


def test_a_cluster_without_the_driver(make_node) -> None:
    node = make_node()
    done = call("cluster", "--kubeconfig", str(node.settings.kubeconfig))
    assert done.returncode == 0
    assert "no node publishes GPUs" in done.stdout


def test_mistakes_are_one_sentence(tmp_path) -> None:
    for arguments, said in (
        (["--kubeconfig", str(tmp_path / "none")], str(tmp_path / "none")),
        (["--by", "rack"], "'rack' is not one of"),
    ):
        done = call("cluster", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
