"""Containers find files that describe their devices, in the documented place and format."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import (
    CDI_DIR,
    DAEMONSET,
    NAMESPACE,
    PLUGIN_DIR,
    Cluster,
    Json,
    claim_template,
    container,
    pod,
    wait_for,
)
from tests.fakes.json_stream import json_documents

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

INSIDE = "/var/run/kubernetes.io/dra-device-attributes"
FILE = "gpu.nvidia.com-metadata.json"
VERSIONS = ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"]

REQUESTS = [
    {"name": "first", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}},
    {"name": "second", "firstAvailable": [{"name": "any", "deviceClassName": "gpu.nvidia.com"}]},
]


def pair() -> list[Json]:
    """A claim of two requests, with a container that uses both and one that uses the second."""
    template = claim_template("pair")
    template["spec"]["spec"]["devices"]["requests"] = REQUESTS
    both, second = container("both", "gpus"), container("second", "gpus")
    second["resources"]["claims"][0]["request"] = "second"
    claims = [{"name": "gpus", "resourceClaimTemplateName": "pair"}]
    return [template, pod("pair", both, second, resourceClaims=claims)]


def roll_out(cluster: Cluster, setting: str) -> None:
    """Change a variable of the driver's environment, and see the new version alone."""
    cluster.kubectl("set", "env", DAEMONSET, "-n", NAMESPACE, setting)
    cluster.rolled_out()

    def is_alone() -> bool:
        pods = cluster.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=node")["items"]
        return len(pods) == 1 and cluster.driver_is_ready()

    wait_for("the new version of the driver alone", is_alone, 300)


@pytest.fixture(scope="module")
def _describing(_cluster: Cluster) -> Iterator[Cluster]:
    """The driver writes the files in both versions; afterwards none again."""
    try:
        roll_out(_cluster, "DEVICE_METADATA=both")
        yield _cluster
    finally:
        roll_out(_cluster, "DEVICE_METADATA-")


@pytest.fixture
def describing(_describing: Cluster, cluster: Cluster) -> Cluster:
    return cluster


def inside(cluster: Cluster, pod: str, container: str, script: str) -> str:
    return cluster.kubectl("exec", pod, "-n", "default", "-c", container, "--", "sh", "-c", script)


def files_in(cluster: Cluster, pod: str, container: str) -> list[str]:
    """The files that a container finds, by their paths below the directory that is for them."""
    found = inside(cluster, pod, container, f"cd {INSIDE} && echo */*/*/*")
    return sorted(found.split())


def documents(text: str) -> list[Json]:
    """The objects of a stream of JSON."""
    return list(json_documents(text))


def results_of(cluster: Cluster, claim: str) -> list[Json]:
    return cluster.get("resourceclaim", claim, "-n", "default")["status"]["allocation"]["devices"]["results"]


def expected(cluster: Cluster, claim: str, request: str, pod_claim: str | None = None) -> list[Json]:
    """What the API server says of a top-level request of the claim, as the documents of its file."""
    metadata = cluster.get("resourceclaim", claim, "-n", "default")["metadata"]
    published = {device["name"]: device["attributes"] for device in cluster.devices()}
    devices: dict[str, list[Json]] = {}
    for result in results_of(cluster, claim):
        if result["request"].partition("/")[0] == request:
            devices.setdefault(result["request"], []).append(
                {
                    "driver": result["driver"],
                    "pool": result["pool"],
                    "name": result["device"],
                    "attributes": published[result["device"]],
                }
            )
    document = {
        "kind": "DeviceMetadata",
        "metadata": {"name": claim, "namespace": "default", "uid": metadata["uid"], "generation": 1},
        "requests": [{"name": name, "devices": entries} for name, entries in devices.items()],
    }
    if pod_claim is not None:
        document["podClaimName"] = pod_claim
    return [document | {"apiVersion": version} for version in VERSIONS]


def read_by_kubernetes(cluster: Cluster, text: str) -> list[str]:
    """The versions that Kubernetes' own reader finds in a file; it fails where a field is missing or wrong."""
    reader = str(cluster.local.metadata_reader())
    done = subprocess.run([reader], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def uuids_in(found: list[Json]) -> list[str]:
    """Of the devices in the newest version of a file."""
    return [
        device["attributes"]["uuid"]["string"]
        for request in found[0]["requests"]
        for device in request["devices"]
    ]


def left_on_the_host() -> list[str]:
    """What describes devices of any claim, and what has it mounted."""
    files = [*(PLUGIN_DIR / "dra-device-metadata").glob("*"), *CDI_DIR.glob("gpu.nvidia.com_metadata_*")]
    return [str(file) for file in files]


def delete_pod(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", "pod", name, "-n", "default", "--timeout=300s")
    wait_for("the claim to be unprepared", lambda: not cluster.leftovers(), 300)
    wait_for("its description to be gone from the host", lambda: not left_on_the_host(), 300)


def test_a_container_reads_what_its_gpu_is(describing: Cluster) -> None:
    describing.start("described")
    path = f"resourceclaims/described/device/{FILE}"
    assert files_in(describing, "described", "main") == [path]
    text = inside(describing, "described", "main", f"cat {INSIDE}/{path}")
    found = documents(text)
    assert found == expected(describing, "described", "device")
    assert read_by_kubernetes(describing, text) == VERSIONS
    assert uuids_in(found) == describing.seen_by("described") == describing.allocated("described")
    on_the_host = PLUGIN_DIR / "dra-device-metadata" / "default_described" / "device" / "metadata.json"
    assert documents(on_the_host.read_text()) == found
    tried = inside(
        describing,
        "described",
        "main",
        f"true 2>/dev/null >> {INSIDE}/{path} && echo written || echo refused",
    )
    assert tried.split()[-1] == "refused", "it is mounted read-only"
    delete_pod(describing, "described")


def test_each_request_of_a_claim_has_its_own_file(describing: Cluster) -> None:
    """A container that uses one request finds only that file."""
    describing.apply(pair())
    describing.wait_running("pair")
    [claim] = describing.claims_of("pair")
    paths = {name: f"resourceclaimtemplates/gpus/{name}/{FILE}" for name in ("first", "second")}
    assert files_in(describing, "pair", "both") == sorted(paths.values())
    assert files_in(describing, "pair", "second") == [paths["second"]]
    texts = {name: inside(describing, "pair", "both", f"cat {INSIDE}/{path}") for name, path in paths.items()}
    assert [read_by_kubernetes(describing, text) for text in texts.values()] == [VERSIONS, VERSIONS]
    found = {name: documents(text) for name, text in texts.items()}
    assert found == {name: expected(describing, claim, name, "gpus") for name in paths}
    assert [request["name"] for request in found["second"][0]["requests"]] == ["second/any"]
    assert (len(uuids_in(found["first"])), len(uuids_in(found["second"]))) == (2, 1)
    assert sorted(uuids_in(found["first"]) + uuids_in(found["second"])) == sorted(
        describing.seen_by("pair", "both")
    )
    assert uuids_in(found["second"]) == describing.seen_by("pair", "second")
    again = documents(inside(describing, "pair", "second", f"cat {INSIDE}/{paths['second']}"))
    assert again == found["second"]
    delete_pod(describing, "pair")
