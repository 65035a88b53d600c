"""Who holds a GPU and uses it, and who holds one that is idle, as `kubectl gpus --usage` shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.cluster

BUSY, IDLE = "team-busy", "team-idle"


@pytest.fixture
def teams(cluster: Cluster) -> Iterator[dict[str, str]]:
    """The UUID of the GPU of each team's pod. A simulated process keeps the GPU of the busy team busy."""
    try:
        for team in (BUSY, IDLE):
            cluster.make_namespace(team)
            cluster.start("worker", namespace=team)
        held = {team: cluster.allocated("worker", team)[0] for team in (BUSY, IDLE)}
        for team, percent in ((BUSY, 90), (IDLE, 0)):
            cluster.simulate("hold", held[team], "--utilisation", str(percent))
        yield held
        for gpu in held.values():
            cluster.simulate("release", gpu)
    finally:
        cluster.kubectl("delete", "namespace", BUSY, IDLE, "--ignore-not-found", "--timeout=300s")


def usage(cluster: Cluster, *arguments: str) -> str:
    """What the plugin of kubectl prints, which kubectl itself finds and starts."""
    kubectl = cluster.local.kubectl()
    programs = f"{Path(sys.executable).parent}:{kubectl.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(kubectl), "gpus", "--usage", *arguments],
        env={**os.environ, "KUBECONFIG": str(cluster.local.kubeconfig()), "PATH": programs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def used_by_teams(cluster: Cluster) -> list[tuple[str, int]]:
    """Namespace and utilisation of each claim of the teams, in the order of the rows, which is that of waste."""
    rows = [
        (row["claim"].partition("/")[0], row["load"])
        for row in json.loads(usage(cluster, "-o", "json"))["rows"]
    ]
    return [(team, load["utilisation_percent"]) for team, load in rows if team in (BUSY, IDLE)]


def test_busy_and_idle_pods_are_distinguished(cluster: Cluster, teams: dict[str, str]) -> None:
    assert used_by_teams(cluster) == [(IDLE, 0), (BUSY, 90)]
    lines = usage(cluster).splitlines()
    [idle], [busy] = ([line for line in lines if f"{team}/" in line] for team in (IDLE, BUSY))
    assert lines.index(idle) < lines.index(busy)
    assert " 0% " in idle
    assert " 90% " in busy
    assert f"gpu-{teams[IDLE].removeprefix('GPU-')[:8]}" in idle
