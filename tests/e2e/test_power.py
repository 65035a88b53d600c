"""Limits of power and clocks by claim, the node's default limit, and its budget, on a real Kubernetes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import (
    SIMULATOR_DIR,
    Cluster,
    claim_and_pod,
    claim_template,
    gpu_config,
    installed,
    pods_of,
    wait_for,
)
from tests.e2e.test_health import only

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAMES = [f"cool-{number}" for number in range(4)]


@pytest.fixture(scope="module")
def power(_cluster: Cluster) -> Iterator[Cluster]:
    """The driver with a default limit and a budget; afterwards the plain one again, with NVIDIA's limits."""

    def has_budget() -> bool:
        return any("sharedCounters" in one["spec"] for one in _cluster.slices())

    with installed(_cluster, "e2e-power", has_budget) as cluster:
        yield cluster
    wait_for("the limits of before", lambda: set(limits()) == {"700.00 W"}, seen=limits)


def limits() -> list[str]:
    """The power limit of each GPU as nvidia-smi shows it on the node."""
    program = SIMULATOR_DIR / "root/usr/bin/nvidia-smi"
    query = [str(program), "--query-gpu=power.limit", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def test_claims_limit_their_gpus_and_leave_the_default_of_the_node(
    power: Cluster, cluster: Cluster, example: Callable[..., None]
) -> None:
    wait_for("the default limit", lambda: limits() == ["500.00 W"] * 8, seen=limits)
    example("power-limit")
    cluster.wait_running("power-limit")
    wait_for("the limit in the pod's log", lambda: "490.00 W" in cluster.logs("power-limit"))
    assert sorted(limits()) == ["490.00 W", *["500.00 W"] * 7]
    lower = gpu_config(power={"limitWatts": 300}, clocks={"graphicsMHz": {"max": 1200}})
    for name in ("first", "next"):
        cluster.start(name, selector=only(2), parameters=lower)
        assert limits()[2] == "300.00 W"
        cluster.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}", "-n", "default")
        wait_for("the default limit again", lambda: limits()[2] == "500.00 W", seen=limits)


def test_more_than_the_node_allows_is_refused_on_the_pod(power: Cluster, cluster: Cluster) -> None:
    cluster.apply(claim_and_pod("hot", parameters=gpu_config(power={"limitWatts": 650})))
    text = "accepts 200 to 500 W (the GPU 700 W, but the node's configuration less), but the claim asks for 650 W"
    wait_for("the cause in the pod's event", lambda: text in cluster.kubectl("describe", "pod", "hot"))
    assert limits() == ["500.00 W"] * 8


def test_scheduler_gives_out_no_more_than_the_budget_of_the_node(power: Cluster, cluster: Cluster) -> None:
    cluster.apply([claim_template("cool"), *pods_of("cool", *NAMES[:3])])
    cluster.wait_running(*NAMES[:3])
    cluster.apply(pods_of("cool", NAMES[3]))
    cluster.wait_unschedulable(NAMES[3], "cannot allocate all claims")
    cluster.kubectl("delete", "pod", NAMES[0])
    cluster.wait_running(NAMES[3])
