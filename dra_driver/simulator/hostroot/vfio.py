"""What the kernel shows of IOMMU groups and vfio: files of sysfs, lists of modules, nodes."""

from __future__ import annotations

from dra_driver.simulator import pci
from dra_driver.simulator.hostroot.entries import Directory, Entries, Link, Node, Text
from dra_driver.simulator.state import Function, Gpu, State

_VFIO_MAJOR, _DEVICE_MAJOR, _MISC_MAJOR = 243, 242, 10
_VFIO_MINOR, _IOMMU_MINOR = 196, 125
_GRACE_MODULE = "nvgrace_gpu_vfio_pci"
_GRACE_GPUS = (0x2342, 0x2345, 0x2348, 0x2941, 0x31C2)
_FIRST_SRIOV = [8, 0]
_REGISTERS_MIB, _LAST_MIB = 16, 32


def vfio_files(state: State) -> Entries:
    """Below sys and lib."""
    entries: Entries = {f"sys/bus/pci/drivers/{driver}": Directory() for driver in pci.drivers(state)}
    groups = pci.groups(state)
    for bus_id, item in pci.functions(state).items():
        place = f"devices/{item.pcie}/{bus_id}"
        device, up = f"sys/{place}", "/".join([".."] * (place.count("/") + 1))
        entries[f"{device}/driver_override"] = Text(f"{item.override or '(null)'}\n")
        entries[f"{device}/modalias"] = Text(f"{_modalias(state, item)}\n")
        if isinstance(item, Gpu):
            entries[f"{device}/resource"] = Text(_regions(state, item))
            if list(state.model_of(item).compute) >= _FIRST_SRIOV:
                virtual = [other for other in state.functions if other.physical == bus_id]
                entries[f"{device}/sriov_numvfs"] = Text(f"{len(virtual)}\n")
                for number, other in enumerate(virtual):
                    entries[f"{device}/virtfn{number}"] = Link(f"../{other.bus_id}")
        group = groups.get(bus_id)
        if group is not None:
            entries[f"{device}/iommu_group"] = Link(f"{up}/kernel/iommu_groups/{group}")
            entries[f"sys/kernel/iommu_groups/{group}/devices/{bus_id}"] = Link(f"../../../../{place}")
        if item.vfio is not None and not pci.is_leaving(item):
            entries[f"{device}/driver"] = Link(f"{up}/bus/pci/drivers/{item.driver}")
            entries[f"sys/bus/pci/drivers/{item.driver}/{bus_id}"] = Link(f"../../../../{place}")
            entries[f"{device}/vfio-dev/vfio{item.vfio}/dev"] = Text(f"{_DEVICE_MAJOR}:{item.vfio}\n")
    return entries | _modules(state)


def vfio_nodes(state: State) -> Entries:
    """Below dev. A group has a node while vfio has a function of it."""
    groups = pci.groups(state)
    bound = [item for item in pci.functions(state).values() if item.vfio is not None]
    entries: Entries = {
        f"dev/vfio/{groups[item.bus_id]}": Node(_VFIO_MAJOR, groups[item.bus_id], 0o600)
        for item in bound
        if item.bus_id in groups
    }
    if state.system.get("vfio_loaded"):
        entries["dev/vfio/vfio"] = Node(_MISC_MAJOR, _VFIO_MINOR)
    if state.system.get("iommufd"):
        entries["dev/iommu"] = Node(_MISC_MAJOR, _IOMMU_MINOR)
        entries |= {
            f"dev/vfio/devices/vfio{item.vfio}": Node(_DEVICE_MAJOR, item.vfio or 0, 0o600) for item in bound
        }
    return entries


def _modules(state: State) -> Entries:
    installed = state.system.get("vfio_modules", [])
    directory = f"lib/modules/{state.system['kernel']}"
    aliases = [
        "# Aliases extracted from modules themselves.",
        "alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia",
    ]
    if "vfio_pci" in installed:
        aliases.append("alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci")
    if _GRACE_MODULE in installed:
        aliases += [
            f"alias vfio_pci:v000010DEd{number:08X}sv*sd*bc*sc*i* {_GRACE_MODULE}" for number in _GRACE_GPUS
        ]
    files = [
        f"kernel/drivers/vfio/{f'pci/{pci.VFIO_DRIVERS[module]}' if module in pci.VFIO_DRIVERS else module}.ko.zst"
        for module in installed
    ]
    entries: Entries = {
        f"{directory}/modules.alias": Text("\n".join(aliases) + "\n"),
        f"{directory}/modules.dep": Text(
            "".join(f"{file}: kernel/drivers/vfio/vfio.ko.zst\n" for file in files)
        ),
    }
    for module in state.system.get("vfio_loaded", []):
        driver = pci.VFIO_DRIVERS.get(module)
        if driver is None:
            entries[f"sys/module/{module}/parameters"] = Directory()
        else:
            entries[f"sys/module/{module}/drivers/pci:{driver}"] = Link(f"../../../bus/pci/drivers/{driver}")
    return entries


def _modalias(state: State, item: Gpu | Function) -> str:
    if isinstance(item, Gpu):
        model = state.model_of(item)
        numbers = (model.pci_id & 0xFFFF, model.pci_id >> 16, model.subsystem_id)
        code = model.pci_class
    else:
        numbers = (item.vendor, item.device, item.device << 16 | item.vendor)
        code = item.pci_class
    vendor, device, subsystem = numbers
    return (
        f"pci:v{vendor:08X}d{device:08X}sv{subsystem & 0xFFFF:08X}sd{subsystem >> 16:08X}"
        f"bc{code >> 16:02X}sc{code >> 8 & 0xFF:02X}i{code & 0xFF:02X}"
    )


def _regions(state: State, gpu: Gpu) -> str:
    """Registers below 4 GiB, then the memory and a small region above: start, end, flags, as the kernel lists them."""
    memory = state.model_of(gpu).memory_bytes or 0
    size = 1 << (memory - 1).bit_length() if memory else 0
    number = state.present.index(gpu) + 1
    regions = [
        (0xA000_0000 + number * 0x0200_0000, _REGISTERS_MIB << 20, 0x40200),
        (number << 40, size, 0x14220C),
        ((number << 40) + size, _LAST_MIB << 20, 0x14220C),
    ]
    lines = []
    for start, length, flags in regions:
        lines.append(f"0x{start:016x} 0x{start + length - 1:016x} 0x{flags:016x}" if length else _NO_REGION)
        if flags != 0x40200:
            lines.append(_NO_REGION)
    return "\n".join([*lines, *[_NO_REGION] * 8]) + "\n"


_NO_REGION = " ".join(["0x" + "0" * 16] * 3)
