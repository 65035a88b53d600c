"""The real cluster of hack/cluster, as `hack/e2e.py` brought it up; every test leaves it empty."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "hack" / "cluster"))

SIMULATOR_DIR = Path("/var/lib/gpu-dra-simulator")
CDI_DIR = Path("/var/run/cdi")
PLUGIN_DIR = Path("/var/lib/kubelet/plugins/gpu.nvidia.com")
NAMESPACE = "gpu-dra-driver"
DAEMONSET = "daemonset/gpu-dra-driver"

Json = dict[str, Any]


def wait_for(what: str, check: Callable[[], Any], timeout_s: float = 60.0, every_s: float = 0.1) -> Any:
    """The first true value of `check`; an assertion that says what was waited for otherwise."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(every_s)
    return value


class Cluster:
    """kubectl, and what the tests ask of the cluster with it."""

    def __init__(self) -> None:
        import localcluster

        self.local = localcluster
        self.node: str = localcluster.NODE_NAME

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        environment = {**os.environ, "KUBECONFIG": str(self.local.kubeconfig())}
        done = subprocess.run(
            [str(self.local.kubectl()), *arguments],
            cwd=ROOT,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not (check and done.returncode), f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def get(self, *arguments: str) -> Json:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, manifest: str) -> None:
        self.kubectl("apply", "-f", "-", stdin=manifest)

    def apply_in_turn(self, manifest: str) -> None:
        """Apply the documents one after the other, and see each pod run before the next.

        For claims that fill a shared device to the brim: while the scheduler stores an allocation, it can count
        the capacity twice, once as in flight and once as stored, and a pod that would fit is put back for up
        to five minutes.
        """
        for document in yaml.safe_load_all(manifest):
            if not document:
                continue
            self.apply(json.dumps(document))
            if document["kind"] == "Pod":
                metadata = document["metadata"]
                self.wait_running(metadata["name"], namespace=metadata.get("namespace", "default"))

    def slices(self) -> list[Json]:
        return self.get("resourceslices")["items"]

    def devices(self) -> list[Json]:
        return [device for entry in self.slices() for device in entry["spec"].get("devices", [])]

    def pod(self, name: str, namespace: str = "default") -> Json:
        return self.get("pod", name, "-n", namespace)

    def wait_running(self, *names: str, namespace: str = "default", timeout_s: float = 60.0) -> float:
        """Seconds until all the pods run; the events of one that does not are in the failure."""
        started = time.monotonic()
        waiting = set(names)
        while waiting:
            pods = self.get("pods", "-n", namespace)["items"]
            running = {pod["metadata"]["name"] for pod in pods if _is_running(pod)}
            waiting -= running
            if waiting and time.monotonic() - started > timeout_s:
                told = "\n".join(self.told_of(name, namespace) for name in sorted(waiting))
                pytest.fail(f"not running after {timeout_s:.0f} s: {sorted(waiting)}\n{told}")
            time.sleep(0.05)
        return time.monotonic() - started

    def told_of(self, pod: str, namespace: str) -> str:
        """The conditions and events of a pod, and what the driver's logs say of it."""
        lines = [f"{namespace}/{pod}:"]
        found = self.kubectl("get", "pod", pod, "-n", namespace, "-o", "json", check=False)
        for one in json.loads(found)["status"].get("conditions", []) if found else []:
            lines.append(f"  {one['type']} {one['status']} {one.get('reason', '')} {one.get('message', '')}")
        of_pod = f"--field-selector=involvedObject.name={pod}"
        lines.append(self.kubectl("get", "events", "-n", namespace, of_pod, check=False)[-2000:])
        logs = self.kubectl("logs", DAEMONSET, "-n", NAMESPACE, "--tail=2000", check=False)
        lines += [line for line in logs.splitlines() if pod in line][-20:]
        return "\n".join(lines)

    def seen_by(self, pod: str, container: str | None = None, namespace: str = "default") -> list[str]:
        """UUIDs that `nvidia-smi -L` printed in a container: GPUs, or MIG devices where there are any."""
        which = ["-c", container] if container else []

        def printed() -> str:
            return self.kubectl("logs", pod, "-n", namespace, *which, check=False)

        text = wait_for(f"output of nvidia-smi in {pod}", printed, 20)
        migs = re.findall(r"UUID: (MIG-[0-9a-f-]+)", text)
        return migs or re.findall(r"UUID: (GPU-[0-9a-f-]+)", text)

    def allocated(self, claim: str, namespace: str = "default") -> list[str]:
        """UUIDs of the devices that a claim was allocated."""
        allocation = self.get("resourceclaim", claim, "-n", namespace)["status"]["allocation"]
        by_name = {device["name"]: device["attributes"]["uuid"]["string"] for device in self.devices()}
        return [by_name[result["device"]] for result in allocation["devices"]["results"]]

    def claims_of(self, pod: str, namespace: str = "default") -> list[str]:
        """Names of the claims of a pod."""
        status = self.pod(pod, namespace)["status"]
        return [entry["resourceClaimName"] for entry in status.get("resourceClaimStatuses", [])]

    def leftovers(self) -> list[str]:
        """CDI specs and claim records on the node."""
        files = [*CDI_DIR.glob("k8s.gpu.nvidia.com-claim_*"), *(PLUGIN_DIR / "claims").glob("*.json*")]
        return [file.name for file in files]

    def driver_pods(self) -> list[Json]:
        return self.get("pods", "-n", NAMESPACE)["items"]

    def driver_is_ready(self) -> bool:
        """Whether every pod of the driver that is not on its way out is ready."""
        pods = [pod for pod in self.driver_pods() if "deletionTimestamp" not in pod["metadata"]]
        return bool(pods) and all(
            any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in pod["status"].get("conditions", [])
            )
            for pod in pods
        )

    def inspect(self, *arguments: str) -> list[Json]:
        """What `gpu-dra-driver inspect` prints for the simulated machine of the node."""
        program = Path(sys.executable).parent / "gpu-dra-driver"
        command = [str(program), "inspect", "-o", "json", "--node-name", self.node, *arguments]
        command += ["--simulate", "dgx-h100", "--simulator-dir", str(SIMULATOR_DIR)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["items"]

    def simulate(self, *arguments: str, directory: Path = SIMULATOR_DIR) -> str:
        """Change the simulated machine under the running driver."""
        program = Path(sys.executable).parent / "gpu-dra-driver"
        command = [str(program), "simulate", *arguments, "--simulator-dir", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def install(cluster: Cluster, overlay: str) -> None:
    """Apply an overlay of `daemonset/overlays` over what is installed, and see it rolled out."""
    cluster.kubectl("apply", "-k", f"daemonset/overlays/{overlay}")
    cluster.kubectl("rollout", "status", DAEMONSET, "-n", NAMESPACE, "--timeout=120s")


def claim_and_pod(
    name: str,
    device_class: str = "gpu.nvidia.com",
    *,
    selector: str = "",
    parameters: str = "",
    command: str = "nvidia-smi -L; exec sleep 3600",
) -> str:
    """A pod and a claim of its own, both of this name; `selector` is CEL, `parameters` are the driver's, as JSON."""
    more = f", selectors: [{{cel: {{expression: '{selector}'}}}}]" if selector else ""
    opaque = (
        f"config: [{{opaque: {{driver: gpu.nvidia.com, parameters: {parameters}}}}}]" if parameters else ""
    )
    return f"""apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}, namespace: default}}
spec:
  devices:
    requests: [{{name: device, exactly: {{deviceClassName: {device_class}{more}}}}}]
    {opaque}
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: local/workload:e2e
      command: [sh, -c, "{command}"]
      resources: {{claims: [{{name: device}}]}}
  resourceClaims: [{{name: device, resourceClaimName: {name}}}]
---
"""


def _is_running(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return pod["status"].get("phase") == "Running" and all("running" in one["state"] for one in statuses)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report ends with the pods, the last events and the end of the driver's log."""
    report = yield
    if report.failed:
        cluster = Cluster()
        for title, command in (
            ("pods", ("get", "pods", "-A", "-o", "wide")),
            ("claims", ("get", "resourceclaims", "-A")),
            ("events", ("get", "events", "-A", "--sort-by=.metadata.creationTimestamp")),
            ("driver", ("logs", DAEMONSET, "-n", NAMESPACE, "--tail=60")),
        ):
            report.sections.append(
                (title, "\n".join(cluster.kubectl(*command, check=False).splitlines()[-60:]))
            )
    return report


@pytest.fixture(scope="session")
def _cluster() -> Cluster:
    cluster = Cluster()
    if not cluster.local.is_up():
        pytest.fail("the cluster of hack/cluster is not up; run these tests by `make e2e`")
    return cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards no pod, claim, CDI spec or record of the test may be left."""
    wait_for("the driver's pods to be ready", _cluster.driver_is_ready)
    yield _cluster
    kinds = "pods,resourceclaims,resourceclaimtemplates"
    _cluster.kubectl("delete", kinds, "--all", "-n", "default", "--timeout=60s")
    wait_for("the node to be clean", lambda: not _cluster.leftovers(), 70)


@pytest.fixture
def example(cluster: Cluster) -> Iterator[Callable[..., None]]:
    """Applies a folder of examples/, as its README says, and deletes it afterwards."""
    applied: list[str] = []

    def apply(name: str, *, in_turn: bool = False) -> None:
        applied.append(name)
        if in_turn:
            for file in sorted((ROOT / "examples" / name).glob("*.yaml")):
                cluster.apply_in_turn(file.read_text(encoding="utf-8"))
        else:
            cluster.kubectl("apply", "-f", f"examples/{name}")

    yield apply
    for name in applied:
        cluster.kubectl("delete", "-f", f"examples/{name}", "--ignore-not-found", "--timeout=60s")
