"""Selectors that users write, evaluated over the devices as published."""

import pytest

from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import build_pool
from dra_driver.validation.rules.selection import SelectorError, view
from dra_driver.validation.rules.selectors import compiled
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIG_1G, MIG_3G, MIXED, NODE, VERSIONS, h100, uuid

A100, T4 = "gpu-00000001", "gpu-00000003"
ATTRIBUTES = 'device.attributes["gpu.nvidia.com"]'
STANDARD = 'device.attributes["resource.kubernetes.io"]'
CAPACITY = 'device.capacity["gpu.nvidia.com"]'

FLEET = Inventory(
    VERSIONS,
    (
        h100(0),
        h100(1, product_name="NVIDIA A100-SXM4-40GB", architecture="Ampere", cuda_compute_capability=(8, 0),
             memory_bytes=40960 << 20, numa_node=1),
        MIXED.gpus[2],
        h100(3, product_name="Tesla T4", architecture="Turing", cuda_compute_capability=(7, 5), numa_node=None,
             memory_bytes=15360 << 20, nvlink_links=None, mig_capable=False),
    ),
    {uuid(0): "nvlink-00000000"},
)  # fmt: skip
ALL = {GPU_0, A100, MIG_1G, MIG_3G, T4}


VIEWS = {device["name"]: view(DRIVER, device) for device in build_pool(FLEET, NODE).slices[0].devices}


def chosen(expression: str) -> set[str]:
    return {name for name, device in VIEWS.items() if compiled(expression).matches(device)}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f'device.driver == "gpu.nvidia.com" && {ATTRIBUTES}.type == "gpu"', {GPU_0, A100, T4}),
        (f'device.driver == "gpu.nvidia.com" && {ATTRIBUTES}.type == "mig"', {MIG_1G, MIG_3G}),
        (f'{ATTRIBUTES}.productName == "NVIDIA A100-SXM4-40GB"', {A100}),
        (f'{ATTRIBUTES}.productName.lowerAscii().matches("^.*h100.*$")', {GPU_0, MIG_1G, MIG_3G}),
        (f'{ATTRIBUTES}.productName.startsWith("Tesla")', {T4}),
        (f'{ATTRIBUTES}.architecture in ["Hopper", "Blackwell"]', {GPU_0, MIG_1G, MIG_3G}),
        (f'{CAPACITY}.memory.compareTo(quantity("40Gi")) >= 0', {GPU_0, A100}),
        (f'{CAPACITY}.memory.isGreaterThan(quantity("39Gi"))', {GPU_0, A100, MIG_3G}),
        (f'{CAPACITY}.memory.isLessThan(quantity("10G"))', set()),
        (f'{CAPACITY}.memory.isLessThan(quantity("10.5G"))', {MIG_1G}),
        (f'{ATTRIBUTES}.cudaComputeCapability.compareTo(semver("8.0.0")) >= 0', {GPU_0, A100, MIG_1G, MIG_3G}),
        (f'{ATTRIBUTES}.cudaComputeCapability.isLessThan(semver("8.0.0"))', {T4}),
        (f'{ATTRIBUTES}.driverVersion.isGreaterThan(semver("570.86.15"))', ALL),
        (f'{ATTRIBUTES}.cudaDriverVersion.compareTo(semver("12.8.0")) == 0', ALL),
        (f'{ATTRIBUTES}.type == "mig" && {ATTRIBUTES}.profile == "1g.10gb"', {MIG_1G}),
        (f'{ATTRIBUTES}.type == "mig" && {ATTRIBUTES}.parentUUID == "{uuid(2)}"', {MIG_1G, MIG_3G}),
        (f'{ATTRIBUTES}.type == "gpu" && {ATTRIBUTES}.index < 2', {GPU_0, A100}),
        (f'"nvlinkDomain" in {ATTRIBUTES}', {GPU_0}),
        (f'"migCapable" in {ATTRIBUTES} && !{ATTRIBUTES}.migCapable', {T4}),
        (f'{STANDARD}.pciBusID == "0000:10:00.0"', {GPU_0}),
        (f'"numaNode" in {STANDARD} && {STANDARD}.numaNode == 1', {A100}),
        (f'"memorySlice4" in {CAPACITY}', {MIG_3G}),
    ],
)  # fmt: skip
def test_selector_chooses_the_devices_that_its_author_means(expression: str, expected: set[str]) -> None:
    assert chosen(expression) == expected


def test_selector_fails_as_in_kubernetes_when_an_attribute_is_unknown() -> None:
    with pytest.raises(SelectorError, match="nvlinkDomain"):
        chosen(f'{ATTRIBUTES}.nvlinkDomain == "x"')


def test_devices_of_the_fleet_are_all_published() -> None:
    assert VIEWS.keys() == ALL
    assert GPU_1 == A100
