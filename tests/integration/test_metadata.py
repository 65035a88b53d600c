"""Files in containers that describe their devices, through the whole driver, for each kind of device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.model.claim import ClaimRef, Prepared
from tests.fakes.json_stream import json_documents
from tests.integration.conftest import Node

Json = dict[str, Any]
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


def published(node: Node, name: str) -> Json:
    [attributes] = [device["attributes"] for device in node.devices() if device["name"] == name]
    return attributes


def described(node: Node, ref: ClaimRef) -> list[Json]:
    """The devices of a claim with the one request `gpu`."""
    [[document, _]] = mounted(node, node.ready(ref)).values()
    [request] = document["requests"]
    assert request["name"] == "gpu"
    return request["devices"]


def left(node: Node) -> list[str]:
    """Returns what claims left, except for the directory, which always exists."""
    return [*node.specs(), *(str(path) for path in (node.plugin_dir / "dra-device-metadata").rglob("*"))]


def test_mig_device_on_demand_has_the_uuid_of_this_making(make_node: Callable[..., Node]) -> None:
    node = make_node().running(8 * 26, device_metadata="both", dynamic_mig=True)
    name = next(d["name"] for d in node.devices() if d["attributes"].get("profile") == {"string": "2g.20gb"})
    ref = node.allocated_by_hand("part", name)
    uuids = set()
    for _ in range(2):
        [device] = described(node, ref)
        [gpu] = [gpu for gpu in (node.machine.gpu(number) for number in range(8)) if gpu.instances]
        [instance] = gpu.instances
        uuid = device["attributes"].pop("uuid")["string"]
        assert uuid.startswith("MIG-")
        uuids.add(uuid)
        assert device["attributes"].pop("gpuInstanceID") == {"int": instance.id}
        assert device["attributes"].pop("computeInstanceID") == {"int": 0}
        assert device["attributes"] == published(node, name)
        node.must_unprepare(ref)
        assert left(node) == []
    assert len(uuids) == 2
