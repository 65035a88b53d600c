"""A node on which NVIDIA's DRA driver ran: with the same name, directory and CDI file names, but other device
names.

docs/migration.md recommends draining such a node first; these tests cover both cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dra_driver.model.claim import ClaimRef
from tests.fakes.tables import data_of
from tests.fakes.waiting import eventually
from tests.integration.conftest import Json, Node


def checkpoint(ref: ClaimRef) -> Json:
    """The records of NVIDIA's DRA driver with one prepared claim, in the form of its releases since 25.3."""
    text = json.dumps(data_of(__file__)["checkpoint"])
    return json.loads(text.replace("UID-OF-THE-CLAIM", ref.uid).replace("NAME-OF-THE-CLAIM", ref.name))


def spec_file(node: Node, ref: ClaimRef) -> Path:
    return node.cdi / f"k8s.gpu.nvidia.com-claim_{ref.uid}.yaml"


@pytest.fixture
def left(make_node: Callable[..., Node]) -> tuple[Node, ClaimRef, bytes]:
    """A node with a claim that NVIDIA's DRA driver prepared, its pod still there; this driver starts on it."""
    node = make_node()
    ref = node.allocated_by_hand("theirs", "gpu-0")
    node.plugin_dir.mkdir(parents=True)
    file = node.plugin_dir / "checkpoint.json"
    file.write_text(json.dumps(checkpoint(ref)))
    node.cdi.mkdir(exist_ok=True)
    edits = {"deviceNodes": [{"path": "/dev/nvidia0"}]}
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "k8s.gpu.nvidia.com/claim",
        "devices": [{"name": f"{ref.uid}-gpu-0", "containerEdits": edits}],
    }
    spec_file(node, ref).write_text(yaml.safe_dump(spec))
    node.start_driver()
    node.wait_devices(8)
    return node, ref, file.read_bytes()


def test_claim_of_the_other_driver_ends_and_its_spec_goes(left: tuple[Node, ClaimRef, bytes]) -> None:
    node, ref, content = left
    assert spec_file(node, ref).exists(), "a pod that runs may restart its containers"
    node.must_unprepare(ref)
    assert not spec_file(node, ref).exists()
    assert (node.plugin_dir / "checkpoint.json").read_bytes() == content, "the way back stays open"


def test_claim_of_the_other_driver_is_not_prepared_again(left: tuple[Node, ClaimRef, bytes]) -> None:
    """As after a reboot, when the kubelet calls again: the device names differ, and a guess could be wrong."""
    node, ref, _ = left
    reported = "device gpu-0 of pool node-a does not exist on this node"
    node.refused(ref, reported, "delete the pod and its claim")
    assert spec_file(node, ref).exists()


def test_gpu_of_the_other_drivers_claim_is_on_offer(left: tuple[Node, ClaimRef, bytes]) -> None:
    """Why the node must be drained first: the scheduler knows the GPU by a new name, which no claim has."""
    node, _, _ = left
    ours = [node.claim(f"ours-{number}") for number in range(8)]
    for ref in ours:
        node.ready(ref)


def test_way_back_leaves_nothing_of_ours_in_the_way(left: tuple[Node, ClaimRef, bytes]) -> None:
    node, theirs, content = left
    ours = node.claim("ours")
    node.prepare(ours)
    node.unprepare(ours)
    node.unprepare(theirs)
    node.driver.stop()
    eventually(lambda: not node.kubelet.instances("gpu.nvidia.com"))
    assert (node.specs(), node.records()) == ([], [])
    assert not (node.plugin_dir / "dra.sock").exists()
    assert (node.plugin_dir / "checkpoint.json").read_bytes() == content
