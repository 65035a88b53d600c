"""The chart next to other drivers named gpu.nvidia.com: what it finds through the API server, and what it then does.

Helm renders, so these tests run in `make e2e`, which builds it; they need no cluster.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster import chart

from tests.deploy.test_chart import chart_with_notes
from tests.fakes.tables import tabled

__all__ = ["chart_with_notes"]

pytestmark = pytest.mark.cluster

Json = dict[str, Any]

KINDS = {
    ("", "v1", "Namespace", "namespaces"),
    ("", "v1", "Node", "nodes"),
    ("apps", "v1", "DaemonSet", "daemonsets"),
    ("resource.k8s.io", "v1", "DeviceClass", "deviceclasses"),
    ("nvidia.com", "v1alpha1", "GPUCluster", "gpuclusters"),
    # Helm 4 wants to know all kinds of objects that the chart has.
    ("", "v1", "ConfigMap", "configmaps"),
    ("", "v1", "ServiceAccount", "serviceaccounts"),
    ("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles"),
    ("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings"),
    ("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
    (
        "admissionregistration.k8s.io",
        "v1",
        "ValidatingAdmissionPolicyBinding",
        "validatingadmissionpolicybindings",
    ),
}
NAMESPACED = ("daemonsets", "configmaps", "serviceaccounts")
NVIDIAS: Json = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {
        "name": "dra-driver-nvidia-gpu-kubelet-plugin",
        "namespace": "nvidia",
        "labels": {"app.kubernetes.io/name": "dra-driver-nvidia-gpu"},
        "annotations": {"meta.helm.sh/release-name": "nvidias", "meta.helm.sh/release-namespace": "nvidia"},
    },
    "spec": {
        "selector": {"matchLabels": {"dra-driver-nvidia-gpu-component": "kubelet-plugin"}},
        "template": {
            "spec": {
                "containers": [
                    {"name": "compute-domains", "image": "registry/dra-driver-nvidia-gpu:v0.4.1"},
                    {
                        "name": "gpus",
                        "image": "registry/mirrored:v1",
                        "command": ["bash", "-c"],
                        "args": ["gpu-kubelet-plugin -v $(LOG_VERBOSITY)"],
                    },
                ]
            }
        },
    },
}


class Cluster:
    """An API server with a few kinds of objects, as far as Helm's `lookup` reads them."""

    def __init__(self, directory: Path) -> None:
        cluster = self
        self.objects: dict[str, list[Json]] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = cluster.answer(self.path.partition("?")[0])
                body = json.dumps(found or {"kind": "Status", "reason": "NotFound", "code": 404}).encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.kubeconfig = directory / "kubeconfig"
        address = f"http://127.0.0.1:{self.server.server_port}"
        named = {"name": "fake", "cluster": {"server": address}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "fake"}}
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [named],
                    "contexts": [context],
                    "users": [{"name": "fake", "user": {}}],
                    "current-context": "fake",
                }
            )
        )

    def answer(self, path: str) -> Json | None:
        if path == "/version":
            return {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = {group: f"{group}/{version}" for group, version, *_ in KINDS if group}
            groups = [
                {"name": group, "versions": [{"groupVersion": name, "version": name.partition("/")[2]}]}
                for group, name in sorted(versions.items())
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        for group, version, kind, plural in KINDS:
            root = f"/apis/{group}/{version}" if group else f"/api/{version}"
            served = f"{group}/{version}".lstrip("/")
            if path == root:
                resources = [
                    {"name": name, "kind": of, "namespaced": name in NAMESPACED, "verbs": ["get", "list"]}
                    for of_group, _, of, name in sorted(KINDS)
                    if of_group == group
                ]
                return {"kind": "APIResourceList", "groupVersion": served, "resources": resources}
            if path == f"{root}/{plural}":
                items = self.objects.get(plural, [])
                return {"kind": f"{kind}List", "apiVersion": served, "metadata": {}, "items": items}
            for item in self.objects.get(plural, []):
                if path == f"{root}/{plural}/{item['metadata']['name']}":
                    return {"kind": kind, "apiVersion": served} | item
        return None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(params=[3, 4], ids="helm {}".format)
def render(request: pytest.FixtureRequest, cluster: Cluster) -> Callable[..., str]:
    """What the chart gives on the cluster, or why it refuses."""

    def rendered(values: Json, *arguments: str, **more: Any) -> str:
        # Helm 4 reads the API versions from the cluster, Helm 3 does not.
        known = (
            "--disable-openapi-validation"
            if request.param == 4
            else "--api-versions=nvidia.com/v1alpha1/GPUCluster"
        )
        found = ("--dry-run=server", "--kubeconfig", str(cluster.kubeconfig), known, *arguments)
        try:
            return chart.template(values, *found, major=request.param, **more)
        except subprocess.CalledProcessError as error:
            return str(error.stderr)

    return rendered


def elsewhere(*expressions: Json) -> Json:
    """NVIDIA's DaemonSet with terms of node affinity, of one expression each."""
    terms = [{"matchExpressions": [one]} for one in expressions]
    daemonset = deepcopy(NVIDIAS)
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    daemonset["spec"]["template"]["spec"]["affinity"] = {"nodeAffinity": required}
    return daemonset


REFUSED = (
    "The DaemonSet dra-driver-nvidia-gpu-kubelet-plugin in the namespace nvidia (release nvidias) is NVIDIA's DRA "
    "driver, which serves gpu.nvidia.com on the same nodes: uninstall it first, or move node by node with a label "
    "(docs/migration.md). If the two never run on one node, set allowOtherDriver to true."
)
NOT_DRA = {"key": "gpus-by", "operator": "NotIn", "values": ["dra"]}
HERE = {"kubeletPlugin": {"nodeSelector": {"gpus-by": "dra"}}}


def test_chart_next_to_nvidias_driver_is_refused(render: Callable[..., str], cluster: Cluster) -> None:
    assert "kind: DaemonSet" in render({})
    cluster.objects["daemonsets"] = [NVIDIAS]
    assert REFUSED in render({})
    assert REFUSED in render(HERE)
    assert "kind: DaemonSet" in render({"allowOtherDriver": True})


@pytest.mark.parametrize(
    ("expressions", "values", "refused"),
    [
        ([NOT_DRA], HERE, False),
        ([NOT_DRA], {}, True),
        ([NOT_DRA, {"key": "other", "operator": "Exists"}], HERE, True),
        ([{"key": "gpus-by", "operator": "DoesNotExist"}], HERE, False),
        ([{"key": "gpus-by", "operator": "In", "values": ["nvidia"]}], HERE, False),
        ([{"key": "gpus-by", "operator": "In", "values": ["nvidia", "dra"]}], HERE, True),
        ([{"key": "gpus-by", "operator": "NotIn", "values": ["nvidia"]}], HERE, True),
    ],
)
def test_affinity_that_keeps_nvidias_driver_off_the_nodes_is_enough(
    render: Callable[..., str], cluster: Cluster, expressions: list[Json], values: Json, refused: bool
) -> None:
    cluster.objects["daemonsets"] = [elsewhere(*expressions)]
    assert (REFUSED in render(values)) == refused


def test_nvidias_driver_for_compute_domains_alone_is_not_an_obstacle(
    render: Callable[..., str], cluster: Cluster
) -> None:
    alone = deepcopy(NVIDIAS)
    del alone["spec"]["template"]["spec"]["containers"][1]
    cluster.objects["daemonsets"] = [alone]
    assert "kind: DaemonSet" in render({})


def test_classes_of_another_release_are_refused(render: Callable[..., str], cluster: Cluster) -> None:
    metadata = {"name": "gpu.nvidia.com", "annotations": NVIDIAS["metadata"]["annotations"]}
    cluster.objects["deviceclasses"] = [{"metadata": metadata}]
    assert "The DeviceClass gpu.nvidia.com belongs to the release nvidias" in render({})


@tabled("name", "release", "values", "reported")
def test_chart_next_to_its_own_release_takes_other_nodes_alone(
    render: Callable[..., str], cluster: Cluster, name: str, release: str, values: Json, reported: str
) -> None:
    there = deepcopy(NVIDIAS)
    owner = {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": release}
    there["metadata"] = {"name": name, "namespace": release, "annotations": owner}
    driver = {"name": "driver", "env": [{"name": "DRIVER_NAME", "value": "gpu.nvidia.com"}]}
    there["spec"]["template"]["spec"] = {"nodeSelector": {"pool": "a"}, "containers": [driver]}
    cluster.objects["daemonsets"] = [there]
    assert reported in render(values)


@pytest.mark.parametrize("render", [3], indirect=True)
def test_notes_count_the_nodes_and_check_the_namespace(
    render: Callable[..., str], cluster: Cluster, chart_with_notes: Path
) -> None:
    def notes() -> str:
        shown = render({}, "--show-only", "templates/notes.yaml", chart=chart_with_notes)
        return str(yaml.safe_load(shown)["notes"])

    admits = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.objects["nodes"] = [{"metadata": {"name": "node"}}]
    cluster.objects["namespaces"] = [{"metadata": {"name": "gpu-dra-driver", "labels": admits}}]
    assert "No node is labelled as a GPU node" in notes()
    assert "has no label that allows privileged pods" not in notes()
    cluster.objects["nodes"][0]["metadata"]["labels"] = {"nvidia.com/gpu.present": "true"}
    del cluster.objects["namespaces"][0]["metadata"]["labels"]
    assert "The plugin runs on nodes that are labelled as GPU nodes: 1 of 1." in notes()
    assert "kubectl label namespace gpu-dra-driver pod-security.kubernetes.io/enforce=privileged" in notes()


@pytest.mark.parametrize("render", [3], indirect=True)  # Helm 4 takes objects only, which the notes are not
@tabled("values", "remedy")
def test_notes_warn_of_a_gpu_cluster(
    render: Callable[..., str], cluster: Cluster, chart_with_notes: Path, values: Json, remedy: str
) -> None:
    only = ("--show-only", "templates/notes.yaml")
    assert "GPUCluster" not in render(values, *only, chart=chart_with_notes)
    cluster.objects["gpuclusters"] = [{"metadata": {"name": "gpu-cluster"}}]
    text = yaml.safe_load(render(values, *only, chart=chart_with_notes))["notes"]
    assert "also named gpu.nvidia.com (GPUCluster gpu-cluster). Keep it off the nodes" in text
    assert remedy in text
