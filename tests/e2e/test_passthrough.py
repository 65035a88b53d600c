"""GPUs for virtual machines on a real Kubernetes with a simulated DGX H100: one view of a card at a time, exactly its
nodes, and the card comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import SIMULATOR_DIR, Cluster, claim_and_pod, installed, wait_for
from tests.fakes.tables import tabled

pytestmark = pytest.mark.cluster

BUS_ID = "0000:43:00.0"
HERE = f'device.attributes["resource.kubernetes.io"].pciBusID == "{BUS_ID}"'
WHOLE = {"selector": HERE}
PART = {"device_class": "mig-1g.10gb.nvidia.com", "selector": HERE}
NODES = "find /dev -name 'nvidia*' -o -path '/dev/vfio/*' -o -name iommu | sort; env | grep NVIDIA_VISIBLE; echo end"
METADATA = "find /var/run/kubernetes.io/dra-device-attributes -name '*.json' -exec cat {} +; echo; echo end"


def machine(**iommu: Any) -> dict[str, Any]:
    """A claim as virtual machines have it."""
    config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "iommu": iommu}
    return {"device_class": "vfio.gpu.nvidia.com", "selector": HERE, "parameters": config if iommu else None}


@pytest.fixture(scope="module")
def _passthrough(_cluster: Cluster) -> Iterator[Cluster]:
    def is_there() -> bool:
        return any(one["name"].startswith("vfio-") for one in _cluster.devices())

    with installed(_cluster, "e2e-passthrough", is_there) as cluster:
        yield cluster


@pytest.fixture
def node(_passthrough: Cluster, cluster: Cluster) -> Iterator[Cluster]:
    """Every test starts and ends with the card bound to the NVIDIA driver and published in all its forms."""
    wait_for("both views of the card", lambda: views(cluster) >= {"gpu", "mig", "vfio"})
    yield cluster
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=300s")
    wait_for("the card to be back", lambda: driver() == "nvidia")
    wait_for("both views of the card", lambda: views(cluster) >= {"gpu", "mig", "vfio"})


def views(cluster: Cluster) -> set[str]:
    """The types of the devices of the card."""
    name = "resource.kubernetes.io/pciBusID"
    all_of = [one["attributes"] for one in cluster.devices()]
    return {one["type"]["string"] for one in all_of if one.get(name, {}).get("string") == BUS_ID}


def card(cluster: Cluster) -> dict[str, Any]:
    """The attributes of the card as it is offered to virtual machines."""
    name = f"vfio-{BUS_ID.replace(':', '-').replace('.', '-')}"
    [found] = [one["attributes"] for one in cluster.devices() if one["name"] == name]
    return found


def driver() -> str:
    """The kernel driver that has the card."""
    gpus = json.loads((SIMULATOR_DIR / "machine.json").read_text())["gpus"]
    [found] = [one["driver"] for one in gpus if one["bus_id"] == BUS_ID]
    return found


def printed(cluster: Cluster, pod: str) -> list[str]:
    wait_for(f"the output of {pod}", lambda: cluster.logs(pod).rstrip().endswith("end"))
    return cluster.logs(pod).split("\n")


def end(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}", "--timeout=300s")


def test_scheduler_gives_out_one_view_of_a_card_at_a_time(node: Cluster) -> None:
    node.start("container", **WHOLE)
    node.apply(claim_and_pod("machine", **machine()))
    node.wait_unschedulable("machine")
    end(node, "container")
    node.wait_running("machine")
    assert driver() == "vfio-pci"
    node.apply([*claim_and_pod("again", **WHOLE), *claim_and_pod("part", **PART)])
    node.wait_unschedulable("again")
    node.wait_unschedulable("part")
    # The card comes back, and one of the two who wait gets it.
    node.kubectl("delete", "pod/again", "resourceclaim/again", "--timeout=300s")
    end(node, "machine")
    node.wait_running("part")
    assert driver() == "nvidia"
    [uuid] = node.seen_by("part")
    assert uuid.startswith("MIG-")
    node.apply(claim_and_pod("machine", **machine()))
    node.wait_unschedulable("machine")
    end(node, "part")
    node.wait_running("machine")
    end(node, "machine")
    node.start("container", **WHOLE)
    [uuid] = node.seen_by("container")
    assert uuid.startswith("GPU-")


@tabled("iommu", "iommufd", "count", "pattern")
def test_pod_sees_exactly_the_nodes_of_its_card(
    node: Cluster, iommu: dict[str, Any], iommufd: str, count: int, pattern: str
) -> None:
    node.simulate("vfio", iommufd)
    wait_for("what the kernel has", lambda: card(node)["iommuFDEnabled"]["bool"] == (iommufd == "--iommufd"))
    group = card(node)["iommuGroup"]["int"]
    node.apply(claim_and_pod("machine", command=f"{NODES}; exec sleep 3600", **machine(**iommu)))
    node.wait_running("machine")
    *lines, void, _, _ = printed(node, "machine")
    found = [line for line in lines if line != "/dev/vfio/devices"]
    assert len(found) == count, lines
    assert any(one.startswith(pattern.format(group=group)) for one in found), lines
    assert not [line for line in lines if "nvidia" in line]
    assert void == "NVIDIA_VISIBLE_DEVICES=void"


def test_metadata_has_the_address_that_a_virtual_machine_monitor_reads(node: Cluster) -> None:
    node.apply(claim_and_pod("machine", command=f"{METADATA}; exec sleep 3600", **machine()))
    node.wait_running("machine")
    text = "\n".join(printed(node, "machine"))
    assert BUS_ID in text
    assert "pciBusID" in text
