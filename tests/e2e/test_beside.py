"""What comes with a GPU: device nodes of the host, devices of another driver, and other nodes of a fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.kubelet.plugin import KubeletPlugin, PluginSettings
from dra_driver.model.claim import Prepared
from tests.deploy.test_beside_compute_domains import CLASSES as COMPUTE_DOMAIN_CLASSES
from tests.e2e.conftest import Cluster, install, uninstall, wait_for
from tests.e2e.test_metadata import roll_out
from tests.kubelet.support import FakeClaims, Owner

pytestmark = pytest.mark.cluster

NICS = "dra.net"
CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": "dranet"},
    "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{NICS}"'}}]},
}


@pytest.fixture
def nics(cluster: Cluster) -> Iterator[dict[str, str]]:
    """A second driver as dranet is: an adapter behind each PCIe root, and RDMA only behind the last; the roots."""
    roots = sorted(
        {device["attributes"]["resource.kubernetes.io/pcieRoot"]["string"] for device in cluster.devices()}
    )
    assert len(roots) > 1
    devices = [
        {
            "name": f"nic-{number}",
            "attributes": {
                "dra.net/ifName": {"string": f"eth{number}"},
                "dra.net/rdma": {"bool": root == roots[-1]},
                "resource.kubernetes.io/pcieRoot": {"string": root},
            },
        }
        for number, root in enumerate(roots)
    ]
    published = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "adapters"},
        "spec": {
            "driver": NICS,
            "nodeName": cluster.node,
            "pool": {"name": cluster.node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }
    adapters = FakeClaims()
    # Nothing that a container would see.
    adapters.on_prepare = lambda claims: {ref.uid: Prepared(()) for ref in claims}
    plugin = KubeletPlugin(PluginSettings(NICS), adapters, Owner())
    plugin.start()
    try:
        wait_for(
            "the kubelet to know the second driver",
            lambda: plugin.registrar.status is not None and plugin.registrar.status.registered,
        )
        cluster.apply([CLASS, published])
        yield {device["name"]: root for device, root in zip(devices, roots, strict=True)}
        cluster.kubectl("delete", "-f", "examples/gpu-and-nic", "--ignore-not-found", "--timeout=300s")
        wait_for("the claim to be gone", lambda: not cluster.get("resourceclaims", "-A")["items"])
    finally:
        cluster.kubectl("delete", "resourceslice", "adapters", "--ignore-not-found", check=False)
        cluster.kubectl("delete", "deviceclass", "dranet", "--ignore-not-found", check=False)
        plugin.stop()
        if plugin.settings.plugin_dir.is_dir() and not any(plugin.settings.plugin_dir.iterdir()):
            plugin.settings.plugin_dir.rmdir()


def test_a_gpu_and_an_adapter_behind_one_root(cluster: Cluster, nics: dict[str, str]) -> None:
    cluster.kubectl("apply", "-f", "examples/gpu-and-nic")
    cluster.wait_running("gpu-and-nic")
    [name] = cluster.claims_of("gpu-and-nic")
    claim = cluster.get("resourceclaim", name, "-n", "default")
    found = {
        result["request"]: result["device"] for result in claim["status"]["allocation"]["devices"]["results"]
    }
    [gpu] = [device for device in cluster.devices() if device["name"] == found["gpu"]]
    wanted = sorted(nics.values())[-1]
    assert nics[found["nic"]] == wanted
    assert gpu["attributes"]["resource.kubernetes.io/pcieRoot"]["string"] == wanted
    assert len(cluster.seen_by("gpu-and-nic")) == 1


class NvidiasChart:
    """NVIDIA's published chart of its DRA driver. Its images are not here, so no program of it runs."""

    NAME = "nvidias"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.chart: Path = cluster.local.compute_domains_chart()

    def install(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the created objects."""
        space = ("--namespace", self.NAME)
        done = self.cluster.helm(
            "install", self.NAME, str(self.chart), *space, "--create-namespace", values=values
        )
        assert done.returncode == 0, done.stderr
        rendered = self.cluster.helm("get", "manifest", self.NAME, *space).stdout
        return [one for one in yaml.safe_load_all(rendered) if one]

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", self.NAME, "--namespace", self.NAME)
        for what in (("-f", str(self.chart / "crds")), ("namespace", self.NAME)):
            self.cluster.kubectl("delete", *what, "--ignore-not-found", "--timeout=300s")


@pytest.fixture
def nvidias(cluster: Cluster) -> Iterator[NvidiasChart]:
    chart = NvidiasChart(cluster)
    try:
        yield chart
    finally:
        chart.uninstall()


def test_nvidias_compute_domains_are_installed_next_to_it(cluster: Cluster, nvidias: NvidiasChart) -> None:
    objects = nvidias.install({"resources": {"gpus": {"enabled": False}}})
    made = {kind: {one["metadata"]["name"] for one in objects if one["kind"] == kind} for kind in (
        "DeviceClass", "DaemonSet", "ValidatingAdmissionPolicy",
    )}  # fmt: skip
    assert made["DeviceClass"] == COMPUTE_DOMAIN_CLASSES
    assert made["DaemonSet"]
    assert made["ValidatingAdmissionPolicy"]
    classes = {one["metadata"]["name"] for one in cluster.get("deviceclasses")["items"]}
    assert classes >= COMPUTE_DOMAIN_CLASSES | {"gpu.nvidia.com", "mig.nvidia.com"}
    # Its policy is about slices too.
    names = {device["name"] for device in cluster.devices()}
    cluster.kubectl("delete", "resourceslices", "--field-selector", "spec.driver=gpu.nvidia.com")
    wait_for("the slices to be back", lambda: {one["name"] for one in cluster.devices()} == names)
    cluster.start("beside")
    assert len(cluster.seen_by("beside")) == 1
    cluster.kubectl("delete", "pod/beside", "resourceclaim/beside", "--timeout=300s")


def test_nvidias_gpu_plugin_gives_way_as_the_manual_says(cluster: Cluster, nvidias: NvidiasChart) -> None:
    """The steps of docs/migration.md for a cluster with one node, as far as they need no program of NVIDIA's."""
    ours = cluster.get("deviceclass", "gpu.nvidia.com")["spec"]
    uninstall(cluster)
    moved = {"matchExpressions": [{"key": "gpus-by", "operator": "NotIn", "values": ["dra"]}]}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [moved]}}
    }
    objects = nvidias.install({"gpuResourcesEnabledOverride": True, "kubeletPlugin": {"affinity": affinity}})
    [plugin] = [one["metadata"]["name"] for one in objects if one["kind"] == "DaemonSet"]
    theirs = cluster.get("deviceclass", "gpu.nvidia.com")["spec"]

    def wanted() -> int:
        return cluster.get("daemonset", plugin, "-n", nvidias.NAME)["status"].get("desiredNumberScheduled", 0)

    try:
        wait_for("NVIDIA's plugin on the node", lambda: wanted() == 1)
        place = ("--namespace", "here", "--create-namespace", "--dry-run=server")
        refused = cluster.helm("install", "ours", "daemonset/chart", *place, values={})
        assert "belongs to the release nvidias" in refused.stderr
        values = {"deviceClasses": {"create": False}}
        refused = cluster.helm("install", "ours", "daemonset/chart", *place, values=values)
        assert f"The DaemonSet {plugin} in the namespace {nvidias.NAME}" in refused.stderr
        assert "is NVIDIA's DRA driver, which serves gpu.nvidia.com on the same nodes" in refused.stderr
        values |= {"kubeletPlugin": {"nodeSelector": {"gpus-by": "dra"}}}
        taken = cluster.helm("install", "ours", "daemonset/chart", *place, values=values)
        assert taken.returncode == 0, taken.stderr
        cluster.kubectl("label", "node", cluster.node, "gpus-by=dra")
        wait_for("NVIDIA's plugin to be off the node", lambda: wanted() == 0)
        install(cluster)
        assert cluster.get("deviceclass", "gpu.nvidia.com")["spec"] == {**theirs, **ours}
        cluster.start("moved")
        nvidias.uninstall()  # that takes its classes away, which are ours too
        assert not cluster.kubectl("get", "deviceclass", "gpu.nvidia.com", "-o", "name", "--ignore-not-found")
        install(cluster)
        assert cluster.get("deviceclass", "gpu.nvidia.com")["spec"] == ours
        assert len(cluster.seen_by("moved")) == 1
        cluster.kubectl("delete", "pod/moved", "resourceclaim/moved", "--timeout=300s")
    finally:
        cluster.kubectl("label", "node", cluster.node, "gpus-by-")
        install(cluster)


@pytest.fixture
def storage(cluster: Cluster) -> Iterator[None]:
    """A node whose modules for GPUDirect Storage and GDRCopy are loaded, and whose plugin gives claims their nodes."""
    cluster.simulate("host-devices", "gds", "gdrcopy")
    try:
        roll_out(cluster, "HOST_DEVICES=gds,gdrcopy")
        yield
    finally:
        cluster.simulate("host-devices")
        roll_out(cluster, "HOST_DEVICES-")


def test_container_on_a_node_with_host_devices_gets_their_nodes_and_files(
    cluster: Cluster, storage: None, example: Callable[..., None]
) -> None:
    example("one-gpu")
    cluster.wait_running("one-gpu")
    command = (
        "ls -d /dev/nvidia-fs* /dev/gdrdrv /run/udev; cat /etc/cufile.json; [ -c /dev/gdrdrv ] && echo node"
    )
    reported = cluster.kubectl("exec", "one-gpu", "--", "sh", "-c", command).split()
    assert reported[:10] == [
        *sorted(["/dev/gdrdrv", *(f"/dev/nvidia-fs{number}" for number in range(8))]),
        "/run/udev",
    ]
    assert reported[-1] == "node"
    assert "logging" in " ".join(reported)
