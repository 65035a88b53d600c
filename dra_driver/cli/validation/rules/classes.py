"""The DeviceClasses that come with gpu-dra-driver."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from dra_driver.api.config import GROUP_VERSION
from dra_driver.cli.validation.rules.cel import DeviceView
from dra_driver.errors import InvalidConfigError
from dra_driver.model.ids import is_subdomain
from dra_driver.model.schema import JsonObject

_DOMAIN = "nvidia.com"
_PROFILE = re.compile(r"(\d+)g\.(\d+)gb(.*)\Z")
_CLASS = re.compile(r"mig-(\d+g\.\d+gb)(?:\.([a-z0-9.-]+))?\.nvidia\.com\Z")
_UNSAFE = re.compile(r"[^a-z0-9.-]")


def mig_classes(profiles: Iterable[str], driver: str) -> list[JsonObject]:
    """Return a DeviceClass for each profile, small profiles first.

    Raises: InvalidConfigError for equal or invalid names.
    """
    taken: dict[str, str] = {}
    for profile in sorted(set(profiles), key=_size):
        label = profile_label(profile)
        if not is_subdomain(label):
            raise InvalidConfigError(
                f"MIG profile {profile!r} cannot be part of a DeviceClass's name; write a class with your own selector"
            )
        other = taken.setdefault(label, profile)
        if other != profile:
            raise InvalidConfigError(
                f"MIG profiles {other!r} and {profile!r} would both get the DeviceClass mig-{label}.{_DOMAIN}; "
                "write a class with a selector for one of them"
            )
    return [_mig_class(profile, label, driver) for label, profile in taken.items()]


def profile_label(profile: str) -> str:
    """Return for example `1g.10gb.me.all` for `1g.10gb+me.all`."""
    return _UNSAFE.sub("-", profile.lower().replace("+", "."))


def profile_of_class(name: str) -> str | None:
    match = _CLASS.match(name)
    return None if match is None else f"{match[1]}{'+' + match[2] if match[2] else ''}"


def _size(profile: str) -> tuple[float, int, str]:
    """Sort names that are not like `1g.10gb` last."""
    match = _PROFILE.match(profile)
    return (float("inf"), 0, profile) if match is None else (int(match[1]), int(match[2]), match[3])


def _mig_class(profile: str, label: str, driver: str) -> JsonObject:
    attributes = f'device.attributes["{driver}"]'
    # Each key is tested before it is read, because a missing key is an error in CEL.
    terms = (
        f'device.driver == "{driver}"',
        f'"type" in {attributes}',
        f'{attributes}.type == "mig"',
        f'"profile" in {attributes}',
        f'{attributes}.profile == "{profile}"',
    )
    return _class(f"mig-{label}.{_DOMAIN}", " &&\n".join(terms), resource=f"{_DOMAIN}/mig-{label}")


API_VERSION = "resource.k8s.io/v1"

_BY_TYPE = re.compile(
    r'device\.driver == "(?P<driver>[^"\\]+)" && '
    r'"type" in (?P<own>device\.attributes\["(?P=driver)"\]) && (?P=own)\.type == "(?P<type>[^"\\]+)"'
    r'(?: && "profile" in (?P=own) && (?P=own)\.profile == "(?P<profile>[^"\\]+)")?'
)
"""The selector of whole GPUs, MIG devices, or MIG devices of one profile."""


def standard_classes(driver: str, profiles: Iterable[str] = ()) -> Mapping[str, JsonObject]:
    """Return the classes that the chart can install, and one for each MIG profile. Raises: InvalidConfigError."""
    whole, mig = _of_type(driver, "gpu"), _of_type(driver, "mig")
    classes = [
        _class("gpu.nvidia.com", whole, resource="nvidia.com/gpu"),
        _class("mig.nvidia.com", mig),
        _class("timeslice.gpu.nvidia.com", whole, _sharing(driver, "TimeSlicing")),
        _class("mps.gpu.nvidia.com", whole, _sharing(driver, "MPS")),
        _class("vfio.gpu.nvidia.com", _of_type(driver, "vfio")),
        _class("shares.gpu.nvidia.com", _shareable(driver)),
        *mig_classes(profiles, driver),
    ]
    return {entry["metadata"]["name"]: entry for entry in classes}


def standard_selector(expression: str) -> Callable[[DeviceView], bool] | None:
    """Return a function that evaluates the selector of a standard class without CEL.

    The selector's text decides, because a cluster may have other selectors under the same class names.
    """
    text = " ".join(expression.split())
    match = _BY_TYPE.fullmatch(text)
    if match is not None:
        wanted = {name: match[name] for name in ("type", "profile") if match[name] is not None}
        return lambda device: (
            device.driver == match["driver"]
            and (wanted.items() <= device.attributes.get(device.driver, {}).items())
        )
    driver = text.partition('"')[2].partition('"')[0]
    if text == _shareable(driver):
        return lambda device: (
            device.driver == driver
            and (
                device.attributes.get(driver, {}).get("shareable") is True
                or device.allow_multiple_allocations
            )
        )
    return None


def _shareable(driver: str) -> str:
    attributes = f'device.attributes["{driver}"]'
    return (
        f'device.driver == "{driver}" && ("shareable" in {attributes} && {attributes}.shareable == true || '
        "device.allowMultipleAllocations == true)"
    )


def _of_type(driver: str, kind: str) -> str:
    attributes = f'device.attributes["{driver}"]'
    return f'device.driver == "{driver}" && "type" in {attributes} && {attributes}.type == "{kind}"'


def _class(
    name: str, expression: str, config: JsonObject | None = None, resource: str | None = None
) -> JsonObject:
    spec: JsonObject = {"selectors": [{"cel": {"expression": expression}}]}
    if config is not None:
        spec["config"] = [config]
    if resource is not None:
        spec["extendedResourceName"] = resource
    return {"apiVersion": API_VERSION, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


def _sharing(driver: str, strategy: str) -> JsonObject:
    parameters = {"apiVersion": GROUP_VERSION, "kind": "GpuConfig", "sharing": {"strategy": strategy}}
    return {"opaque": {"driver": driver, "parameters": parameters}}
