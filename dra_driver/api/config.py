"""The opaque parameters of a claim or class as plain values: `resource.nvidia.com/v1beta1`.

These carry no checks; `decode` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GROUP_VERSION = "resource.nvidia.com/v1beta1"

DeviceType = Literal["gpu", "mig", "vfio"]
Strategy = Literal["TimeSlicing", "MPS"]
Interval = Literal["Default", "Short", "Medium", "Long"]
IommuBackend = Literal["LegacyOnly", "PreferIommuFD"]


@dataclass(frozen=True, slots=True)
class TimeSlicingConfig:
    """How long a time slice of a shared GPU is; None takes what it is."""

    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class MpsConfig:
    """Settings of an MPS control daemon. Memory limits in bytes, at least 1 MiB; None means no limit.

    Keys of `per_device_memory_limits` are device UUIDs or indexes into the sorted UUIDs of the devices
    that the parameters apply to.
    """

    active_thread_percentage: int | None = None
    memory_limit: int | None = None
    per_device_memory_limits: Mapping[str, int] = field(default_factory=dict)
    multi_user: bool | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the containers of a claim share a device. Exactly the part that fits the strategy is set."""

    strategy: Strategy
    time_slicing: TimeSlicingConfig | None = None
    mps: MpsConfig | None = None


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """Parameters of whole GPUs. `management` gives a claim with adminAccess what agents such as DCGM need: all GPUs of
    the node, and the capabilities to monitor and configure MIG."""

    sharing: Sharing | None = None
    management: bool = False


@dataclass(frozen=True, slots=True)
class MigDeviceConfig:
    """Parameters of MIG devices. TimeSlicing is accepted there and changes nothing; `management` as for whole GPUs."""

    sharing: Sharing | None = None
    management: bool = False


@dataclass(frozen=True, slots=True)
class VfioDeviceConfig:
    """Parameters of GPUs that are passed through to virtual machines."""

    iommu_backend: IommuBackend = "LegacyOnly"
    enable_api_device: bool = False


OpaqueConfig = GpuConfig | MigDeviceConfig | VfioDeviceConfig

KINDS: Mapping[str, DeviceType] = {"GpuConfig": "gpu", "MigDeviceConfig": "mig", "VfioDeviceConfig": "vfio"}

DEFAULTS: Mapping[DeviceType, OpaqueConfig] = {
    "gpu": GpuConfig(),
    "mig": MigDeviceConfig(),
    "vfio": VfioDeviceConfig(),
}


def config_type(config: OpaqueConfig) -> DeviceType:
    """The type of device that the parameters are for."""
    return KINDS[type(config).__name__]
