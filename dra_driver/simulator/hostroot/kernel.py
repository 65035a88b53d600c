"""/proc, /sys and /dev: the kernel's and NVIDIA driver's view of the GPUs, and of related kernel modules."""

from __future__ import annotations

import functools
import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

from dra_driver.model.host import DeviceNode
from dra_driver.simulator import mig, pci
from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.hostroot.entries import Directory, Entries, Link, Node, Text, can_make_nodes
from dra_driver.simulator.machine_state import NVIDIA, Function, Gpu, State

NVIDIA_MAJOR = 195
DRM_MAJOR = 226
SWITCH_MAJOR = 234
_VIDEO, _RENDER = 44, 993
_FIXED_DEVICES = ("  1 mem", "  4 tty", "  5 /dev/tty", "  5 /dev/console", " 10 misc", " 29 fb", "226 drm")
_FS, _VERBS, _RDMA_CM, _GDR = 511, 231, 10, 510
HOST_DEVICE_MAJORS = (
    ("gds", _FS, "nvidia-fs"),
    ("mofed", _VERBS, "infiniband_verbs"),
    ("gdrcopy", _GDR, "gdrdrv"),
)
_VFIO_MAJOR, _DEVICE_MAJOR, _MISC_MAJOR = 243, 242, 10
_VFIO_MINOR, _IOMMU_MINOR = 196, 125
_GRACE_MODULE = "nvgrace_gpu_vfio_pci"
_GRACE_GPUS = (0x2342, 0x2345, 0x2348, 0x2941, 0x31C2)
FIRST_SRIOV = [8, 0]
"""The lowest compute capability of GPUs with virtual functions."""
_REGISTERS_MIB, _LAST_MIB = 16, 32


def procfs(state: State) -> Entries:
    """Return the files of /proc that the plugin reads."""
    entries: Entries = {
        "proc/devices": Text(_proc_devices(state)),
        "proc/modules": Text(_modules(state)),
        "proc/sys/kernel/random/boot_id": Text(f"{state.boot_id}\n"),
        "proc/sys/kernel/osrelease": Text(f"{state.system['kernel']}\n"),
    }
    if not state.driver_loaded:
        return entries
    entries["proc/driver/nvidia/version"] = Text(_version(state))
    entries["proc/driver/nvidia/params"] = Text(
        "\n".join((*driver_facts()["params"], f"ImexChannelCount: {state.system.get('imex_channels', 2048)}"))
        + "\n"
    )
    entries["proc/driver/nvidia-caps/mig-minors"] = Text(_mig_minors())
    caps = "proc/driver/nvidia/capabilities"
    entries[f"{caps}/mig/config"] = _access(1, 0o400)
    entries[f"{caps}/mig/monitor"] = _access(2, 0o444)
    entries[f"{caps}/fabric-imex-mgmt"] = _access(4323, 0o400)
    for gpu in state.shown:
        entries[f"proc/driver/nvidia/gpus/{gpu.bus_id}/information"] = Text(_information(state, gpu))
        if state.model_of(gpu).mig:
            entries[f"{caps}/gpu{gpu.minor}/mig"] = Directory()
        for gi in gpu.instances:
            base = f"{caps}/gpu{gpu.minor}/mig/gi{gi.id}"
            entries[f"{base}/access"] = _access(mig.cap_minor(gpu.minor, gi.id), 0o444)
            for ci in gi.compute:
                entries[f"{base}/ci{ci.id}/access"] = _access(mig.cap_minor(gpu.minor, gi.id, ci.id), 0o444)
    return entries


def _access(minor: int, mode: int) -> Text:
    return Text(f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n", 0o444)


@functools.cache
def _mig_minors() -> str:
    lines = ["config 1", "monitor 2"]
    for gpu in range(32):
        for gi in range(15):
            lines.append(f"gpu{gpu}/gi{gi}/access {mig.cap_minor(gpu, gi)}")
            lines += [f"gpu{gpu}/gi{gi}/ci{ci}/access {mig.cap_minor(gpu, gi, ci)}" for ci in range(8)]
    return "\n".join(lines) + "\n"


def _proc_devices(state: State) -> str:
    lines = ["Character devices:", *_FIXED_DEVICES]
    if state.driver_loaded:
        system = state.system
        lines += ["195 nvidia", "195 nvidia-modeset", "195 nvidiactl"]
        if any(item.driver == "nvidia-nvswitch" for item in state.functions):
            lines.append("234 nvidia-nvswitch")
        if system.get("imex_channels", 2048):
            lines.append(f"{system['imex_major']} nvidia-caps-imex-channels")
        lines += [
            f"{system['caps_major']} nvidia-caps",
            f"{system['uvm_major']} nvidia-uvm",
        ]
    lines += [f"{major} {name}" for kind, major, name in HOST_DEVICE_MAJORS if kind in host_devices(state)]
    return "\n".join([*lines, "", "Block devices:", "259 blkext", "  8 sd", ""])


def _modules(state: State) -> str:
    if not state.driver_loaded:
        return ""
    return (
        "nvidia_drm 122880 0 - Live 0x0000000000000000 (OE)\n"
        "nvidia_uvm 2097152 4 - Live 0x0000000000000000 (OE)\n"
        "nvidia_modeset 1720320 1 nvidia_drm, Live 0x0000000000000000 (OE)\n"
        "nvidia 14405632 99 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (OE)\n"
    )


def _version(state: State) -> str:
    arch, release = state.system["arch"], f"{state.driver_version}  Release Build"
    if state.system["open_kernel_module"]:
        return f"NVRM version: NVIDIA UNIX Open Kernel Module for {arch}  {release}\n"
    return f"NVRM version: NVIDIA UNIX {arch} Kernel Module  {release}\n"


def _information(state: State, gpu: Gpu) -> str:
    model = state.model_of(gpu)
    return (
        f"Model: \t\t {model.name}\nIRQ:   \t\t {18 + gpu.minor}\nGPU UUID: \t {gpu.uuid}\n"
        f"Video BIOS: \t {model.vbios}\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {gpu.bus_id}\nDevice Minor: \t {gpu.minor}\nGPU Firmware: \t {state.driver_version}\n"
        "GPU Excluded:\t No\n"
    )


def sysfs(state: State) -> Entries:
    entries: Entries = {
        "sys/module/firmware_class/parameters/path": Text("\n"),
        **{f"sys/bus/pci/drivers/{driver}": Directory() for driver in pci.drivers(state)},
    }
    if state.driver_loaded:
        entries["sys/module/nvidia/version"] = Text(f"{state.driver_version}\n")
        entries["sys/module/nvidia/initstate"] = Text("live\n")
    groups = pci.groups(state)
    for item in pci.functions(state).values():
        entries |= _function(state, item, groups.get(item.bus_id))
    return entries | _module_lists(state)


def _function(state: State, item: Gpu | Function, group: int | None) -> Entries:
    bus_id, place, driver = (
        item.bus_id,
        f"devices/{item.pcie}/{item.bus_id}",
        pci.driver_of(state, item.bus_id),
    )
    device, up = f"sys/{place}", "/".join([".."] * (place.count("/") + 1))
    if isinstance(item, Gpu):
        model = state.model_of(item)
        numbers = (model.pci_id & 0xFFFF, model.pci_id >> 16, model.pci_class, model.subsystem_id)
        more = _of_a_gpu(state, item, device, driver)
    else:
        numbers = (item.vendor, item.device, item.pci_class, item.device << 16 | item.vendor)
        more = {f"{device}/physfn": Link(f"../{item.physical}")} if item.physical else {}
    entries: Entries = {
        **_identity(device, *numbers),
        f"sys/bus/pci/devices/{bus_id}": Link(f"../../../{place}"),
        f"{device}/numa_node": Text(f"{item.numa}\n"),
        f"{device}/driver_override": Text(f"{item.override or '(null)'}\n"),
        **more,
    }
    if driver:
        entries[f"{device}/driver"] = Link(f"{up}/bus/pci/drivers/{driver}")
        entries[f"sys/bus/pci/drivers/{driver}/{bus_id}"] = Link(f"../../../../{place}")
        if item.vfio is not None:
            entries[f"{device}/vfio-dev/vfio{item.vfio}/dev"] = Text(f"{_DEVICE_MAJOR}:{item.vfio}\n")
    if group is not None:
        entries[f"{device}/iommu_group"] = Link(f"{up}/kernel/iommu_groups/{group}")
        entries[f"sys/kernel/iommu_groups/{group}/devices/{bus_id}"] = Link(f"../../../../{place}")
    return entries


def _of_a_gpu(state: State, gpu: Gpu, device: str, driver: str) -> Entries:
    entries: Entries = {
        f"{device}/local_cpulist": Text(f"{gpu.cpus}\n"),
        f"{device}/resource": Text(_regions(state, gpu)),
    }
    if gpu.lost:
        entries[f"{device}/config"] = Text(b"\xff" * 64)
    if driver == NVIDIA and gpu.drm is not None:
        entries[f"{device}/drm/card{gpu.drm}/dev"] = Text(f"226:{gpu.drm}\n")
        entries[f"{device}/drm/renderD{127 + gpu.drm}/dev"] = Text(f"226:{127 + gpu.drm}\n")
    if list(state.model_of(gpu).compute) >= FIRST_SRIOV:
        virtual = [other for other in state.functions if other.physical == gpu.bus_id]
        entries[f"{device}/sriov_numvfs"] = Text(f"{len(virtual)}\n")
        for number, other in enumerate(virtual):
            entries[f"{device}/virtfn{number}"] = Link(f"../{other.bus_id}")
    return entries


@functools.lru_cache(maxsize=1024)
def _identity(device: str, vendor: int, number: int, pci_class: int, subsystem: int) -> Entries:
    header = struct.pack("<HHHHI", vendor, number, 0x0406, 0x0010, pci_class << 8 | 0xA1).ljust(0x2C, b"\0")
    config = (header + struct.pack("<HH", subsystem & 0xFFFF, subsystem >> 16)).ljust(64, b"\0")
    modalias = (
        f"pci:v{vendor:08X}d{number:08X}sv{subsystem & 0xFFFF:08X}sd{subsystem >> 16:08X}"
        f"bc{pci_class >> 16:02X}sc{pci_class >> 8 & 0xFF:02X}i{pci_class & 0xFF:02X}"
    )
    return {
        f"{device}/vendor": Text(f"0x{vendor:04x}\n"),
        f"{device}/device": Text(f"0x{number:04x}\n"),
        f"{device}/class": Text(f"0x{pci_class:06x}\n"),
        f"{device}/subsystem_vendor": Text(f"0x{subsystem & 0xFFFF:04x}\n"),
        f"{device}/subsystem_device": Text(f"0x{subsystem >> 16:04x}\n"),
        f"{device}/modalias": Text(f"{modalias}\n"),
        f"{device}/config": Text(config),
    }


def host_devices(state: State) -> list[str]:
    return list(state.system.get("host_devices", []))


def host_device_nodes(state: State) -> Entries:
    """Return the nodes for GPUDirect Storage, RDMA (one adapter for each GPU) and GDRCopy."""
    kinds = host_devices(state)
    entries: Entries = {}
    if "gds" in kinds:
        entries |= {f"dev/nvidia-fs{number}": Node(_FS, number, 0o660) for number in range(8)}
        entries["etc/cufile.json"] = Text('{"logging": {"dir": "/tmp"}}\n')
        entries["run/udev"] = Directory()
    if "mofed" in kinds:
        for number in range(len(state.present)):
            entries[f"dev/infiniband/uverbs{number}"] = Node(_VERBS, 192 + number)
            entries[f"dev/infiniband/umad{number}"] = Node(_VERBS, number, 0o600)
        entries["dev/infiniband/rdma_cm"] = Node(_RDMA_CM, 122)
    if "gdrcopy" in kinds:
        entries["dev/gdrdrv"] = Node(_GDR, 0)
    return entries


def vfio_nodes(state: State) -> Entries:
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


def _module_lists(state: State) -> Entries:
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


def _regions(state: State, gpu: Gpu) -> str:
    """Return memory regions in the kernel's format (start, end, flags): registers below 4 GiB, then the memory."""
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


def devices(state: State) -> Entries:
    """Keep the NVIDIA driver's nodes while the driver is unloaded, as on a real host; the DRM nodes disappear."""
    system = state.system
    entries: Entries = {
        "dev/char": Directory(),  # udev creates links here, but not to the NVIDIA driver's nodes
        "dev/nvidiactl": Node(NVIDIA_MAJOR, 255),
        "dev/nvidia-modeset": Node(NVIDIA_MAJOR, 254),
        "dev/nvidia-uvm": Node(system["uvm_major"], 0),
        "dev/nvidia-uvm-tools": Node(system["uvm_major"], 1),
        "dev/nvidia-caps/nvidia-cap1": Node(system["caps_major"], 1, 0o400),
        "dev/nvidia-caps/nvidia-cap2": Node(system["caps_major"], 2, 0o444),
    }
    for gpu in state.present:
        entries[f"dev/nvidia{gpu.minor}"] = Node(NVIDIA_MAJOR, gpu.minor)
        if gpu.drm is not None and state.driver_loaded and gpu.driver == NVIDIA:
            card, render = f"card{gpu.drm}", f"renderD{127 + gpu.drm}"
            entries[f"dev/dri/{card}"] = Node(DRM_MAJOR, gpu.drm, 0o660, _VIDEO)
            entries[f"dev/dri/{render}"] = Node(DRM_MAJOR, 127 + gpu.drm, 0o660, _RENDER)
            entries[f"dev/dri/by-path/pci-{gpu.bus_id}-card"] = Link(f"../{card}")
            entries[f"dev/dri/by-path/pci-{gpu.bus_id}-render"] = Link(f"../{render}")
        for gi, ci in gpu.mig_devices if system["cap_nodes"] else []:
            for minor in (
                mig.cap_minor(gpu.minor, gi.id),
                mig.cap_minor(gpu.minor, gi.id, ci.id),
            ):
                entries[f"dev/nvidia-caps/nvidia-cap{minor}"] = Node(system["caps_major"], minor, 0o444)
    switches = [item for item in state.functions if item.driver == "nvidia-nvswitch"]
    for number in range(len(switches)):
        entries[f"dev/nvidia-nvswitch{number}"] = Node(SWITCH_MAJOR, number)
    if switches:
        entries["dev/nvidia-nvswitchctl"] = Node(SWITCH_MAJOR, 255)
    if state.fabric.get("cluster"):
        entries["dev/nvidia-caps-imex-channels/channel0"] = Node(system["imex_major"], 0)
    return entries | vfio_nodes(state)


class SimulatedDeviceNodes:
    """Reads device nodes, real or described. A path may be below the host root, or as containers see it
    (`/dev/nvidia0`).
    """

    def __init__(self, host_root: Path) -> None:
        self._root = str(host_root)

    def read(self, path: str) -> DeviceNode | None:
        full = self._full(os.path.normpath(path))
        try:
            status = full.lstat()
        except OSError:
            return None
        if stat.S_ISCHR(status.st_mode):
            return DeviceNode(
                path=path,
                type="c",
                major=os.major(status.st_rdev),
                minor=os.minor(status.st_rdev),
                mode=stat.S_IMODE(status.st_mode),
                uid=status.st_uid,
                gid=status.st_gid,
            )
        described = _description(full) if stat.S_ISREG(status.st_mode) else None
        return None if described is None else DeviceNode(path=path, type="c", uid=0, **described)

    def make(self, path: str, node: DeviceNode) -> None:
        """Create a node, or a file that describes it. Raises: FileExistsError; OSError."""
        full = self._full(path)
        full.parent.mkdir(parents=True, exist_ok=True)
        if can_make_nodes(Path(self._root).parent):
            os.mknod(full, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
        else:
            with full.open("xb") as file:
                file.write(Node(node.major, node.minor, node.mode, node.gid).described.raw)

    def remove(self, path: str) -> None:
        self._full(path).unlink()

    def _full(self, path: str) -> Path:
        return Path(path if path.startswith(f"{self._root}/") else f"{self._root}{path}")


def _description(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and said.keys() == {"major", "minor", "mode", "gid"} else None
