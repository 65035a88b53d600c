"""Pods get exactly their devices: the examples, and what users do with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import (
    ROOT,
    Cluster,
    Json,
    claim,
    claim_and_pod,
    claim_template,
    container,
    gpu_config,
    objects_of,
    pod,
    pods_of,
    wait_for,
    with_test_workload,
)
from tests.e2e.podresources import uses
from tests.fakes.tables import tabled

pytestmark = pytest.mark.cluster

EXAMPLES = ROOT / "examples"
Example = Callable[[str], None]


BURST = claim_template("burst")
NAMES = [f"burst-{number}" for number in range(8)]


@pytest.mark.core
def test_pod_sees_exactly_its_gpu(cluster: Cluster, example: Example) -> None:
    example("one-gpu")
    took = cluster.wait_running("one-gpu")
    print(f"running after {took:.2f} s")
    seen = cluster.seen_by("one-gpu")
    assert len(seen) == 1
    assert seen == cluster.allocated(*cluster.claims_of("one-gpu"))


@pytest.mark.core
def test_ninth_pod_waits_until_a_gpu_is_free(cluster: Cluster) -> None:
    cluster.apply([BURST, *pods_of("burst", *NAMES)])
    print(f"eight pods running after {cluster.wait_running(*NAMES):.2f} s")
    seen = [uuid for name in NAMES for uuid in cluster.seen_by(name)]
    assert len(seen) == len(set(seen)) == 8
    cluster.apply(pods_of("burst", "burst-8"))
    cluster.wait_unschedulable("burst-8")
    first, *_, last = shown(cluster).splitlines()
    assert first == "8 GPUs: 0 free, 8 in use, 0 tainted; 1 claim or pod waits"
    assert re.match(r"[- ]+ default/burst-8-gpu-\w+ +burst-8 +waits: 0/1 nodes are available: ", last)
    cluster.kubectl("delete", "pod", "burst-0")
    cluster.wait_running("burst-8")
    totals = json.loads(shown(cluster, "-o", "json"))["totals"]
    assert (totals["waiting"], totals["used"]) == (0, 8)
    assert cluster.seen_by("burst-8") == seen[:1]


def shown(cluster: Cluster, *arguments: str) -> str:
    """What the command `cluster` prints."""
    command = [sys.executable, "-m", "dra_driver.cli.main", "cluster", *arguments]
    environment = {**os.environ, "KUBECONFIG": str(cluster.local.kubeconfig())}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.core
def test_two_pods_share_a_claim(cluster: Cluster, example: Example) -> None:
    example("shared-claim")
    cluster.wait_running("reader", "writer")
    assert cluster.seen_by("reader") == cluster.seen_by("writer") == cluster.allocated("shared")


@pytest.mark.core
def test_containers_see_only_their_own_claim(cluster: Cluster, example: Example) -> None:
    example("two-claims")
    cluster.wait_running("two-claims")
    first, second = cluster.seen_by("two-claims", "first"), cluster.seen_by("two-claims", "second")
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.core
def test_two_gpus_are_in_one_nvlink_domain(cluster: Cluster, example: Example) -> None:
    example("nvlink-domain")
    cluster.wait_running("nvlink-domain")
    seen = set(cluster.seen_by("nvlink-domain"))
    domains = {
        device["attributes"]["nvlinkDomain"]["string"]
        for device in cluster.devices()
        if device["attributes"]["uuid"]["string"] in seen
    }
    assert len(seen) == 2
    assert len(domains) == 1


@pytest.mark.core
def test_cel_selects_by_product_memory_and_compute_capability(cluster: Cluster, example: Example) -> None:
    example("selectors")
    cluster.wait_running("selectors")
    assert len(cluster.seen_by("selectors")) == 1


@tabled("expression")
def test_cel_refuses_what_does_not_fit(cluster: Cluster, expression: str) -> None:
    cluster.apply([claim_template("burst", selector=expression), *pods_of("burst", "burst-0")])
    cluster.wait_unschedulable("burst-0", "cannot allocate all claims")


@pytest.mark.core
def test_static_mig_device_made_while_the_driver_runs(cluster: Cluster, example: Example) -> None:
    whole = len(cluster.devices())
    cluster.simulate("mig", "enable", "7", "--force")
    try:
        made = cluster.simulate("mig", "create", "7", "1g.10gb", "0")
        gpu_instance = re.search(r"GPU instance (\d+)", made)
        assert gpu_instance, made
        wait_for(
            "the MIG device to be published",
            lambda: [d for d in cluster.devices() if d["attributes"]["type"]["string"] == "mig"],
        )
        assert len(_whole_gpus(cluster)) == whole - 1
        example("static-mig")
        cluster.wait_running("static-mig")
        seen = cluster.seen_by("static-mig")
        assert seen == cluster.allocated(*cluster.claims_of("static-mig"))
        assert seen[0].startswith("MIG-")
        cluster.kubectl("delete", "-f", "examples/static-mig")
        wait_for("the claim to be unprepared", lambda: not cluster.leftovers())
        cluster.simulate("mig", "destroy", "7", gpu_instance[1])
    finally:
        cluster.simulate("mig", "disable", "7", "--force")
    wait_for("the whole GPU to be offered again", lambda: len(_whole_gpus(cluster)) == whole)


def _whole_gpus(cluster: Cluster) -> list[Any]:
    return [device for device in cluster.devices() if device["attributes"]["type"]["string"] == "gpu"]


@pytest.mark.core
def test_admin_access_sees_all_gpus_while_one_is_in_use(cluster: Cluster, example: Example) -> None:
    example("one-gpu")
    cluster.wait_running("one-gpu")
    example("admin-access")
    cluster.wait_running("gpu-monitor", namespace="admin-access")
    everything = {device["attributes"]["uuid"]["string"] for device in cluster.devices()}
    assert set(cluster.seen_by("gpu-monitor", namespace="admin-access")) == everything
    cluster.kubectl("delete", "-f", "examples/admin-access", "--timeout=300s")
    assert len(cluster.seen_by("one-gpu")) == 1
    assert cluster.pod("one-gpu")["status"]["phase"] == "Running"


def test_extended_resource_needs_no_claim(cluster: Cluster, example: Example) -> None:
    example("extended-resource")
    cluster.wait_running("extended-resource")
    assert len(cluster.seen_by("extended-resource")) == 1


@pytest.fixture
def workload(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Apply an example with the test workload in the place of its programs, and delete it afterwards."""
    applied: list[list[Json]] = []

    def apply(name: str) -> None:
        documents = with_test_workload(name)
        for document in documents:
            if document["kind"] == "Namespace":
                cluster.make_namespace(document["metadata"]["name"], document["metadata"]["labels"])
        applied.append(documents)
        cluster.apply(documents)

    yield apply
    for documents in applied:
        cluster.delete(documents)


def test_each_pod_of_a_job_has_a_gpu_that_is_free_after_it(
    cluster: Cluster, workload: Callable[[str], None]
) -> None:
    workload("cuda-job")
    cluster.kubectl("wait", "--for=condition=complete", "job/cuda-job", "--timeout=300s")
    seen = cluster.logs_of("batch.kubernetes.io/job-name=cuda-job")
    assert [len(uuids) for uuids in seen] == [1] * 4
    wait_for("the claims of the Job's pods to be unprepared", lambda: not cluster.leftovers())


MONITORING = ("-n", "gpu-monitoring")


def test_monitoring_daemonset_sees_all_gpus_and_takes_none(
    cluster: Cluster, workload: Callable[[str], None]
) -> None:
    workload("monitoring-daemonset")
    cluster.rolled_out("daemonset/dcgm-exporter", "gpu-monitoring")
    (seen,) = cluster.logs_of("app.kubernetes.io/name=dcgm-exporter", namespace="gpu-monitoring")
    assert set(seen) == {device["attributes"]["uuid"]["string"] for device in cluster.devices()}
    inside = cluster.kubectl("exec", "daemonset/dcgm-exporter", *MONITORING, "--", "ls", "/dev/nvidia-caps")
    assert {"nvidia-cap1", "nvidia-cap2"} <= set(inside.split())
    cluster.apply(claim_and_pod("user", count=8))
    cluster.wait_running("user")
    assert set(cluster.seen_by("user")) == set(seen)
    with_caps = cluster.kubectl("exec", "user", "-n", "default", "--", "ls", "/dev")
    assert "nvidia-caps" not in with_caps.split()


def test_the_kubelet_shows_a_monitor_which_container_has_which_gpu(
    cluster: Cluster, example: Example, workload: Callable[[str], None]
) -> None:
    """As for the DCGM exporter: the kubelet reports driver, pool and device, and the slices have the UUID."""
    workload("monitoring-daemonset")
    example("two-claims")
    example("shared-claim")
    cluster.wait_running("two-claims", "reader", "writer")
    cluster.rolled_out("daemonset/dcgm-exporter", "gpu-monitoring")
    uuids = {
        (entry["spec"]["driver"], entry["spec"]["pool"]["name"], device["name"]): device["attributes"]["uuid"]
        for entry in cluster.slices()
        for device in entry["spec"].get("devices", [])
    }
    reported: dict[tuple[str, str, str], list[str]] = {}
    # Of pods that share a claim and start together the kubelet may list each device twice, and not with the same files.
    for use in uses():
        assert use.claim_namespace == use.namespace
        uid = cluster.get("resourceclaim", use.claim, "-n", use.claim_namespace)["metadata"]["uid"]
        # The kubelet lists the CDI devices of the claim's devices before this one too.
        assert f"k8s.gpu.nvidia.com/claim={uid}-{use.device}" in use.cdi_devices
        label = (use.namespace, use.pod, use.container)
        uuid = uuids[use.driver, use.pool, use.device]["string"]
        reported[label] = list(dict.fromkeys([*reported.get(label, []), uuid]))
    for name, part in (("two-claims", "first"), ("two-claims", "second"), ("reader", None), ("writer", None)):
        (label,) = [key for key in reported if key[:2] == ("default", name) and part in (None, key[2])]
        assert reported[label] == cluster.seen_by(name, part)
    (monitor,) = [label for label in reported if label[0] == "gpu-monitoring"]
    assert sorted(reported[monitor]) == sorted(uuid["string"] for uuid in uuids.values())
    assert len(reported) == 5


def test_management_needs_admin_access_and_admin_access_the_label_of_the_namespace(cluster: Cluster) -> None:
    """Kubernetes checks the label, the policy and the driver check adminAccess."""
    managing = gpu_config(management=True)
    refused = cluster.refused(claim_and_pod("manager", parameters=managing))
    assert "management requires adminAccess: true on request 'device'" in refused
    asks = claim_and_pod("manager", parameters=managing, adminAccess=True)
    assert "resource.kubernetes.io/admin-access" in cluster.refused(asks)
    # Another user's class: only the driver knows what it allocates.
    own = {
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "any.example.com"},
        "spec": {"selectors": [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}]},
    }  # fmt: skip
    cluster.apply([own])
    try:
        cluster.apply(claim_and_pod("manager", "any.example.com", parameters=managing))
        wait_for(
            "the driver's refusal",
            lambda: any(
                "adminAccess: true on request 'device'" in text
                for text in cluster.refusals("manager", "default")
            ),
        )
    finally:
        cluster.kubectl("delete", "deviceclass", "any.example.com")


def test_feature_discovery_needs_no_privileges_to_see_all_gpus(
    cluster: Cluster, workload: Callable[[str], None]
) -> None:
    name = "gpu-feature-discovery"
    workload(name)
    cluster.rolled_out(f"daemonset/{name}", name)
    (seen,) = cluster.logs_of(f"app.kubernetes.io/name={name}", namespace=name)
    assert set(seen) == {device["attributes"]["uuid"]["string"] for device in cluster.devices()}


FOREIGN = (
    "batch.volcano.sh/", "config.kueue.x-k8s.io/", "jobset.x-k8s.io/", "kubevirt.io/", "kueue.x-k8s.io/",
    "scheduling.run.ai/", "scheduling.volcano.sh/",
)  # fmt: skip
"""API groups of other projects, which this cluster does not have."""


def check_at_the_server(cluster: Cluster, documents: list[Json]) -> None:
    """The API server must know each field and each value of them."""
    for document in documents:
        if document["kind"] == "Namespace":
            cluster.make_namespace(document["metadata"]["name"], document["metadata"]["labels"])
    known = [document for document in documents if not document["apiVersion"].startswith(FOREIGN)]
    strictly = ("apply", "--dry-run=server", "--validate=strict", "-f", "-")
    reported = cluster.kubectl(*strictly, stdin=yaml.safe_dump_all(known))
    assert len(reported.splitlines()) == len(known)


@pytest.mark.parametrize(
    "folder", sorted(path for path in EXAMPLES.iterdir() if path.is_dir()), ids=lambda it: it.name
)
def test_api_server_takes_every_example(cluster: Cluster, folder: Path) -> None:
    check_at_the_server(cluster, objects_of(folder.name))


def test_api_server_takes_what_the_page_on_schedulers_shows(cluster: Cluster) -> None:
    page = (ROOT / "docs/schedulers.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    documents = [document for text in blocks for document in yaml.safe_load_all(text)]
    objects = [document for document in documents if "kind" in document]
    assert {"ResourceClaim", "ResourceClaimTemplate", "DeviceClass"} <= {one["kind"] for one in objects}
    check_at_the_server(cluster, objects)


def test_a_quota_of_kubernetes_counts_as_the_page_on_schedulers_says(cluster: Cluster) -> None:
    page = (ROOT / "docs/schedulers.md").read_text()
    [quota] = re.findall(
        r"^```yaml\n(apiVersion: v1\nkind: ResourceQuota\n.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    cluster.make_namespace("team-a")
    cluster.kubectl("apply", "-n", "team-a", "-f", "-", stdin=quota)
    try:
        counted = ("get", "resourcequota", "gpus", "-n", "team-a", "-o", "jsonpath={.status.used}")
        wait_for("the quota to be counted", lambda: cluster.kubectl(*counted))

        def refusal(request: Json) -> str | None:
            """Of a claim with this request; nothing is stored."""
            tried = claim("tried", namespace="team-a")
            tried["spec"]["devices"]["requests"] = [{"name": "gpu", **request}]
            try:
                cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(tried))
            except AssertionError as error:
                return "quota" if "exceeded quota: gpus" in str(error) else str(error)
            return None

        def some(count: int, name: str) -> Json:
            return {"exactly": {"deviceClassName": name, "count": count}}

        whole, share, mig = "gpu.nvidia.com", "shares.gpu.nvidia.com", "mig.nvidia.com"
        either = [{"name": name[:3], "deviceClassName": name} for name in (mig, whole)]
        assert refusal(some(8, whole)) is None
        assert refusal(some(9, whole)) == "quota", "claims count for requests.nvidia.com/gpu"
        assert refusal({"exactly": {"deviceClassName": whole, "allocationMode": "All"}}) == "quota"
        assert refusal(some(16, share)) is None
        assert refusal(some(17, share)) == "quota"
        assert refusal(some(1, mig)) == "quota"
        assert refusal(some(1, "timeslice.gpu.nvidia.com")) == "quota"
        assert refusal({"firstAvailable": either}) == "quota", "it counts for each class that it names"
        assert refusal({"firstAvailable": either[1:]}) is None
    finally:
        cluster.kubectl("delete", "namespace", "team-a", "--timeout=300s")


@pytest.mark.core
def test_refused_parameters_are_shown_on_the_pod_and_the_claim(cluster: Cluster) -> None:
    """By the kubelet with the driver's words, and by the driver."""
    # Kubernetes takes that for a quantity, and so does the policy for parameters.
    beyond = gpu_config(sharing={"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "1e65"}})
    wrong, pod = claim_and_pod("wrong", parameters=beyond)
    wrong["spec"]["devices"]["config"][0]["requests"] = ["device"]
    cluster.apply([wrong, pod])
    uid = cluster.pod("wrong")["metadata"]["uid"]

    def messages() -> list[str]:
        found = cluster.get("events", "--field-selector", f"involvedObject.uid={uid}")["items"]
        return [one["message"] for one in found if one["reason"] == "FailedPrepareDynamicResources"]

    def reported(kind: str) -> str:
        return cluster.kubectl("describe", kind, "wrong").partition("Events:")[2]

    wait_for(
        "the cause in the kubelet's event",
        lambda: any("1e65" in message and "requests device" in message for message in messages()),
    )
    wait_for("the cause on the claim", lambda: "PrepareFailed" in reported("resourceclaim"))
    assert "sharing.mpsConfig" in reported("resourceclaim")
    wait_for("the event on the pod", lambda: "PrepareFailed" in reported("pod"))


@pytest.mark.core
def test_containers_of_every_kind_see_the_claim(cluster: Cluster) -> None:
    """A claim that no container uses is prepared as well."""
    once = container("first", "gpu", command="nvidia-smi -L")
    sidecar = container("sidecar", "gpu", restartPolicy="Always")
    claims = [{"name": name, "resourceClaimTemplateName": "burst"} for name in ("gpu", "unused")]
    user = pod("kinds", container("main", "gpu"), initContainers=[once, sidecar], resourceClaims=claims)
    cluster.apply([BURST, user])
    cluster.wait_running("kinds")
    [first, *others] = [cluster.seen_by("kinds", name) for name in ("first", "sidecar", "main")]
    assert (len(first), others) == (1, [first, first])
    assert len(cluster.leftovers()) == 4, "record and spec of both claims"


def metrics_of_kubelet(cluster: Cluster) -> str:
    return cluster.kubectl("get", "--raw", f"/api/v1/nodes/{cluster.node}/proxy/metrics")


def test_kubelet_counts_the_claims_in_use(cluster: Cluster) -> None:
    def in_use() -> list[str]:
        pattern = r'^dra_resource_claims_in_use\{driver_name="gpu.nvidia.com"\} (\S+)'
        return re.findall(pattern, metrics_of_kubelet(cluster), re.MULTILINE)

    cluster.start("used")
    wait_for("one claim in use", lambda: in_use() == ["1"])
    cluster.kubectl("delete", "pod", "used")
    wait_for("no claim in use", lambda: in_use() in (["0"], []))


def test_kubelet_measures_prepare_and_unprepare(cluster: Cluster) -> None:
    """No assertion on time: the figures of the kubelet itself are printed for the record."""
    text = metrics_of_kubelet(cluster)
    for method in ("NodePrepareResources", "NodeUnprepareResources"):
        found = {}
        for kind in ("sum", "count"):
            labels = rf'driver_name="gpu.nvidia.com",grpc_status_code="OK",method_name="[^"]*{method}"'
            pattern = rf"^dra_grpc_operations_duration_seconds_{kind}\{{{labels}\}} (\S+)"
            match = re.search(pattern, text, re.MULTILINE)
            assert match, f"the kubelet has no figure for {method}"
            found[kind] = float(match[1])
        print(f"{method}: {found['sum'] / found['count'] * 1000:.1f} ms, mean of {found['count']:.0f} calls")
        assert found["count"] > 0
