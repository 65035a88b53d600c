"""Finding what a server left out, by value and with the feature gate to name."""

from __future__ import annotations

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.kube.slices import SliceClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.units import same_quantity
from dra_driver.slices.rules.dropped_fields import dropped_fields
from tests.kube.support import DRIVER, make_slice

_TAINT = {"key": "gpu.nvidia.com/x", "value": "y", "effect": "NoSchedule"}


def spec(**fields):
    return {"spec": fields}


def device(**fields):
    return spec(devices=[{"name": "gpu-0", **fields}])


@pytest.mark.parametrize(
    ("sent", "returned", "expected"),
    [
        (device(taints=[_TAINT]), device(), (("spec.devices[0].taints", "DRADeviceTaints"),)),
        (
            device(consumesCounters=[{"counterSet": "s", "counters": {}}]),
            device(),
            (("spec.devices[0].consumesCounters", "DRAPartitionableDevices"),),
        ),
        (spec(sharedCounters=[{"name": "s"}]), spec(), (("spec.sharedCounters", "DRAPartitionableDevices"),)),
        (
            device(allowMultipleAllocations=True),
            device(),
            (("spec.devices[0].allowMultipleAllocations", "DRAConsumableCapacity"),),
        ),
        (
            device(capacity={"memory": {"value": "1Gi", "requestPolicy": {"default": "1Gi"}}}),
            device(capacity={"memory": {"value": "1Gi"}}),
            (("spec.devices[0].capacity.memory.requestPolicy", "DRAConsumableCapacity"),),
        ),
        (
            device(attributes={"a.example.com/links": {"int": 1}}),
            device(attributes={"a.example.com/links": {}}),
            (("spec.devices[0].attributes[a.example.com/links].int", "unknown"),),
        ),
        (
            device(attributes={"x": {"string": "a"}}),
            device(attributes={"x": {"string": "b"}}),
            (("spec.devices[0].attributes.x.string", "unknown"),),
        ),
        (
            spec(devices=[{"name": "a"}, {"name": "b"}]),
            spec(devices=[{"name": "a"}]),
            (("spec.devices", "unknown"),),
        ),
    ],
)
def test_loss_is_named_with_its_gate(sent, returned, expected):
    assert dropped_fields(sent, returned) == expected


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        (device(taints=[_TAINT]), device(taints=[_TAINT | {"timeAdded": "2026-01-01T00:00:00Z"}])),
        (
            device(taints=[_TAINT | {"timeAdded": "2026-01-01T00:00:00.123Z"}]),
            device(taints=[_TAINT | {"timeAdded": "2026-01-01T00:00:00Z"}]),
        ),
        (device(capacity={"m": {"value": "1024Mi"}}), device(capacity={"m": {"value": "1Gi"}})),
        (
            spec(sharedCounters=[{"name": "s", "counters": {"m": {"value": "1000m"}}}]),
            spec(sharedCounters=[{"name": "s", "counters": {"m": {"value": "1"}}}]),
        ),
        (device(attributes={}, taints=[], allowMultipleAllocations=False), device()),
        (
            device(capacity={"m": {"value": "2Gi", "requestPolicy": {"validValues": ["1024Mi", "2Gi"]}}}),
            device(capacity={"m": {"value": "2Gi", "requestPolicy": {"validValues": ["1Gi", "2Gi"]}}}),
        ),
        (spec(driver="a"), spec(driver="b")),
    ],
)
def test_nothing_is_reported_when_values_are_equal(sent, returned):
    assert dropped_fields(sent, returned) == ()


def test_other_time_of_a_taint_is_a_loss():
    sent = device(taints=[_TAINT | {"timeAdded": "2026-01-01T00:00:00Z"}])
    returned = device(taints=[_TAINT | {"timeAdded": "2026-01-02T00:00:00Z"}])
    assert dropped_fields(sent, returned) == (("spec.devices[0].taints[0].timeAdded", "DRADeviceTaints"),)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("1Gi", "1024Mi", True),
        ("1", 1, True),
        ("0.5", "500m", True),
        ("1e3", "1k", True),
        ("1G", "1Gi", False),
        ("x", "y", False),
        (None, None, True),
        (None, "1", False),
        ("1E", "1e18", True),
    ],
)
def test_quantities_are_compared_by_value(left, right, same):
    assert same_quantity(left, right) is same


@pytest.mark.parametrize("served", [("v1",), ("v1beta1",)])
def test_loss_is_seen_when_server_has_the_gate_off(connect, served):
    gates = {"DRADeviceTaints": False, "DRAConsumableCapacity": False}
    with PlaygroundApiServer(gates=gates, served=served) as server:
        slices = SliceClient(ResourceApi(connect(server)), DRIVER, "n")
        sent = make_slice("n")
        sent["spec"]["devices"][0] |= {"taints": [_TAINT], "allowMultipleAllocations": True}
        assert dropped_fields(sent, slices.create(sent)) == (
            ("spec.devices[0].allowMultipleAllocations", "DRAConsumableCapacity"),
            ("spec.devices[0].taints", "DRADeviceTaints"),
        )
