"""A taint with the effect NoExecute on a real Kubernetes: who is evicted from a lost GPU, and who stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import NAMESPACE, STAY, Cluster, Json, container, installed, pod, wait_for
from tests.e2e.test_health import only, taints_of
from tests.e2e.test_pods import workload
from tests.e2e.test_service import AT_WORK, GATED, GO, service, serviced
from tests.e2e.test_service import NAMESPACE as SERVICE

__all__ = ["serviced", "workload"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

AGENTS = {
    "monitoring-daemonset": ("dcgm-exporter", "gpu-monitoring"),
    "gpu-feature-discovery": ("gpu-feature-discovery", "gpu-feature-discovery"),
}
"""By example: the name of its DaemonSet, and the namespace."""
USER = 5


@pytest.fixture(scope="module")
def _evicting(_cluster: Cluster) -> Iterator[Cluster]:
    """The driver whose lost GPUs evict pods; afterwards the plain one again."""

    def is_configured() -> bool:
        return "NoExecute" in _cluster.kubectl("get", "configmaps", "-n", NAMESPACE, "-o", "yaml")

    with installed(_cluster, "e2e-evicting", is_configured) as cluster:
        yield cluster
    wait_for("GPUs without taints", lambda: not any(map(taints_of, _cluster.devices())))


def staying(cluster: Cluster, *namespaces: str) -> set[str]:
    """UIDs of the pods in the namespaces that are not being deleted."""
    found = [one for name in namespaces for one in cluster.get("pods", "-n", name)["items"]]
    return {one["metadata"]["uid"] for one in found if "deletionTimestamp" not in one["metadata"]}


@pytest.mark.usefixtures("_evicting")
def test_lost_gpus_evict_their_users_but_neither_agents_nor_the_job_that_services_one(
    cluster: Cluster, workload: Callable[[str], None], serviced: Callable[[list[Json]], None]
) -> None:
    namespaces = [namespace for _, namespace in AGENTS.values()]
    for example, (name, namespace) in AGENTS.items():
        workload(example)
        cluster.rolled_out(f"daemonset/{name}", namespace)
    agents = staying(cluster, *namespaces)
    assert len(agents) == len(AGENTS)
    cluster.start("by-claim", selector=only(USER))
    by_limit = container("main", command=STAY)
    by_limit["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    cluster.apply([pod("by-limit", by_limit)])
    cluster.wait_running("by-limit")
    used = [*cluster.seen_by("by-claim"), *cluster.seen_by("by-limit")]
    try:
        for uuid in used:
            cluster.simulate("lose", uuid)
        wait_for("no user of a lost GPU", lambda: not cluster.get("pods", "-n", "default")["items"])
        assert staying(cluster, *namespaces) == agents

        for name, namespace in AGENTS.values():  # the Job would wait for their claims
            cluster.kubectl("delete", f"daemonset/{name}", "-n", namespace, "--timeout=300s")
            cluster.kubectl("wait", "--for=delete", "pod", "--all", "-n", namespace, "--timeout=300s")
        # A reset is tested with the maintenance claims: nvidia-smi cannot reset a lost GPU.
        serviced(service(used[0], GATED.format("true")))
        wait_for("the Job's pod", lambda: staying(cluster, SERVICE))
        job = staying(cluster, SERVICE)
        wait_for("the Job to be at work", AT_WORK.exists)
        GO.touch()
        cluster.kubectl("wait", "--for=condition=complete", "job/reset-gpu", "-n", SERVICE, "--timeout=300s")
        assert (len(job), staying(cluster, SERVICE)) == (1, job)
    finally:
        for uuid in used:
            cluster.simulate("restore", uuid)
