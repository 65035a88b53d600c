"""NVIDIA's own NVML libraries: the session without an NVIDIA driver, and what is missing if a library lacks
functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace

import pynvml
import pytest
from debian_programs import Programs

from dra_driver.errors import DriverGoneError
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.nvml.gpu_users import read_processes
from dra_driver.nvml.health_polls import read_health
from dra_driver.nvml.mig_changes import MigHardware
from dra_driver.nvml.reader import NvmlReader
from dra_driver.nvml.scan import ScanMemory
from dra_driver.nvml.session import NvmlSession, load_library
from dra_driver.nvml.usage_source import read_load
from dra_driver.simulator import SimulatedLibrary
from tests.fakes.machines import SimulatedNode, read_inventory

LOST = {
    "nvmlDeviceGetAddressingMode": "addressing_mode",
    "nvmlDeviceGetGpuFabricInfo": "fabric",
    "nvmlDeviceGetNumGpuCores": "multiprocessors",
    "nvmlDeviceGetNumaNodeId": "memory_numa_node",
    "nvmlDeviceGetModuleId": "module_id",
    "nvmlDeviceGetPlatformInfo": "chassis",
}
"""Values of a GPU without an older function as a fallback."""


@pytest.fixture(autouse=True)
def _binding_as_before() -> Iterator[None]:
    yield
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def test_driver_that_is_not_loaded_is_reported_when_the_library_is_the_real_one(nvidia: Programs) -> None:
    """The library is found through Debian's alternatives, whose links are absolute."""
    path = find_nvml_library(str(nvidia.root))
    assert path == str(nvidia.library("libnvidia-ml"))
    session = NvmlSession(lambda: load_library(path))
    for _ in range(2):
        with pytest.raises(DriverGoneError) as caught:
            session.reopen()
        assert str(caught.value) == (
            "cannot initialise NVML: the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)"
        )
        assert (session.is_open, session.driver_loads) == (False, 0)


class OfBranch:
    """The simulator's NVML without the functions that a real library does not export."""

    def __init__(self, simulated: object, real: ctypes.CDLL) -> None:
        self._simulated = simulated
        self._real = real

    def __getattr__(self, name: str) -> object:
        if not hasattr(self._real, name):
            raise AttributeError(name)
        return getattr(self._simulated, name)


@pytest.fixture
def of_branch(nvidia: Programs, machine: Callable[[str], SimulatedNode]) -> Callable[[str], SimulatedNode]:
    """Create simulated machines whose NVML has the functions of the branch, with MIG on demand."""
    real = ctypes.CDLL(str(nvidia.library("libnvidia-ml")))

    def make(name: str) -> SimulatedNode:
        node = machine(name)
        node.nvml = NvmlReader(lambda: OfBranch(SimulatedLibrary(node.machine), real))
        node.session = node.nvml.session
        return node

    return make


def inventory(node: SimulatedNode) -> Inventory:
    node.session.reopen()
    return read_inventory(lambda _: True, ScanMemory())


@pytest.mark.parametrize("name", ["gb200-nvl72-tray", "h100-mig-static", "hgx-h100-4"])
def test_slices_lose_only_what_the_branch_cannot_report(
    name: str,
    nvidia: Programs,
    machine: Callable[[str], SimulatedNode],
    of_branch: Callable[[str], SimulatedNode],
) -> None:
    real = ctypes.CDLL(str(nvidia.library("libnvidia-ml")))
    lost = {field for function, field in LOST.items() if not hasattr(real, function)}
    node = of_branch(name)
    found = inventory(node)
    full = machine(name)
    expected = inventory(full)
    assert found.faults == ()
    assert [without(gpu, lost) for gpu in found.gpus] == [without(gpu, lost) for gpu in expected.gpus]
    assert {field for gpu in found.gpus for field in lost if getattr(gpu, field) is not None} == set()


def without(gpu: Gpu, lost: set[str]) -> Gpu:
    return replace(gpu, **dict.fromkeys(lost))  # type: ignore[arg-type]


def test_health_load_and_processes_are_read_with_what_the_branch_has(
    of_branch: Callable[[str], SimulatedNode], machine: Callable[[str], SimulatedNode], nvidia: Programs
) -> None:
    node = of_branch("hgx-h100-4")
    uuid = node.machine.gpu(0).uuid
    node.machine.hold_gpu(0, 4711, "python")
    node.session.reopen()
    health, load, processes = read_health(uuid), read_load(uuid), read_processes(uuid)
    full = machine("hgx-h100-4")
    full.machine.hold_gpu(0, 4711, "python")
    full.session.reopen()
    full_health = read_health(uuid)
    knows_mode = hasattr(ctypes.CDLL(str(nvidia.library("libnvidia-ml"))), "nvmlSystemGetConfComputeState")
    assert (health.accepts_work, full_health.accepts_work) == (True if knows_mode else None, True)
    # What older branches do not report is unknown, and not well.
    unknown = {
        name: None
        for name in ("sram_exceeded", "memory_unrepairable", "repairs_pending", "bank_remap_pending")
        if getattr(health, name) is None
    }
    assert replace(health, fabric=None, accepts_work=True) == replace(full_health, fabric=None, **unknown)
    assert (health.sram_exceeded is None) == (nvidia.branch == "R470")
    assert processes == read_processes(uuid) == {4711: "process 4711 (python)"}
    newest = read_load(uuid)
    if hasattr(ctypes.CDLL(str(nvidia.library("libnvidia-ml"))), "nvmlDeviceGetMemoryInfo_v2"):
        assert load == newest
    else:
        assert (load.memory_used_bytes or 0) > (newest.memory_used_bytes or 0), "with the driver's own share"
        assert replace(load, memory_used_bytes=0) == replace(newest, memory_used_bytes=0)


def test_mig_devices_are_made_and_destroyed_with_what_the_branch_has(
    of_branch: Callable[[str], SimulatedNode],
) -> None:
    node = of_branch("hgx-h100-4")
    node.session.reopen()
    hardware = MigHardware(lambda: node.nvml.session.operation(lambda: 0.0))
    gpu = inventory(node).gpus[0]
    row = next(row for row in gpu.partitioning.profiles if row.profile.name == "3g.40gb")
    hardware.set_mode(gpu.uuid, gpu.pci_bus_id, True)
    made = hardware.create(gpu.uuid, gpu.pci_bus_id, row.profile.profile_id, row.placements[1])
    compute, uuid = hardware.create_compute(gpu.uuid, gpu.pci_bus_id, made)
    assert hardware.compute_instances(gpu.uuid, gpu.pci_bus_id, made) == ((compute, uuid),)
    assert [item.placement for item in hardware.instances(gpu.uuid, gpu.pci_bus_id)] == [row.placements[1]]
    hardware.destroy_compute(gpu.uuid, gpu.pci_bus_id, made, compute)
    hardware.destroy(gpu.uuid, gpu.pci_bus_id, made)
    assert hardware.instances(gpu.uuid, gpu.pci_bus_id) == ()


def test_simulated_library_has_the_functions_of_the_branch(
    machine: Callable[[str], SimulatedNode], nvidia: Programs
) -> None:
    """Of all functions of the simulator, exactly those that the branch's own library exports."""
    real = ctypes.CDLL(str(nvidia.library("libnvidia-ml")))
    node = machine("dgx-h100")
    known = {name for name in vars(SimulatedLibrary(node.machine)) if name.startswith("nvml")}
    node.machine.load_driver(nvidia.version)
    simulated = {name for name in vars(SimulatedLibrary(node.machine)) if name.startswith("nvml")}
    assert simulated == {name for name in known if hasattr(real, name)}
