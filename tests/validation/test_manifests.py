"""Every mistake in a claim, template, class or pod has its path and its sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dra_driver.validation.rules.manifests import (
    KINDS,
    as_v1,
    claim_spec,
    class_names,
    object_faults,
    parameter_faults,
    pod_faults,
    unused_claims,
)
from dra_driver.validation.rules.workloads import pod_specs

ROOT = Path(__file__).parents[2]
DRIVER = "gpu.nvidia.com"
Json = dict[str, Any]

PARAMETERS = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing"},
}
OPAQUE = {"driver": DRIVER, "parameters": PARAMETERS}
CLAIM: Json = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "c"},
    "spec": {
        "devices": {
            "requests": [
                {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}},
                {"name": "any", "firstAvailable": [{"name": "big", "deviceClassName": "gpu.nvidia.com"}]},
            ],
            "constraints": [{"requests": ["gpu"], "matchAttribute": "gpu.nvidia.com/nvlinkDomain"}],
            "config": [
                {"requests": ["gpu", "any/big"], "opaque": {"driver": DRIVER, "parameters": PARAMETERS}}
            ],
        }
    },
}


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


def told(document: Json) -> list[str]:
    return [str(fault) for fault in object_faults(document, DRIVER)]


R = "spec.devices.requests"
E = f"{R}.0.exactly"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("apiVersion", "resource.k8s.io/v1alpha2", "apiVersion: 'resource.k8s.io/v1alpha2' is gone or unknown"),
        ("apiVersion", "resource.k8s.io/v1alpha3", "apiVersion: 'resource.k8s.io/v1alpha3' is gone or unknown"),
        ("metadata", {}, "metadata.name: is required"),
        ("metadata.name", "Big", "metadata.name: 'Big' is not a lower-case DNS name"),
        ("spec", None, "spec: is required"),
        ("spec", "x", "spec: must be an object, not the string 'x'"),
        ("spec.resourceClassName", "gpu", "spec.resourceClassName: belongs to resource.k8s.io/v1alpha2, which is gone"),
        ("spec.requests", [], "spec.requests: stands under `devices`: devices.requests"),
        (f"{R}.0.deviceClassName", "gpu.nvidia.com", "requests[0].deviceClassName: stands under `exactly`"),
        (f"{R}.0.exactly", None, "requests[0]: exactly one of `exactly` and `firstAvailable` is required"),
        (f"{R}.0.name", "GPU", "requests[0].name: 'GPU' is not a DNS label"),
        (f"{R}.1.name", "gpu", "requests[1].name: 'gpu' is taken by another request"),
        (f"{E}.deviceClassName", None, "exactly.deviceClassName: is required"),
        (f"{E}.deviceClassName", "", "exactly.deviceClassName: '' is not a lower-case DNS name"),
        (f"{E}.deviceclassname", "x", "exactly.deviceclassname: unknown field; did you mean deviceClassName?"),
        (f"{E}.zzz", 1, "exactly.zzz: unknown field; there are adminAccess, allocationMode"),
        (f"{E}.count", 0, "exactly.count: 0 must be greater than zero"),
        (f"{E}.count", "2", "exactly.count: must be a number, not the string '2'"),
        (f"{E}.allocationMode", "Some", "exactly.allocationMode: 'Some' must be ExactCount or All"),
        (f"{E}.allocationMode", "All", "exactly.count: does not go with allocationMode All"),
        (f"{E}.adminAccess", "yes", "exactly.adminAccess: must be true or false, not the string 'yes'"),
        (f"{E}.selectors", {"cel": {}}, "exactly.selectors: must be a list, not an object"),
        (f"{E}.selectors", [{"expression": "true"}], "selectors[0].expression: stands under `cel`: cel.expression"),
        (f"{E}.selectors", [{"cel": "true"}], "selectors[0].cel: must be an object, not the string 'true'"),
        (f"{E}.selectors", [{"cel": {"expression": "a b"}}], "cel.expression: does not compile: Syntax error: "),
        (f"{E}.selectors", [{"cel": {"expression": "x"}}], "does not compile: undeclared reference to 'x'"),
        (f"{E}.selectors", [{"cel": {"expression": "true"}}] * 33, "selectors: has 33 items, at most 32 are allowed"),
        (f"{E}.tolerations", [{"effect": "Never"}], "effect: 'Never' must be NoSchedule or NoExecute"),
        (f"{E}.capacity", {"requests": {"memory": "8GB"}}, "capacity.requests.memory: '8GB' is not a quantity"),
        (f"{E}.capacity", {"requests": {"memory": "-1"}}, "capacity.requests.memory: '-1' must not be negative"),
        (f"{E}.capacity", {"requests": {"me mory": "1"}}, "capacity.requests.me mory: 'me mory' is not the name"),
        (f"{R}.1.firstAvailable.0.count", 0, "firstAvailable[0].count: 0 must be greater than zero"),
        (f"{R}.1.firstAvailable.0.adminAccess", True, "firstAvailable[0].adminAccess: unknown field"),
        ("spec.devices.constraints.0.requests.0", "gpuu", "constraints[0].requests[0]: there is no request 'gpuu'"),
        ("spec.devices.constraints.0.matchAttribute", "nvlinkDomain", "put its domain before it, such as"),
        ("spec.devices.constraints.0.distinctAttribute", "a.b/c", "exactly one of `matchAttribute` and `distinct"),
        ("spec.devices.config.0.requests.1", "any/small", "config[0].requests[1]: there is no request 'any/small'"),
        ("spec.devices.config.0.opaque.driver", None, "config[0].opaque.driver: is required"),
        ("spec.devices.config.0.opaque.parameters.kind", "GpuConf", "parameters.kind: 'GpuConf' is not supported"),
        ("spec.devices.config.0.opaque.parameters.sharing.mpsConfig", {}, "parameters.sharing.mpsConfig: does not fit"),
        ("spec.devices.config.0.opaque.parameters.nope", 1, "opaque.parameters.nope: unknown field"),
        ("spec.devices.config.0.opaque.parameters", "x", "opaque.parameters: the parameters must be an object"),
        ("spec.devices.config.0.opaque.parameters",
         {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig"}, "VFIO passthrough"),
    ],
)  # fmt: skip
def test_a_fault_in_a_claim(path: str, value: Any, expected: str) -> None:
    assert told(CLAIM) == []
    faults = told(changed(path, value))
    assert any(expected in fault for fault in faults), faults
    template = {
        "apiVersion": CLAIM["apiVersion"],
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t"},
        "spec": {"spec": changed(path, value).get("spec")},
    }
    if path.startswith("spec."):
        assert any(expected in fault for fault in told(template))


def test_a_misspelt_required_field_is_one_fault() -> None:
    document = changed(f"{E}.deviceClasName", "gpu.nvidia.com", changed(f"{E}.deviceClassName", None))
    (fault,) = told(document)
    assert fault.endswith("unknown field; did you mean deviceClassName?")


def test_parameters_of_another_driver_are_its_own() -> None:
    other = changed("spec.devices.config.0.opaque", {"driver": "other.example.com", "parameters": {"any": 1}})
    assert told(other) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"devices": {"requests": []}},
            "spec.devices: a template holds a claim, so it stands one `spec` deeper",
        ),
        ({}, "spec.spec: is required"),
    ],
)
def test_a_fault_in_a_template(spec: Json, expected: str) -> None:
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t"},
    }
    assert any(fault.startswith(expected) for fault in told(document | {"spec": spec}))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"selectors": [{"cel": {"expression": "devic.driver == 'x'"}}]}, "to 'devic.driver' at character 6"),
        ({"suitableNodes": {}}, "spec.suitableNodes: belongs to an alpha version"),
        ({"config": [{"requests": [], "opaque": OPAQUE}]}, "requests: unknown field"),
        ({"config": [{"opaque": OPAQUE | {"parameters": {}}}]}, "config[0].opaque.parameters.apiVersion: is required"),
    ],
)  # fmt: skip
def test_a_fault_in_a_class(spec: Json, expected: str) -> None:
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "x.example.com"},
    }
    assert any(expected in fault for fault in told(document | {"spec": spec}))
    assert told(document | {"spec": {}}) == []


def test_older_versions_are_read_as_they_are_written() -> None:
    flat = changed(f"{R}.0", {"name": "gpu", "deviceClassName": "gpu.nvidia.com", "count": 2})
    flat["apiVersion"] = "resource.k8s.io/v1beta1"
    assert told(flat) == []
    assert as_v1(flat) == CLAIM
    assert class_names(claim_spec(as_v1(flat))) == ["gpu.nvidia.com"] * 2
    template = {"apiVersion": flat["apiVersion"], "kind": "ResourceClaimTemplate", "metadata": {"name": "t"}}
    assert as_v1(template | {"spec": {"spec": flat["spec"]}})["spec"]["spec"] == CLAIM["spec"]
    nested = CLAIM | {"apiVersion": "resource.k8s.io/v1beta1"}
    assert any("exactly: does not exist in resource.k8s.io/v1beta1" in fault for fault in told(nested))
    assert told(CLAIM | {"apiVersion": "resource.k8s.io/v1beta2"}) == []


POD: Json = {
    "containers": [{"name": "a", "resources": {"claims": [{"name": "gpu"}]}}],
    "resourceClaims": [
        {"name": "gpu", "resourceClaimName": "c"},
        {"name": "spare", "resourceClaimTemplateName": "t"},
    ],
}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("resourceClaims.0.source", {}, "resourceClaims[0].source: is gone since Kubernetes 1.31"),
        ("resourceClaims.0.resourceClaimName", None, "resourceClaims[0]: exactly one of `resourceClaimName`"),
        (
            "resourceClaims.0.resourceClaimTemplateName",
            "t",
            "resourceClaims[0]: exactly one of `resourceClaimName`",
        ),
        ("resourceClaims.0.name", "other", "containers[0].resources.claims[0].name: there is no entry 'gpu'"),
        (
            "containers.0.resources.claims.0.name",
            "x",
            "there is no entry 'x' in resourceClaims; there are: gpu, spare",
        ),
    ],
)
def test_a_fault_in_a_pod(path: str, value: Any, expected: str) -> None:
    assert pod_faults(POD, "spec") == []
    faults = [str(fault) for fault in pod_faults(changed(path, value, POD), "spec")]
    assert any(expected in fault for fault in faults), faults


def test_claims_of_a_pod_that_no_container_uses() -> None:
    assert unused_claims(POD) == ["spare"]


def test_parameters_that_stand_alone() -> None:
    assert parameter_faults(PARAMETERS, "") == []
    (fault,) = parameter_faults(PARAMETERS | {"shring": 1}, "")
    assert str(fault) == "shring: unknown field"


def test_all_that_is_shipped_is_without_fault() -> None:
    seen = 0
    classes = [
        file
        for folder in ("base", "components", "overlays")
        for file in ROOT.glob(f"daemonset/{folder}/**/device-class*.yaml")
    ]
    for file in (*ROOT.glob("examples/*/*.yaml"), *classes):
        for document in yaml.safe_load_all(file.read_text()):
            if document.get("kind") in KINDS:
                seen += 1
                assert told(document) == [], file
            for path, spec in pod_specs(document):
                assert pod_faults(spec, path) == [], file
    assert seen > 10
