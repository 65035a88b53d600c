"""DeviceClasses for MIG profiles, which let pods ask for one by an extended resource and no claim of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dra_driver.errors import InvalidConfigError
from dra_driver.model.schema import JsonObject

_DOMAIN = "nvidia.com"
_PROFILE = re.compile(r"(\d+)g\.(\d+)gb(.*)\Z")
_CLASS = re.compile(r"mig-(\d+g\.\d+gb)(?:\.([a-z0-9.-]+))?\.nvidia\.com\Z")
_UNSAFE = re.compile(r"[^a-z0-9.-]")


def mig_classes(profiles: Iterable[str], driver: str) -> list[JsonObject]:
    """A DeviceClass for each profile name, small profiles first; same profiles, same bytes.

    Raises: InvalidConfigError if two profiles would get one name, or a profile a name that Kubernetes refuses.
    """
    taken: dict[str, str] = {}
    for profile in sorted(set(profiles), key=_size):
        label = profile_label(profile)
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", label):
            raise InvalidConfigError(
                f"MIG profile {profile!r} cannot be part of a DeviceClass's name; write a class with a selector for it"
            )
        other = taken.setdefault(label, profile)
        if other != profile:
            raise InvalidConfigError(
                f"MIG profiles {other!r} and {profile!r} would both get the DeviceClass mig-{label}.{_DOMAIN}; "
                "write a class with a selector for one of them"
            )
    return [_mig_class(profile, label, driver) for label, profile in taken.items()]


def profile_label(profile: str) -> str:
    """A profile's name as a part of names in Kubernetes, which take no `+`: `1g.10gb+me.all` is `1g.10gb.me.all`."""
    return _UNSAFE.sub("-", profile.lower().replace("+", "."))


def profile_of_class(name: str) -> str | None:
    """The profile for which a class with this name was made; None if that is no name of such a class."""
    match = _CLASS.match(name)
    return None if match is None else f"{match[1]}{'+' + match[2] if match[2] else ''}"


def _size(profile: str) -> tuple[float, int, str]:
    """By slices, memory and variant; names that follow no rule come last."""
    match = _PROFILE.match(profile)
    return (float("inf"), 0, profile) if match is None else (int(match[1]), int(match[2]), match[3])


def _mig_class(profile: str, label: str, driver: str) -> JsonObject:
    attributes = f'device.attributes["{driver}"]'
    # Each key is looked for before it is read: a key that is missing is an error in CEL.
    terms = (
        f'device.driver == "{driver}"',
        f'"type" in {attributes}',
        f'{attributes}.type == "mig"',
        f'"profile" in {attributes}',
        f'{attributes}.profile == "{profile}"',
    )
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": f"mig-{label}.{_DOMAIN}"},
        "spec": {
            "selectors": [{"cel": {"expression": " &&\n".join(terms)}}],
            "extendedResourceName": f"{_DOMAIN}/mig-{label}",
        },
    }
