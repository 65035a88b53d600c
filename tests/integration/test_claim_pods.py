"""From a device's UUID to the pods that use it: in the metrics, and from the records alone."""

from __future__ import annotations

from typing import Any

from dra_driver.cli.state_on_disk import read_state
from tests.fakes.scrapes import labelled, scraped
from tests.integration.conftest import NODE, Node

Json = dict[str, Any]


def told(node: Node) -> list[tuple[str, str, str]]:
    """Claim, pod and UUID of each series."""
    found = list(labelled(scraped(node.driver.metrics), "nvidia_dra_claim_info"))
    assert {(entry["namespace"], entry["node"]) for entry in found} <= {("default", NODE)}
    return sorted((entry["claim"], entry["pod"], entry["uuid"]) for entry in found)


def written(node: Node) -> dict[str, list[str]]:
    """By claim, as another process reads it."""
    records = read_state(node.plugin_dir).records
    return {record.ref.name: [pod.name for pod in record.claim.pods or ()] for record in records}


def pod(name: str) -> Json:
    return {"metadata": {"name": name, "uid": f"uid-of-{name}"}}


def test_each_pod_of_a_claim_is_joined_to_its_gpu(node: Node) -> None:
    node.scheduler.allocate_claim("default", (ref := node.claim("shared")).name, pod=pod("first"))
    [claim] = node.server.objects("resourceclaims")
    [result] = claim["status"]["allocation"]["devices"]["results"]
    uuid = next(
        device["attributes"]["uuid"]["string"]
        for device in node.devices()
        if device["name"] == result["device"]
    )
    node.ready(ref)
    first = ["pod-of-shared", "first"]
    assert told(node) == sorted(("shared", name, uuid) for name in first)
    assert written(node) == {"shared": first}

    # Another pod comes and one goes, of which the kubelet says nothing to the driver.
    node.scheduler.allocate_claim("default", "shared", pod=pod("second"))
    node.scheduler.release_claim("default", "shared", pod=pod("first"))
    reconciler = node.driver.claims.reconciler
    assert reconciler.look() is None
    now = ["pod-of-shared", "second"]
    assert told(node) == sorted(("shared", name, uuid) for name in now)
    assert written(node) == {"shared": now}

    # A kubelet that starts again has the claim prepared again; the reconciler writes its pods down later.
    node.scheduler.allocate_claim("default", "shared", pod=pod("third"))
    node.ready(ref)
    assert reconciler.look() is None
    assert written(node) == {"shared": [*now, "third"]}

    node.driver.stop()
    node.start_driver()
    assert told(node) == sorted(("shared", name, uuid) for name in [*now, "third"]), "from the record"
    node.take_back(ref)
    assert (told(node), written(node)) == ([], {})
