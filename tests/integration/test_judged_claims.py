"""`validate` and Prepare judge the same claims on the same machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from playground.pods import PodLoop

from dra_driver.app.settings import config_values
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.validate import machine_to_try
from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.manifest_check import DocumentReport, check_documents
from dra_driver.cli.validation.rules.allocator import AllocationError
from dra_driver.model.claim import Failed, Prepared
from tests.fakes.tables import tabled
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, NODE, Node

Json = dict[str, Any]

_NO_HOST = "the MPS host is not running on this node"


def judged(node: Node, settings: Json, claims: list[Json]) -> tuple[list[DocumentReport], int]:
    """What `validate` says about each claim, given by its `devices`, and how many devices the node's machine has."""
    machine, _ = machine_to_try(CommandMachine(replace(node.settings, **settings)))
    assert machine is not None
    documents = [
        Document("claims.yaml", number, {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": f"c{number}"},
            "spec": {"devices": devices},
        })
        for number, devices in enumerate(claims)
    ]  # fmt: skip
    return check_documents(documents, DRIVER, [machine]), len(machine.devices)


def prepared(node: Node, name: str, devices: Json) -> str | None:
    """Return the error of the claim's Prepare, None if it succeeds. Nothing of the claim remains."""
    ref = node.claim(name, devices)
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Prepared | Failed)
    node.must_unprepare(ref)
    node.scheduler.release_claim("default", name)
    node.delete_claim(name)
    return outcome.error.partition("): ")[2] if isinstance(outcome, Failed) else None


@tabled("machine", "config", "claims")
def test_validate_refuses_the_claims_that_prepare_refuses(
    machine: str, config: Json, claims: list[list[Any]], make_node: Callable[..., Node]
) -> None:
    node, settings = make_node(machine), config_values(config, Path("config.yaml"))
    reports, count = judged(node, settings, [devices for devices, _ in claims])
    faults = ["; ".join(report.faults) for report in reports]
    node.running(count, **settings)
    errors = [prepared(node, f"c{number}", devices) or "" for number, (devices, _) in enumerate(claims)]
    for fault, error, (_, says) in zip(faults, errors, claims, strict=True):
        assert (bool(fault), bool(error)) == (says is not None, says is not None), (fault, error)
        assert (says or "") in fault
        assert fault.endswith(error)


def any_claim(chance: random.Random) -> Json:
    """The `devices` of a claim that the API server accepts."""
    classes = ("gpu", "gpu", "mig", "mig", "mps.gpu", "timeslice.gpu")
    requests = [
        {"name": name, "exactly": {
            "deviceClassName": f"{chance.choice(classes)}.nvidia.com",
            "count": chance.choice((1, 1, 1, 2, 3)),
            **({"adminAccess": True} if chance.random() < 0.2 else {}),
        }}
        for name in "abc"[: chance.choice((1, 1, 2, 3))]
    ]  # fmt: skip
    limits = {
        "defaultActiveThreadPercentage": 50,
        "defaultPinnedDeviceMemoryLimit": chance.choice(("1Gi", "30Gi", "200Gi")),
        "defaultPerDevicePinnedMemoryLimit": {chance.choice("012"): "2Gi"},
    }
    config = []
    for _ in range(chance.choice((0, 1, 1, 2))):
        sharing = chance.choice(
            (
                {"strategy": "TimeSlicing"},
                {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
                {"strategy": "MPS"},
                {
                    "strategy": "MPS",
                    "mpsConfig": {key: limits[key] for key in limits if chance.random() < 0.5},
                },
            )
        )
        kind = chance.choice(("GpuConfig", "MigDeviceConfig"))
        if kind == "MigDeviceConfig" and "timeSlicingConfig" in sharing:
            continue
        management = {"management": True} if chance.random() < 0.1 else {}
        body = {
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing, **management
        }  # fmt: skip
        named = {"requests": [chance.choice(requests)["name"]]} if chance.random() < 0.3 else {}
        config.append({**named, "opaque": {"driver": DRIVER, "parameters": body}})
    return {"requests": requests, **({"config": config} if config else {})}


def test_random_claims_are_judged_as_prepare_does(make_node: Callable[..., Node]) -> None:
    """No MPS host runs, so a claim that Prepare does not refuse fails there if it has MPS."""
    chance, node = random.Random(7), make_node("h100-mig-static")
    claims = [any_claim(chance) for _ in range(40)]
    reports, count = judged(node, {}, claims)
    node.running(count)
    seen = {True: 0, False: 0}
    for number, (claim, report) in enumerate(zip(claims, reports, strict=True)):
        try:
            error = prepared(node, f"c{number}", claim)
        except AllocationError:
            assert report.verdict == "FAULT", claim
            continue
        is_refused = error is not None and _NO_HOST not in error
        assert (report.verdict == "FAULT") == is_refused, (claim, report, error)
        seen[is_refused] += 1
    assert min(seen.values()) > 5, seen


def test_pod_with_a_node_name_does_not_run_unless_its_claim_is_allocated(node: Node) -> None:
    server, lines = node.server, list[str]()
    one = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}
    template = {"metadata": {"name": "one", "namespace": "default"}, "spec": {"spec": one}}
    server.add("resourceclaimtemplates", template, group="resource.k8s.io")
    shared = {"metadata": {"name": "shared", "namespace": "default"}, "spec": one}
    server.add("resourceclaims", shared, group="resource.k8s.io")

    def create(name: str, resources: Json, **spec: Any) -> None:
        body = {"containers": [{"name": "c", "image": "busybox", "resources": resources}], **spec}
        server.add("pods", {"metadata": {"name": name, "namespace": "default"}, "spec": body}, group="")

    of_template = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    named = [{"name": "gpu", "resourceClaimName": "shared"}]
    by_claim = {"claims": [{"name": "gpu"}]}
    with PodLoop(node, lines.append):
        create("pinned", by_claim, nodeName=NODE, resourceClaims=of_template)
        implicit = "deviceclass.resource.kubernetes.io/gpu.nvidia.com"
        create("pinned-limit", {"limits": {implicit: 1}}, nodeName=NODE)
        create("early", by_claim, nodeName=NODE, resourceClaims=named)
        why = "kube-scheduler allocates claims, but only for pods that are created without nodeName"
        eventually(lambda: len([line for line in lines if "is waiting" in line and line.endswith(why)]) == 3)

        def pods() -> set[str]:
            return {one["involvedObject"]["name"] for one in node.events("FailedPrepareDynamicResources")}

        eventually(lambda: pods() == {"pinned", "pinned-limit", "early"})
        create("scheduled", by_claim, resourceClaims=named)
        eventually(lambda: {"pod default/scheduled running", "pod default/early running"} <= {*lines})
    assert not any("pinned" in line and line.endswith("running") for line in lines)
