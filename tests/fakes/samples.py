"""GPUs, MIG devices, claims and records for tests of pure decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dra_driver.claims.rules.plan import Identity, plan_claim
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult, HeldDevice
from dra_driver.model.gpu import VFIO_PCI, Card, Chassis, Gpu, uuid_of_bus_id
from dra_driver.model.inventory import DriverVersions, Inventory, WholeGpu
from dra_driver.model.mig import MigDevice, MigProfile, Placement
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteCdiSpec

DRIVER = "gpu.nvidia.com"
NODE = "node-a"
VERSIONS = DriverVersions("570.124.06", (12, 8))

ONE_G = MigProfile(19, "1g.10gb", 1, 7, 16, 1, 1, 0, 1, 0, 9984)
TWO_G = MigProfile(14, "2g.20gb", 2, 3, 32, 2, 2, 0, 2, 0, 20096)
THREE_G = MigProfile(9, "3g.40gb", 3, 2, 60, 3, 3, 0, 3, 0, 40448)


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-06c0-7d70-1a51-e59b25b2c16c"


def h100(number: int, **changes: Any) -> Gpu:
    return replace(
        Gpu(
            uuid=uuid(number),
            index=number,
            minor=number,
            pci_bus_id=f"0000:{number + 0x10:02x}:00.0",
            product_name="NVIDIA H100 80GB HBM3",
            brand="Nvidia",
            architecture="Hopper",
            cuda_compute_capability=(9, 0),
            memory_bytes=81559 << 20,
            addressing_mode="HMM",
            pcie_root=f"pci0000:{number + 0x0F:02x}",
            numa_node=0,
            nvlink_links=18,
            mig_capable=True,
            power_limits_w=(200, 700),
            power_limit_default_w=700,
            graphics_clocks_mhz=(210, 1980),
            memory_clocks_mhz=(1593, 2619),
            chassis=Chassis("1821025190042", 26, 14),
            module_id=2,
        ),
        **changes,
    )


def mig(parent: int, profile: MigProfile, start: int, size: int, gi: int, **changes: Any) -> MigDevice:
    return replace(
        MigDevice(
            uuid=f"MIG-{parent:08x}-0000-5555-aaaa-{gi:012x}",
            parent_uuid=uuid(parent),
            gpu_instance_id=gi,
            compute_instance_id=0,
            profile=profile,
            placement=Placement(start, size),
        ),
        **changes,
    )


def partitioned(number: int, *devices: MigDevice) -> Gpu:
    return h100(number, mig_enabled=True, mig_devices=devices, nvlink_links=18)


def inventory(*gpus: Gpu, cards: tuple[Card, ...] = (), **domains: str) -> Inventory:
    return Inventory(VERSIONS, gpus, domains, cards=cards)


def card(number: int, **changes: Any) -> Card:
    """The GPU `h100(number)` as a card that the NVIDIA driver has."""
    bus_id = f"0000:{number + 0x10:02x}:00.0"
    return replace(
        Card(
            bus_id=bus_id,
            gpu_uuid=uuid(number),
            device_id=0x2330,
            iommu_group=number + 40,
            functions=(bus_id,),
            vfio_driver=VFIO_PCI,
            driver="nvidia",
            has_iommufd=False,
            product_name="GH100 [H100 SXM5 80GB]",
            addressable_memory=128 << 30,
            pcie_root=f"pci0000:{number + 0x0F:02x}",
            numa_node=0,
        ),
        **changes,
    )


def bound(number: int, **changes: Any) -> Card:
    """The same card after this plugin gave it to vfio."""
    return card(number, **{"driver": VFIO_PCI, "by_us": True, **changes})


def bound_by_hand(number: int) -> Card:
    """The same card after an administrator bound it, so the GPU's UUID is unknown."""
    return bound(number, by_us=False, gpu_uuid=uuid_of_bus_id(card(number).bus_id))


GPU_0, GPU_1, GPU_2 = "gpu-00000000", "gpu-00000001", "gpu-00000002"
VFIO_0, VFIO_1 = "vfio-0000-10-00-0", "vfio-0000-11-00-0"
MIG_1G, MIG_3G = "gpu-00000002-mig-1g10gb-19-0", "gpu-00000002-mig-3g40gb-9-4"
MIXED = inventory(h100(0), h100(1), partitioned(2, mig(2, ONE_G, 0, 1, 7), mig(2, THREE_G, 4, 4, 2)))
"""Two whole GPUs, and one with the MIG devices `MIG_1G` and `MIG_3G`."""


def ref(uid: str = "uid-1", name: str = "claim-1") -> ClaimRef:
    return ClaimRef("default", name, uid)


def result(device: str, request: str = "gpu", **changes: Any) -> DeviceResult:
    return replace(DeviceResult(request, DRIVER, NODE, device), **changes)


def claim(
    *devices: str | DeviceResult, uid: str = "uid-1", configs: tuple[DeviceConfig, ...] = ()
) -> AllocatedClaim:
    results = tuple(item if isinstance(item, DeviceResult) else result(item) for item in devices)
    return AllocatedClaim(ref(uid, f"claim-{uid}"), results, configs)


def plan(
    wanted: AllocatedClaim,
    *others: ClaimRecord,
    found: Inventory = MIXED,
    known: ClaimRecord | None = None,
    **settings: Any,
) -> Plan:
    """What Prepare plans on a node with this inventory and these settings."""
    return plan_claim(wanted, found, Identity(DRIVER, NODE, **settings), others, known)


def record(*held: HeldDevice, uid: str = "uid-other", phase: Any = "prepared") -> ClaimRecord:
    names = [item.device for item in held]
    return ClaimRecord(claim(*names, uid=uid), phase, "boot-1", held, (WriteCdiSpec(),))


def hold(name: str, **changes: Any) -> HeldDevice:
    device = MIXED.by_name[name]
    kind = "gpu" if isinstance(device, WholeGpu) else "mig"
    return replace(HeldDevice(name, kind, device.uuid, device.gpu.uuid), **changes)
