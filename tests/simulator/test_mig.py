"""MIG: tables, placements, creation, refusals, the walk."""

from __future__ import annotations

import ctypes
import json
import random
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from dra_driver.simulator import mig

TABLES = json.loads((Path(__file__).parent / "data" / "mig-profile-tables.json").read_text())["gpus"]
MACHINE_OF = {
    "NVIDIA A30": "a30-4", "NVIDIA A100-SXM4-40GB": "dgx-a100-40gb", "NVIDIA A100-SXM4-80GB": "dgx-a100-80gb",
    "NVIDIA H100 80GB HBM3": "dgx-h100", "NVIDIA H200": "dgx-h200", "NVIDIA B200": "dgx-b200",
    "NVIDIA GB200": "gb200-nvl72-tray",
}  # fmt: skip
FIELDS = {
    "id": "id", "sliceCount": "sliceCount", "instanceCount": "maxInstances", "memorySizeMB": "memoryMiB",
    "multiprocessorCount": "multiprocessors", "copyEngineCount": "copyEngines", "decoderCount": "decoders",
    "encoderCount": "encoders", "jpegCount": "jpegEngines", "ofaCount": "ofaEngines",
}  # fmt: skip


def placements(gpu, profile_id):
    count = ctypes.c_uint()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile_id, None, ctypes.byref(count))
    rows = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile_id, rows, ctypes.byref(count))
    return [(row.start, row.size) for row in rows]


def profiles(gpu):
    found = {}
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum)
        except pynvml.NVMLError_NotSupported:
            continue
        found[info.name.removeprefix("MIG ")] = (enum, info)
    return found


def create_gi(gpu, profile_id, start, size):
    placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
    return pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile_id, ctypes.byref(placement))


def create(gpu, name, start):
    """As production does it: GPU instance with placement, whole compute instance, MIG handle."""
    _, info = profiles(gpu)[name]
    size = placements(gpu, info.id)[0][1]
    gi = create_gi(gpu, info.id, start, size)
    for enum in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            compute = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, enum, 0)
        except pynvml.NVMLError_NotSupported:
            continue
        if compute.sliceCount == info.sliceCount:
            ci = pynvml.nvmlGpuInstanceCreateComputeInstance(gi, compute.id)
            return gi, ci, pynvml.nvmlComputeInstanceGetInfo(ci).device
    raise AssertionError("no compute profile for the whole instance")


def gi_id(gi):
    return pynvml.nvmlGpuInstanceGetInfo(gi).id


@pytest.fixture
def gpu(nvml, handles):
    """A GPU of a DGX H100 in MIG mode."""
    nvml("dgx-h100")
    first = handles()[0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(first) == 0  # as a real H100
    assert pynvml.nvmlDeviceSetMigMode(first, 1) == 0
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(first) == 7
    return first


@pytest.mark.parametrize("product", sorted(TABLES))
def test_tables_equal_the_reference(product, look, handles):
    look(MACHINE_OF[product])
    gpu = handles()[0]
    assert pynvml.nvmlDeviceGetName(gpu) == product
    found = profiles(gpu)
    assert set(found) == {row["name"] for row in TABLES[product]["profiles"]}
    for row in TABLES[product]["profiles"]:
        enum, info = found[row["name"]]
        assert enum == row["enum"]
        assert {name: getattr(info, name) for name in FIELDS} == {
            name: row[key] for name, key in FIELDS.items()
        }
        assert placements(gpu, info.id) == [(item["start"], item["size"]) for item in row["placements"]]
        old = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, enum, version=1)
        assert (old.id, old.memorySizeMB) == (info.id, info.memorySizeMB)
    most = max(row["maxInstances"] for row in TABLES[product]["profiles"])
    is_on = pynvml.nvmlDeviceGetMigMode(gpu)[0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == (most if is_on else 0)


def test_refusals(gpu, refused):
    gi, ci, device = create(gpu, "3g.40gb", 0)
    assert refused(create_gi, gpu, 9, 0, 4) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    assert refused(create_gi, gpu, 19, 2, 1) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    assert refused(create_gi, gpu, 9, 2, 4) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(create_gi, gpu, 999, 0, 4) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refused(pynvml.nvmlGpuInstanceDestroy, gi) == pynvml.NVML_ERROR_IN_USE
    assert refused(pynvml.nvmlDeviceGetMinorNumber, device) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pynvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    pynvml.nvmlComputeInstanceDestroy(ci)
    assert refused(pynvml.nvmlComputeInstanceDestroy, ci) == pynvml.NVML_ERROR_NOT_FOUND
    assert refused(pynvml.nvmlDeviceGetUUID, device) == pynvml.NVML_ERROR_NOT_FOUND
    pynvml.nvmlGpuInstanceDestroy(gi)
    assert refused(pynvml.nvmlGpuInstanceDestroy, gi) == pynvml.NVML_ERROR_NOT_FOUND
    assert pynvml.nvmlDeviceSetMigMode(gpu, 0) == 0
    assert refused(create_gi, gpu, 9, 0, 4) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_media_extensions_of_an_a30_exclude_each_other(nvml, handles, refused):
    nvml("a30-4")
    gpu = handles()[0]
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == 0
    create(gpu, "1g.6gb+me", 0)
    assert refused(create_gi, gpu, 6, 2, 2) == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
    assert gi_id(create(gpu, "2g.12gb", 2)[0]) == 2


@pytest.mark.parametrize("product", sorted(TABLES))
def test_random_creations_never_exceed_the_silicon(product, shared):
    state = shared(MACHINE_OF[product]).current()
    for seed in range(40):
        dice = random.Random(seed)
        blank, codes = replace(state.present[0], mig_mode=1, instances=[]), set()
        model = state.model_of(blank)
        rows = {row.id: row for row in model.mig}
        for _ in range(12):
            row = dice.choice(model.mig)
            before = mig.free_placements(blank, model, row)
            try:
                created = mig.create_gpu_instance(blank, model, row.id, dice.choice([None, *row.placements]))
            except mig.Refusal as refusal:
                codes.add(refusal.code)
                continue
            assert created.start in before
            assert (created.start, created.size) in row.placements
        assert codes <= {pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES}
        units = [unit for item in blank.instances for unit in range(item.start, item.start + item.size)]
        assert len(units) == len(set(units))
        assert len({item.id for item in blank.instances}) == len(blank.instances)
        for engine in ("multiprocessors", "copy_engines", "decoders", "jpeg", "ofa", "memory_mib", "slices"):
            used = sum(getattr(rows[item.profile_id], engine) for item in blank.instances)
            assert used <= max(getattr(row, engine) for row in model.mig)
