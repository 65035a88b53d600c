"""Selectors that users write, evaluated over the devices as published."""

import pytest

from dra_driver.cli.validation.rules.cel import SelectorError, view
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.model.inventory import Inventory
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIG_1G, MIG_3G, MIXED, NODE, VERSIONS, h100, uuid
from tests.fakes.tables import tabled

A100, T4 = "gpu-00000001", "gpu-00000003"
ATTRIBUTES = 'device.attributes["gpu.nvidia.com"]'

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


@tabled("expression", "expected")
def test_selector_chooses_the_devices_that_its_author_means(expression: str, expected: list[str]) -> None:
    assert chosen(expression) == set(expected)


def test_selector_fails_as_in_kubernetes_when_an_attribute_is_unknown() -> None:
    with pytest.raises(SelectorError, match="nvlinkDomain"):
        chosen(f'{ATTRIBUTES}.nvlinkDomain == "x"')


def test_devices_of_the_fleet_are_all_published() -> None:
    assert VIEWS.keys() == ALL
    assert GPU_1 == A100
