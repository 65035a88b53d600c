"""Claims for virtual machines, tried on what a machine publishes."""

from __future__ import annotations

from typing import Any

import yaml

from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.manifest_check import DocumentReport, check_documents
from dra_driver.model.inventory import Inventory
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, VFIO_0, VFIO_1, bound, card, h100, inventory
from tests.fakes.slices import machine_fit

Json = dict[str, Any]
MACHINE = inventory(h100(0), h100(1), cards=(card(0), card(1)))
PARAMETERS = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig"}


def report(found: Inventory, *classes: str, **devices: Any) -> DocumentReport:
    requests = [
        {"name": f"r{number}", "exactly": {"deviceClassName": f"{name}.nvidia.com"}}
        for number, name in enumerate(classes)
    ]
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c"},
        "spec": {"devices": {"requests": requests, **devices}},
    }
    document = Document("c.yaml", 1, yaml.safe_load(yaml.safe_dump(claim)))
    (made,) = check_documents([document], DRIVER, [machine_fit(found)])
    return made


def given(made: DocumentReport) -> list[str]:
    assert made.faults == []
    return [entry["device"] for entry in made.devices]


def test_virtual_machine_gets_a_card() -> None:
    config = [{"opaque": {"driver": DRIVER, "parameters": PARAMETERS}}]
    assert given(report(MACHINE, "vfio.gpu", config=config)) == [VFIO_0]
    assert given(report(MACHINE, "vfio.gpu", "vfio.gpu")) == [VFIO_0, VFIO_1]
    assert given(report(inventory(h100(0), cards=(card(0), bound(1))), "gpu")) == [GPU_0]


def test_claim_with_devices_of_both_sorts_is_refused_as_a_prepare_would() -> None:
    made = report(MACHINE, "gpu", "vfio.gpu")
    assert made.faults == [
        f"if the claim is allocated on m, Prepare refuses it: requests r1 and r0: device {VFIO_1} is for a virtual "
        f"machine, and device {GPU_0} is for containers, so one claim cannot have both; use two claims"
    ]


def test_card_is_not_allocated_twice() -> None:
    made = report(inventory(h100(0), cards=(card(0),)), "gpu", "vfio.gpu")
    assert "no combination of them serves all requests" in made.faults[0]


def test_report_names_what_a_machine_without_passthrough_lacks() -> None:
    made = report(inventory(h100(0), h100(1)), "vfio.gpu")
    assert "2 devices, 0 of class vfio.gpu.nvidia.com" in made.faults[0]
    assert made.hints == [
        "the machine has no GPUs for virtual machines; with --passthrough, validate includes the GPUs that "
        "can be passed through"
    ]
    assert report(MACHINE, "vfio.gpu", "vfio.gpu", "vfio.gpu").hints == []


def test_parameters_of_a_container_do_not_fit() -> None:
    parameters = {**PARAMETERS, "kind": "GpuConfig"}
    config = [{"requests": ["r0"], "opaque": {"driver": DRIVER, "parameters": parameters}}]
    made = report(MACHINE, "vfio.gpu", config=config)
    assert made.faults == [
        "spec.devices.config[0].requests[0]: GpuConfig does not apply to request 'r0' of class vfio.gpu.nvidia.com"
    ]
    assert GPU_1 not in str(made.devices)
