"""/proc and /sys: what the kernel and the NVIDIA driver tell about the GPUs."""

from __future__ import annotations

import functools
import struct

from dra_driver.simulator import mig
from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.hostroot.entries import Directory, Entries, Link, Text
from dra_driver.simulator.hostroot.host_devices import HOST_DEVICE_MAJORS, host_devices
from dra_driver.simulator.hostroot.vfio import vfio_files
from dra_driver.simulator.state import NVIDIA, Function, Gpu, State

_FIXED_DEVICES = ("  1 mem", "  4 tty", "  5 /dev/tty", "  5 /dev/console", " 10 misc", " 29 fb", "226 drm")


def procfs(state: State) -> Entries:
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
    kind = "NVIDIA UNIX Open Kernel Module for" if state.system["open_kernel_module"] else "NVIDIA UNIX"
    tail = "  Release Build" if state.system["open_kernel_module"] else " Kernel Module"
    if not state.system["open_kernel_module"]:
        return f"NVRM version: {kind} {state.system['arch']}{tail}  {state.driver_version}  Release Build\n"
    return f"NVRM version: {kind} {state.system['arch']}  {state.driver_version}{tail}\n"


def _information(state: State, gpu: Gpu) -> str:
    model = state.model_of(gpu)
    return (
        f"Model: \t\t {model.name}\nIRQ:   \t\t {18 + gpu.minor}\nGPU UUID: \t {gpu.uuid}\n"
        f"Video BIOS: \t {model.vbios}\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {gpu.bus_id}\nDevice Minor: \t {gpu.minor}\nGPU Firmware: \t {state.driver_version}\n"
        "GPU Excluded:\t No\n"
    )


def sysfs(state: State) -> Entries:
    entries: Entries = {"sys/module/firmware_class/parameters/path": Text("\n")}
    if state.driver_loaded:
        entries["sys/module/nvidia/version"] = Text(f"{state.driver_version}\n")
        entries["sys/module/nvidia/initstate"] = Text("live\n")
    for gpu in state.present:
        device = _pci_device(entries, gpu.bus_id, gpu.pcie, gpu.numa)
        model = state.model_of(gpu)
        number, vendor = model.pci_id >> 16, model.pci_id & 0xFFFF
        entries.update(_identity(device, vendor, number, model.pci_class, model.subsystem_id, lost=gpu.lost))
        entries[f"{device}/local_cpulist"] = Text(f"{gpu.cpus}\n")
        if gpu.driver == NVIDIA and state.driver_loaded:
            _bind(entries, device, gpu.bus_id, NVIDIA)
            if gpu.drm is not None:
                entries[f"{device}/drm/card{gpu.drm}/dev"] = Text(f"226:{gpu.drm}\n")
                entries[f"{device}/drm/renderD{127 + gpu.drm}/dev"] = Text(f"226:{127 + gpu.drm}\n")
    for function in state.functions:
        _other_function(entries, state, function)
    return entries | vfio_files(state)


def _up(device: str) -> str:
    """The way from a device directory to /sys."""
    return "/".join([".."] * (device.count("/")))


def _pci_device(entries: Entries, bus_id: str, pcie: str, numa: int) -> str:
    device = f"sys/devices/{pcie}/{bus_id}"
    entries[f"sys/bus/pci/devices/{bus_id}"] = Link(f"../../../devices/{pcie}/{bus_id}")
    entries[f"{device}/numa_node"] = Text(f"{numa}\n")
    return device


@functools.lru_cache(maxsize=1024)
def _identity(
    device: str,
    vendor: int,
    number: int,
    pci_class: int,
    subsystem: int,
    *,
    lost: bool = False,
) -> Entries:
    """What does not change while the device is there."""
    header = struct.pack("<HHHHI", vendor, number, 0x0406, 0x0010, pci_class << 8 | 0xA1).ljust(0x2C, b"\0")
    config = (header + struct.pack("<HH", subsystem & 0xFFFF, subsystem >> 16)).ljust(64, b"\0")
    return {
        f"{device}/vendor": Text(f"0x{vendor:04x}\n"),
        f"{device}/device": Text(f"0x{number:04x}\n"),
        f"{device}/class": Text(f"0x{pci_class:06x}\n"),
        f"{device}/subsystem_vendor": Text(f"0x{subsystem & 0xFFFF:04x}\n"),
        f"{device}/subsystem_device": Text(f"0x{subsystem >> 16:04x}\n"),
        f"{device}/config": Text(b"\xff" * 64 if lost else config),
    }


def _bind(entries: Entries, device: str, bus_id: str, driver: str) -> None:
    entries[f"{device}/driver"] = Link(f"{_up(device)}/bus/pci/drivers/{driver}")
    entries[f"sys/bus/pci/drivers/{driver}/{bus_id}"] = Link(f"../../../../{device[4:]}")


def _other_function(entries: Entries, state: State, function: Function) -> None:
    device = _pci_device(entries, function.bus_id, function.pcie, function.numa)
    subsystem = function.device << 16 | function.vendor
    entries.update(_identity(device, function.vendor, function.device, function.pci_class, subsystem))
    if function.physical:
        entries[f"{device}/physfn"] = Link(f"../{function.physical}")
    # A vfio driver is linked where everything of vfio is.
    has_driver = state.driver_loaded or not function.driver.startswith("nvidia")
    if function.driver and function.vfio is None and has_driver:
        _bind(entries, device, function.bus_id, function.driver)
