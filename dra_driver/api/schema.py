"""The opaque parameters as users write them: their fields as data, and how parameters are checked against them.

A daemon checks them for the life of a node, so this needs no library: pydantic would cost each node whose claims have
parameters 8 MiB, and the first such Prepare a tenth of a second.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from dra_driver.api.config import (
    GpuConfig,
    Interval,
    IommuBackend,
    MigDeviceConfig,
    MpsConfig,
    OpaqueConfig,
    Sharing,
    Strategy,
    TimeSlicingConfig,
    VfioDeviceConfig,
)
from dra_driver.errors import InvalidConfigError
from dra_driver.model.companions import HOST_DEVICES, in_order
from dra_driver.model.units import quantity_bytes

LEAST_MEMORY = 1024 * 1024
DEVICE_KEY = r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{4,}"
"""What a UUID or an index looks like, for Python and for RE2."""


class _Fault(Exception):  # noqa: N818  found input, not a failure of ours
    """One value does not fit its field; the text says what it must be."""


class Field(ABC):
    """What one field takes. `is_required` fields have no default."""

    is_required = False

    @abstractmethod
    def read(self, value: Any, path: str, faults: list[str]) -> Any:
        """The value that parameters give, never null, as a plain one; what is wrong goes to `faults`."""


class SingleValue(Field):
    """A field that is no object: all that can be wrong is the value."""

    def read(self, value: Any, path: str, faults: list[str]) -> Any:
        """As `Field.read`; None if the value is wrong."""
        try:
            return self.parse(value)
        except _Fault as fault:
            faults.append(f"{path}: {' '.join(str(fault).split())}")
            return None

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """One value. Raises: _Fault."""


@dataclass(frozen=True)
class Choice(SingleValue):
    """One of several words."""

    words: tuple[str, ...]
    is_required: bool = False

    def parse(self, value: Any) -> str:
        """The word."""
        if not isinstance(value, str) or value not in self.words:
            raise _Fault(f"must be {', '.join(self.words[:-1])} or {self.words[-1]}")
        return value


@dataclass(frozen=True)
class WholeNumber(SingleValue):
    """A number without a fraction, in a range."""

    least: int
    most: int

    def parse(self, value: Any) -> int:
        """The number."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise _Fault(f"must be a whole number from {self.least} to {self.most}")
        return value


@dataclass(frozen=True)
class Switch(SingleValue):
    """True or false."""

    def parse(self, value: Any) -> bool:
        """The position of the switch."""
        if not isinstance(value, bool):
            raise _Fault("must be true or false")
        return value


@dataclass(frozen=True)
class Memory(SingleValue):
    """A quantity of memory; MPS takes whole MiB."""

    def parse(self, value: Any) -> int:
        """Bytes."""
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise _Fault("must be a quantity such as 10Gi")
        try:
            number = quantity_bytes(str(value))
        except InvalidConfigError as error:
            raise _Fault(str(error)) from error
        if number < LEAST_MEMORY:
            raise _Fault(f"{value} is below the least limit, 1Mi")
        return number


@dataclass(frozen=True)
class MemoryByDevice(Field):
    """Quantities by the UUID of a device, or by its index."""

    def read(self, value: Any, path: str, faults: list[str]) -> dict[str, int]:
        """Bytes by key."""
        if not isinstance(value, Mapping):
            faults.append(f"{path}: must be an object")
            return {}
        wrong = [key for key in value if not isinstance(key, str) or re.fullmatch(DEVICE_KEY, key) is None]
        if wrong:
            shown = " ".join(", ".join(map(repr, wrong)).split())
            faults.append(f"{path}: {shown} is not a device UUID or an index")
        return {
            key: Memory().read(limit, f"{path}.{key}", faults)
            for key, limit in value.items()
            if key not in wrong
        }


@dataclass(frozen=True)
class Choices(Field):
    """A list of words."""

    words: tuple[str, ...]

    def read(self, value: Any, path: str, faults: list[str]) -> list[str]:
        """The words."""
        if not isinstance(value, list):
            faults.append(f"{path}: must be a list")
            return []
        one = Choice(self.words)
        return [one.read(word, f"{path}[{number}]", faults) for number, word in enumerate(value)]


@dataclass(frozen=True)
class Section(Field):
    """An object. An unknown field is an error; `null` means that the field was not given, as it does in Kubernetes."""

    fields: Mapping[str, Field]

    def read(self, value: Any, path: str, faults: list[str]) -> dict[str, Any]:
        """The values of the fields that were given."""
        if not isinstance(value, Mapping):
            faults.append(f"{path}: must be an object")
            return {}
        given = {name: inner for name, inner in value.items() if inner is not None}
        missing = [name for name, field in self.fields.items() if field.is_required and name not in given]
        faults += [f"{_below(path, name)}: is required" for name in missing]
        values = {
            name: field.read(given[name], _below(path, name), faults)
            for name, field in self.fields.items()
            if name in given
        }
        unknown = [name for name in given if name not in self.fields]
        faults += [f"{' '.join(_below(path, str(name)).split())}: unknown field" for name in unknown]
        return values


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_STRATEGY: Final = Choice(get_args(Strategy), is_required=True)
_MPS: Final = Section(
    {
        "defaultActiveThreadPercentage": WholeNumber(1, 100),
        "defaultPinnedDeviceMemoryLimit": Memory(),
        "defaultPerDevicePinnedMemoryLimit": MemoryByDevice(),
        "multiUser": Switch(),
    }
)
_MANAGEMENT: Final = Switch()
_HOST_DEVICES: Final = Choices(HOST_DEVICES)
FIELDS: Final[Mapping[str, Section]] = {
    "GpuConfig": Section(
        {
            "hostDevices": _HOST_DEVICES,
            "sharing": Section(
                {
                    "strategy": _STRATEGY,
                    "mpsConfig": _MPS,
                    "timeSlicingConfig": Section({"interval": Choice(get_args(Interval))}),
                }
            ),
            "management": _MANAGEMENT,
        }
    ),
    "MigDeviceConfig": Section(
        {
            "hostDevices": _HOST_DEVICES,
            "sharing": Section({"strategy": _STRATEGY, "mpsConfig": _MPS}),
            "management": _MANAGEMENT,
        }
    ),
    "VfioDeviceConfig": Section(
        {
            "iommu": Section(
                {"backendPolicy": Choice(get_args(IommuBackend)), "enableAPIDevice": Switch()},
            )
        }
    ),
}
"""The fields of each kind, without apiVersion and kind."""


def read_fields(kind: str, parameters: Mapping[str, Any], faults: list[str]) -> OpaqueConfig | None:
    """The value of parameters of a known kind; None, and `faults` has every fault, if there is one."""
    before = len(faults)
    fields = {name: value for name, value in parameters.items() if name not in ("apiVersion", "kind")}
    values = FIELDS[kind].read(fields, "", faults)
    return None if len(faults) > before else _config(kind, values)


def _config(kind: str, values: Mapping[str, Any]) -> OpaqueConfig:
    if kind == "VfioDeviceConfig":
        iommu = values.get("iommu", {})
        return VfioDeviceConfig(iommu.get("backendPolicy", "LegacyOnly"), iommu.get("enableAPIDevice", False))
    sharing = _sharing(values["sharing"]) if "sharing" in values else None
    management, beside = values.get("management", False), in_order(values.get("hostDevices", ()))
    if kind == "GpuConfig":
        return GpuConfig(sharing, management, beside)
    return MigDeviceConfig(sharing, management, beside)


def _sharing(given: Mapping[str, Any]) -> Sharing:
    if given["strategy"] == "MPS":
        mps = given.get("mpsConfig", {})
        return Sharing(
            "MPS",
            mps=MpsConfig(
                mps.get("defaultActiveThreadPercentage"),
                mps.get("defaultPinnedDeviceMemoryLimit"),
                mps.get("defaultPerDevicePinnedMemoryLimit", {}),
                mps.get("multiUser"),
            ),
        )
    interval = given.get("timeSlicingConfig", {}).get("interval")
    return Sharing("TimeSlicing", time_slicing=TimeSlicingConfig(interval))
