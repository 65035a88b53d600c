"""NVIDIA's compute-domain plugin runs next to this driver without a name in common."""

from __future__ import annotations

import re
from pathlib import Path

from dra_driver.app.settings import DEFAULT_DRIVER_NAME
from dra_driver.cdi.rules.spec import spec_kind
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.slices.rules.build import build_pool
from tests.deploy.test_daemonset import installed, of_kind
from tests.fakes.samples import MIXED

ROOT = Path(__file__).parents[2]
PLUGIN = "compute-domain.nvidia.com"
CLASSES = {"compute-domain-daemon.nvidia.com", "compute-domain-default-channel.nvidia.com"}
CDI_KIND = "k8s.compute-domain.nvidia.com/claim"
"""Of release 0.5 of NVIDIA's chart with `resources.gpus.enabled=false`."""


def own_classes() -> set[str]:
    return {one["metadata"]["name"] for one in of_kind(installed(), "DeviceClass")} | {*standard_classes("")}


def test_drivers_classes_and_cdi_kinds_differ() -> None:
    classes = own_classes()
    assert {"gpu.nvidia.com", "mig.nvidia.com", "shares.gpu.nvidia.com"} <= classes
    assert not classes & CLASSES
    assert DEFAULT_DRIVER_NAME != PLUGIN
    assert spec_kind(DEFAULT_DRIVER_NAME) != CDI_KIND


def test_attributes_are_in_the_domain_of_the_driver() -> None:
    """A bare name is qualified with its driver's; a standard name means the same in every driver."""
    pool = build_pool(MIXED, "node-a")
    names = {name for entry in pool.slices for device in entry.devices for name in device["attributes"]}
    assert {name.partition("/")[0] for name in names if "/" in name} == {"resource.kubernetes.io"}


def test_the_manual_names_them() -> None:
    text = (ROOT / "docs/imex.md").read_text()
    section = text.partition("## Beside NVIDIA's compute domains")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [a-zA-Z ]+ \| (.+) \| (.+) \|$", section, re.MULTILINE)
    ours, theirs = (set(re.findall(r"`([^`]+)`", " ".join(cells))) for cells in zip(*rows, strict=True))
    assert {PLUGIN, CDI_KIND, *CLASSES} <= theirs
    assert ours <= own_classes() | {"gpu.nvidia.com", "vfio.gpu.nvidia.com", spec_kind(DEFAULT_DRIVER_NAME)}
    assert not ours & theirs
