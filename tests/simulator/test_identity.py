"""Every machine, read as discovery reads it."""

from __future__ import annotations

import ctypes

import pynvml
import pytest

from dra_driver.simulator import machine_names
from tests.simulator.conftest import load

MIB = 1 << 20
# machine: product, GPUs, total MiB, architecture, compute capability, PCI id, driver
EXPECTED = {
    "a10-8": ("NVIDIA A10", 8, 23028, 7, (8, 6), 0x223610DE, "580.95.05"),
    "a100-mig-static": ("NVIDIA A100-SXM4-40GB", 4, 40960, 7, (8, 0), 0x20B010DE, "580.95.05"),
    "a100-pcie-pairs": ("NVIDIA A100-PCIE-40GB", 4, 40960, 7, (8, 0), 0x20F110DE, "570.124.06"),
    "a30-4": ("NVIDIA A30", 4, 24576, 7, (8, 0), 0x20B710DE, "580.95.05"),
    "a30-mig-static": ("NVIDIA A30", 4, 24576, 7, (8, 0), 0x20B710DE, "580.95.05"),
    "dgx-1v": ("Tesla V100-SXM2-32GB", 8, 32768, 5, (7, 0), 0x1DB510DE, "570.124.06"),
    "dgx-2": ("Tesla V100-SXM3-32GB", 16, 32768, 5, (7, 0), 0x1DB810DE, "570.124.06"),
    "dgx-a100-40gb": ("NVIDIA A100-SXM4-40GB", 8, 40960, 7, (8, 0), 0x20B010DE, "570.124.06"),
    "dgx-a100-80gb": ("NVIDIA A100-SXM4-80GB", 8, 81920, 7, (8, 0), 0x20B210DE, "580.95.05"),
    "dgx-b200": ("NVIDIA B200", 8, 183359, 10, (10, 0), 0x290110DE, "580.95.05"),
    "dgx-h100": ("NVIDIA H100 80GB HBM3", 8, 81559, 9, (9, 0), 0x233010DE, "580.95.05"),
    "dgx-h200": ("NVIDIA H200", 8, 143771, 9, (9, 0), 0x233510DE, "580.95.05"),
    "gb10": ("NVIDIA GB10", 1, None, 10, (12, 1), 0x2E1210DE, "580.95.05"),
    "gb200-nvl72-tray": ("NVIDIA GB200", 4, 189471, 10, (10, 0), 0x294110DE, "580.95.05"),
    "h100-mig-empty": ("NVIDIA H100 80GB HBM3", 8, 81559, 9, (9, 0), 0x233010DE, "580.95.05"),
    "h100-mig-static": ("NVIDIA H100 80GB HBM3", 8, 81559, 9, (9, 0), 0x233010DE, "580.95.05"),
    "hgx-h100-4": ("NVIDIA H100 80GB HBM3", 4, 81559, 9, (9, 0), 0x233010DE, "580.95.05"),
    "l40s-8": ("NVIDIA L40S", 8, 46068, 8, (8, 9), 0x26B910DE, "580.95.05"),
    "rtx-pro-6000-8": (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        8,
        97887,
        10,
        (12, 0),
        0x2BB510DE,
        "580.95.05",
    ),
    "t4-4": ("Tesla T4", 4, 15360, 6, (7, 5), 0x1EB810DE, "570.124.06"),
    "vm-passthrough": ("NVIDIA A100-SXM4-80GB", 2, 81920, 7, (8, 0), 0x20B210DE, "580.95.05"),
}


def test_every_machine_is_expected():
    assert machine_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_identity(name, look, handles, refused):
    product, count, memory, architecture, compute, pci_id, driver = EXPECTED[name]
    machine = look(name)
    gpus = handles()
    assert len(gpus) == count
    assert pynvml.nvmlSystemGetDriverVersion() == driver == machine.driver_version
    assert pynvml.nvmlSystemGetCudaDriverVersion() == (13000 if driver.startswith("580") else 12080)
    assert len({pynvml.nvmlDeviceGetUUID(gpu) for gpu in gpus}) == count
    assert len({ctypes.cast(gpu, ctypes.c_void_p).value for gpu in gpus}) == count
    for index, gpu in enumerate(gpus):
        assert pynvml.nvmlDeviceGetIndex(gpu) == index
        assert pynvml.nvmlDeviceGetMinorNumber(gpu) == index
        assert pynvml.nvmlDeviceGetName(gpu) == product
        assert pynvml.nvmlDeviceGetArchitecture(gpu) == architecture
        assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu) == compute
        assert pynvml.nvmlDeviceGetBrand(gpu) == pynvml.NVML_BRAND_NVIDIA
        assert pynvml.nvmlDeviceGetPciInfo(gpu).pciDeviceId == pci_id
        assert not bool(pynvml.nvmlDeviceIsMigDeviceHandle(gpu))
        if memory is None:
            assert refused(pynvml.nvmlDeviceGetMemoryInfo, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED
            continue
        first = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        second = pynvml.nvmlDeviceGetMemoryInfo(gpu, version=pynvml.nvmlMemory_v2)
        assert first.total == second.total
        assert first.total // MIB == memory
        assert first.used + first.free == first.total
        assert second.used + second.free + second.reserved == second.total


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
