"""Creating and destroying GPU instances and compute instances, through the real binding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from dra_driver.errors import (
    DeviceBusyError,
    DeviceLostError,
    NotSupportedError,
    NvmlTransientError,
    NvmlUnknownOutcomeError,
    RetryableError,
)
from dra_driver.model.mig import GpuInstance, MigProfile, Placement
from dra_driver.nvml.mig_changes import MigHardware
from dra_driver.nvml.mig_reading import whole_compute_profile
from dra_driver.simulator.machine_state import Gpu
from dra_driver.simulator.machine_state import MigProfile as Row
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import ONE_G
from tests.fakes.tables import tabled

Make = Callable[[str], SimulatedNode]

MACHINES = ["dgx-a100-40gb", "dgx-h100", "dgx-b200", "a30-4"]
PROFILE_1G, PROFILE_1G_ME, PROFILE_3G, PROFILE_7G = 19, 20, 9, 0
FIRST, LAST = Placement(0, 1), Placement(6, 1)
LEFT_HALF = Placement(0, 4)


class Bench:
    """GPU 0 of a simulated machine, and the hardware under test with that GPU filled in."""

    def __init__(self, node: SimulatedNode, by_address: bool = True) -> None:
        self.node = node
        self.machine = node.machine
        self.hardware = MigHardware(nullcontext)
        node.session.reopen()
        self.where = (self.gpu.uuid, self.gpu.bus_id if by_address else None)

    @property
    def gpu(self) -> Gpu:
        return self.machine.gpu(0)

    @property
    def rows(self) -> list[Row]:
        return self.machine.current().model_of(self.gpu).mig

    def make(self, profile: int = PROFILE_1G, placement: Placement = FIRST) -> int:
        return self.hardware.create(*self.where, profile, placement)

    def make_device(self, profile: int = PROFILE_1G, placement: Placement = FIRST) -> tuple[int, int, str]:
        made = self.make(profile, placement)
        return made, *self.hardware.create_compute(*self.where, made)


@pytest.fixture
def pair(machine: Make, tmp_path: Path) -> Bench:
    """A machine with two H100, whose minor numbers change with the mode; small, so that it is created
    quickly.
    """
    source = tmp_path / "pair.yaml"
    source.write_text(
        "description: two GPUs\nsystem: {minors_move: true}\ndefaults: {model: h100-sxm}\n"
        'gpus:\n  - {bus: "0000:1b:00.0"}\n  - {bus: "0000:1c:00.0"}\n'
    )
    return Bench(machine(str(source)))


@pytest.fixture
def bench(pair: Bench) -> Bench:
    """The first GPU is in MIG mode."""
    pair.machine.set_mig_mode(0, True)
    return pair


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Put another function into the place of one of the driver's."""

    def put(name: str, function: Any) -> None:
        monkeypatch.setattr(pynvml.nvmlLib, name, function)
        pynvml._nvmlGetFunctionPointer_cache.pop(name, None)

    return put


# --- there and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_address", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_every_placement_can_be_made_and_destroyed(machine: Make, name: str, by_address: bool) -> None:
    bench = Bench(machine(name), by_address)
    hardware, where = bench.hardware, bench.where
    hardware.set_mode(*where, True)
    for row in bench.rows if by_address else bench.rows[:1]:
        for start, size in row.placements:
            placement = Placement(start, size)
            made = hardware.create(*where, row.id, placement)
            assert hardware.instances(*where) == (GpuInstance(made, row.id, placement),)
            assert hardware.compute_instances(*where, made) == ()
            compute, uuid = hardware.create_compute(*where, made)
            assert hardware.compute_instances(*where, made) == ((compute, uuid),)
            (pair,) = bench.gpu.mig_devices
            assert (pair[0].id, pair[1].id, pair[1].uuid, pair[1].size) == (made, compute, uuid, row.slices)
            hardware.destroy_compute(*where, made, compute)
            hardware.destroy(*where, made)
            assert hardware.instances(*where) == ()
    hardware.set_mode(*where, False)
    assert hardware.mode(*where) == (False, False)


def test_instances_are_in_the_order_of_their_placements(bench: Bench) -> None:
    last, half, first = bench.make(19, Placement(5, 1)), bench.make(14, Placement(2, 2)), bench.make()
    bench.hardware.create_compute(*bench.where, half)
    found = bench.hardware.instances(*bench.where)
    assert [item.gpu_instance_id for item in found] == [first, half, last]
    assert [item.slot for item in found] == [(19, 0), (14, 2), (19, 5)]


def test_all_compute_instances_of_a_gpu_instance_are_reported(bench: Bench) -> None:
    made = bench.make(PROFILE_3G, LEFT_HALF)
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for _ in range(3):
        pynvml.nvmlGpuInstanceCreateComputeInstance(pynvml.nvmlDeviceGetGpuInstanceById(handle, made), 0)
    expected = tuple((compute.id, compute.uuid) for _, compute in bench.gpu.mig_devices)
    assert bench.hardware.compute_instances(*bench.where, made) == expected
    assert len(expected) == 3


def test_destruction_of_a_missing_instance_succeeds(bench: Bench) -> None:
    made, compute, _ = bench.make_device()
    bench.machine.destroy_mig(0, made)
    bench.hardware.destroy_compute(*bench.where, made, compute)
    bench.hardware.destroy(*bench.where, made)
    assert bench.hardware.compute_instances(*bench.where, made) == ()
    made = bench.make()
    bench.hardware.destroy_compute(*bench.where, made, 0)
    bench.hardware.destroy(*bench.where, made)
    bench.machine.set_mig_mode(0, False)
    bench.hardware.destroy_compute(*bench.where, made, 0)
    bench.hardware.destroy(*bench.where, made)
    assert bench.hardware.compute_instances(*bench.where, made) == ()
    assert bench.hardware.instances(*bench.where) == ()


def test_instance_that_disappears_during_its_destruction_is_accepted(bench: Bench) -> None:
    made, compute, _ = bench.make_device()
    for function in ("nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"):
        bench.machine.set_fault(function, code="not-found", count=1)
        bench.hardware.destroy_compute(*bench.where, made, compute)
        if "Gpu" in function:
            bench.hardware.destroy(*bench.where, made)
        assert bench.machine.current().faults == []


def test_gpu_instance_that_cannot_be_looked_up_is_not_taken_for_gone(bench: Bench) -> None:
    made = bench.make()
    bench.machine.set_fault("nvmlDeviceGetGpuInstanceById", code="function-not-found")
    with pytest.raises(NotSupportedError, match=f"cannot find GPU instance {made} of GPU {bench.gpu.uuid}"):
        bench.hardware.destroy(*bench.where, made)


# --- creation refused ----------------------------------------------------------------------------------


def test_taken_placement_is_refused_with_what_is_in_the_way(bench: Bench) -> None:
    made = bench.make(PROFILE_3G, LEFT_HALF)
    bench.make(PROFILE_1G, LAST)
    with pytest.raises(RetryableError) as caught:
        bench.make(PROFILE_1G, Placement(3, 1))
    assert str(caught.value) == (
        f"cannot create a GPU instance of profile 19 at memory slice 3 of GPU {bench.gpu.uuid}: the NVIDIA driver has "
        f"no free space at that placement; in the way: GPU instance {made} (profile 9) at memory slices 0-3"
    )
    assert type(caught.value) is RetryableError, "that does not pass by itself"


def test_profile_that_is_used_up_is_refused_with_who_has_it(bench: Bench) -> None:
    made = bench.make(PROFILE_1G_ME, LAST)
    with pytest.raises(RetryableError) as caught:
        bench.make(PROFILE_1G_ME, FIRST)
    assert str(caught.value).endswith(
        f"the GPU cannot have more instances of this profile; it has: GPU instance {made} (profile 20) at memory "
        "slice 6"
    )
    assert type(caught.value) is RetryableError


def test_room_that_is_not_there_for_no_reason_comes(bench: Bench) -> None:
    made = bench.make(PROFILE_1G, LAST)
    bench.machine.set_fault(
        "nvmlDeviceCreateGpuInstanceWithPlacement", code="insufficient-resources", count=2
    )
    with pytest.raises(NvmlTransientError, match=r"although nothing is in the way; .*scrubbing") as caught:
        bench.make()
    assert f"(existing GPU instances: GPU instance {made} (profile 19) at memory slice 6)" in str(
        caught.value
    )
    bench.machine.set_fault("nvmlDeviceGetGpuInstances", code="timeout")
    with pytest.raises(
        NvmlTransientError, match="no free space at that placement; the reason cannot be read"
    ):
        bench.make()
    bench.machine.clear_faults()
    bench.make()


def test_creation_while_mig_mode_is_off_can_be_retried(bench: Bench) -> None:
    bench.machine.set_mig_mode(0, False)
    with pytest.raises(NvmlTransientError, match="MIG mode was switched off"):
        bench.make()


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (
            "invalid-argument",
            RetryableError,
            "does not accept this profile or placement .*delete the pod and its claim",
        ),
        ("no-permission", RetryableError, "run as root"),
        ("reset-required", RetryableError, "nvidia-smi --gpu-reset"),
        ("in-use", NvmlTransientError, "In use"),
        ("not-ready", NvmlTransientError, "Not Ready|code 27"),
        ("invalid-state", NvmlTransientError, "Invalid State|code 29"),
        ("memory", NvmlTransientError, "Insufficient Memory"),
        ("unknown", NvmlUnknownOutcomeError, "Unknown"),
        ("timeout", NvmlUnknownOutcomeError, "Timeout"),
    ],
)
@pytest.mark.parametrize("what", ["GPU", "compute"])
def test_refusal_of_an_instance_has_its_class_and_leaves_nothing(
    bench: Bench, what: str, code: str, error: type[Exception], text: str
) -> None:
    if what == "GPU":
        function, make = "nvmlDeviceCreateGpuInstanceWithPlacement", bench.make
    else:
        made = bench.make(PROFILE_1G, LAST)
        function, make = (
            "nvmlGpuInstanceCreateComputeInstance",
            partial(bench.hardware.create_compute, *bench.where, made),
        )
        text = "Invalid Argument" if code == "invalid-argument" else text
    bench.machine.set_fault(function, code=code, count=1)
    before = deepcopy(bench.gpu.instances)
    with pytest.raises(
        RetryableError, match=f"cannot create a {what} .* of GPU {bench.gpu.uuid}: .*({text})"
    ) as caught:
        make()
    assert type(caught.value) is error
    assert bench.gpu.instances == before
    make()


def test_gpu_instance_that_cannot_be_read_back_is_destroyed(bench: Bench) -> None:
    bench.machine.set_fault("nvmlGpuInstanceGetInfo", code="timeout", count=1)
    with pytest.raises(RetryableError, match="read it back"):
        bench.make()
    assert bench.gpu.instances == []


def test_gpu_instance_at_another_placement_is_destroyed(
    bench: Bench, library: Callable[[str, Any], None]
) -> None:
    create = pynvml.nvmlLib.nvmlDeviceCreateGpuInstance
    library(
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        lambda handle, profile, _placement, out: create(handle, profile, out),
    )
    assert bench.make(PROFILE_1G, LAST) == bench.gpu.instances[0].id
    with pytest.raises(
        RetryableError, match="the NVIDIA driver created profile 19 at memory slice 5 instead"
    ):
        bench.make(PROFILE_1G, FIRST)
    assert [item.start for item in bench.gpu.instances] == [6]


@tabled("function", "code")
def test_compute_instance_that_fails_is_not_left(bench: Bench, function: str, code: str) -> None:
    made = bench.make()
    hardware, where = bench.hardware, (bench.gpu.uuid, None)  # by UUID, which reads no other UUID
    bench.machine.set_fault(function, code=code, count=1)
    with pytest.raises(RetryableError, match=f"GPU instance {made} of GPU {bench.gpu.uuid}"):
        hardware.create_compute(*where, made)
    assert bench.gpu.instances[0].compute == []
    assert bench.machine.current().faults == []
    assert hardware.create_compute(*where, made)[0] == 0


def test_failed_undo_is_reported(bench: Bench) -> None:
    made = bench.make()
    for function in ("nvmlComputeInstanceGetInfo*", "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"):
        bench.machine.set_fault(function, code="unknown")
    with pytest.raises(NvmlUnknownOutcomeError, match="the new instance may still exist"):
        bench.hardware.create_compute(*bench.where, made)
    bench.machine.clear_faults()
    bench.machine.set_fault("nvmlGpuInstanceDestroy", code="in-use")
    for code, error in (("no-permission", NvmlUnknownOutcomeError), ("gpu-is-lost", DeviceLostError)):
        bench.machine.set_fault("nvmlGpuInstanceGetInfo", code=code, count=1)
        with pytest.raises(error, match="the new instance may still exist"):
            bench.make(PROFILE_1G, LAST)
        bench.machine.destroy_mig(0, bench.gpu.instances[-1].id)


def test_compute_instance_in_a_gpu_instance_that_is_gone_can_be_retried(bench: Bench) -> None:
    with pytest.raises(NvmlTransientError, match="another program destroyed the GPU instance"):
        bench.hardware.create_compute(*bench.where, 3)


def test_driver_without_a_whole_compute_profile_is_not_supported(bench: Bench) -> None:
    made = bench.make()
    bench.machine.set_fault("nvmlGpuInstanceGetComputeInstanceProfileInfo*", code="not-supported")
    with pytest.raises(
        NotSupportedError, match="NVML offers no compute instance that uses the whole GPU instance"
    ):
        bench.hardware.create_compute(*bench.where, made)


def offer(number: int, profile_id: int, slices: int, multiprocessors: int) -> tuple[int, Any]:
    info = pynvml.c_nvmlComputeInstanceProfileInfo_t()
    info.id, info.sliceCount, info.multiprocessorCount = profile_id, slices, multiprocessors
    return number, info


@pytest.mark.parametrize(
    ("offered", "profile", "chosen"),
    [
        ([offer(0, 40, 1, 16), offer(7, 47, 1, 16)], ONE_G, 40),
        ([offer(7, 47, 1, 16), offer(0, 40, 1, 16)], ONE_G, 40),
        ([offer(0, 40, 1, 16), offer(7, 47, 1, 26)], replace(ONE_G, multiprocessors=26), 47),
        ([offer(7, 47, 1, 16)], ONE_G, 47),
        ([offer(0, 40, 1, 14)], ONE_G, 40),
        ([offer(4, 44, 7, 98), offer(8, 48, 7, 98)], replace(ONE_G, slice_count=7, multiprocessors=98), 44),
        ([offer(1, 41, 2, 32)], ONE_G, None),
        ([], ONE_G, None),
    ],
)
def test_whole_compute_profile_is_the_plain_one_with_all_multiprocessors(
    offered: list[tuple[int, Any]], profile: MigProfile, chosen: int | None
) -> None:
    assert whole_compute_profile(offered, profile) == chosen


# --- in use --------------------------------------------------------------------------------------------


def test_processes_on_a_mig_device_are_named(bench: Bench) -> None:
    made, compute, _ = bench.make_device()
    other = bench.make_device(PROFILE_1G, LAST)[0]
    bench.machine.hold_gpu(0, 4712, "/usr/bin/python3", gpu_instance=made)
    bench.machine.hold_gpu(0, 4711, "trainer", gpu_instance=made, compute_instance=compute)
    bench.machine.hold_gpu(0, 4713, "nvidia-cuda-mps-server", gpu_instance=made, mps=True)
    bench.machine.hold_gpu(0, 99, "neighbour", gpu_instance=other)
    with pytest.raises(DeviceBusyError) as caught:
        bench.hardware.destroy_compute(*bench.where, made, compute)
    assert str(caught.value) == (
        f"cannot destroy compute instance {compute} of GPU instance {made} of GPU {bench.gpu.uuid}: it is in use by "
        "process 4711 (trainer), process 4712 (/usr/bin/python3), process 4713 (nvidia-cuda-mps-server); stop "
        "them, or wait until they stop"
    )
    bench.machine.release_gpu(0)
    bench.hardware.destroy_compute(*bench.where, made, compute)
    bench.hardware.destroy(*bench.where, made)


def test_compute_instance_keeps_its_gpu_instance(bench: Bench) -> None:
    made, compute, uuid = bench.make_device()
    with pytest.raises(DeviceBusyError) as caught:
        bench.hardware.destroy(*bench.where, made)
    assert str(caught.value) == (
        f"cannot destroy GPU instance {made} of GPU {bench.gpu.uuid}: it contains compute instances: {compute} "
        f"({uuid}); destroy them first"
    )
    bench.machine.hold_gpu(0, 4711, "trainer", gpu_instance=made)
    with pytest.raises(DeviceBusyError, match=r"process 4711 \(trainer\)"):
        bench.hardware.destroy(*bench.where, made)


@pytest.mark.parametrize(
    ("function", "act"),
    [
        ("nvmlGpuInstanceDestroy", lambda bench, made: bench.hardware.destroy(*bench.where, made)),
        (
            "nvmlComputeInstanceDestroy",
            lambda bench, made: bench.hardware.destroy_compute(*bench.where, made, 0),
        ),
    ],
)
def test_holder_that_nvml_does_not_show_is_searched_on_the_node(
    bench: Bench, function: str, act: Callable[[Bench, int], None]
) -> None:
    made = bench.make()
    if "Compute" in function:
        bench.hardware.create_compute(*bench.where, made)
    bench.machine.set_fault(function, code="in-use", count=1)
    with pytest.raises(DeviceBusyError, match=r"no process on it; a monitor such as DCGM .* `fuser -v"):
        act(bench, made)
    act(bench, made)


@pytest.mark.parametrize("code", ["function-not-found", "no-permission"])
def test_busy_gpu_is_also_reported_where_processes_are_not(bench: Bench, code: str) -> None:
    made, compute, _ = bench.make_device()
    bench.machine.hold_gpu(0, 4711, "trainer", gpu_instance=made)
    bench.machine.set_fault("nvmlSystemGetProcessName", code="not-found", count=1)
    with pytest.raises(DeviceBusyError, match="in use by process 4711; stop"):
        bench.hardware.destroy_compute(*bench.where, made, compute)
    bench.machine.set_fault("nvmlDeviceGet*RunningProcesses*", code=code)
    with pytest.raises(DeviceBusyError, match="NVML shows no process on it"):
        bench.hardware.destroy_compute(*bench.where, made, compute)


# --- mode ----------------------------------------------------------------------------------------------


def test_mode_of_a_gpu_without_mig_is_none(machine: Make) -> None:
    bench = Bench(machine("t4-4"))
    assert bench.hardware.mode(*bench.where) is None
    assert bench.hardware.instances(*bench.where) == ()
    with pytest.raises(NotSupportedError, match="the GPU does not support MIG"):
        bench.hardware.set_mode(*bench.where, True)


@pytest.mark.parametrize("on", [True, False])
def test_mode_is_not_switched_while_a_process_uses_the_gpu(bench: Bench, on: bool) -> None:
    bench.machine.set_mig_mode(0, not on)
    bench.machine.hold_gpu(0, 4711, "trainer")
    with pytest.raises(DeviceBusyError) as caught:
        bench.hardware.set_mode(*bench.where, on)
    assert str(caught.value).startswith(
        f"cannot switch MIG mode of GPU {bench.gpu.uuid} {'on' if on else 'off'}: the GPU is in use by process 4711"
    )
    assert bench.hardware.mode(*bench.where) == (not on, not on)
    bench.machine.release_gpu(0)
    bench.hardware.set_mode(*bench.where, on)
    assert bench.hardware.mode(*bench.where) == (on, on)


def test_mode_that_the_call_refuses_names_a_monitor(bench: Bench) -> None:
    bench.machine.set_fault("nvmlDeviceSetMigMode", code="in-use", count=1)
    with pytest.raises(DeviceBusyError, match=r"a monitor such as DCGM .* `fuser -v /dev/nvidia"):
        bench.hardware.set_mode(*bench.where, False)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        ("NVML_ERROR_IN_USE", DeviceBusyError, "a monitor such as DCGM"),
        ("NVML_ERROR_RESET_REQUIRED", RetryableError, "nvidia-smi --gpu-reset"),
        ("NVML_ERROR_UNKNOWN", NvmlUnknownOutcomeError, "Unknown Error"),
        ("NVML_ERROR_NOT_READY", NvmlTransientError, ""),
        ("NVML_SUCCESS", RetryableError, "takes effect at the next reset"),
    ],
)
def test_mode_is_in_effect_only_if_the_status_says_so_and_it_reads_so(
    bench: Bench, library: Callable[[str, Any], None], status: str, error: type[Exception], text: str
) -> None:
    def answer(_handle: Any, _mode: Any, out: Any) -> int:
        out._obj.value = getattr(pynvml, status)
        return 0

    library("nvmlDeviceSetMigMode", answer)
    with pytest.raises(error, match=f"cannot switch MIG mode of GPU {bench.gpu.uuid} off: .*{text}"):
        bench.hardware.set_mode(*bench.where, False)


def test_mode_that_waits_for_a_reset_says_so(machine: Make) -> None:
    bench = Bench(machine("vm-passthrough"))
    for _ in range(2):
        with pytest.raises(RetryableError, match="reboot the node or virtual machine"):
            bench.hardware.set_mode(*bench.where, True)
        assert bench.hardware.mode(*bench.where) == (False, True)


def test_minor_number_is_that_of_now(pair: Bench) -> None:
    bench = pair
    assert bench.hardware.minor(*bench.where) == 0
    bench.hardware.set_mode(*bench.where, True)
    assert bench.hardware.minor(*bench.where) == 2
    assert (bench.machine.host_root / "proc/driver/nvidia/capabilities/gpu2/mig").is_dir()
    bench.machine.set_fault("nvmlDeviceGetMinorNumber", code="not-supported")
    assert bench.hardware.minor(*bench.where) is None


# --- the GPU itself ------------------------------------------------------------------------------------


def test_other_gpu_at_the_address_is_not_touched(bench: Bench) -> None:
    uuid, other = bench.gpu.uuid, bench.machine.gpu(1)
    with pytest.raises(DeviceLostError) as caught:
        bench.hardware.create(uuid, other.bus_id, PROFILE_1G, FIRST)
    assert str(caught.value) == (
        f"cannot find GPU {uuid}: GPU {other.uuid} is at {other.bus_id} now; the GPU was moved or replaced"
    )


@pytest.mark.parametrize("where", [("GPU-none", "0000:ff:00.0"), ("GPU-none", None)])
def test_gpu_that_nvml_does_not_show_is_lost(bench: Bench, where: tuple[str, str | None]) -> None:
    with pytest.raises(DeviceLostError, match="cannot find GPU GPU-none: NVML shows no such GPU"):
        bench.hardware.mode(*where)


def test_list_of_instances_is_whole_or_fails(bench: Bench) -> None:
    bench.make()
    bench.machine.set_fault("nvmlDeviceGetGpuInstanceProfileInfoV", code="timeout", count=1)
    fresh = MigHardware(nullcontext)
    with pytest.raises(RetryableError, match="read GPU instance profile 0"):
        fresh.instances(*bench.where)
    assert len(fresh.instances(*bench.where)) == 1
    bench.machine.set_fault("nvmlDeviceGetGpuInstances", code="unknown", count=1)
    with pytest.raises(RetryableError, match="list the GPU instances of profile"):
        fresh.instances(*bench.where)
