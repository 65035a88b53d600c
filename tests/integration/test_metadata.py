"""Files in containers that describe their devices, through the whole driver, for each kind of device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.model.claim import ClaimRef, Failed, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.integration.conftest import DRIVER, NODE, Node, eventually

Json = dict[str, Any]
INSIDE = "/var/run/kubernetes.io/dra-device-attributes"
SHARES = ("9f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4", "0f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4")


def ready(node: Node, ref: ClaimRef) -> Prepared:
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Prepared), outcome
    return outcome


def mounted(node: Node, prepared: Prepared) -> dict[str, list[Json]]:
    """What a container of the claim reads, by path, as its runtime resolves the CDI names."""
    wanted = [name for device in prepared.devices for name in device.cdi_ids]
    found: dict[str, list[Json]] = {}
    for path in node.cdi.glob("*.json"):
        spec = json.loads(path.read_text())
        for device in spec["devices"]:
            if f"{spec['kind']}={device['name']}" not in wanted:
                continue
            for mount in device["containerEdits"].get("mounts", ()):
                if mount["containerPath"].startswith(INSIDE):
                    assert mount["options"] == ["ro", "bind"]
                    found[mount["containerPath"]] = documents(Path(mount["hostPath"]))
    return found


def documents(path: Path) -> list[Json]:
    text, decoder, found = path.read_text(), json.JSONDecoder(), []
    while text.strip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:].lstrip()
    return found


def published(node: Node, name: str) -> Json:
    [attributes] = [device["attributes"] for device in node.devices() if device["name"] == name]
    return attributes


def described(node: Node, ref: ClaimRef) -> list[Json]:
    """The devices of a claim with the one request `gpu`."""
    [[document]] = mounted(node, ready(node, ref)).values()
    [request] = document["requests"]
    assert request["name"] == "gpu"
    return request["devices"]


def left(node: Node) -> list[str]:
    """What claims left, except for the directory that is there for all."""
    return [*node.specs(), *(str(path) for path in (node.plugin_dir / "dra-device-metadata").rglob("*"))]


def start(node: Node, count: int, **settings: Any) -> None:
    node.start_driver(**{"device_metadata": "v1beta1"} | settings)
    eventually(lambda: len(node.devices()) == count)


def test_whole_gpus_of_several_requests(make_node: Callable[..., Node]) -> None:
    node = make_node()
    start(node, 8, device_metadata="both")
    two = {"deviceClassName": "gpu.nvidia.com", "count": 2}
    one = {"name": "big", "deviceClassName": "gpu.nvidia.com"}
    ref = node.claim(
        "training", {"requests": [{"name": "pair", "exactly": two}, {"name": "any", "firstAvailable": [one]}]}
    )
    prepared = ready(node, ref)
    assert [len(device.cdi_ids) for device in prepared.devices] == [2, 1, 2]
    found = mounted(node, prepared)
    assert sorted(found) == [
        f"{INSIDE}/resourceclaims/training/{request}/{DRIVER}-metadata.json" for request in ("any", "pair")
    ]
    names = {
        "pair": [device.device for device in prepared.devices[:2]],
        "any/big": [prepared.devices[2].device],
    }
    for beta, alpha in found.values():
        assert beta["apiVersion"] == "metadata.resource.k8s.io/v1beta1"
        assert alpha == beta | {"apiVersion": "metadata.resource.k8s.io/v1alpha1"}
        assert beta["metadata"] == {
            "name": "training", "namespace": "default", "uid": ref.uid, "generation": 1,
        }  # fmt: skip
        [request] = beta["requests"]
        assert request["devices"] == [
            {"driver": DRIVER, "pool": NODE, "name": name, "attributes": published(node, name)}
            for name in names[request["name"]]
        ]
    assert ready(node, ref) == prepared
    assert mounted(node, prepared) == found
    assert node.unprepare(ref) == {ref.uid: None}
    assert left(node) == []


def test_claim_of_a_template_has_the_name_that_the_pod_gives_it(make_node: Callable[..., Node]) -> None:
    node = make_node()
    start(node, 8)
    exactly = {"deviceClassName": "gpu.nvidia.com"}
    annotations = {"resource.kubernetes.io/pod-claim-name": "gpus"}
    stored = node.server.add(
        "resourceclaims",
        {
            "metadata": {"name": "pod-gpus-x7k2p", "namespace": "default", "annotations": annotations},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        },
        group="resource.k8s.io",
    )
    node.scheduler.allocate_claim("default", "pod-gpus-x7k2p")
    ref = ClaimRef("default", "pod-gpus-x7k2p", stored["metadata"]["uid"])
    found = mounted(node, ready(node, ref))
    [document] = found[f"{INSIDE}/resourceclaimtemplates/gpus/gpu/{DRIVER}-metadata.json"]
    assert document["podClaimName"] == "gpus"
    # The same from the record alone.
    node.server.stop()
    assert mounted(node, ready(node, ref)) == found
    assert node.unprepare(ref) == {ref.uid: None}
    assert left(node) == []


def test_mig_device_that_somebody_made(make_node: Callable[..., Node]) -> None:
    node = make_node("h100-mig-static")
    node.start_driver(device_metadata="v1alpha1")
    name = eventually(lambda: [d["name"] for d in node.devices() if "profile" in d["attributes"]])[0]
    [device] = described(node, node.allocated_by_hand("part", name))
    ids = {key: device["attributes"].pop(key) for key in ("gpuInstanceID", "computeInstanceID")}
    assert ids["computeInstanceID"] == {"int": 0}
    assert ids["gpuInstanceID"]["int"] > 0
    assert device["attributes"] == published(node, name)


def test_mig_device_on_demand_has_the_uuid_of_this_making(make_node: Callable[..., Node]) -> None:
    node = make_node()
    start(node, 8 * 26, dynamic_mig=True)
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
        assert node.unprepare(ref) == {ref.uid: None}
        assert left(node) == []
    assert len(uuids) == 2


def test_each_share_is_told_which_it_is(make_node: Callable[..., Node]) -> None:
    node = make_node()
    start(node, 8, sharing=share_all(SharingRule("shares", 4)))
    name = node.devices()[0]["name"]
    refs = [
        node.allocated_by_hand(f"share-{number}", name, shareID=share, consumedCapacity={"shares": "1"})
        for number, share in enumerate(SHARES)
    ]
    for ref, share in zip(refs, SHARES, strict=True):
        [device] = described(node, ref)
        assert device["attributes"] == published(node, name) | {"shareID": {"string": share}}
    assert node.unprepare(refs[0]) == {refs[0].uid: None}
    assert mounted(node, ready(node, refs[1]))
    assert node.unprepare(refs[1]) == {refs[1].uid: None}
    assert left(node) == []


def test_switching_it_changes_new_claims_only(make_node: Callable[..., Node]) -> None:
    node = make_node()
    start(node, 8, device_metadata="off")
    old = node.claim("old")
    first = ready(node, old)
    assert mounted(node, first) == {}
    node.driver.stop()
    start(node, 8)
    new = node.claim("new")
    second = ready(node, new)
    assert (ready(node, old), len(mounted(node, second))) == (first, 1)
    node.driver.stop()
    start(node, 8, device_metadata="off")
    assert (ready(node, old), ready(node, new)) == (first, second)
    assert node.unprepare(old, new) == {old.uid: None, new.uid: None}
    assert left(node) == []


def test_annotation_that_leads_elsewhere_is_refused(make_node: Callable[..., Node]) -> None:
    node = make_node()
    start(node, 8)
    annotations = {"resource.kubernetes.io/pod-claim-name": "../../../etc"}
    device = node.devices()[0]["name"]
    result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}
    stored = node.server.add(
        "resourceclaims",
        {
            "metadata": {"name": "bad", "namespace": "default", "annotations": annotations},
            "spec": {
                "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}
            },
            "status": {"allocation": {"devices": {"results": [result]}}},
        },
        group="resource.k8s.io",
    )
    ref = ClaimRef("default", "bad", stored["metadata"]["uid"])
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Failed)
    assert "annotation with the pod's claim name '../../../etc' cannot be part of a path" in outcome.error
    assert (left(node), node.records()) == ([], [])
