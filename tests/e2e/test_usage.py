"""Who uses a GPU and who holds an idle one, as `kubectl gpus` shows it, and the receipts of ended claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_driver.base.fields import Codec
from dra_driver.model.claim import ClaimRef
from dra_driver.reporting.receipts import RECEIPTS_FILE, read_kept
from dra_driver.reporting.rules.receipts import Part, Receipt
from dra_driver.simulator import open_machine
from tests.e2e.conftest import DAEMONSET, NAMESPACE, PLUGIN_DIR, SIMULATOR_DIR, Cluster, wait_for
from tests.e2e.test_health import only
from tests.fakes.machines import Work, assert_done

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


def gpus(cluster: Cluster, *arguments: str) -> str:
    """What the plugin of kubectl prints, which kubectl itself finds and starts."""
    kubectl = cluster.local.kubectl()
    programs = f"{Path(sys.executable).parent}:{kubectl.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(kubectl), "gpus", *arguments],
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
        for row in json.loads(gpus(cluster, "--usage", "-o", "json"))["rows"]
    ]
    return [(team, load["utilisation_percent"]) for team, load in rows if team in (BUSY, IDLE)]


def test_busy_and_idle_pods_are_distinguished(cluster: Cluster, teams: dict[str, str]) -> None:
    assert used_by_teams(cluster) == [(IDLE, 0), (BUSY, 90)]
    lines = gpus(cluster, "--usage").splitlines()
    [idle], [busy] = ([line for line in lines if f"{team}/" in line] for team in (IDLE, BUSY))
    assert lines.index(idle) < lines.index(busy)
    assert " 0% " in idle
    assert " 90% " in busy
    assert f"gpu-{teams[IDLE].removeprefix('GPU-')[:8]}" in idle


def send_away(cluster: Cluster, *, back: bool) -> None:
    """The node gets no pod of the plugin, or gets it back."""
    selector = None if back else {"nowhere": "true"}
    patch = json.dumps({"spec": {"template": {"spec": {"nodeSelector": selector}}}})
    cluster.kubectl("patch", DAEMONSET, "-n", NAMESPACE, "-p", patch)
    if back:
        cluster.rolled_out()
    else:
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, "--all", "--grace-period=0", "--force")
        wait_for("the plugin to be away", lambda: not cluster.driver_pods())


def test_receipts_agree_with_what_the_gpus_did_and_give_advice(cluster: Cluster) -> None:
    """A busy claim and an idle one, and one whose pod ends while the plugin is away after a kill."""
    machine, names = open_machine(SIMULATOR_DIR), ("busy", "idle", "killed")
    for index, percent in ((0, 80), (2, 60)):
        machine.hold_gpu(index, 4711 + index, "python3", utilisation=percent)
    begun: dict[str, tuple[Work, Work]] = {}
    ended: dict[str, tuple[Work, Work]] = {}
    for index, name in enumerate(names):
        before = Work.of(machine, index)
        cluster.start(name, selector=only(index))
        begun[name] = before, Work.of(machine, index)

    def is_written() -> bool:
        return {one.claim.name for one in read_kept(PLUGIN_DIR).running} >= {*names}

    wait_for("the plugin to write the receipts", is_written)
    send_away(cluster, back=False)
    cluster.kubectl("delete", "pod", "killed", "--wait=false")
    before = Work.of(machine, 2)
    kept = json.loads((PLUGIN_DIR / RECEIPTS_FILE).read_text())
    part = Part("NVIDIA H100 80GB HBM3", "gpu", 1, None, 3600, 0, 3600, peak_bytes=0, memory_bytes=80 << 30)
    old = Receipt(ClaimRef("team", "unused", "uid-unused"), 1e9, 1e9 + 3600, (part,), "ended")
    kept["ended"].append(Codec(Receipt).encode(old))
    (PLUGIN_DIR / RECEIPTS_FILE).write_text(json.dumps(kept))
    send_away(cluster, back=True)
    cluster.kubectl("wait", "--for=delete", "pod/killed", "--timeout=300s")
    ended["killed"] = before, Work.of(machine, 2)
    for index, name in enumerate(names[:2]):
        before = Work.of(machine, index)
        cluster.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}")
        ended[name] = before, Work.of(machine, index)
    for index in (0, 2):
        machine.release_gpu(index)

    def receipts() -> dict[str, dict]:
        run = ("exec", DAEMONSET, "-n", NAMESPACE, "--", "gpu-dra-driver", "claims", "--ended", "-o", "json")
        return {one["name"]: one for one in json.loads(cluster.kubectl(*run))["ended"]}

    wait_for("the receipts of ended claims", lambda: receipts().keys() >= {*names, "unused"}, seen=receipts)
    found = receipts()
    for name in names:
        [part] = found[name]["parts"]
        assert found[name]["end"] == "ended", name
        assert_done(part, begun[name], ended[name])
    advice = json.loads(gpus(cluster, "--advise", "-o", "json"))
    assert advice["unknown"] == []
    [unused] = [one for one in advice["advice"] if one["name"] == "unused"]
    assert (unused["node"], unused["advice"]) == (cluster.node, "idle")
