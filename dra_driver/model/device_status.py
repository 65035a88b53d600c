"""The status of a prepared device in `status.devices` of its claim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MpsFacts:
    """The limits of the MPS daemon that serves a device; None is no limit."""

    active_thread_percentage: int | None = None
    pinned_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a claim's status says about a prepared device; a field that is None is left out."""

    type: str | None = None
    uuid: str | None = None
    product_name: str | None = None
    driver_version: str | None = None
    pci_bus_id: str | None = None
    parent_uuid: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    profile: str | None = None
    mps: MpsFacts | None = None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device of a claim: whether it can be used, why (a CamelCase `reason`, a sentence), and what it is.

    `pool`, `device` and `share_id` are those of the allocation result.
    """

    pool: str
    device: str
    ready: bool
    reason: str
    message: str
    share_id: str | None = None
    facts: DeviceFacts = DeviceFacts()
