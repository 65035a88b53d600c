"""Power limits and locked clocks on a simulated machine, as NVML refuses, forgets and enforces them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pynvml
import pytest

from dra_driver.errors import (
    ClaimRefusedError,
    DeviceLostError,
    DraDriverError,
    NotSupportedError,
    NvmlTransientError,
    RetryableError,
)
from dra_driver.nvml.limits import GpuLimits
from dra_driver.nvml.mig_reading import gpu_handle
from dra_driver.nvml.usage_source import read_load, read_meters
from tests.fakes.machines import SimulatedNode

LIMITS = GpuLimits(nullcontext)


@pytest.fixture
def gpu(node: SimulatedNode) -> str:
    return node.machine.gpu(0).uuid


def clocks(gpu: str) -> tuple[float | None, float | None]:
    meters = read_meters(gpu_handle(gpu, None))
    return meters.sm_clock_hz, meters.memory_clock_hz


def test_limit_is_set_and_enforced_until_the_driver_forgets_it(node: SimulatedNode, gpu: str) -> None:
    assert LIMITS.power_mw(gpu) == 700_000
    LIMITS.set_power(gpu, 500_500)
    node.machine.hold_gpu(0, 4711, "train", utilisation=100)
    load, meters = read_load(gpu), read_meters(gpu_handle(gpu, None))
    assert (LIMITS.power_mw(gpu), load.power_w, load.power_limit_w) == (500_500, 500.5, 500.5)
    assert (meters.power_limit_set_w, meters.throttles) == (500.5, {"sw_power_cap"})
    node.machine.set_gpu(0, power_enforced_mw=300_000)
    assert (read_load(gpu).power_limit_w, LIMITS.power_mw(gpu)) == (300.0, 500_500)
    node.machine.unload_driver()
    node.machine.load_driver()
    node.session.reopen()
    assert LIMITS.power_mw(gpu) == 700_000


def test_clocks_are_locked_each_for_itself(gpu: str) -> None:
    before = clocks(gpu)
    LIMITS.lock_clock(gpu, "graphics", 1200, 1200)
    LIMITS.lock_clock(gpu, "memory", 2619, 2619)
    assert clocks(gpu) == (1200e6, 2619e6)
    LIMITS.unlock_clock(gpu, "graphics")
    assert clocks(gpu) == (before[0], 2619e6)
    LIMITS.unlock_clock(gpu, "memory")
    LIMITS.unlock_clock(gpu, "memory")
    assert clocks(gpu) == before


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("no-permission", ClaimRefusedError, "NVML denies permission, as it may in a virtual machine"),
        ("invalid-argument", ClaimRefusedError, "the GPU does not accept this value"),
        ("not-supported", NotSupportedError, "Not Supported"),
        ("gpu-is-lost", DeviceLostError, "the GPU does not answer"),
        ("not-ready", NvmlTransientError, ""),
        ("unknown", RetryableError, "Unknown Error"),
    ],
)  # fmt: skip
def test_each_error_says_what_it_means(
    node: SimulatedNode, gpu: str, code: str, error: type[DraDriverError], text: str
) -> None:
    node.machine.set_fault("nvmlDeviceSetPowerManagementLimit", code=code)
    with pytest.raises(error, match=f"cannot set the power limit of GPU {gpu} to 500 W: .*{text}") as caught:
        LIMITS.set_power(gpu, 500_000)
    assert caught.value.has_no_effect == (error is ClaimRefusedError)
    assert LIMITS.power_mw(gpu) == 700_000


def test_library_refuses_what_is_outside_the_range(gpu: str) -> None:
    with pytest.raises(ClaimRefusedError):
        LIMITS.set_power(gpu, 100_000)
    with pytest.raises(ClaimRefusedError):
        LIMITS.lock_clock(gpu, "graphics", 100, 1200)


def test_gpu_without_settable_limits_reports_none(machine: Callable[[str], SimulatedNode]) -> None:
    made = machine("gb10")
    [gpu] = made.read().gpus
    assert (gpu.power_limits_w, gpu.power_limit_default_w, gpu.graphics_clocks_mhz) == (None, None, None)
    with pytest.raises(NotSupportedError):
        LIMITS.power_mw(gpu.uuid)
    assert read_meters(gpu_handle(gpu.uuid, None)).power_limit_set_w is None


def test_reading_rounds_into_the_range(node: SimulatedNode) -> None:
    gpu = node.read().gpus[0]
    assert (gpu.power_limits_w, gpu.power_limit_default_w) == ((200, 700), 700)
    assert (gpu.graphics_clocks_mhz, gpu.memory_clocks_mhz) == ((210, 1980), (1593, 2619))


def test_binding_has_the_function_whose_return_code_it_does_not_drop() -> None:
    """nvmlDeviceSetPowerManagementLimit_v2 of nvidia-ml-py reports success whatever NVML says."""
    assert "_v2" not in pynvml.nvmlDeviceSetPowerManagementLimit.__code__.co_consts
