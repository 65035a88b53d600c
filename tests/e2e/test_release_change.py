"""The last release, this one, and the last one again, under running pods of every kind.

It runs if the environment names the last release, which has to be a commit of this clone:

LAST_RELEASE=<commit of the last release> python hack/e2e.py -- -k another_release
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Cluster, claim_and_pod, install_plain, wait_for
from tests.e2e.test_mig import GPUS, instances, modes
from tests.e2e.test_sharing import control_processes, state

LAST_RELEASE = os.environ.get("LAST_RELEASE", "")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not LAST_RELEASE, reason="LAST_RELEASE names no commit"),
]

OVERLAY = "e2e-mig"
"""With MIG on demand and an MPS host."""

Json = dict[str, Any]


def config(**sharing: Any) -> str:
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    return json.dumps(body)


KINDS = {
    "whole": claim_and_pod("whole"),
    "sliced": claim_and_pod(
        "sliced", parameters=config(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
    ),
    "mps": claim_and_pod(
        "mps", parameters=config(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 25})
    ),
    "mig": claim_and_pod("mig", "mig-1g.10gb.nvidia.com"),
}


@pytest.fixture
def roll_out(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Installs the driver as a tree of files has it, as an operator does; afterwards this one is there, plain."""

    def one(tree: Path) -> None:
        command = [sys.executable, "hack/cluster/install.py", "--overlay", OVERLAY]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for("the driver to have settled", cluster.driver_has_settled)

    yield one
    command = [sys.executable, "hack/cluster/install.py", "--overlay", "e2e"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    install_plain(cluster, instead_of=OVERLAY)
    wait_for("plain devices", lambda: len(cluster.devices()) == GPUS and cluster.pool_is_whole())


@pytest.fixture
def last_release(tmp_path: Path) -> Iterator[Path]:
    tree = tmp_path / "last-release"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(tree), LAST_RELEASE], check=True, capture_output=True)
    yield tree
    subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def untouched(cluster: Cluster) -> dict[str, object]:
    """What no update may change: containers, what they see, and the settings and daemons of the GPUs."""
    pods: dict[str, object] = {}
    for name in KINDS:
        pod = cluster.pod(name)
        [status] = pod["status"]["containerStatuses"]
        pods[name] = (pod["metadata"]["uid"], status["containerID"], status["restartCount"])
        pods[f"{name} sees"] = cluster.seen_by(name)
    settings = {key: value for key, value in state().items() if key.startswith(("compute-mode", "timeslice"))}
    return {**pods, "settings": settings, "daemons": sorted(control_processes()), "mig": instances()}


def test_no_pod_is_disturbed_by_another_release_and_the_way_back(
    cluster: Cluster, roll_out: Callable[[Path], None], last_release: Path
) -> None:
    roll_out(last_release)
    for name, manifest in KINDS.items():
        cluster.apply(manifest)
        cluster.wait_running(name)
    before = untouched(cluster)
    assert before["settings"]
    assert before["daemons"]
    assert before["mig"]
    for number, tree in enumerate((ROOT, last_release)):
        roll_out(tree)
        assert untouched(cluster) == before
        cluster.apply(claim_and_pod(f"new-{number}"))
        cluster.wait_running(f"new-{number}")
        assert untouched(cluster) == before
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=120s")
    wait_for("nothing of the claims to be left", lambda: not cluster.leftovers())
    wait_for("nothing of the GPUs' settings to be left", lambda: not (state() or instances() or modes()))
