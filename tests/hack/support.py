"""Simulated machines as hack/gpucheck looks at them, and an nvidia-smi that answers everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

from gpucheck.machine import View, opened

from dra_driver.app.settings import Settings
from dra_driver.model.gpu import Gpu
from dra_driver.simulator import open_machine
from dra_driver.simulator.machine_state import nvlink_count


@contextmanager
def looking_at(name: str, directory: Path) -> Iterator[View]:
    """The simulated machine, kept in `directory`/machine."""
    with opened(Settings("gpu-check", simulate=name, simulator_dir=str(directory / "machine"))) as view:
        yield view


def script(path: Path, cases: dict[str, str]) -> str:
    """A program that answers each command line with a text and refuses all others."""
    lines = ["#!/bin/sh", 'case "$*" in']
    for number, (arguments, text) in enumerate(cases.items()):
        answer = path.with_name(f"{path.name}.{number}")
        answer.write_text(text)
        lines.append(f"  {arguments}) cat '{answer}' ;;")
    path.write_text("\n".join([*lines, '  *) echo "unknown: $*" >&2; exit 2 ;;', "esac", ""]))
    path.chmod(0o755)
    return str(path)


def full_smi(path: Path, view: View, replace: dict[str, str] | None = None) -> str:
    """An nvidia-smi with the forms of a real one. `replace` changes texts in all its answers."""
    gpus = view.inventory.gpus
    version = f"<driver_version>{view.inventory.versions.driver}</driver_version>"
    cases = {
        "-L": "".join(map(_listed, gpus)),
        "'-q -x'": f"<nvidia_smi_log>{version}{''.join(map(_xml, gpus))}</nvidia_smi_log>\n",
        "'topo -m'": _topology(view),
    }
    for old, new in (replace or {}).items():
        cases = {arguments: text.replace(old, new) for arguments, text in cases.items()}
    return script(path, cases)


def _listed(gpu: Gpu) -> str:
    migs = (
        f"  MIG {mig.profile.name:<12}Device {number:2d}: (UUID: {mig.uuid})\n"
        for number, mig in enumerate(gpu.mig_devices)
    )
    return f"GPU {gpu.index}: {gpu.product_name} (UUID: {gpu.uuid})\n{''.join(migs)}"


def _xml(gpu: Gpu) -> str:
    fabric = ("N/A", "N/A", "N/A")
    if gpu.fabric is not None:
        fabric = ("Completed", gpu.fabric.cluster_uuid, str(gpu.fabric.clique_id))
    bus = f"0000{gpu.pci_bus_id}".upper()
    memory = "[N/A]" if gpu.memory_bytes is None else f"{gpu.memory_bytes >> 20} MiB"
    mode = "[N/A]" if not gpu.mig_capable else "Enabled" if gpu.mig_enabled else "Disabled"
    return (
        f'<gpu id="{bus}"><product_name>{escape(gpu.product_name or "")}</product_name>'
        f"<product_brand>{(gpu.brand or '').upper()}</product_brand>"
        f"<product_architecture>{gpu.architecture}</product_architecture><uuid>{gpu.uuid}</uuid>"
        f"<mig_mode><current_mig>{mode}</current_mig></mig_mode>"
        f"<fb_memory_usage><total>{memory}</total></fb_memory_usage>"
        f"<minor_number>{gpu.minor}</minor_number><addressing_mode>{gpu.addressing_mode or 'N/A'}</addressing_mode>"
        f"<fabric><state>{fabric[0]}</state><status>Success</status><cliqueId>{fabric[2]}</cliqueId>"
        f"<clusterUUID>{fabric[1]}</clusterUUID></fabric><pci><pci_bus_id>{bus}</pci_bus_id></pci></gpu>"
    )


def _topology(view: View) -> str:
    """The matrix from the simulator's own wiring, not from what discovery made of it."""
    state = open_machine(Path(view.platform.paths.driver_root).parent).current()
    gpus = view.inventory.gpus
    names = [f"GPU{gpu.index}" for gpu in gpus]
    affinity = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    lines = ["\t" + "\t".join(f"\x1b[4m{name}" for name in names) + f"{affinity}\x1b[0m"]
    for gpu, name in zip(gpus, names, strict=True):
        cells = []
        for peer in gpus:
            count = nvlink_count(state, state.by_uuid[gpu.uuid], state.by_uuid[peer.uuid])
            cells.append("X" if peer is gpu else f"NV{count}" if count else "SYS")
        numa = "N/A" if gpu.numa_node is None else gpu.numa_node
        lines.append("\t".join([name, *cells, "0-7", str(numa), "", "N/A"]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", ""])
