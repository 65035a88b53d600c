"""The real cluster of hack/cluster, started by `hack/e2e.py`; every test leaves it empty."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

ROOT = Path(__file__).resolve().parents[2]
_COMPONENTS = (ROOT / "hack/cluster/localcluster/components.toml").read_text()
RESOURCE_VERSIONS = ("v1", *re.findall(r"resource\.k8s\.io/(v\w+)=true", _COMPONENTS))
"""The versions of resource.k8s.io that the cluster's API server serves; older releases serve fewer."""
sys.path.insert(0, str(ROOT / "hack" / "cluster"))

SIMULATOR_DIR = Path("/var/lib/gpu-dra-simulator")
CDI_DIR = Path("/var/run/cdi")
PLUGIN_DIR = Path("/var/lib/kubelet/plugins/gpu.nvidia.com")
NAMESPACE = "gpu-dra-driver"
DAEMONSET = "daemonset/gpu-dra-driver"

Json = dict[str, Any]

SLOW_S = 420.0
"""For events that come by themselves, on any machine. The kubelet retries a failed Prepare after 10 to 15 s here, and
after 60 to 90 s by default; the scheduler retries a pod without events after five and a half minutes; dead pods, claims
and namespaces are removed by other loops. A shorter limit would test the machine, not the driver."""
SECOND_TRY = bool(os.environ.get("GPU_DRA_KUBELET_AS_NODE"))
"""A kubelet that acts as a node may need a retry: the node authorizer sees a claim later than the kubelet."""


def wait_for(
    what: str,
    check: Callable[[], Any],
    timeout_s: float = SLOW_S,
    every_s: float = 0.1,
    seen: Callable[[], object] = lambda: "",
) -> Any:
    """The first true value of `check`; an assertion that says what was waited for, and what was `seen`, otherwise."""
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}; {seen()}"
        time.sleep(every_s)
    return value


_NO_ANSWER = re.compile(
    "TLS handshake timeout|i/o timeout|connection refused|connection reset|connection lost|unexpected EOF|etcdserver:"
)


class Cluster:
    """kubectl, and the tests' queries of the cluster."""

    def __init__(self) -> None:
        import localcluster

        self.local = localcluster
        self.node: str = localcluster.NODE_NAME

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        done = self._run_kubectl(arguments, stdin)
        tries = 1
        # Reads are repeated if the server did not answer at all.
        while done.returncode and arguments[0] == "get" and tries < 5 and _NO_ANSWER.search(done.stderr):
            time.sleep(1)
            tries += 1
            done = self._run_kubectl(arguments, stdin)
        assert not (check and done.returncode), f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def _run_kubectl(self, arguments: tuple[str, ...], stdin: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.local.kubectl()), *arguments],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(self.local.kubeconfig())},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def get(self, *arguments: str) -> Json:
        """Return the output of `kubectl get` as JSON, in simple cases directly from the API server.

        Tests poll ten times a second, and a process each time would take the CPU from what they test.
        """
        path = _path_of(arguments)
        if path is None:
            return json.loads(self.kubectl("get", *arguments, "-o", "json"))
        status, body = self.read(path)
        assert status == 200, f"GET {path}: {status} {body[-2000:].decode(errors='replace')}"
        return json.loads(body)

    def read(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET, which is repeated until there is an answer."""
        for tries_left in (4, 3, 2, 1, 0):
            try:
                status, body = self.request("GET", path)
            except urllib3.exceptions.HTTPError:
                if not tries_left:
                    raise
            else:
                if status < 500 or not tries_left:
                    break
            time.sleep(1)
        return status, body

    def request(self, method: str, path: str, body: Json | None = None) -> tuple[int, bytes]:
        """Return status and body of a single request as administrator."""
        headers = {"Content-Type": "application/json"}
        sent = None if body is None else json.dumps(body)
        answer = self._server.request(method, path, body=sent, headers=headers, retries=False, timeout=60.0)
        return answer.status, answer.data

    def logs(self, pod: str, namespace: str = "default", **query: str) -> str:
        """What a container printed, the first one if none is named; nothing where there is none yet.

        `query` is that of the API, as `container` and `timestamps`.
        """
        place = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        if "container" not in query:
            status, found = self.read(place)
            if status != 200:
                return ""
            query["container"] = json.loads(found)["spec"]["containers"][0]["name"]
        status, text = self.read(f"{place}/log?{urllib.parse.urlencode(query)}")
        return text.decode() if status == 200 else ""

    @functools.cached_property
    def _server(self) -> urllib3.HTTPSConnectionPool:
        """The API server, with the administrator's certificate."""
        config = json.loads(self.local.kubeconfig().read_text(encoding="utf-8"))
        [cluster], [user] = config["clusters"], config["users"]
        context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["cluster"]["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as both:
            for key in ("client-certificate-data", "client-key-data"):
                both.write(base64.b64decode(user["user"][key]))
            both.flush()
            context.load_cert_chain(both.name)
        place = urllib3.util.parse_url(cluster["cluster"]["server"])
        return urllib3.HTTPSConnectionPool(place.hostname, place.port, maxsize=8, ssl_context=context)

    def helm(
        self, *arguments: str, values: Json | None = None, major: int = 3
    ) -> subprocess.CompletedProcess[str]:
        """Run Helm 3 or 4 in the project's directory; `values` are passed on standard input."""
        return subprocess.run(
            [str(self.local.helm(major)), *arguments, *(() if values is None else ("-f", "-"))],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(self.local.kubeconfig())},
            input=json.dumps(values or {}),
            capture_output=True,
            text=True,
            check=False,
        )

    def apply(self, objects: Iterable[Json]) -> None:
        self.kubectl("apply", "-f", "-", stdin=manifest(objects))

    def delete(self, objects: Iterable[Json]) -> None:
        """Delete the objects that still exist."""
        self.kubectl("delete", "-f", "-", "--ignore-not-found", "--timeout=300s", stdin=manifest(objects))

    def start(self, *names: str, **how: Any) -> None:
        """Claims and pods of these names, `how` as for `claim_and_pod`; they run, prepared at the first try."""
        self.apply(one for name in names for one in claim_and_pod(name, **how))
        self.wait_running(*names, namespace=how.get("namespace", "default"))

    def refused(self, objects: Iterable[Json]) -> str:
        """What the API server says of objects that it does not take."""
        done = self._run_kubectl(("apply", "-f", "-", "--dry-run=server"), manifest(objects))
        assert done.returncode, done.stdout
        return done.stderr

    def apply_in_turn(self, objects: Iterable[Json]) -> None:
        """Apply the objects one after the other, and see each pod run before the next.

        For claims that fill a shared device to the brim: while the scheduler stores an allocation, it can count
        the capacity twice, once as in flight and once as stored, and a pod that would fit is put back for up
        to five minutes.
        """
        for one in objects:
            self.apply([one])
            if one["kind"] == "Pod":
                metadata = one["metadata"]
                self.wait_running(metadata["name"], namespace=metadata.get("namespace", "default"))

    def rolled_out(self, what: str = DAEMONSET, namespace: str = NAMESPACE) -> None:
        self.kubectl("rollout", "status", what, "-n", namespace, "--timeout=300s")

    def roll_out(self) -> None:
        """Replace the driver's instance by a new one."""
        self.kubectl("rollout", "restart", DAEMONSET, "-n", NAMESPACE)
        self.rolled_out()

    def token_of(self, pod: str, account: str = "gpu-dra-driver", namespace: str = NAMESPACE) -> str:
        """As a pod of the account has it, bound to the pod and so to the node."""
        bound = ("--bound-object-kind", "Pod", "--bound-object-name", pod)
        return self.kubectl("create", "token", account, "-n", namespace, *bound).strip()

    def wait_unschedulable(self, pod: str, why: str = "", namespace: str = "default") -> None:
        def reported() -> bool:
            conditions = self.pod(pod, namespace)["status"].get("conditions", [])
            return any(
                one.get("reason") == "Unschedulable" and why in one.get("message", "") for one in conditions
            )

        wait_for(f"pod {pod} to be unschedulable", reported)

    def slices(self) -> list[Json]:
        return self.get("resourceslices")["items"]

    def devices(self) -> list[Json]:
        return [device for entry in self.slices() for device in entry["spec"].get("devices", [])]

    def pool_is_whole(self) -> bool:
        """Whether the node's slices are all of one generation: the driver writes them one after the other."""
        specs = [entry["spec"] for entry in self.slices()]
        mine = ("gpu.nvidia.com", self.node)
        pools = [spec["pool"] for spec in specs if (spec["driver"], spec.get("nodeName")) == mine]
        reported = {(pool["generation"], pool["resourceSliceCount"]) for pool in pools}
        return len(reported) == 1 and reported.pop()[1] == len(pools)

    def pod(self, name: str, namespace: str = "default") -> Json:
        return self.get("pod", name, "-n", namespace)

    def wait_running(
        self, *names: str, namespace: str = "default", timeout_s: float | None = None, every_s: float = 0.1
    ) -> float:
        """Seconds until all the pods run; the events of one that does not are in the failure.

        Without a limit given, the driver must have prepared their claims at the first try.
        """
        at_once, timeout_s = timeout_s is None and not SECOND_TRY, timeout_s or SLOW_S
        started = time.monotonic()
        waiting = set(names)
        while waiting:
            pods = self.get("pods", "-n", namespace)["items"]
            running = {pod["metadata"]["name"] for pod in pods if _is_running(pod)}
            waiting -= running
            if waiting and time.monotonic() - started > timeout_s:
                reported = "\n".join(self.reports_about(name, namespace) for name in sorted(waiting))
                pytest.fail(f"not running after {timeout_s:.0f} s: {sorted(waiting)}\n{reported}")
            time.sleep(every_s)
        took = time.monotonic() - started
        if at_once:
            refused = {name: self.refusals(name, namespace) for name in names}
            assert not any(refused.values()), f"{refused}, which ran only after {took:.0f} s"
        return took

    def refusals(self, pod: str, namespace: str) -> list[str]:
        """Return the kubelet's messages about failed Prepares of the pod's claims."""
        uid = self.pod(pod, namespace)["metadata"]["uid"]  # others of this name may have been there before
        of_pod = f"--field-selector=involvedObject.uid={uid},reason=FailedPrepareDynamicResources"
        messages = [event["message"] for event in self.get("events", "-n", namespace, of_pod)["items"]]
        return [text for text in messages if "NodePrepareResources" in text or "is not registered" in text]

    def reports_about(self, pod: str, namespace: str) -> str:
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
        which = {"container": container} if container else {}
        looks = [""]

        def printed() -> bool:
            # It prints a line for each device, and the log has one after the other.
            looks.append(self.logs(pod, namespace, **which))
            return bool(looks[-1]) and looks[-1] == looks[-2]

        wait_for(f"output of nvidia-smi in {pod}", printed, every_s=0.2)
        text = looks[-1]
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

    def staying_pods(self, component: str | None = None) -> list[Json]:
        """The driver's pods that are not on their way out, the oldest first; `component` is node or mps."""
        pods = [
            pod
            for pod in self.driver_pods()
            if "deletionTimestamp" not in pod["metadata"]
            and component in (None, pod["metadata"].get("labels", {}).get("app.kubernetes.io/component"))
        ]
        return sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def driver_is_ready(self) -> bool:
        """Whether every pod of the driver that is not on its way out is ready."""
        pods = self.staying_pods()
        return bool(pods) and all(
            any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in pod["status"].get("conditions", [])
            )
            for pod in pods
        )

    def driver_has_settled(self) -> bool:
        """Whether the driver is ready, no older pod of it is still ending, and the slices are whole."""
        return (
            self.driver_is_ready()
            and len(self.driver_pods()) == len(self.staying_pods())
            and len(self.staying_pods("node")) == 1
            and self.pool_is_whole()
        )

    def logs_of(self, selector: str, namespace: str = "default") -> list[list[str]]:
        """The UUIDs that each of the pods printed."""
        names = [
            pod["metadata"]["name"] for pod in self.get("pods", "-n", namespace, "-l", selector)["items"]
        ]
        return [self.seen_by(name, namespace=namespace) for name in names]

    def make_namespace(self, name: str, labels: dict[str, str] | None = None) -> None:
        """Create a namespace with its default account, which a controller creates and every pod needs."""
        metadata = {"name": name, "labels": labels or {}}
        self.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
        account = ("get", "serviceaccount", "default", "-n", name, "--ignore-not-found")
        wait_for(f"the default account of {name}", lambda: self.kubectl(*account))

    def inspect(self, *arguments: str) -> list[Json]:
        """What `gpu-dra-driver inspect` prints for the simulated machine of the node."""
        program = Path(sys.executable).parent / "gpu-dra-driver"
        command = [str(program), "inspect", "-o", "json", "--node-name", self.node, *arguments]
        command += ["--simulate", "dgx-h100", "--simulator-dir", str(SIMULATOR_DIR)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["items"]

    def simulate(self, *arguments: str, directory: Path = SIMULATOR_DIR, check: bool = True) -> str:
        """Change the simulated machine under the running driver; what the command says, or why not."""
        program = Path(sys.executable).parent / "gpu-dra-driver"
        command = [str(program), "simulate", *arguments, "--simulator-dir", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not (check and done.returncode), done.stderr
        return done.stdout or done.stderr


def install(cluster: Cluster, values: str = "e2e") -> None:
    """Apply the chart with values of `hack/cluster/values` over the installation, and wait until the old
    one is gone.
    """
    applied = cluster.kubectl("apply", "--filename", "-", stdin=rendered(cluster, values))
    cluster.rolled_out()
    if "daemonset.apps/gpu-dra-driver-mps" in applied:
        # A moment later there may be no pod of it yet, and the others are all ready.
        wait_for("the MPS host's pod", lambda: cluster.staying_pods("mps"))
    wait_for("the driver to have settled", cluster.driver_has_settled)


def uninstall(cluster: Cluster, *more: str) -> None:
    """Delete what `install` created, with further arguments for kubectl."""
    cluster.kubectl("delete", "--filename", "-", "--timeout=300s", *more, stdin=rendered(cluster, "e2e"))


def install_plain(cluster: Cluster, instead_of: str) -> None:
    """Installs the values `e2e` again, without objects that only other values have."""
    plain = {_identity(one) for one in objects(cluster, "e2e")}
    more = [one for one in objects(cluster, instead_of) if _identity(one) not in plain]
    if more:
        # Including its pods: an MPS host that exits later would remove the socket of the next one.
        cluster.kubectl(
            *("delete", "-f", "-", "--ignore-not-found", "--cascade=foreground", "--timeout=300s"),
            stdin=yaml.safe_dump_all(more),
        )
        wait_for("the MPS host's pod to be gone", lambda: not _mps_pods(cluster))
    install(cluster)


@contextmanager
def installed(cluster: Cluster, values: str, is_there: Callable[[], Any]) -> Iterator[Cluster]:
    """The driver with other values, by which something is published; afterwards the plain one again."""
    install(cluster, values)
    wait_for(f"what {values} publishes", lambda: is_there() and cluster.pool_is_whole())
    yield cluster
    install_plain(cluster, instead_of=values)
    wait_for("plain devices", lambda: cluster.devices() and not is_there() and cluster.pool_is_whole())


def rendered(cluster: Cluster, values: str) -> str:
    """The chart's objects with the values `e2e`, and others of `hack/cluster/values` on top of them."""
    return cluster.local.manifests(*dict.fromkeys(("e2e", values)))


def objects(cluster: Cluster, values: str) -> list[Json]:
    return [one for one in yaml.safe_load_all(rendered(cluster, values)) if one]


def _identity(one: Json) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _mps_pods(cluster: Cluster) -> list[Json]:
    return [pod for pod in cluster.driver_pods() if "gpu-dra-driver-mps" in pod["metadata"]["name"]]


WORKLOAD, UBUNTU = "local/workload:e2e", "docker.io/library/ubuntu:22.04"
STAY = "nvidia-smi -L; exec sleep 3600"


def manifest(objects: Iterable[Json]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def container(
    name: str = "main", *claims: str, command: str = STAY, image: str = WORKLOAD, **more: Any
) -> Json:
    """One that uses these claims of its pod."""
    used = {"claims": [{"name": one} for one in claims]} if claims else {}
    return {"name": name, "image": image, "command": ["sh", "-c", command], "resources": used, **more}


def pod(name: str, *containers: Json, namespace: str = "default", **spec: Any) -> Json:
    """A pod that ends quickly and is not restarted."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": list(containers),
            **spec,
        },
    }


def pods_of(template: str, *names: str, image: str = UBUNTU) -> list[Json]:
    """Each with a claim of this template."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": template}]
    return [pod(name, container("main", "gpu", image=image), resourceClaims=claims) for name in names]


def claim(
    name: str,
    device_class: str = "gpu.nvidia.com",
    *,
    request: str = "device",
    namespace: str = "default",
    selector: str = "",
    parameters: Json | None = None,
    **exactly: Any,
) -> Json:
    """`selector` is CEL, `parameters` are the driver's, and `exactly` is what else the request says."""
    if selector:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    devices: Json = {"requests": [{"name": request, "exactly": {"deviceClassName": device_class, **exactly}}]}
    if parameters:
        devices["config"] = [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": devices},
    }


def claim_template(name: str, **how: Any) -> Json:
    """A template of such claims."""
    made = claim(name, request="gpu", **how)
    return made | {"kind": "ResourceClaimTemplate", "spec": {"spec": made["spec"]}}


def gpu_config(**fields: Any) -> Json:
    """Parameters of the driver."""
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", **fields}


def claim_and_pod(
    name: str,
    device_class: str = "gpu.nvidia.com",
    *,
    namespace: str = "default",
    command: str = STAY,
    **how: Any,
) -> list[Json]:
    """A pod and a claim of its own, both of this name."""
    used = [{"name": "device", "resourceClaimName": name}]
    return [
        claim(name, device_class, namespace=namespace, **how),
        pod(name, container("main", "device", command=command), namespace=namespace, resourceClaims=used),
    ]


_APIS = {
    "/api/v1": ("namespaces", "nodes"),
    "/api/v1/namespaces/{}": ("events", "pods"),
    "/apis/apps/v1/namespaces/{}": ("daemonsets",),
    "/apis/resource.k8s.io/v1": ("deviceclasses", "resourceslices"),
    "/apis/resource.k8s.io/v1/namespaces/{}": ("resourceclaims", "resourceclaimtemplates"),
}
_PARENTS = {kind: api for api, kinds in _APIS.items() for kind in kinds}
_PLURALS = {re.sub("(?<=ss)es$|s$", "", kind): kind for kind in _PARENTS} | {kind: kind for kind in _PARENTS}


def _path_of(arguments: Sequence[str]) -> str | None:
    """The path that these arguments of `kubectl get` lead to, or None where that is kubectl's own affair."""
    namespace, names, query = "default", [], {}
    rest = iter(arguments)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag == "-n":
            namespace = next(rest)
        elif flag == "-A":
            namespace = ""
        elif flag == "-l":
            query["labelSelector"] = next(rest)
        elif flag == "--field-selector":
            query["fieldSelector"] = value or next(rest)
        elif flag.startswith("-"):
            return None
        else:
            names.append(word)
    if not names or names[0] not in _PLURALS or len(names) > 2:
        return None
    plural = _PLURALS[names[0]]
    parent = (
        _PARENTS[plural].format(namespace) if namespace else _PARENTS[plural].removesuffix("/namespaces/{}")
    )
    return "/".join((parent, plural, *names[1:])) + (f"?{urllib.parse.urlencode(query)}" if query else "")


def _is_running(pod: Json) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    return pod["status"].get("phase") == "Running" and all("running" in one["state"] for one in statuses)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the pods, the last events and the end of the driver's log to the report of a failed test."""
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
    if not all(row.pid for row in cluster.local.state()):
        pytest.fail("the cluster of hack/cluster is not up; run these tests by `make e2e`")
    wait_for("every component of the cluster to answer", cluster.local.is_up)
    return cluster


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards no pod, claim, CDI spec or record of the test may remain."""
    wait_for("the driver's pods to be ready", _cluster.driver_is_ready)
    yield _cluster
    kinds = "pods,resourceclaims,resourceclaimtemplates"
    _cluster.kubectl("delete", kinds, "--all", "-n", "default", "--timeout=300s")
    wait_for("the node to be clean", lambda: not _cluster.leftovers())


@pytest.fixture
def example(cluster: Cluster) -> Iterator[Callable[..., None]]:
    """Apply a folder of examples/, as its README says, and delete it afterwards."""
    applied: list[str] = []

    def apply(name: str, *, in_turn: bool = False) -> None:
        applied.append(name)
        if in_turn:
            cluster.apply_in_turn(objects_of(name))
        else:
            for one in objects_of(name):
                if one["kind"] == "Namespace":
                    cluster.make_namespace(one["metadata"]["name"], one["metadata"].get("labels"))
            cluster.kubectl("apply", "-f", f"examples/{name}")

    yield apply
    for name in applied:
        cluster.kubectl("delete", "-f", f"examples/{name}", "--ignore-not-found", "--timeout=300s")


def objects_of(example: str) -> list[Json]:
    """The documents of an example."""
    files = sorted((ROOT / "examples" / example).glob("*.yaml"))
    documents = (one for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8")))
    return [one for one in documents if one]


def with_test_workload(name: str) -> list[Json]:
    """Return the objects of an example, with the test workload instead of its programs: it prints its GPUs.
    That of a Job then ends.
    """
    documents = objects_of(name)
    for document in documents:
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        rest = "" if document["kind"] == "Job" else "; exec sleep 3600"
        for container in pod.get("containers", ()):
            pod["terminationGracePeriodSeconds"] = 1
            container["image"] = "local/workload:e2e"
            container["command"] = ["sh", "-c", f"nvidia-smi -L{rest}"]
            for key in ("args", "startupProbe", "readinessProbe"):
                container.pop(key, None)
    return documents
