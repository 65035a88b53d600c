"""The NVIDIA driver's installation: libraries by name, programs, firmware, sockets, and nvidia-smi with its facts."""

from __future__ import annotations

import functools

import pynvml

from dra_driver.simulator import mig
from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.hostroot.entries import Directory, Entries, Link, Socket, Text
from dra_driver.simulator.hostroot.scripts import quoted, script
from dra_driver.simulator.mps import mps_programs
from dra_driver.simulator.state import Gpu, State

_PROGRAM = "#!/bin/sh\nprintf '%s\\n' \"{name} of the simulated driver {version}\"\n"


def driver_files(state: State) -> Entries:
    entries = dict(_installed(state.driver_version, state.system["arch"], _programs(state)))
    if state.system["cdi_hook"]:
        hook = script("nvidia-cdi-hook.sh").replace("@VERSION@", state.driver_version)
        entries["usr/bin/nvidia-cdi-hook"] = Text(hook, 0o755)
    entries.update(mps_programs(state))
    if any(item.driver == "nvidia-nvswitch" for item in state.functions):
        entries["run/nvidia-fabricmanager/socket"] = Socket()
    return entries


@functools.lru_cache(maxsize=16)
def _installed(version: str, arch: str, programs: tuple[str, ...]) -> Entries:
    """What no change of a machine but another driver changes."""
    facts = driver_facts()
    libraries = f"usr/lib/{arch}-linux-gnu"
    entries: Entries = {}
    for name, links in facts["libraries"].items():
        entries[f"{libraries}/{name}.so.{version}"] = _placeholder(f"{name}.so.{version}")
        target = f"{name}.so.{version}"
        for link in links:
            entries[f"{libraries}/{name}.so{'.' if link else ''}{link}"] = Link(target)
            target = f"{name}.so.{link}"
    for name, soname in facts["other_libraries"].items():
        entries[f"{libraries}/{name}"] = _placeholder(name)
        entries[f"{libraries}/{soname}"] = Link(name)
    entries[f"{libraries}/gbm/nvidia-drm_gbm.so"] = Link("../libnvidia-allocator.so.1")
    entries[f"{libraries}/vdpau/libvdpau_nvidia.so.{version}"] = _placeholder(f"libvdpau_nvidia.so.{version}")
    entries["usr/lib/xorg/modules/drivers/nvidia_drv.so"] = _placeholder("nvidia_drv.so")
    server = f"libglxserver_nvidia.so.{version}"
    entries[f"usr/lib/xorg/modules/extensions/{server}"] = _placeholder(server)
    entries["usr/lib/xorg/modules/extensions/libglxserver_nvidia.so"] = Link(server)
    for name in programs:
        entries[f"usr/bin/{name}"] = Text(_PROGRAM.format(name=name, version=version), 0o755)
    for path, library in facts["loader_files"].items():
        entries[path] = Text(f'{{"file_format_version": "1.0.0", "ICD": {{"library_path": "{library}"}}}}\n')
    entries["etc/OpenCL/vendors/nvidia.icd"] = Text("libnvidia-opencl.so.1\n")
    entries["usr/share/nvidia/nvoptix.bin"] = _placeholder("nvoptix.bin")
    entries["usr/share/X11/xorg.conf.d/10-nvidia.conf"] = Text('# OutputClass "nvidia"\n')
    for firmware in facts["firmware"]:
        entries[f"lib/firmware/nvidia/{version}/{firmware}"] = _placeholder(firmware)
    entries["run/nvidia-persistenced/socket"] = Socket()
    entries["tmp"] = Directory(0o1777)
    return entries


def _programs(state: State) -> tuple[str, ...]:
    programs: tuple[str, ...] = tuple(driver_facts()["programs"])
    if state.fabric.get("cluster"):
        programs = (*programs, "nvidia-imex")
    return programs


def _placeholder(name: str) -> Text:
    return Text(f"simulated {name}\n")


def nvidia_smi(state: State) -> Entries:
    """The script with the facts of the machine, as containers and the host run it."""
    version, cuda = state.driver_version, state.cuda_version
    lines = [
        f"MACHINE={quoted(state.machine)}",
        f"DRIVER_VERSION={version}",
        f"DRIVER_LOADED={'yes' if state.driver_loaded else 'no'}",
        f"CUDA_VERSION={cuda // 1000}.{cuda % 1000 // 10}",
        f"NVML_VERSION={cuda // 1000}.{version}",
        f"GPU_COUNT={len(state.shown)}",
        "each_device() {",
        "    :",
    ]
    for gpu in state.shown:
        lines.append(f"    on_gpu {_gpu_facts(state, gpu)}")
        lines += [f"    on_mig {facts}" for facts in _mig_facts(state, gpu)]
    lines.append("}")
    return {"usr/bin/nvidia-smi": Text(script("nvidia-smi.sh").replace("#@FACTS@", "\n".join(lines)), 0o755)}


def _gpu_facts(state: State, gpu: Gpu) -> str:
    model = state.model_of(gpu)
    total = "[N/A]" if model.memory_bytes is None else str(model.memory_bytes >> 20)
    used = (model.reserved_bytes >> 20) + sum(holder.memory_mib for holder in gpu.holders)
    modes = [
        ("Enabled" if mode else "Disabled") if model.mig else "[N/A]"
        for mode in (gpu.mig_mode, gpu.mig_pending)
    ]
    facts = [
        str(gpu.minor),
        gpu.uuid,
        model.name,
        f"0000{gpu.bus_id}".upper(),
        total,
        "[N/A]" if model.memory_bytes is None else str(used),
        *modes,
        gpu.serial if model.serial else "[N/A]",
        ".".join(str(part) for part in model.compute),
        "Enabled" if gpu.persistence else "Disabled",
        "lost" if gpu.lost else "ok",
        "vgpu" if gpu.virtualization == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU else "none",
    ]
    return " ".join(quoted(fact) for fact in facts)


def _mig_facts(state: State, gpu: Gpu) -> list[str]:
    rows = []
    for gi, ci in gpu.mig_devices:
        profile = mig.profile_by_id(state.model_of(gpu), gi.profile_id)
        if profile is None:
            continue
        name = profile.name if ci.size == profile.slices else f"{ci.size}c.{profile.name}"
        caps = (mig.cap_minor(gpu.minor, gi.id), mig.cap_minor(gpu.minor, gi.id, ci.id))
        rows.append(f"{gpu.minor} {caps[0]} {caps[1]} {quoted(name)} {ci.uuid}")
    return rows
