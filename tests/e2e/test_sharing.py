"""Several workloads on one GPU, on a real Kubernetes: time slices, MPS, shares of independent claims."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dra_driver.host.processes import origin
from tests.deploy.test_monitoring import ALERTS, requested, series
from tests.e2e.conftest import (
    NAMESPACE,
    PLUGIN_DIR,
    SIMULATOR_DIR,
    Cluster,
    Json,
    claim_and_pod,
    installed,
    wait_for,
)
from tests.e2e.podresources import uses
from tests.e2e.test_usage import gpus
from tests.fakes.scrapes import samples_in

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

BY_MEMORY = "0000:1b:00.0"
SETTINGS = SIMULATOR_DIR / "root/var/lib/nvidia-simulator"


@pytest.fixture(scope="module")
def _sharing(_cluster: Cluster) -> Iterator[Cluster]:
    """The driver with shared devices and its MPS host; afterwards the plain one again."""
    with installed(_cluster, "e2e-sharing", lambda: shared_devices(_cluster)) as cluster:
        yield cluster


@pytest.fixture
def sharing(_sharing: Cluster, cluster: Cluster) -> Iterator[Cluster]:
    """Every test starts and ends without daemons, their directories and changed settings."""
    wait_for("a node without MPS and time slices", lambda: not state())
    yield cluster
    cluster.kubectl("delete", "pods,resourceclaims,resourceclaimtemplates", "--all", "-n", "default")
    wait_for("nothing of MPS and time slices to be left", lambda: not state())


def state() -> dict[str, str]:
    """Daemon records and directories, compute modes and time slices on the node."""
    try:
        return _state()
    except FileNotFoundError as error:  # it was removed during the check, so there was something
        return {str(error.filename): "going"}


def _state() -> dict[str, str]:
    files = [path for path in (PLUGIN_DIR / "mps").rglob("*") if "host." not in str(path)]
    values = {str(path): "" for path in files}
    values.update({f"process {pid}": "" for pid in control_processes()})
    for kind in ("compute-mode", "timeslice"):
        for file in (SETTINGS / kind).glob("*"):
            if file.read_text().strip() not in ("", "0"):
                values[f"{kind} {file.name}"] = file.read_text()
    return values


def control_processes() -> list[str]:
    """Process IDs of all MPS control daemons and servers of the simulated node; other tests here may have others."""
    program, found = re.compile(rf"{SIMULATOR_DIR}/root/\S*/nvidia-cuda-mps-".encode()), []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if program.search(file.read_bytes()):
                found.append(file.parent.name)
    return found


def shared_devices(cluster: Cluster) -> list[dict]:
    return [device for device in cluster.devices() if device.get("allowMultipleAllocations")]


def daemons() -> dict[str, str]:
    """Process IDs of the control daemons, by device."""
    return {path.parent.parent.name: path.read_text() for path in (PLUGIN_DIR / "mps").glob("*/pipe/*.pid")}


def alive(pid: int) -> bool:
    """Whether the process runs; the MPS host and its daemons have the host's process IDs."""
    return Path(f"/proc/{pid}").exists()


def printed(cluster: Cluster, pod: str, *names: str, namespace: str = "default") -> dict[str, str]:
    """The lines NAME=value that a pod printed: its MPS environment, and what `mps-client` got; these at least."""
    got: dict[str, str] = {}

    def all_there() -> bool:
        text = cluster.logs(pod, namespace)
        got.update(line.split("=", 1) for line in text.splitlines() if "=" in line)
        # Lines are logged one after the other, and the reason of a failure replaces the rest.
        return got.keys() >= set(names) or "reason" in got

    wait_for(f"{', '.join(names)} in the output of {pod}", all_there)
    return got


def memory_pod(name: str, namespace: str) -> list[Json]:
    return claim_and_pod(
        name,
        "shares.gpu.nvidia.com",
        namespace=namespace,
        selector=f'device.attributes["resource.kubernetes.io"].pciBusID == "{BY_MEMORY}"',
        command="nvidia-smi -L; mps-client; exec sleep 3600",
        capacity={"requests": {"memory": "8000Mi"}},
    )


def test_time_slice_is_set_while_the_pods_run_and_reset_after(
    sharing: Cluster, example: Callable[[str], None]
) -> None:
    example("time-slicing")
    sharing.wait_running("slice-a", "slice-b")
    [uuid] = sharing.seen_by("slice-a")
    assert sharing.seen_by("slice-b") == [uuid]
    assert (SETTINGS / "timeslice" / uuid).read_text().strip() == "3"


def test_two_pods_share_a_claim_through_mps(sharing: Cluster, example: Callable[[str], None]) -> None:
    example("mps-shared-claim")
    sharing.wait_running("mps-a", "mps-b")
    assert sharing.seen_by("mps-a") == sharing.seen_by("mps-b")
    for pod in ("mps-a", "mps-b"):
        got = printed(sharing, pod, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        assert got["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert got["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    assert len(daemons()) == 1


def test_ten_claims_of_two_namespaces_share_a_gpu_and_the_eleventh_waits(sharing: Cluster) -> None:
    sharing.make_namespace("other-team")
    names = [(f"part-{number}", "default" if number % 2 else "other-team") for number in range(11)]
    try:
        # Half of them at once, which leaves room for what the scheduler may count twice.
        parts = [memory_pod(*name) for name in names]
        sharing.apply(one for part in parts[:5] for one in part)
        for name, namespace in names[:5]:
            sharing.wait_running(name, namespace=namespace)
        sharing.apply_in_turn(one for part in parts[5:10] for one in part)
        seen = {uuid for name, space in names[:10] for uuid in sharing.seen_by(name, namespace=space)}
        assert len(seen) == 1
        assert len(daemons()) == 1
        for name, space in names[:10]:
            got = printed(sharing, name, "mps", "pinned_device_mem_limit", namespace=space)
            assert got["mps"] == "connected", got
            assert got["pinned_device_mem_limit"] == "0=8000M"
        sharing.apply(parts[10])
        sharing.wait_unschedulable(names[10][0], "cannot allocate all claims", names[10][1])
    finally:
        sharing.kubectl("delete", "namespace", "other-team", "--timeout=300s")


def test_pods_that_share_a_gpu_are_distinguished_by_what_their_processes_use(
    sharing: Cluster, example: Callable[[str], None]
) -> None:
    """The simulated NVML lists the pods' processes, which have the control groups that the real runtime gave them."""
    example("gpu-shares")
    sharing.wait_running("share-1", "share-2")
    [gpu] = {uuid for pod in ("share-1", "share-2") for uuid in sharing.seen_by(pod)}
    busy = {"share-1": 70, "share-2": 3}
    made: list[Path] = []
    try:
        for pod, percent in busy.items():
            pid = process_of(sharing.pod(pod)["metadata"]["uid"])
            sharing.simulate("hold", gpu, "--pid", str(pid), "--utilisation", str(percent))
            made = [SIMULATOR_DIR / f"root/proc/{pid}", *made]
            made[0].mkdir()
            shutil.copy(f"/proc/{pid}/cgroup", made[0])
        rows = [row for row in json.loads(gpus(sharing, "--usage", "-o", "json"))["rows"] if row["pods"]]
        assert {row["pods"][0]: row["load"]["utilisation_percent"] for row in rows} == {
            f"default/{pod}": percent for pod, percent in busy.items()
        }
        table = gpus(sharing, "--usage")
        assert re.search(r" share-1 .* 70% 0\.5/80 GiB", table)
        assert re.search(r" share-2 .* 3% 0\.5/80 GiB", table)
        [pod] = sharing.staying_pods("node")
        page = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:8080/proxy/metrics"
        samples = samples_in(sharing.kubectl("get", "--raw", page))
        [idle] = requested(series(samples, lambda *_: None, sharing.node), ALERTS["GpuDraHeldIdle"]["expr"])
        assert [(labels["claim"], value) for labels, value in idle] == [
            (sharing.claims_of("share-2")[0], 0.03)
        ]
    finally:
        sharing.simulate("release", gpu)
        for directory in made:
            shutil.rmtree(directory)


def process_of(pod_uid: str) -> int:
    """The last process of a pod: its first one is the sandbox's."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return max(pid for pid in pids if origin("/proc", pid).pod_uid == pod_uid)


def test_halves_of_a_mig_device(sharing: Cluster, example: Callable[..., None]) -> None:
    sharing.simulate("mig", "enable", "7", "--force")
    made = sharing.simulate("mig", "create", "7", "3g.40gb", "0")
    try:
        wait_for("the MIG device", lambda: [d for d in shared_devices(sharing) if "mig" in d["name"]])
        example("mig-shares", in_turn=True)
        pods = [pod["metadata"]["name"] for pod in sharing.get("pods")["items"]]
        assert len({tuple(sharing.seen_by(pod)) for pod in pods}) == 1
        for pod in pods:
            got = printed(sharing, pod, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
            assert got["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        (device,) = [one for one in shared_devices(sharing) if "mig" in one["name"]]
        assert device["attributes"]["shareable"] == {"bool": True}
        reported = [use for use in uses() if use.namespace == "default"]
        assert sorted((use.pod, use.device) for use in reported) == sorted(
            (pod, device["name"]) for pod in pods
        )
        assert len({use.share_id for use in reported} - {""}) == len(pods)
        sharing.kubectl("delete", "-f", "examples/mig-shares")
        wait_for("the claims to be unprepared", lambda: not sharing.leftovers())
        sharing.simulate("mig", "destroy", "7", made.split("GPU instance ")[1].split(",")[0])
    finally:
        sharing.simulate("mig", "disable", "7", "--force")
    wait_for("the whole GPU", lambda: len(sharing.devices()) == 8)
