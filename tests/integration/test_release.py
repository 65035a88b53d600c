"""Devices pass to other claims: replaced pods, and claims that the kubelet never unprepares."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from dra_driver.claims import lifecycle
from dra_driver.claims.reconciler import Rhythm
from dra_driver.model.claim import ClaimRef, Prepared
from dra_driver.model.sharing import SharingRule, share_all
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.integration.conftest import Node, sliced


def looked_at(node: Node, ref: ClaimRef) -> bool:
    """Whether the driver read the claim from the API server after it was prepared."""
    path = f"/resourceclaims/{ref.name}"
    return (
        sum(request.method == "GET" and request.path.endswith(path) for request in node.server.requests) > 1
    )


def begin(pool: ThreadPoolExecutor, node: Node, ref: ClaimRef) -> Future[Any]:
    return pool.submit(lambda: node.prepare(ref)[ref.uid])


def test_eight_pods_are_replaced_at_once(node: Node) -> None:
    devices = [device["name"] for device in node.devices()]
    old = [node.allocated_by_hand(f"old-{number}", device) for number, device in enumerate(devices)]
    assert all(isinstance(outcome, Prepared) for outcome in node.prepare(*old).values())
    for ref in old:
        node.delete_claim(ref.name)
    new = [node.allocated_by_hand(f"new-{number}", device) for number, device in enumerate(devices)]
    with ThreadPoolExecutor(8) as pool:
        waiting = [begin(pool, node, ref) for ref in new]
        eventually(lambda: all(looked_at(node, ref) for ref in old))
        # The plugin may release a deleted claim itself, so a waiting one may be prepared before this.
        for ref in reversed(old):
            node.must_unprepare(ref)
        assert all(isinstance(one.result(PATIENCE_S), Prepared) for one in waiting)
    assert node.records() == sorted(f"{ref.uid}.json" for ref in new)
    assert len(node.specs()) == 8


def test_share_waits_for_one_of_another_way_of_sharing(make_node: Callable[..., Node]) -> None:
    node = make_node().running(sharing=share_all(SharingRule("shares", 4)))
    device = node.devices()[0]["name"]
    first, second = (
        node.allocated_by_hand(
            interval.lower(),
            device,
            config=sliced(interval),
            shareID=f"{number:08x}-06c0-4d70-8a51-e59b25b2c16c",
            consumedCapacity={"shares": "1"},
        )
        for number, interval in enumerate(("Long", "Short"))
    )
    node.ready(first)
    node.refused(second, "one requests Long, the other Short")
    node.delete_claim(first.name)
    with ThreadPoolExecutor(1) as pool:
        before = len(node.server.requests)
        waiting = begin(pool, node, second)
        eventually(lambda: any(one.path.endswith("/long") for one in list(node.server.requests)[before:]))
        node.must_unprepare(first)
        assert isinstance(waiting.result(PATIENCE_S), Prepared)
    assert node.machine.timeslice(0) == 1


# --- processes that outlive their claim ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpu", "mig on demand"])
def test_stale_claim_stays_while_a_process_computes_on_its_device(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(
        lifecycle, "Rhythm", lambda: Rhythm(first_s=0.2, grace_s=0.2, every_s=0.3, retry_s=0.1)
    )
    node = make_node()
    node.start_driver(dynamic_mig=kind == "mig on demand")
    wanted = {
        "gpu": lambda device: device["attributes"]["index"]["int"] == 0,
        "mig on demand": lambda device: device["name"].endswith("-mig-1g10gb-19-0"),
    }[kind]
    eventually(lambda: len(node.devices()) >= 8)
    device = next(device["name"] for device in node.devices() if wanted(device))
    old = node.allocated_by_hand("old", device)
    node.ready(old)
    gpu = next(gpu for gpu in node.machine.current().gpus if device.startswith(f"gpu-{gpu.uuid[4:12]}"))
    instance = gpu.instances[0].id if kind != "gpu" else None
    node.machine.hold_gpu(gpu.uuid, 4711, "python3", gpu_instance=instance)
    node.delete_claim(old.name)
    [reported] = eventually(lambda: node.events("ClaimStillInUse"))
    assert reported["message"].startswith(
        f"Claim default/old (UID {old.uid}) was deleted, but process 4711 (python3) still uses {device} "
        f"(GPU {gpu.uuid}); run `kill -9 4711` on the node"
    )
    assert (node.records(), len(node.specs())) == ([f"{old.uid}.json"], 1)
    assert node.events("ClaimRecovered") == []
    node.machine.release_gpu(gpu.uuid)
    eventually(lambda: node.records() == [])
    assert (node.specs(), len(node.events("ClaimStillInUse"))) == ([], 1)
    [recovered] = eventually(lambda: node.events("ClaimRecovered"))
    assert recovered["message"].startswith(
        f"Released the devices of claim default/old (UID {old.uid}): the claim was "
    )
    if kind == "mig on demand":
        eventually(lambda: not node.machine.gpu(gpu.uuid).instances)
