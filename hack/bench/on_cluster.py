"""Measures the driver as a DaemonSet under a real kubelet, compared with pods without claims.

It uses the cluster of `make cluster`, with the driver on a simulated machine and the image of this checkout. Rounds
with claims alternate with rounds of the same pods without claims (the control), so that a busy machine affects both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from processes import cpu_s
from processes import wait_for as wait_for_s

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import MERGE_PATCH, ApiClient
from dra_driver.kube.endpoint import load_endpoint

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "hack/cluster"))
import localcluster  # noqa: E402
from localcluster.processes import all_pids, command_line  # noqa: E402

DRIVER = "gpu.nvidia.com"
NAMESPACE = "gpu-dra-driver"
GPUS = 8
_WAIT_S = 300.0
_SLICES = "/apis/resource.k8s.io/v1/resourceslices"
_PODS = "/api/v1/namespaces/default/pods"
_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
_TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
_UNPREPARE = "NodeUnprepareResources"
_METRIC = re.compile(r"^dra_grpc_operations_duration_seconds_(sum|count)\{([^}]*)\} (\S+)$", re.MULTILINE)

Json = dict[str, Any]


def wait_for(check: Callable[[], Any]) -> None:
    """Wait as long as an action of a cluster may take. Raises: TimeoutError."""
    wait_for_s(check, _WAIT_S, every_s=0.01)


class Cluster:
    """The cluster of this machine, with the driver in it."""

    def __init__(self) -> None:
        self.client = ApiClient(load_endpoint(str(localcluster.kubeconfig())))
        self._made = 0

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl, and return its output. Raises: CalledProcessError."""
        environment = {**os.environ, "KUBECONFIG": str(localcluster.kubeconfig())}
        command = [str(localcluster.kubectl()), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def get(self, path: str) -> Json:
        """Return an object or a list from the API server."""
        return self.client.request("GET", path, action=f"get {path}")

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Delete an object. Do nothing if it does not exist."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1"}
        try:
            self.client.request(
                "DELETE",
                path,
                action=f"delete {path}",
                body=body if grace_s is None else body | {"gracePeriodSeconds": grace_s},
            )
        except ApiRejectedError as error:
            if error.status != 404:
                raise

    def slices(self) -> list[Json]:
        """Return the slices of the driver."""
        return [one for one in self.get(_SLICES)["items"] if one["spec"]["driver"] == DRIVER]

    def has_devices(self) -> bool:
        """Whether all GPUs are published."""
        return sum(len(one["spec"].get("devices") or ()) for one in self.slices()) >= GPUS

    def place(self, selector: Json) -> None:
        """Add these labels to the node selector of the driver's pods; None removes a label."""
        self.client.request(
            "PATCH",
            f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{NAMESPACE}",
            action="change where the driver runs",
            body={"spec": {"template": {"spec": {"nodeSelector": selector}}}},
            content_type=MERGE_PATCH,
        )

    def start_pods(self, count: int, *, claims: bool) -> list[str]:
        """Create pods with one sleeping container, each with its own GPU or without a claim. Return their names."""
        names = []
        for _ in range(count):
            self._made += 1
            names.append(f"bench-{os.getpid()}-{self._made}")
            self.client.request(
                "POST", _PODS, action=f"create pod {names[-1]}", body=_pod(names[-1], claims=claims)
            )
        return names

    def wait_running(self, names: Sequence[str]) -> None:
        """Wait until these pods are running. Raises: TimeoutError."""
        wanted = set(names)
        wait_for(lambda: wanted <= {one["metadata"]["name"] for one in self._pods() if _is_running(one)})

    def claim_of(self, pod: str) -> Json:
        """Return the claim that was created from the template for a pod; empty if there is none."""
        for claim in self.get(_CLAIMS)["items"]:
            if any(owner["name"] == pod for owner in claim["metadata"].get("ownerReferences", ())):
                return dict(claim)
        return {}

    def is_allocated(self, pod: str) -> bool:
        """Whether the pod's claim is allocated."""
        return "allocation" in (self.claim_of(pod).get("status") or {})

    def end_pods(self, names: Sequence[str], *, others: int = 0) -> None:
        """Delete these pods, and wait until they are gone and their claims are unprepared. `others` is the number of
        claims that stay prepared.
        """
        for name in names:
            self.delete(f"{_PODS}/{name}", grace_s=0)
        wait_for(lambda: not {one["metadata"]["name"] for one in self._pods()} & {*names})
        wait_for(lambda: len(list(_plugin_directory().glob("claims/*.json"))) <= others)

    def _pods(self) -> list[Json]:
        items: list[Json] = self.get(_PODS)["items"]
        return items

    def prepared(self, call: str = "NodePrepareResources") -> tuple[float, float]:
        """Return how many seconds the kubelet spent in these calls of the driver, and their number."""
        text = self.kubectl("get", "--raw", f"/api/v1/nodes/{localcluster.NODE_NAME}/proxy/metrics")
        found = {"sum": 0.0, "count": 0.0}
        for kind, labels, value in _METRIC.findall(text):
            if f'"{DRIVER}"' in labels and f'{call}"' in labels:
                found[kind] += float(value)
        return found["sum"], found["count"]

    def pod_uid(self) -> str:
        """Return the UID of the driver's pod, once there is only one and it is ready; empty before."""
        pods = self.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        ready = [
            one
            for one in pods
            if _is_running(one) and all(c["ready"] for c in one["status"]["containerStatuses"])
        ]
        return ready[0]["metadata"]["uid"] if len(pods) == len(ready) == 1 else ""


def _pod(name: str, *, claims: bool) -> Json:
    container: Json = {
        "name": "main",
        "image": localcluster.WORKLOAD_IMAGE,
        "command": ["sh", "-c", "exec sleep 3600"],
    }
    spec: Json = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    if claims:
        container["resources"] = {"claims": [{"name": "gpu"}]}
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "bench"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _is_running(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all("running" in one["state"] for one in statuses)


def _plugin_directory() -> Path:
    return Path("/var/lib/kubelet/plugins") / DRIVER


def driver_processes() -> list[int]:
    """Return the process IDs of the driver's pods on this machine, the daemon's first."""
    found: dict[str, list[int]] = {"run": [], "mps-host": []}
    for pid in all_pids():
        words = command_line(pid)
        if not any(word.endswith("gpu-dra-driver") for word in words):
            continue
        with suppress(OSError):  # the process has exited
            if "kubepods" in Path(f"/proc/{pid}/cgroup").read_text():
                for name in found.keys() & words:
                    found[name].append(pid)
    return found["run"] + found["mps-host"]


def daemon() -> int:
    """Return the daemon's process ID on this machine."""
    return driver_processes()[0]


def _age_s(pid: int) -> float:
    """Return how many seconds ago the process was started."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def prepare_cluster() -> Cluster:
    """Return the cluster with this checkout's driver; start it if necessary. Raises: CalledProcessError."""
    for command in (
        ["hack/image.py"],
        ["hack/cluster/cluster.py", "up"],
        ["hack/cluster/install.py"],
    ):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=sys.stderr)
    cluster = Cluster()
    cluster.delete(f"{_TEMPLATES}/bench")
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
    cluster.client.request(
        "POST",
        _TEMPLATES,
        action="create the claim template",
        body={
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": "bench"},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        },
    )
    wait_for(cluster.has_devices)
    wait_for(cluster.pod_uid)
    return cluster


def rounds(cluster: Cluster, runs: int) -> Iterator[tuple[str, float]]:
    """Yield label and value of each measurement: of one pod, of eight pods, and of eight replaced pods. A measurement
    with claims is followed by the same measurement without claims.
    """
    for names in (cluster.start_pods(1, claims=True), cluster.start_pods(1, claims=False)):
        cluster.wait_running(names)  # the first pods are slower, for example because they load the image
        cluster.end_pods(names)
    for _ in range(runs):
        before = cluster.prepared()
        yield "one pod running", _start_and_end(cluster, 1, claims=True)
        yield "kubelet's NodePrepareResources, alone", _mean_ms(before, cluster.prepared())
        yield "  one without a claim", _start_and_end(cluster, 1, claims=False)
        before, burst = cluster.prepared(), _Spent()
        yield "eight pods running", _start_and_end(cluster, GPUS, claims=True)
        burst.stop()
        yield "kubelet's NodePrepareResources, mean of 8", _mean_ms(before, cluster.prepared())
        control = _Spent()
        yield "  eight without claims", _start_and_end(cluster, GPUS, claims=False)
        control.stop()
        cpu_s = burst.cpu_s - control.cpu_s / control.took_s * burst.took_s
        yield "CPU of one Prepare and Unprepare, above idle", cpu_s / GPUS * 1000
        yield "  idle share included", burst.cpu_s / GPUS * 1000
        mine, theirs = _replace(cluster, claims=True), _replace(cluster, claims=False)
        yield "eight force-deleted and replaced", mine
        yield "  eight replaced without claims", theirs
        yield "  difference", mine - theirs
        yield "slices back after a wipe", _wipe(cluster)
        print(".", end="", flush=True, file=sys.stderr)


class _Spent:
    """The CPU seconds of the daemon, and the time that passes, from the constructor until `stop`."""

    def __init__(self) -> None:
        self.cpu_s, self.took_s = -cpu_s(daemon()), -time.monotonic()

    def stop(self) -> None:
        """Stop measuring."""
        self.cpu_s += cpu_s(daemon())
        self.took_s += time.monotonic()


def _mean_ms(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1]) * 1000


def _start_and_end(cluster: Cluster, count: int, *, claims: bool) -> float:
    started = time.monotonic()
    names = cluster.start_pods(count, claims=claims)
    cluster.wait_running(names)
    took = time.monotonic() - started
    cluster.end_pods(names)
    return took


def churn(cluster: Cluster, pods: int) -> Iterator[tuple[str, float]]:
    """Yield label and value of each measurement, in a load like that of the DRA test in kubernetes/perf-tests: some
    pods hold 90% of the devices, and short-lived pods use the others, one pod after the other.
    """
    held = cluster.start_pods(GPUS * 9 // 10, claims=True)
    cluster.wait_running(held)
    for _ in range(pods):
        before, began = cluster.prepared(), time.monotonic()
        names = cluster.start_pods(1, claims=True)
        wait_for(partial(cluster.claim_of, names[0]))
        claimed = time.monotonic()
        wait_for(partial(cluster.is_allocated, names[0]))
        yield "7 of 8 GPUs held, churn: claim allocated", time.monotonic() - claimed
        cluster.wait_running(names)
        yield "  pod running", time.monotonic() - began
        yield "  kubelet's NodePrepareResources", _mean_ms(before, cluster.prepared())
        ended = cluster.prepared(_UNPREPARE)
        cluster.end_pods(names, others=len(held))
        wait_for(partial(_was_called, cluster, ended))
        yield "  kubelet's NodeUnprepareResources", _mean_ms(ended, cluster.prepared(_UNPREPARE))
        print(".", end="", flush=True, file=sys.stderr)
    cluster.end_pods(held)


def _was_called(cluster: Cluster, before: tuple[float, float]) -> bool:
    return cluster.prepared(_UNPREPARE)[1] > before[1]


def _replace(cluster: Cluster, *, claims: bool) -> float:
    """Return the seconds from the forced deletion of eight pods until eight pods that replace them are running."""
    old = cluster.start_pods(GPUS, claims=claims)
    cluster.wait_running(old)
    started = time.monotonic()
    for name in old:
        cluster.delete(f"{_PODS}/{name}", grace_s=0)
    new = cluster.start_pods(GPUS, claims=claims)
    cluster.wait_running(new)
    took = time.monotonic() - started
    cluster.end_pods([*old, *new])
    return took


def _wipe(cluster: Cluster) -> float:
    """Return the seconds from the deletion of all slices, as at a start of the kubelet, until they are back."""
    time.sleep(0.5)
    for one in cluster.slices():
        cluster.delete(f"{_SLICES}/{one['metadata']['name']}")
    started = time.monotonic()
    wait_for(cluster.has_devices)
    return time.monotonic() - started


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def starts(cluster: Cluster, runs: int) -> list[float]:
    """Return the seconds from the start of a daemon process until its node's slices exist.

    Before each start, wait until no instance is running, and delete all slices. Otherwise the next instance would start
    while the old one exits, and would find its slices.
    """
    found = []
    for _ in range(runs):
        before = daemon()
        cluster.place({"bench": "nowhere"})
        wait_for(partial(_is_gone, before))
        for one in cluster.slices():
            cluster.delete(f"{_SLICES}/{one['metadata']['name']}")
        cluster.place({"bench": None})
        wait_for(cluster.has_devices)
        found.append(_age_s(daemon()))
        wait_for(cluster.pod_uid)
        print(".", end="", flush=True, file=sys.stderr)
    return found


def idle_percent(duration_s: float) -> float:
    """Return the percent of a core that the idle daemon uses."""
    pid = daemon()
    time.sleep(12)  # until the workers of the last calls have exited and the last change is published
    before = cpu_s(pid)
    time.sleep(duration_s)
    return (cpu_s(pid) - before) / duration_s * 100
