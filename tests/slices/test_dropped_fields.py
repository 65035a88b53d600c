"""Finding what a server left out, by value and with the feature gate to name."""

from __future__ import annotations

from playground.apiserver import PlaygroundApiServer

from dra_driver.kube.resource_api import ResourceApi
from dra_driver.kube.slices import SliceClient
from dra_driver.model.units import same_quantity
from dra_driver.slices.rules.dropped_fields import dropped_fields
from tests.fakes.tables import tabled
from tests.kube.support import DRIVER, make_slice

_TAINT = {"key": "gpu.nvidia.com/x", "value": "y", "effect": "NoSchedule"}


def spec(**fields):
    return {"spec": fields}


def device(**fields):
    return spec(devices=[{"name": "gpu-0", **fields}])


@tabled("sent", "returned", "expected")
def test_loss_is_named_with_its_gate(sent, returned, expected):
    assert dropped_fields(sent, returned) == tuple((path, gate) for path, gate in expected)


@tabled("sent", "returned")
def test_nothing_is_reported_when_values_are_equal(sent, returned):
    assert dropped_fields(sent, returned) == ()


def test_other_time_of_a_taint_is_a_loss():
    sent = device(taints=[_TAINT | {"timeAdded": "2026-01-01T00:00:00Z"}])
    returned = device(taints=[_TAINT | {"timeAdded": "2026-01-02T00:00:00Z"}])
    assert dropped_fields(sent, returned) == (("spec.devices[0].taints[0].timeAdded", "DRADeviceTaints"),)


@tabled("left", "right", "same")
def test_quantities_are_compared_by_value(left, right, same):
    assert same_quantity(left, right) is same


def test_loss_is_seen_when_server_has_the_gate_off(connect):
    gates = {"DRADeviceTaints": False, "DRAConsumableCapacity": False}
    with PlaygroundApiServer(gates=gates) as server:
        slices = SliceClient(ResourceApi(connect(server)), DRIVER, "n")
        sent = make_slice("n")
        sent["spec"]["devices"][0] |= {"taints": [_TAINT], "allowMultipleAllocations": True}
        assert dropped_fields(sent, slices.create(sent)) == (
            ("spec.devices[0].allowMultipleAllocations", "DRAConsumableCapacity"),
            ("spec.devices[0].taints", "DRADeviceTaints"),
        )
