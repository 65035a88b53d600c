"""DeviceClasses of MIG profiles: their names, whom they select, and the file that comes with daemonset/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground.apiserver import PlaygroundApiServer

from dra_driver.cli.validation.rules.cel import view
from dra_driver.cli.validation.rules.classes import mig_classes, profile_label
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.mig.rules.counters import partitioned
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, MIXED, NODE, h100, inventory
from tests.fakes.tables import tabled
from tests.mig.migtables import MODELS, table

SHIPPED = Path(__file__).parents[3] / "daemonset/chart/files/mig-classes.yaml"
PROFILES = sorted({row.name for model in MODELS.values() for row in model.mig})


@tabled("profile", "label")
def test_label_is_the_name_that_kubernetes_takes(profile: str, label: str) -> None:
    assert profile_label(profile) == label
    (made,) = mig_classes([profile], DRIVER)
    assert made["metadata"]["name"] == f"mig-{label}.nvidia.com"
    assert made["spec"]["extendedResourceName"] == f"nvidia.com/mig-{label}"


def test_every_profile_has_its_own_class_that_the_api_server_takes() -> None:
    classes = mig_classes(PROFILES, DRIVER)
    assert len({entry["metadata"]["name"] for entry in classes}) == len(PROFILES) == len(classes)
    server = PlaygroundApiServer()
    for entry in classes:
        stored = server.add("deviceclasses", entry, group="resource.k8s.io")
        assert stored["spec"]["extendedResourceName"] == entry["spec"]["extendedResourceName"]


def test_order_is_that_of_size_whatever_the_order_given() -> None:
    names = ["7g.80gb", "1g.10gb+me", "3g.40gb", "1g.5gb", "1g.10gb", "odd", "1g.10gb", "1g.20gb"]
    classes = mig_classes(names, DRIVER)
    assert classes == mig_classes(reversed(names), DRIVER)
    assert [entry["metadata"]["name"].removesuffix(".nvidia.com") for entry in classes] == [
        "mig-1g.5gb", "mig-1g.10gb", "mig-1g.10gb.me", "mig-1g.20gb", "mig-3g.40gb", "mig-7g.80gb", "mig-odd",
    ]  # fmt: skip


@pytest.mark.parametrize("names", [["1g.10gb+me", "1g.10gb.me"], ["1g.10gb+"], ["1g.10gb+-x"]])
def test_names_that_cannot_be_distinguished_or_taken_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidConfigError, match=re.escape(repr(names[0]))):
        mig_classes(names, DRIVER)


def selected(profile: str, device: dict[str, Any], driver: str = DRIVER) -> bool:
    (made,) = mig_classes([profile], DRIVER)
    (selector,) = made["spec"]["selectors"]
    return compiled(selector["cel"]["expression"]).matches(view(driver, device))


def test_devices_that_exist_and_that_can_be_made_are_selected_alike() -> None:
    gpu = h100(0, partitioning=partitioned(table(MODELS["h100-sxm"]), (), offers_whole=True))
    on_demand = [device for part in build_pool(inventory(gpu), NODE).slices for device in part.devices]
    static = [device for part in build_pool(MIXED, NODE).slices for device in part.devices]
    assert [device["name"] for device in static if selected("1g.10gb", device)] == [
        "gpu-00000002-mig-1g10gb-19-0"
    ]
    assert len([device for device in on_demand if selected("1g.10gb", device)]) == 7
    assert len([device for device in on_demand if selected("1g.10gb+me", device)]) == 7
    assert len([device for device in on_demand if selected("7g.80gb", device)]) == 1


@pytest.mark.parametrize(
    "device",
    [
        {"name": "other"},
        {"name": "other", "attributes": {"type": {"string": "mig"}}},
        {"name": "other", "attributes": {"profile": {"string": "1g.10gb"}}},
        {"name": "other", "attributes": {"type": {"string": "gpu"}, "profile": {"string": "1g.10gb"}}},
    ],
)
@pytest.mark.parametrize("driver", [DRIVER, "nic.example.com"])
def test_other_devices_are_passed_over_without_an_error(device: dict[str, Any], driver: str) -> None:
    assert not selected("1g.10gb", device, driver)


def test_shipped_classes_are_those_of_all_products_of_the_catalogue() -> None:
    shipped = list(yaml.safe_load_all(SHIPPED.read_text()))
    assert shipped == mig_classes({row.name for model in MODELS.values() for row in model.mig}, DRIVER)
    assert {"mig-1g.6gb.nvidia.com", "mig-7g.40gb.nvidia.com", "mig-1g.10gb.me.nvidia.com"} <= {
        entry["metadata"]["name"] for entry in shipped
    }
