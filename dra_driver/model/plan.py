"""What a claim needs on this node: devices and steps."""

from __future__ import annotations

import re

from dra_driver.model.claim import AllocatedClaim, DeviceResult, HeldDevice
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import HostDevice, ImexChannels
from dra_driver.model.inventory import DynamicMigDevice, OfferedDevice
from dra_driver.model.mps import SharingMode
from dra_driver.model.sharing import kind_of
from dra_driver.model.steps import Step, maintenance_of

_SHARE_SUFFIX = re.compile(r"-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """If the claim manages the node, containers get the management nodes of the `managed` GPUs. A device for
    a virtual machine uses iommufd if the claim `prefers_iommufd` and the host supports it. With
    `has_api_device`, containers also get /dev/iommu or /dev/vfio/vfio.
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
        return cdi_device(self.result)

    def held(self) -> HeldDevice:
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
    """`waits_for` are the other claims on the GPUs of a maintenance claim."""

    claim: AllocatedClaim
    devices: tuple[PlannedDevice, ...]
    steps: tuple[Step, ...]
    waits_for: tuple[str, ...] = ()

    @property
    def used_gpus(self) -> frozenset[str]:
        """What the claim uses or changes. A request with adminAccess does neither, except in a maintenance
        claim.
        """
        step = maintenance_of(self.steps)
        return frozenset(offered.gpu.uuid for offered in self.used_devices()) | frozenset(
            step.gpu_uuids if step else ()
        )

    def used_devices(self) -> list[OfferedDevice]:
        """Return the devices without adminAccess."""
        return [device.offered for device in self.devices if not device.result.admin_access]

    @property
    def has_extra_devices(self) -> bool:
        return any(device.imex is not None or device.host_devices for device in self.devices)

    def held_devices(self) -> tuple[HeldDevice, ...]:
        return tuple(device.held() for device in self.devices)


def held_silicon(offered: OfferedDevice) -> HeldDevice:
    """Return the device for a record, without the claim's own settings."""
    return HeldDevice(
        device=offered.name,
        kind=kind_of(offered),
        uuid=offered.uuid,
        gpu_uuid=offered.gpu.uuid,
        placement=offered.placement if isinstance(offered, DynamicMigDevice) else None,
    )


def cdi_device(result: DeviceResult) -> str:
    """Return the name in the claim's CDI spec. It includes the share ID, because two shares of one device
    have separate limits.
    """
    return result.device if result.share_id is None else f"{result.device}-{result.share_id}"


def device_of_cdi_name(name: str) -> str:
    return _SHARE_SUFFIX.sub("", name)


def share_of_cdi_name(name: str) -> str | None:
    found = _SHARE_SUFFIX.search(name)
    return None if found is None else found[0][1:]
