"""MIG devices on demand, on a real Kubernetes with a simulated DGX H100."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import PLUGIN_DIR, SIMULATOR_DIR, SLOW_S, Cluster, claim_and_pod, installed, wait_for
from tests.e2e.test_slices import versions

# Some waits are the kubelet's, which by default tries again after a minute or more.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

GPUS = 8
BURST = 4
ONE_GPU = "0000:1b:00.0"
CHURN_S = float(os.environ.get("MIG_CHURN_S", "100"))


@pytest.fixture(scope="module")
def _mig(_cluster: Cluster) -> Iterator[Cluster]:
    """The driver with MIG on demand; afterwards the plain one again."""
    with installed(_cluster, "e2e-mig", lambda: len(_cluster.devices()) > GPUS) as cluster:
        yield cluster


@pytest.fixture
def clean(_mig: Cluster, cluster: Cluster) -> Iterator[Cluster]:
    """Every test starts and ends without instances, and with MIG mode off on all GPUs."""
    wait_for("a node without MIG instances", lambda: not instances())
    yield cluster
    cluster.kubectl("delete", "pods,resourceclaims,resourceclaimtemplates", "--all", "-n", "default")
    wait_for("every instance to be destroyed", lambda: not instances())
    wait_for("MIG mode to be off", lambda: not modes())
    # The ledger is removed after its entries.
    wait_for("an empty ledger", lambda: not list((PLUGIN_DIR / "ledger").glob("*.json")))


@pytest.fixture
def mig(clean: Cluster) -> Iterator[Cluster]:
    """MIG devices that come and go change nothing of what is published."""
    wait_for("all slices to be written", clean.pool_is_whole)
    published = fingerprint(clean)
    yield clean
    assert fingerprint(clean) == published


def machine() -> list[dict[str, Any]]:
    """The simulated GPUs, as the machine's state file has them."""
    return json.loads((SIMULATOR_DIR / "machine.json").read_text())["gpus"]


def instances() -> list[tuple[str, int, int]]:
    """(GPU, profile, start) of every GPU instance."""
    return [(gpu["uuid"], one["profile_id"], one["start"]) for gpu in machine() for one in gpu["instances"]]


def modes() -> list[str]:
    """GPUs in MIG mode."""
    return [gpu["uuid"] for gpu in machine() if gpu["mig_mode"]]


def faults() -> list[dict[str, Any]]:
    """What NVML still answers wrong."""
    return json.loads((SIMULATOR_DIR / "machine.json").read_text())["faults"]


def fingerprint(cluster: Cluster) -> list[tuple[str, int]]:
    """Slices and their generations."""
    return sorted(
        (entry["metadata"]["name"], entry["spec"]["pool"]["generation"]) for entry in cluster.slices()
    )


ON_ONE_GPU = f'device.attributes["resource.kubernetes.io"].pciBusID == "{ONE_GPU}"'
SMALL = {"device_class": "mig-1g.10gb.nvidia.com", "selector": ON_ONE_GPU}


def test_whole_gpu_waits_for_its_slices_and_starts_after(mig: Cluster) -> None:
    mig.start("small", **SMALL)
    mig.apply(claim_and_pod("whole", "gpu.nvidia.com", selector=ON_ONE_GPU))
    mig.wait_unschedulable("whole", "cannot allocate all claims")
    mig.kubectl("delete", "pod/small", "resourceclaim/small")
    mig.wait_running("whole", timeout_s=SLOW_S)
    assert mig.seen_by("whole")[0].startswith("GPU-")
    assert not modes()


def test_an_agent_for_all_devices_waits_while_a_part_is_held(mig: Cluster) -> None:
    """kube-scheduler counts counters for adminAccess too; so does the playground's."""
    space = "agents"
    mig.make_namespace(space, {"resource.kubernetes.io/admin-access": "true"})
    agent = claim_and_pod("agent", namespace=space, allocationMode="All", adminAccess=True)
    try:
        mig.start("small", **SMALL)
        mig.apply(agent)
        mig.wait_unschedulable("agent", "cannot allocate all", space)
        mig.kubectl("delete", "pod/small", "resourceclaim/small")
        wait_for(
            "the agent to run",
            lambda: mig.get("pod", "agent", "-n", space)["status"]["phase"] == "Running",
            timeout_s=SLOW_S,
        )
    finally:
        mig.kubectl("delete", "namespace", space, "--timeout=300s")


def test_a_limit_in_the_pod_is_enough(mig: Cluster, example: Callable[[str], None]) -> None:
    example("mig-extended-resource")
    [found] = mig.get("pods")["items"]
    assert "resourceClaims" not in found["spec"]
    mig.wait_running(found["metadata"]["name"])
    [uuid] = mig.seen_by(found["metadata"]["name"])
    assert uuid.startswith("MIG-")


def test_a_device_by_claim_template(mig: Cluster, example: Callable[[str], None]) -> None:
    example("mig-on-demand")
    names = [one["metadata"]["name"] for one in mig.get("pods")["items"]]
    mig.wait_running(*names)
    assert all(mig.seen_by(name)[0].startswith("MIG-") for name in names)

    # What the last call creates is removed again, and the fixture waits for that.


def test_update_and_kubelet_restart_keep_running_devices(clean: Cluster) -> None:
    clean.start("stays", device_class="mig-2g.20gb.nvidia.com")
    before, uuid = instances(), clean.seen_by("stays")
    published = versions(clean)
    clean.roll_out()
    wait_for("the driver to have settled", clean.driver_has_settled)
    assert versions(clean) == published, "a newer process writes no slice again"
    wiped = {entry["metadata"]["uid"] for entry in clean.slices()}
    clean.local.restart("kubelet")
    # Each start of a kubelet deletes all slices of its node, some time after it serves.
    wait_for(
        "other slices than before",
        lambda: not wiped & {entry["metadata"]["uid"] for entry in clean.slices()} and clean.pool_is_whole(),
    )
    wait_for("the driver to have settled", clean.driver_has_settled)
    assert len(clean.devices()) > GPUS
    assert (instances(), clean.seen_by("stays")) == (before, uuid)
    assert clean.pod("stays")["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.timeout(CHURN_S + 1500)
def test_churn_of_whole_gpus_and_slices_leaks_nothing(mig: Cluster) -> None:
    """Mixed load with a fixed seed; `MIG_CHURN_S` seconds.

    The simulator replaces nvidia-smi and the MPS programs whenever MIG devices come or go, which no host does. runc
    refuses to start a container whose file was replaced at that moment, so these pods start again.
    """
    choose = random.Random(20)
    classes = [
        "gpu.nvidia.com", "mig-1g.10gb.nvidia.com", "mig-1g.10gb.me.nvidia.com", "mig-1g.20gb.nvidia.com",
        "mig-2g.20gb.nvidia.com", "mig-3g.40gb.nvidia.com", "mig-7g.80gb.nvidia.com",
    ]  # fmt: skip
    alive: list[str] = []
    number = ran = 0
    until = time.monotonic() + CHURN_S
    while time.monotonic() < until:
        fresh = [f"churn-{number + extra}" for extra in range(choose.randint(1, BURST))]
        number += len(fresh)
        wanted = [one for name in fresh for one in claim_and_pod(name, choose.choice(classes))]
        for pod in wanted[1::2]:
            pod["spec"]["restartPolicy"] = "OnFailure"
        mig.apply(wanted)
        alive += fresh
        mig.wait_running(*fresh, timeout_s=SLOW_S)
        ran += len(fresh)
        for name in fresh:
            assert mig.seen_by(name)
        taken = [(gpu, start) for gpu, _, start in instances()]
        assert len(taken) == len(set(taken))
        # However the devices of the remaining pods are spread, there is a GPU for each new pod.
        while len(alive) > GPUS - BURST:
            gone = alive.pop(choose.randrange(len(alive)))
            mig.kubectl("delete", f"pod/{gone}", f"resourceclaim/{gone}", "--wait=false")
    assert ran >= CHURN_S / 20, f"only {ran} pods ran"
