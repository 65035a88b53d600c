"""The NVIDIA driver's installation: libraries, programs, firmware, sockets, MPS, and nvidia-imex on machines in a
fabric.

Like real programs, the ELF files (`SIMULATE_ELF`) need the NVIDIA driver's libraries and a C library that differs from
the container's. `program` runs the simulator's script, which is appended to it or in usr/libexec; `library` is
libnvidia-ml and libcuda; `libc` does not work in containers.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pynvml

from dra_driver.simulator import mig
from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.faults import SMI
from dra_driver.simulator.hostroot.entries import Directory, Entries, Link, Socket, Text
from dra_driver.simulator.machine_state import Gpu, State

SCRIPTS = Path(__file__).parent.parent / "scripts"
_PROGRAM = "#!/bin/sh\nprintf '%s\\n' \"{name} of the simulated driver {version}\"\n"
_IMEX_SOCKET = "etc/nvidia-imex/imex_ctrl.sock"
_IMEX_CONFIG = f"""\
# Configuration of the simulated nvidia-imex.
SERVER_PORT=50000
IMEX_NODE_CONFIG_FILE=/etc/nvidia-imex/nodes_config.cfg
IMEX_CMD_ENABLED=1
IMEX_CMD_PORT=
IMEX_CMD_UNIX_DOMAIN_PATH=/{_IMEX_SOCKET}
"""
_FILES = ("program", "library", "libc")
_ALONE = "nvidia-smi"
"""The script is appended, because a container that runs nvidia-smi gets only this file."""
_IN_LIBEXEC = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")


@functools.cache
def script(name: str) -> str:
    return (SCRIPTS / name).read_text()


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def driver_files(state: State) -> Entries:
    entries = dict(_installed(state.driver_version, state.system["arch"], _programs(state)))
    if state.system["cdi_hook"]:
        hook = script("nvidia-cdi-hook.sh").replace("@VERSION@", state.driver_version)
        entries["usr/bin/nvidia-cdi-hook"] = Text(hook, 0o755)
    entries.update(mps_programs(state.driver_version))
    if any(item.driver == "nvidia-nvswitch" for item in state.functions):
        entries["run/nvidia-fabricmanager/socket"] = Socket()
    return entries


@functools.lru_cache(maxsize=16)
def _installed(version: str, arch: str, programs: tuple[str, ...]) -> Entries:
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
    for name in programs:
        entries[f"usr/bin/{name}"] = Text(_PROGRAM.format(name=name, version=version), 0o755)
    for path, library in facts["loader_files"].items():
        entries[path] = Text(f'{{"file_format_version": "1.0.0", "ICD": {{"library_path": "{library}"}}}}\n')
    for path, content in facts["files"].items():
        entries[path.format(libraries=libraries, version=version)] = (
            _placeholder(path.rpartition("/")[2].format(version=version))
            if content is None
            else Text(content)
        )
    for path, target in facts["links"].items():
        entries[path.format(libraries=libraries)] = Link(target.format(version=version))
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
    version, cuda = state.driver_version, state.cuda_version
    lines = [
        f"MACHINE={quoted(state.machine)}",
        f"DRIVER_VERSION={version}",
        f"DRIVER_LOADED={'yes' if state.driver_loaded else 'no'}",
        f"CUDA_VERSION={cuda // 1000}.{cuda % 1000 // 10}",
        f"NVML_VERSION={cuda // 1000}.{version}",
        f"WITHOUT_EFFECT={quoted(' '.join(fault.gpu or 'all' for fault in state.faults if fault.function == SMI))}",
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
        "held" if gpu.holders else "free",
        f"{(gpu.power_limit_mw or model.power_limit_w * 1000) / 1000:.2f}" if model.power_min_w else "[N/A]",
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


def mps_programs(version: str) -> Entries:
    control = script("nvidia-cuda-mps-control.py").replace("#@BRANCH@", version.partition(".")[0])
    return {
        "usr/bin/nvidia-cuda-mps-control": Text(control, 0o755),
        "usr/bin/nvidia-cuda-mps-server": Text(script("nvidia-cuda-mps-server.sh"), 0o755),
        "usr/bin/mps-client": Text(script("mps-client.sh"), 0o755),
    }


def imex(state: State) -> Entries:
    if not state.fabric.get("cluster"):
        return {}
    daemon = state.system.get("imex", "ready")
    facts = f"MACHINE={quoted(state.machine)}\nSTATE={quoted(daemon)}"
    entries: Entries = {
        "etc/nvidia-imex/config.cfg": Text(_IMEX_CONFIG),
        "usr/bin/nvidia-imex-ctl": Text(script("nvidia-imex-ctl.sh").replace("#@FACTS@", facts), 0o755),
    }
    if daemon != "stopped":
        entries[_IMEX_SOCKET] = Socket()
    return entries


class ElfFiles:
    """Without these files, programs are scripts, and libraries are placeholders."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "elf"
        self._known: dict[str, bytes] = {}

    def keep(self, source: Path) -> None:
        self._directory.mkdir(exist_ok=True)
        for name in _FILES:
            shutil.copy(source / name, self._directory / name)

    def replace_in(self, entries: Entries, state: State) -> None:
        if not self._known:
            if not self._directory.is_dir():
                return
            self._known = {name: (self._directory / name).read_bytes() for name in _FILES}
        program, version = self._known["program"], state.driver_version
        script = entries[f"usr/bin/{_ALONE}"]
        if isinstance(script, Text):
            entries[f"usr/bin/{_ALONE}"] = Text(program + script.raw, 0o755)
        for name in _IN_LIBEXEC:
            entries[f"usr/libexec/{name}"] = entries[f"usr/bin/{name}"]
            entries[f"usr/bin/{name}"] = Text(program, 0o755)
        libraries = f"usr/lib/{state.system['arch']}-linux-gnu"
        for name in ("libnvidia-ml", "libcuda"):
            entries[f"{libraries}/{name}.so.{version}"] = Text(self._known["library"])
        entries[f"{libraries}/libc.so.6"] = Text(self._known["libc"])
