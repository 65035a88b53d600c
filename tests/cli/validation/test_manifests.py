"""Every mistake in a claim, template, class or pod has its path and its sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from dra_driver.cli.validation.rules.manifests import (
    KINDS,
    as_v1,
    claim_spec,
    class_names,
    is_of_device_plugin,
    object_faults,
    parameter_faults,
)
from dra_driver.cli.validation.rules.pods import pod_faults, pod_specs, unused_claims
from tests.fakes.tables import data_of, tabled

ROOT = Path(__file__).parents[3]
DRIVER = "gpu.nvidia.com"
Json = dict[str, Any]

CLAIM: Json = data_of(__file__)["claim without fault"]
POD: Json = data_of(__file__)["pod without fault"]
PARAMETERS = CLAIM["spec"]["devices"]["config"][0]["opaque"]["parameters"]


def changed(path: str, value: Any, base: Json = CLAIM) -> Json:
    """A copy with one field set, or removed by None."""
    result = copy.deepcopy(base)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = result
    for part in parents:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return result


def reported(document: Json) -> list[str]:
    return object_faults(document, DRIVER)


R = "spec.devices.requests"
E = f"{R}.0.exactly"


@tabled("path", "value", "expected")
def test_a_fault_in_a_claim(path: str, value: Any, expected: str) -> None:
    assert reported(CLAIM) == []
    faults = reported(changed(path, value))
    assert any(expected in fault for fault in faults), faults
    template = {
        "apiVersion": CLAIM["apiVersion"],
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t"},
        "spec": {"spec": changed(path, value).get("spec")},
    }
    if path.startswith("spec."):
        assert any(expected in fault for fault in reported(template))


def test_a_misspelt_required_field_is_one_fault() -> None:
    document = changed(f"{E}.deviceClasName", "gpu.nvidia.com", changed(f"{E}.deviceClassName", None))
    (fault,) = reported(document)
    assert fault.endswith("unknown field; did you mean deviceClassName?")


def test_parameters_of_another_driver_are_its_own() -> None:
    other = changed("spec.devices.config.0.opaque", {"driver": "other.example.com", "parameters": {"any": 1}})
    assert reported(other) == []


@tabled("spec", "expected")
def test_a_fault_in_a_template(spec: Json, expected: str) -> None:
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t"},
    }
    assert any(fault.startswith(expected) for fault in reported(document | {"spec": spec}))


@tabled("spec", "expected")
def test_a_fault_in_a_class(spec: Json, expected: str) -> None:
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "x.example.com"},
    }
    assert any(expected in fault for fault in reported(document | {"spec": spec}))
    assert reported(document | {"spec": {}}) == []


def test_older_versions_are_read_as_they_are_written() -> None:
    flat = changed(f"{R}.0", {"name": "gpu", "deviceClassName": "gpu.nvidia.com", "count": 2})
    flat["apiVersion"] = "resource.k8s.io/v1beta1"
    assert reported(flat) == []
    assert as_v1(flat) == CLAIM
    assert class_names(claim_spec(as_v1(flat))) == ["gpu.nvidia.com"] * 2
    template = {"apiVersion": flat["apiVersion"], "kind": "ResourceClaimTemplate", "metadata": {"name": "t"}}
    assert as_v1(template | {"spec": {"spec": flat["spec"]}})["spec"]["spec"] == CLAIM["spec"]
    nested = CLAIM | {"apiVersion": "resource.k8s.io/v1beta1"}
    assert any("exactly: does not exist in resource.k8s.io/v1beta1" in fault for fault in reported(nested))
    assert reported(CLAIM | {"apiVersion": "resource.k8s.io/v1beta2"}) == []


@tabled("path", "value", "expected")
def test_a_fault_in_a_pod(path: str, value: Any, expected: str) -> None:
    assert pod_faults(POD, "spec") == []
    faults = pod_faults(changed(path, value, POD), "spec")
    assert any(expected in fault for fault in faults), faults


def test_claims_of_a_pod_that_no_container_uses() -> None:
    assert unused_claims(POD) == ["spare"]


def test_parameters_that_are_alone() -> None:
    assert parameter_faults(PARAMETERS, "") == []
    (fault,) = parameter_faults(PARAMETERS | {"shring": 1}, "")
    assert fault == "shring: unknown field; did you mean sharing?"


def test_all_that_is_shipped_is_without_fault() -> None:
    seen = 0
    classes = [ROOT / "daemonset/install.yaml", ROOT / "daemonset/chart/files/mig-classes.yaml"]
    for file in (*ROOT.glob("examples/*/*.yaml"), *classes):
        for document in yaml.safe_load_all(file.read_text()):
            if document.get("kind") in KINDS:
                seen += 1
                assert reported(document) == [], file
            for path, spec in pod_specs(document):
                assert pod_faults(spec, path) == [], file
    assert seen > 10


def test_a_deeply_nested_file_in_a_config_map_is_no_file_of_a_plugin() -> None:
    assert not is_of_device_plugin({"kind": "ConfigMap", "data": {"f": "sharing: " + "[" * 3000}})
