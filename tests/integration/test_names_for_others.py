"""Slices, CDI specs, metadata files and the status of claims, read as other programs read them; and device names by
minor number, which some of these programs need."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import ClaimRef, Prepared
from tests.fakes.json_stream import json_documents
from tests.fakes.tables import read_yaml
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, NODE, Node

Json = dict[str, Any]
MakeNode = Callable[..., Node]
INSIDE = "/var/run/kubernetes.io/dra-device-attributes"


def mounted(node: Node, prepared: Prepared) -> dict[str, list[Json]]:
    """What a container of the claim reads, by path, as its runtime resolves the CDI names."""
    wanted = [name for device in prepared.devices for name in device.cdi_ids]
    found: dict[str, list[Json]] = {}
    for path in node.cdi.iterdir():
        spec = json.loads(path.read_text())
        for device in spec["devices"]:
            if f"{spec['kind']}={device['name']}" not in wanted:
                continue
            for mount in device["containerEdits"].get("mounts", ()):
                if mount["containerPath"].startswith(INSIDE):
                    assert mount["options"] == ["ro", "bind"]
                    found[mount["containerPath"]] = list(json_documents(Path(mount["hostPath"]).read_text()))
    return found


def index_in_name(device: str) -> int | None:
    """Datadog's agent takes the number in the name of a whole GPU for its index."""
    found = re.fullmatch(r"gpu-(\d+)", device)
    return None if found is None else int(found[1])


def mig_in_spec(node: Node, device: str) -> str:
    """Return the UUID of a MIG device as Datadog's agent finds it: the CDI device whose name ends with the
    device's, its capability nodes, their numbers in mig-minors, and NVML.
    """
    specs = [json.loads(path.read_text()) for path in node.cdi.glob("k8s.*")]
    [found] = [entry for spec in specs for entry in spec["devices"] if entry["name"].endswith(f"-{device}")]
    nodes = {Path(entry["path"]).name for entry in found["containerEdits"]["deviceNodes"]}
    rows = (node.machine.host_root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    names = {f"nvidia-cap{row.split()[1]}": row.split()[0] for row in rows}
    paths = [re.fullmatch(r"gpu(\d+)/gi(\d+)/ci(\d+)/access", names.get(name, "")) for name in nodes]
    [(minor, gi, ci)] = [tuple(map(int, path.groups())) for path in paths if path is not None]
    [gpu] = [gpu for gpu in map(node.machine.gpu, range(8)) if gpu.minor == minor]
    [uuid] = [
        compute.uuid
        for instance in gpu.instances
        if instance.id == gi
        for compute in instance.compute
        if compute.id == ci
    ]
    return uuid


def exporters_labels(node: Node, device: str) -> Json:
    """What dcgm-exporter knows of a device: by its type the GPU's UUID, and for MIG also profile and UUID."""
    text = {
        entry["name"]: {key: value.get("string") for key, value in entry["attributes"].items()}
        for slice_ in node.slices()
        if slice_["spec"]["driver"] == "gpu.nvidia.com" and slice_["spec"]["pool"]["name"] == NODE
        for entry in slice_["spec"].get("devices", ())
    }[device]
    match text["type"]:
        case "gpu":
            return {"gpu": text["uuid"]}
        case "mig":
            return {"gpu": text["parentUUID"], "profile": text["profile"], "uuid": text.get("uuid")}
    raise AssertionError(text)


def kubevirts_device(node: Node, ref: ClaimRef, claim: str, request: str) -> Json:
    """The device as KubeVirt finds it: the only metadata file of the request, the only document that it knows, the
    only device."""
    prefix = f"{INSIDE}/resourceclaims/{claim}/{request}/"
    found = {
        path: documents
        for path, documents in mounted(node, node.ready(ref)).items()
        if path.startswith(prefix)
    }
    [(path, documents)] = found.items()
    assert path.endswith("-metadata.json")
    document = next(one for one in documents if one["apiVersion"] == "metadata.resource.k8s.io/v1alpha1")
    [devices] = [entry["devices"] for entry in document["requests"] if entry["name"] == request]
    [device] = devices
    return device["attributes"]


def status_data(node: Node, name: str, pool: str = NODE) -> Json:
    def written() -> list[Json]:
        claims = node.server.objects("resourceclaims")
        [claim] = [claim for claim in claims if claim["metadata"]["name"] == name]
        return [entry for entry in claim["status"].get("devices", ()) if entry["pool"] == pool]

    [entry] = eventually(written)
    return entry["data"]


def test_a_whole_gpu_is_known_to_all(make_node: MakeNode) -> None:
    node = make_node().running(device_names="minor", device_metadata="both")
    devices = {device["name"]: device for device in node.devices()}
    assert list(devices) == [f"gpu-{number}" for number in range(8)]
    ref = node.allocated_by_hand("one", "gpu-3")
    [prepared] = node.ready(ref).devices
    gpu = node.machine.gpu(index_in_name(prepared.device))
    assert prepared.cdi_ids[0] == f"k8s.{DRIVER}/claim={ref.uid}-gpu-3"
    assert exporters_labels(node, "gpu-3") == {"gpu": gpu.uuid}
    attributes = kubevirts_device(node, ref, "one", "gpu")
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": gpu.bus_id}
    assert {"resource.kubernetes.io/numaNode", "resource.kubernetes.io/pcieRoot"} <= attributes.keys()
    assert status_data(node, "one") == {
        "version": "v1alpha1", "type": "gpu", "uuid": gpu.uuid, "productName": "NVIDIA H100 80GB HBM3",
        "driverVersion": node.machine.driver_version, "pciBusID": gpu.bus_id,
    }  # fmt: skip


def test_a_mig_device_on_demand_is_known_to_all(make_node: MakeNode) -> None:
    node = make_node().running(8 * 26, device_names="minor", device_metadata="both", dynamic_mig=True)
    name = "gpu-2-mig-1g10gb-19-4"
    ref = node.allocated_by_hand("part", name)
    node.ready(ref)
    gpu = node.machine.gpu(2)
    uuid = mig_in_spec(node, name)
    assert index_in_name(name) is None
    assert exporters_labels(node, name) == {"gpu": gpu.uuid, "profile": "1g.10gb", "uuid": None}
    [instance] = gpu.instances
    [published] = [device["attributes"] for device in node.devices() if device["name"] == name]
    made = {"uuid": {"string": uuid}, "gpuInstanceID": {"int": instance.id}, "computeInstanceID": {"int": 0}}
    assert kubevirts_device(node, ref, "part", "gpu") == published | made
    assert status_data(node, "part") == {
        "version": "v1alpha1", "type": "mig", "uuid": uuid, "productName": "NVIDIA H100 80GB HBM3",
        "driverVersion": node.machine.driver_version, "pciBusID": gpu.bus_id, "parentUUID": gpu.uuid,
        "gpuInstanceID": instance.id, "computeInstanceID": 0, "profile": "1g.10gb",
    }  # fmt: skip


def test_names_cannot_change_while_claims_hold_devices(make_node: MakeNode) -> None:
    node = make_node().running()
    [name] = [device["name"] for device in node.devices()][:1]
    ref = node.allocated_by_hand("held", name)
    node.ready(ref)
    node.driver.stop()
    with pytest.raises(InvalidConfigError) as caught:
        node.start_driver(device_names="minor")
    assert str(caught.value) == (
        "device names cannot change from uuid to minor on this node, because claims still hold 1 device: "
        f"default/held ({name}); set --device-names uuid again, drain the node, and change the flag when "
        "`gpu-dra-driver claims` and `gpu-dra-driver cleanup` list nothing"
    )
    node.start_driver()
    node.must_unprepare(ref)
    node.restart_driver(device_names="minor")
    eventually(lambda: [device["name"] for device in node.devices()] == [f"gpu-{n}" for n in range(8)])
    later = node.allocated_by_hand("later", "gpu-0")
    node.ready(later)
    node.driver.stop()
    with pytest.raises(InvalidConfigError, match=r"from minor to uuid .*: default/later \(gpu-0\); set"):
        node.start_driver(device_names="uuid")


def test_a_claim_keeps_its_card_when_numbers_move(make_node: MakeNode) -> None:
    node = make_node().running(device_names="minor")
    uuids = [node.machine.gpu(number).uuid for number in range(8)]
    ref = node.allocated_by_hand("held", "gpu-1")
    before = node.ready(ref)
    node.driver.stop()
    with (
        node.machine._change() as state
    ):  # the first card is removed, and the NVIDIA driver renumbers the others
        state.by_uuid[uuids[0]].present = False
        for number, uuid in enumerate(uuids[1:]):
            state.by_uuid[uuid].minor = number
    node.start_driver(device_names="minor")
    named = {device["attributes"]["uuid"]["string"]: device["name"] for device in node.wait_devices(7)}
    digits = uuids[2].removeprefix("GPU-").replace("-", "")
    assert named == {
        uuids[1]: "gpu-1",
        uuids[2]: f"gpu-{digits}",
        **{uuid: f"gpu-{number + 2}" for number, uuid in enumerate(uuids[3:])},
    }
    assert node.ready(ref) == before
    [spec] = [json.loads(path.read_text()) for path in node.cdi.glob("k8s.*")]
    assert "/dev/nvidia0" in {entry["path"] for entry in spec["devices"][0]["containerEdits"]["deviceNodes"]}
    node.must_unprepare(ref)
    node.driver.discovery.request_rescan()
    eventually(lambda: [device["name"] for device in node.devices()] == [f"gpu-{n}" for n in range(7)])


def test_a_gpu_that_is_cut_on_demand_keeps_its_name(make_node: MakeNode, tmp_path: Path) -> None:
    """Though MIG mode changes its minor number."""
    source = tmp_path / "pair.yaml"
    source.write_text(
        "description: two GPUs\nsystem: {minors_move: true}\ndefaults: {model: h100-sxm}\n"
        'gpus:\n  - {bus: "0000:1b:00.0"}\n  - {bus: "0000:1c:00.0"}\n'
    )
    node = make_node(str(source)).running(2 * 26, device_names="minor", dynamic_mig=True)
    names = [device["name"] for device in node.devices()]
    ref = node.allocated_by_hand("part", "gpu-0-mig-1g10gb-19-4")
    node.ready(ref)
    assert node.machine.gpu(0).minor == 2
    node.driver.discovery.scan_now(10)
    assert list(node.driver.discovery.inventory.gpu_names.values()) == ["gpu-0", "gpu-1"]
    node.restart_driver(device_names="minor", dynamic_mig=True)
    node.ready(ref)
    assert [device["name"] for device in node.devices()] == names


NAMES: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_suffix(".yaml"))


def test_names_on_the_node_are_those_of_the_incumbent_but_for_the_table(make_node: MakeNode) -> None:
    node = make_node().running(8, device_names="minor", device_metadata="both", pod_uid="POD-UID")
    ref = node.allocated_by_hand("held", "gpu-1")
    [device] = node.ready(ref).devices
    [inside] = mounted(node, node.ready(ref))
    kind, metadata = device.cdi_ids
    paths = {
        str(path.relative_to(node.root))
        for top in (node.cdi, node.plugin_dir.parent, node.registry)
        for path in (top, *top.rglob("*"))
    }
    found = {text.replace(ref.uid, "CLAIM-UID") for text in (*paths, kind, metadata, inside)}
    expected = {what: names.get("ours", names["incumbent"]) for what, names in NAMES.items()}
    assert {what: name for what, name in expected.items() if name not in found} == {}
    assert found & {names["incumbent"] for names in NAMES.values() if "ours" in names} == set()
    assert {path for path in found if path.startswith("cdi/")} == {
        name for name in expected.values() if name.startswith("cdi/")
    }


def test_names_that_differ_from_the_incumbent_are_in_the_guide_to_moving() -> None:
    guide = (Path(__file__).parents[2] / "docs/migration.md").read_text()
    _, _, rest = guide.partition("<!-- names -->\n")
    lines = rest.partition("<!-- end of names -->")[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:3] for row in rows] == [
        [what, names["incumbent"], names["ours"]] for what, names in NAMES.items() if "ours" in names
    ]
    assert all(row[3] for row in rows)
