"""The DeviceClasses that come with this driver, for where no API server can be asked for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dra_driver.api.config import GROUP_VERSION
from dra_driver.validation.rules.device_classes import mig_classes

JsonObject = dict[str, Any]

API_VERSION = "resource.k8s.io/v1"


def standard_classes(driver: str, profiles: Iterable[str] = ()) -> Mapping[str, JsonObject]:
    """By name: those that are installed with the driver, and one for each MIG profile. Whoever shares devices has
    `shares.gpu.nvidia.com` as well.

    Raises: InvalidConfigError if two profiles would have the same name.
    """
    whole, mig = _of_type(driver, "gpu"), _of_type(driver, "mig")
    attributes = f'device.attributes["{driver}"]'
    shared = (
        f'device.driver == "{driver}" && ("shareable" in {attributes} && {attributes}.shareable == true || '
        "device.allowMultipleAllocations == true)"
    )
    classes = [
        _class("gpu.nvidia.com", whole),
        _class("mig.nvidia.com", mig),
        _class("timeslice.gpu.nvidia.com", whole, _sharing(driver, "TimeSlicing")),
        _class("mps.gpu.nvidia.com", whole, _sharing(driver, "MPS")),
        _class("shares.gpu.nvidia.com", shared),
        *mig_classes(profiles, driver),
    ]
    return {entry["metadata"]["name"]: entry for entry in classes}


def _of_type(driver: str, kind: str) -> str:
    attributes = f'device.attributes["{driver}"]'
    return f'device.driver == "{driver}" && "type" in {attributes} && {attributes}.type == "{kind}"'


def _class(name: str, expression: str, config: JsonObject | None = None) -> JsonObject:
    spec: JsonObject = {"selectors": [{"cel": {"expression": expression}}]}
    if config is not None:
        spec["config"] = [config]
    return {"apiVersion": API_VERSION, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def _sharing(driver: str, strategy: str) -> JsonObject:
    parameters = {"apiVersion": GROUP_VERSION, "kind": "GpuConfig", "sharing": {"strategy": strategy}}
    return {"opaque": {"driver": driver, "parameters": parameters}}
