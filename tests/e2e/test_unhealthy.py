"""A GPU that is not well gets no pod, whatever this release of Kubernetes does with taints."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import SLOW_S, Cluster, pods_of, wait_for
from tests.e2e.test_pods import BURST, NAMES

pytestmark = [pytest.mark.cluster, pytest.mark.core]

LOST = 2
"""No other test loses this GPU: one that goes bad again and again is held back."""
FIRST_WITH_TAINTS = 36
WHILE_LOST = ["Pending", *["Running"] * 7]


def keeps_taints(cluster: Cluster) -> bool:
    """Whether the release stores taints with its default feature gates."""
    version = json.loads(cluster.kubectl("get", "--raw", "/version"))
    return int(version["minor"]) >= FIRST_WITH_TAINTS


def on_offer(cluster: Cluster) -> dict[int, bool]:
    """By index, whether new pods may get the GPU."""
    return {
        one["attributes"]["index"]["int"]: all(taint["effect"] == "None" for taint in one.get("taints", []))
        for one in cluster.devices()
    }


def test_pods_get_the_other_gpus_and_none_hangs_on_a_lost_one(cluster: Cluster) -> None:
    everything = dict.fromkeys(range(8), True)
    wait_for("eight GPUs that are well", lambda: on_offer(cluster) == everything)
    others = {index: True for index in range(8) if index != LOST}
    cluster.simulate("lose", str(LOST))
    try:
        expected = others | {LOST: False} if keeps_taints(cluster) else others
        wait_for("the lost GPU to be kept from pods", lambda: on_offer(cluster) == expected)
        cluster.apply([BURST, *pods_of("burst", *NAMES)])

        def phases() -> dict[str, str]:
            found = cluster.get("pods", "-n", "default")["items"]
            return {pod["metadata"]["name"]: pod["status"].get("phase", "") for pod in found}

        wait_for("seven pods to run and one to wait", lambda: sorted(phases().values()) == WHILE_LOST)
        [left] = [name for name, phase in phases().items() if phase == "Pending"]
        conditions = cluster.pod(left)["status"]["conditions"]
        assert "Unschedulable" in {one.get("reason") for one in conditions}, conditions
    finally:
        cluster.simulate("restore", str(LOST))
    wait_for("eight GPUs that are well", lambda: on_offer(cluster) == everything)
    cluster.wait_running(left, timeout_s=SLOW_S)
