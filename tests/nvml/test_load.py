"""How busy a GPU is: what each kind of GPU tells, and what a failing call costs."""

from __future__ import annotations

import pytest

from dra_driver.errors import DeviceLostError, NvmlUnavailableError
from dra_driver.model.gpu import GpuLoad
from dra_driver.nvml.load import read_load


@pytest.fixture
def node(dgx):
    dgx.session.reopen()
    return dgx


def test_busy_and_idle(machine):
    node = machine("hgx-h100-4")
    node.session.reopen()
    busy, idle = (node.machine.gpu(index).uuid for index in (0, 1))
    node.machine.hold_gpu(0, 4711, "python")
    assert read_load(busy) == GpuLoad(512 << 20, 81559 << 20, 40, 30, 70.0, 700.0)
    assert read_load(idle) == GpuLoad(0, 81559 << 20, 0, 31, 70.0, 700.0)
    node.machine.set_mig_mode(1, on=True)
    assert read_load(idle).utilisation_percent is None
    node.machine.lose_gpu(1)
    with pytest.raises(DeviceLostError):
        read_load(idle)


def test_shared_memory_is_nobodys(machine):
    node = machine("gb10")
    node.session.reopen()
    load = read_load(node.machine.gpu(0).uuid)
    assert (load.memory_used_bytes, load.memory_total_bytes) == (None, None)
    assert load.temperature_c is not None


@pytest.mark.parametrize(
    ("function", "code", "missing"),
    [
        ("nvmlDeviceGetMemoryInfo*", "UNKNOWN", {"memory_used_bytes", "memory_total_bytes"}),
        ("nvmlDeviceGetUtilizationRates", "NOT_SUPPORTED", {"utilisation_percent"}),
        ("nvmlDeviceGetTemperature*", "UNKNOWN", {"temperature_c"}),
        ("nvmlDeviceGetPowerUsage", "NO_PERMISSION", {"power_w"}),
        ("nvmlDeviceGetEnforcedPowerLimit", "NOT_SUPPORTED", {"power_limit_w"}),
    ],
)
def test_failing_call_costs_its_value_only(node, function, code, missing):
    node.machine.set_fault(function, code=code)
    load = read_load(node.machine.gpu(0).uuid)
    assert {name for name in GpuLoad.__slots__ if getattr(load, name) is None} == missing


def test_older_drivers_count_what_they_keep_for_themselves(node):
    uuid = node.machine.gpu(0).uuid
    newer = read_load(uuid)
    node.machine.set_fault("nvmlDeviceGetMemoryInfo_v2", code="FUNCTION_NOT_FOUND")
    older = read_load(uuid)
    assert newer.memory_used_bytes == 0
    assert older.memory_used_bytes is not None
    assert older.memory_used_bytes > 0
    assert older.memory_total_bytes == newer.memory_total_bytes


def test_driver_that_goes_away_is_no_missing_value(node):
    uuid = node.machine.gpu(0).uuid
    node.machine.set_fault("nvmlDeviceGetTemperature*", code="UNINITIALIZED")
    with pytest.raises(NvmlUnavailableError):
        read_load(uuid)
