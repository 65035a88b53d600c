"""What a claim needs on this node: its devices, and the steps that prepare them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dra_driver.model.claim import AllocatedClaim, DeviceResult
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import HostDevice, ImexChannels
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice
from dra_driver.model.mps import SharingMode
from dra_driver.model.record import HeldDevice, Step, maintenance_of
from dra_driver.model.sharing import kind_of

_SHARE_SUFFIX = re.compile(r"-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One allocation result of ours, the device that it names, and how the claim uses the device. `managed` are the
    GPUs that containers get beside it, for a claim that manages the node.

    `imex` and `host_devices` are what its containers get beside it. A device for a virtual machine goes by the kernel's
    iommufd if the claim `prefers_iommufd` and the host has it; its containers get the node of the interface too if
    `has_api_device`.
    """

    result: DeviceResult
    offered: OfferedDevice
    usage: SharingMode = None
    managed: tuple[Gpu, ...] = ()
    imex: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()
    prefers_iommufd: bool = False
    has_api_device: bool = False

    @property
    def cdi_device(self) -> str:
        """The device's name in the claim's CDI spec; see `cdi_device`."""
        return cdi_device(self.result)

    def held(self) -> HeldDevice:
        """The device as a record keeps it."""
        bare = held_silicon(self.offered)
        result = self.result
        return replace(
            bare,
            admin_access=result.admin_access,
            share_id=result.share_id,
            usage=self.usage,
            imex=self.imex,
            host_devices=self.host_devices,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a claim needs on this node."""

    claim: AllocatedClaim
    devices: tuple[PlannedDevice, ...]
    steps: tuple[Step, ...]

    @property
    def locked_gpus(self) -> frozenset[str]:
        """The GPUs whose locks the plan needs: adminAccess reserves and changes nothing, except for maintenance."""
        step = maintenance_of(self.steps)
        return frozenset(offered.gpu.uuid for offered in self.used_devices()) | frozenset(
            step.gpu_uuids if step else ()
        )

    def used_devices(self) -> list[OfferedDevice]:
        """The devices that the claim does more with than look."""
        return [device.offered for device in self.devices if not device.result.admin_access]

    @property
    def has_extra_devices(self) -> bool:
        """Whether a device comes with something of the host beside it."""
        return any(device.imex is not None or device.host_devices for device in self.devices)

    def held_devices(self) -> tuple[HeldDevice, ...]:
        """The devices as a record keeps them."""
        return tuple(device.held() for device in self.devices)


def held_silicon(offered: OfferedDevice) -> HeldDevice:
    """The device as a record keeps it, without the way in which a claim uses it."""
    return HeldDevice(
        device=offered.name,
        kind=kind_of(offered),
        uuid=offered.uuid,
        gpu_uuid=offered.gpu.uuid,
        placement=offered.placement if isinstance(offered, DynamicMigDevice) else None,
    )


def cdi_device(result: DeviceResult) -> str:
    """The name of a result's device within its claim: two shares of one device have limits of their own."""
    return result.device if result.share_id is None else f"{result.device}-{result.share_id}"


def device_of_cdi_name(name: str) -> str:
    """The device's name in a name that `cdi_device` made."""
    return _SHARE_SUFFIX.sub("", name)


def share_of_cdi_name(name: str) -> str | None:
    """The ID of the share in a name that `cdi_device` made; None for a device that is not shared."""
    found = _SHARE_SUFFIX.search(name)
    return None if found is None else found[0][1:]
