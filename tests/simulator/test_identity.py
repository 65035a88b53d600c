"""What NVML tells of a machine beside what discovery reads."""

from __future__ import annotations

import ctypes

import pynvml
import pytest

from tests.simulator.conftest import load


def test_bus_ids_and_lookups(look, handles):
    look("dgx-h100")
    info = pynvml.nvmlDeviceGetPciInfo(handles()[0])
    assert (info.busId, info.domain, info.bus, info.device) == ("00000000:1B:00.0", 0, 0x1B, 0)
    uuid = pynvml.nvmlDeviceGetUUID(handles()[0])
    for bus_id in ("00000000:1B:00.0", "0000:1b:00.0", "1b:00.0"):
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)) == uuid
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 0


def test_uuids_are_the_same_on_every_creation(make, tmp_path):
    from dra_driver.simulator import create_machine

    first = make("dgx-h100")
    second = create_machine("dgx-h100", tmp_path / "other")
    assert [gpu.uuid for gpu in first.current().present] == [gpu.uuid for gpu in second.current().present]


def test_wrong_arguments(look, handles, refused):
    look("l40s-8")
    gpu = handles()[0]
    assert refused(pynvml.nvmlDeviceGetHandleByIndex, 8) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(pynvml.nvmlDeviceGetHandleByUUID, "GPU-none") == pynvml.NVML_ERROR_NOT_FOUND
    assert refused(pynvml.nvmlDeviceGetHandleByPciBusId, "0000:99:00.0") == pynvml.NVML_ERROR_NOT_FOUND
    assert refused(pynvml.nvmlDeviceGetUUID, pynvml.c_nvmlDevice_t()) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(pynvml.nvmlDeviceGetMigMode, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert refused(pynvml.nvmlDeviceGetMemoryInfo, gpu, 1) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    assert refused(pynvml.nvmlDeviceGetAttributes, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0


def test_before_init_and_after_shutdown(look, refused):
    look("t4-4")
    pynvml.nvmlShutdown()
    assert refused(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    assert refused(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED
    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    assert pynvml.nvmlDeviceGetCount() == 4


def test_old_drivers_lack_symbols(look, handles, refused):
    look("dgx-a100-40gb")
    assert refused(pynvml.nvmlDeviceGetAddressingMode, handles()[0]) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert refused(pynvml.nvmlDeviceGetHostVgpuMode, handles()[0]) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert pynvml.nvmlErrorString(15) == "GPU is lost"


def test_addressing_and_memory_node(look, handles, refused):
    look("gb200-nvl72-tray")
    assert [pynvml.nvmlDeviceGetAddressingMode(gpu) for gpu in handles()] == [2, 2, 2, 2]
    assert [pynvml.nvmlDeviceGetNumaNodeId(gpu) for gpu in handles()] == [2, 10, 18, 26]
    look("dgx-h100")
    assert pynvml.nvmlDeviceGetAddressingMode(handles()[0]) == pynvml.NVML_DEVICE_ADDRESSING_MODE_HMM
    assert refused(pynvml.nvmlDeviceGetNumaNodeId, handles()[0]) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_virtual_machine(nvml, handles):
    nvml("vm-passthrough")
    assert (
        pynvml.nvmlDeviceGetVirtualizationMode(handles()[0])
        == pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH
    )
    assert pynvml.nvmlDeviceSetMigMode(handles()[0], 1) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert pynvml.nvmlDeviceGetMigMode(handles()[0]) == [0, 1]


@pytest.mark.parametrize(
    ("name", "driver", "answers"),
    [
        ("t4-4", "580.95.05", [3, 3, 3]),
        ("a10-8", "580.95.05", [0, 3, 0]),
        ("hgx-h100-4", "580.95.05", [0, 0, 0]),
        ("hgx-h100-4", "535.183.01", [0, 13, 0]),
        ("hgx-h100-4", "525.147.05", [13, 13, 13]),
    ],
)
def test_confidential_computing_is_told_by_newer_gpus_and_drivers(nvml, name, driver, answers):
    machine = nvml(name)
    machine.load_driver(driver)
    pynvml.nvmlShutdown()
    load(machine)
    pynvml.nvmlInit()

    def settings():
        found = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
        pynvml._nvmlCheckReturn(pynvml.nvmlSystemGetConfComputeSettings(ctypes.byref(found)))
        return found

    calls = [
        pynvml.nvmlSystemGetConfComputeState,
        settings,
        pynvml.nvmlSystemGetConfComputeGpusReadyState,
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append(0)
        except pynvml.NVMLError as error:
            found.append(error.value)
    assert found == answers


def test_protected_pcie_is_a_mode_of_several_gpus_and_the_feature_is_off(nvml):
    machine = nvml("hgx-h100-4")
    machine.set_confidential_compute("ppcie", ready=True)
    found = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
    assert pynvml.nvmlSystemGetConfComputeSettings(ctypes.byref(found)) == 0
    assert (found.ccFeature, found.devToolsMode, found.multiGpuMode) == (0, 0, 1)
    assert pynvml.nvmlSystemGetConfComputeGpusReadyState() == 1
    machine.load_driver()
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetConfComputeGpusReadyState() == 0
    found.version = 0
    assert pynvml.nvmlSystemGetConfComputeSettings(ctypes.byref(found)) == 25
