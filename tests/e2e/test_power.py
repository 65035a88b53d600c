"""Limits of power and clocks by claim, the node's default limit, and its budget, on a real Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dra_driver.simulator import open_machine
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
    wait_for("the limits of before", lambda: set(limits()) == {700}, seen=limits)


def limits() -> list[float]:
    """The power limit that is set on each GPU, in watts."""
    state = open_machine(SIMULATOR_DIR).current()
    return [(gpu.power_limit_mw or state.model_of(gpu).power_limit_w * 1000) / 1000 for gpu in state.present]


def test_claims_limit_their_gpus_and_leave_the_default_of_the_node(
    power: Cluster, cluster: Cluster, example: Callable[..., None]
) -> None:
    wait_for("the default limit", lambda: limits() == [500] * 8, seen=limits)
    example("power-limit")
    cluster.wait_running("power-limit")
    wait_for("the limit in the pod's log", lambda: "490.00 W" in cluster.logs("power-limit"))
    assert sorted(limits()) == [490, *[500] * 7]
    lower = gpu_config(power={"limitWatts": 300}, clocks={"graphicsMHz": {"max": 1200}})
    for name in ("first", "next"):
        cluster.start(name, selector=only(2), parameters=lower)
        assert limits()[2] == 300
        cluster.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}", "-n", "default")
        wait_for("the default limit again", lambda: limits()[2] == 500, seen=limits)


def test_more_than_the_node_allows_is_refused_on_the_pod(power: Cluster, cluster: Cluster) -> None:
    cluster.apply(claim_and_pod("hot", parameters=gpu_config(power={"limitWatts": 650})))
    text = "accepts 200 to 500 W (the GPU 700 W, but the node's configuration less), but the claim asks for 650 W"
    wait_for("the cause in the pod's event", lambda: text in cluster.kubectl("describe", "pod", "hot"))
    assert limits() == [500] * 8


def test_scheduler_gives_out_no_more_than_the_budget_of_the_node(power: Cluster, cluster: Cluster) -> None:
    cluster.apply([claim_template("cool"), *pods_of("cool", *NAMES[:3])])
    cluster.wait_running(*NAMES[:3])
    cluster.apply(pods_of("cool", NAMES[3]))
    cluster.wait_unschedulable(NAMES[3], "cannot allocate all claims")
    cluster.kubectl("delete", "pod", NAMES[0])
    cluster.wait_running(NAMES[3])
