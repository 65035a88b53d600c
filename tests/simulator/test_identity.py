"""What NVML tells of a machine beside what discovery reads."""

from __future__ import annotations

import pynvml


def test_bus_ids_and_lookups(look, handles):
    look("dgx-h100")
    info = pynvml.nvmlDeviceGetPciInfo(handles()[0])
    assert (info.busId, info.domain, info.bus, info.device) == ("00000000:1B:00.0", 0, 0x1B, 0)
    uuid = pynvml.nvmlDeviceGetUUID(handles()[0])
    for bus_id in ("00000000:1B:00.0", "0000:1b:00.0", "1b:00.0"):
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)) == uuid
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 0


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
