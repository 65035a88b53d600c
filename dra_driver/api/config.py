"""Opaque parameters of a claim or class (`resource.nvidia.com/v1beta1`), and the shape of their fields.

`resolve.decode` checks the parameters; the dataclasses do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.maintenance import CLOSED_TIMES, closed_seconds
from dra_driver.model.schema import Choice, MapField, Object, Scalar, Words, faults
from dra_driver.model.steps import MaintenancePolicy
from dra_driver.model.units import quantity_bytes

GROUP_VERSION = "resource.nvidia.com/v1beta1"

DeviceType = Literal["gpu", "mig", "vfio"]
Strategy = Literal["TimeSlicing", "MPS"]
Interval = Literal["Default", "Short", "Medium", "Long"]
IommuBackend = Literal["LegacyOnly", "PreferIommuFD"]


@dataclass(frozen=True, slots=True)
class TimeSlicingConfig:
    """None keeps the current length of a time slice."""

    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class MpsConfig:
    """Memory limits are in bytes, at least 1 MiB; None means no limit.

    Keys of `per_device_memory_limits` are device UUIDs, or indexes into the sorted UUIDs of the devices that the
    parameters apply to.
    """

    active_thread_percentage: int | None = None
    memory_limit: int | None = None
    per_device_memory_limits: Mapping[str, int] = field(default_factory=dict)
    multi_user: bool | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Only the field of the chosen strategy is set."""

    strategy: Strategy
    time_slicing: TimeSlicingConfig | None = None
    mps: MpsConfig | None = None


@dataclass(frozen=True, slots=True)
class PowerConfig:
    """In watts or in percent of the product's default limit; the lower one applies."""

    limit_w: int | None = None
    percent: int | None = None


@dataclass(frozen=True, slots=True)
class ClockRange:
    """None is the lowest or highest clock of the GPU."""

    least_mhz: int | None = None
    most_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """None does not lock a clock."""

    graphics: ClockRange | None = None
    memory: ClockRange | None = None


NO_CLOCKS: Final = Clocks()


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """Without `power` and `clocks`, the GPU keeps the node's limits.

    `management` is for agents such as DCGM: it gives a claim with adminAccess all GPUs of the node, and the
    capabilities to monitor and configure MIG.
    """

    sharing: Sharing | None = None
    management: bool = False
    power: PowerConfig | None = None
    clocks: Clocks = NO_CLOCKS


@dataclass(frozen=True, slots=True)
class MigDeviceConfig:
    """TimeSlicing has no effect on MIG devices."""

    sharing: Sharing | None = None
    management: bool = False


@dataclass(frozen=True, slots=True)
class VfioDeviceConfig:
    iommu_backend: IommuBackend = "LegacyOnly"
    enable_api_device: bool = False


@dataclass(frozen=True, slots=True)
class MaintenanceConfig:
    """A claim with adminAccess takes GPUs out of service. While other claims use these GPUs, Prepare waits (`Wait`)
    or fails (`Refuse`). NVML stays closed for at most `timeout_s` s.
    """

    policy: MaintenancePolicy = "Wait"
    timeout_s: int = 15 * 60


OpaqueConfig = GpuConfig | MigDeviceConfig | VfioDeviceConfig | MaintenanceConfig

KINDS: Mapping[str, tuple[DeviceType, ...]] = {
    "GpuConfig": ("gpu",),
    "MigDeviceConfig": ("mig",),
    "VfioDeviceConfig": ("vfio",),
    "MaintenanceConfig": ("gpu", "mig"),
}
"""The device types that each kind applies to."""

DEFAULTS: Mapping[DeviceType, OpaqueConfig] = {
    "gpu": GpuConfig(),
    "mig": MigDeviceConfig(),
    "vfio": VfioDeviceConfig(),
}


def fits(config: OpaqueConfig, device_type: DeviceType) -> bool:
    return device_type in KINDS[type(config).__name__]


MIN_MEMORY = 1024 * 1024
DEVICE_KEY = r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{4,}"
"""A UUID or an index; valid in Python and in RE2."""


def _memory_fault(value: Any) -> str | None:
    """MPS limits are whole MiB, so 1Mi is the minimum."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return "must be a quantity such as 10Gi"
    try:
        is_enough = _memory(value) >= MIN_MEMORY
    except InvalidConfigError as error:
        return str(error)
    return None if is_enough else f"{value} is below the minimum, 1Mi"


def _memory(value: Any) -> int:
    return quantity_bytes(str(value))


def _is_device(key: Any) -> bool:
    return isinstance(key, str) and re.fullmatch(DEVICE_KEY, key) is not None


def _time_fault(value: str) -> str | None:
    return None if closed_seconds(value) is not None else f"must be {CLOSED_TIMES}"


MEMORY: Final = Scalar(object, _memory_fault)
TIMEOUT: Final = Scalar(str, _time_fault, says=CLOSED_TIMES)
_STRATEGY: Final = Choice(get_args(Strategy))
_MPS: Final = Object(
    {
        "defaultActiveThreadPercentage": Scalar(int, least=1, most=100, says="a whole number from 1 to 100"),
        "defaultPinnedDeviceMemoryLimit": MEMORY,
        "defaultPerDevicePinnedMemoryLimit": MapField(
            MEMORY, _is_device, "{} is not a device UUID or an index"
        ),
        "multiUser": Scalar(bool),
    }
)
_MANAGEMENT: Final = Scalar(bool)
_AMOUNT: Final = Scalar(int, least=1, most=10000, says="a whole number from 1 to 10000")
_CLOCKS: Final = Object({"min": _AMOUNT, "max": _AMOUNT})
FIELDS: Final[Mapping[str, Object]] = {
    "GpuConfig": Object(
        {
            "sharing": Object(
                {
                    "strategy": _STRATEGY,
                    "mpsConfig": _MPS,
                    "timeSlicingConfig": Object({"interval": Choice(get_args(Interval))}),
                },
                ("strategy",),
            ),
            "management": _MANAGEMENT,
            "power": Object(
                {
                    "limitWatts": _AMOUNT,
                    "percent": Scalar(int, least=1, most=100, says="a whole number from 1 to 100"),
                }
            ),
            "clocks": Object({"graphicsMHz": _CLOCKS, "memoryMHz": _CLOCKS}),
        }
    ),
    "MigDeviceConfig": Object(
        {
            "sharing": Object({"strategy": _STRATEGY, "mpsConfig": _MPS}, ("strategy",)),
            "management": _MANAGEMENT,
        }
    ),
    "VfioDeviceConfig": Object(
        {"iommu": Object({"backendPolicy": Choice(get_args(IommuBackend)), "enableAPIDevice": Scalar(bool)})}
    ),
    "MaintenanceConfig": Object({"policy": Choice(get_args(MaintenancePolicy)), "timeout": TIMEOUT}),
}
WORDS: Final = Words(unknown="unknown field", meant=False, null_is_absent=True, names_found=False)


def field_faults(kind: str, fields: Mapping[str, Any], words: Words = WORDS) -> list[str]:
    return [" ".join(str(fault).split()) for fault in faults(fields, FIELDS[kind], "", words)]


def config_of(kind: str, fields: Mapping[str, Any]) -> OpaqueConfig:
    """Build the config from fields without faults. As in Kubernetes, `null` means unset."""
    if kind == "VfioDeviceConfig":
        iommu = fields.get("iommu") or {}
        return VfioDeviceConfig(
            iommu.get("backendPolicy") or "LegacyOnly", bool(iommu.get("enableAPIDevice"))
        )
    if kind == "MaintenanceConfig":
        return MaintenanceConfig(
            fields.get("policy") or "Wait", closed_seconds(fields.get("timeout") or "15m") or 0
        )
    given = fields.get("sharing")
    sharing = None if given is None else _sharing(given)
    management = bool(fields.get("management"))
    if kind == "GpuConfig":
        return GpuConfig(sharing, management, _power(fields), _clocks(fields.get("clocks") or {}))
    return MigDeviceConfig(sharing, management)


def _power(fields: Mapping[str, Any]) -> PowerConfig | None:
    given = fields.get("power") or {}
    found = PowerConfig(given.get("limitWatts"), given.get("percent"))
    return None if found == PowerConfig() else found


def _clocks(given: Mapping[str, Any]) -> Clocks:
    graphics, memory = given.get("graphicsMHz"), given.get("memoryMHz")
    return Clocks(
        *((one and ClockRange(one.get("min"), one.get("max"))) or None for one in (graphics, memory))
    )


def _sharing(given: Mapping[str, Any]) -> Sharing:
    if given["strategy"] == "MPS":
        mps = given.get("mpsConfig") or {}
        limit = mps.get("defaultPinnedDeviceMemoryLimit")
        by_device = mps.get("defaultPerDevicePinnedMemoryLimit") or {}
        return Sharing(
            "MPS",
            mps=MpsConfig(
                mps.get("defaultActiveThreadPercentage"),
                None if limit is None else _memory(limit),
                {key: _memory(one) for key, one in by_device.items()},
                mps.get("multiUser"),
            ),
        )
    interval = (given.get("timeSlicingConfig") or {}).get("interval")
    return Sharing("TimeSlicing", time_slicing=TimeSlicingConfig(interval))
