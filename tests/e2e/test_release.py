"""Pods that were torn away make room at once for those that come in their place."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Cluster, wait_for
from tests.e2e.test_pods import TEMPLATE, pods

pytestmark = pytest.mark.cluster

GPUS, ROUNDS, WITHIN_S = 8, 10, 6.0


def generation(number: int) -> tuple[str, list[str]]:
    """Eight pods of a name of their own, and their names."""
    names = [f"burst-{number}-{index}" for index in range(GPUS)]
    manifest = pods(GPUS, "burst")
    for index, name in enumerate(names):
        manifest = manifest.replace(f"metadata: {{name: burst-{index}}}", f"metadata: {{name: {name}}}")
    return manifest, names


@pytest.mark.timeout(400)
def test_force_deleted_pods_are_replaced_within_seconds(cluster: Cluster) -> None:
    """Eight pods are deleted by force and eight new ones created at once, ten times: all run within six seconds.

    The claims of the old pods are gone from the API server before the kubelet has unprepared them, so each new pod
    gets a GPU that its former holder has not let go of yet.
    """
    cluster.apply(TEMPLATE)
    manifest, names = generation(0)
    cluster.apply(manifest)
    cluster.wait_running(*names)
    took: list[float] = []
    for number in range(1, ROUNDS + 1):
        manifest, fresh = generation(number)
        cluster.kubectl("delete", "pod", *names, "--grace-period=0", "--force", "--wait=false")
        cluster.apply(manifest)
        took.append(cluster.wait_running(*fresh, timeout_s=100))
        seen = [uuid for name in fresh for uuid in cluster.seen_by(name)]
        assert len(seen) == len(set(seen)) == GPUS
        wait_for("the old claims to be unprepared", lambda: len(cluster.leftovers()) == 2 * GPUS, 30)
        names = fresh
    print("eight pods replaced after " + ", ".join(f"{seconds:.2f}" for seconds in took) + " s")
    assert max(took) <= WITHIN_S, took
