"""The limits of the API, one by one: what is just allowed and what is just not."""

from __future__ import annotations

import pytest
from playground.apiserver.rules import claim_faults, slice_faults

_POOL = {"name": "n", "generation": 1, "resourceSliceCount": 1}
_TAINT = {"key": "a/b", "value": "c", "effect": "NoSchedule"}


def faults(**spec):
    """Field paths of the faults of a slice."""
    full = {"driver": "d.example.com", "nodeName": "n", "pool": _POOL} | spec
    full = {key: value for key, value in full.items() if value is not None}
    return [cause.field for cause in slice_faults({"metadata": {"name": "s"}, "spec": full}, None)]


def device_faults(**fields):
    return [path.removeprefix("spec.devices[0]") for path in faults(devices=[{"name": "g", **fields}])]


def attributes(count):
    return {f"a{i}": {"int": i} for i in range(count)}


def counters(count):
    return {f"c{i}": {"value": "1"} for i in range(count)}


def gpus(count, **fields):
    return [{"name": f"g{i}", **fields} for i in range(count)]


def counter_sets(count, each):
    return [{"name": f"s{i}", "counters": counters(each)} for i in range(count)]


TWENTY = {"attributes": attributes(20)}


def test_smallest_slice_is_valid():
    assert faults() == []
    assert faults(devices=[], sharedCounters=[]) == []


SLICES = [
    ({"devices": gpus(128)}, {"devices": gpus(129)}, "spec.devices"),
    ({"devices": gpus(64, taints=[_TAINT])}, {"devices": gpus(65, taints=[_TAINT])}, "spec.devices"),
    ({"sharedCounters": counter_sets(8, 32)}, {"sharedCounters": counter_sets(9, 1)}, "spec.sharedCounters"),
    ({}, {"sharedCounters": counter_sets(1, 33)}, "spec.sharedCounters[0].counters"),
    ({}, {"sharedCounters": counter_sets(1, 0)}, "spec.sharedCounters[0].counters"),
    ({}, {"sharedCounters": counter_sets(1, 1), "devices": gpus(1)}, "spec"),
    ({"pool": _POOL | {"name": "a/b.c"}}, {"pool": _POOL | {"name": "a//b"}}, "spec.pool.name"),
    ({"pool": _POOL | {"generation": 0}}, {"pool": _POOL | {"generation": -1}}, "spec.pool.generation"),
    ({"driver": "a" * 63}, {"driver": "a" * 64}, "spec.driver"),
    ({}, {"driver": "Upper"}, "spec.driver"),
    ({}, {"nodeName": None}, "spec"),
    ({}, {"devices": gpus(1) * 2}, "spec.devices[1].name"),
    ({}, {"devices": [{"name": "G"}]}, "spec.devices[0].name"),
]


@pytest.mark.parametrize(("good", "bad", "field"), SLICES)
def test_slice_limits(good, bad, field):
    assert faults(**good) == []
    assert field in faults(**bad)


def value(kind, given, name="a"):
    return {"attributes": {name: {kind: given}}}


def uses(*counter_sets, count=1):
    return {"consumesCounters": [{"counterSet": name, "counters": counters(count)} for name in counter_sets]}


DEVICES = [
    ({"attributes": attributes(32)}, {"attributes": attributes(33)}, ""),
    ({**TWENTY, "capacity": counters(12)}, {**TWENTY, "capacity": counters(13)}, ""),
    (value("string", "x" * 64), value("string", "x" * 65), ".attributes.a.string"),
    (value("string", "ü" * 32), value("string", "ü" * 33), ".attributes.a.string"),
    (value("version", "1.2.3-rc.1+b"), value("version", "1.02.3"), ".attributes.a.version"),
    ({}, value("version", "550.54"), ".attributes.a.version"),
    (value("bool", False), value("int", True), ".attributes.a.int"),
    (value("int", 1, "a.b/c_d"), value("int", 1, "a.b/c-d"), ".attributes"),
    ({}, {"attributes": {"a": {"int": 1, "string": "x"}}}, ".attributes.a.value"),
    ({"capacity": {"m": {"value": "1.5Gi"}}}, {"capacity": {"m": {"value": "lots"}}}, ".capacity.m.value"),
    (uses("s0", "s1", count=32), uses("s0", "s1", "s2"), ".consumesCounters"),
    ({}, uses("s", "s"), ".consumesCounters[1].counterSet"),
    ({"taints": [_TAINT] * 16}, {"taints": [_TAINT] * 17}, ".taints"),
    ({"taints": [{"key": "a", "effect": "None"}]}, {"taints": [{"key": "a", "effect": "Evict"}]}, ".taints[0].effect"),
    ({}, {"taints": [{"key": "a b", "effect": "None"}]}, ".taints[0].key"),
]  # fmt: skip


@pytest.mark.parametrize(("good", "bad", "field"), DEVICES)
def test_device_limits(good, bad, field):
    assert device_faults(**good) == []
    assert field in device_faults(**bad)


def test_claim_is_reserved_only_once_it_is_allocated():
    claim = {"spec": {}, "status": {"reservedFor": [{"uid": "u"}]}}
    assert "status.reservedFor" in [cause.field for cause in claim_faults(claim, None)]
