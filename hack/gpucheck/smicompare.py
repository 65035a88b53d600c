"""Compares what nvidia-smi and the kernel driver's files say with what discovery found."""

from __future__ import annotations

import re
import shutil
from itertools import combinations
from pathlib import Path

from dra_driver.errors import DraDriverError
from dra_driver.host.driver_root import find_nvidia_smi, find_nvml_library
from dra_driver.inventory.rules.nvlink import nvlink_domains
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.inventory import Inventory
from gpucheck.findings import Section
from gpucheck.smi import Matrix, NvidiaSmi, SmiDetails, SmiError, SmiGpu, SmiInstance
from gpucheck.view import Options, View

_SMI = "nvidia-smi"
_NVLINK = re.compile(r"NV(\d+)\Z")


def find_smi(view: View, options: Options) -> NvidiaSmi | None:
    """The nvidia-smi that belongs to the driver root; elsewhere on the path where the root is `/`."""
    root = view.machine.paths.driver_root
    program = options.nvidia_smi or find_nvidia_smi(root)
    if program is None and root == "/":
        program = shutil.which(_SMI)
    if program is None:
        return None
    directory = None
    if root != "/" and not view.machine.is_simulated:
        try:
            directory = str(Path(find_nvml_library(root)).parent)
        except DraDriverError:
            directory = None
    return NvidiaSmi(program, directory)


def check_smi(view: View, smi: NvidiaSmi | None) -> list[Section]:
    """The sections `nvidia-smi` and `NVLink`."""
    section, links = Section(_SMI), Section("NVLink")
    if smi is None:
        section.skip(f"there is no nvidia-smi below the driver root {view.machine.paths.driver_root}")
        links.skip("there is no nvidia-smi")
        return [section, links]
    inventory = view.inventory
    try:
        listed = smi.gpus()
        _compare_list(section, inventory, listed)
        _compare_query(section, inventory, smi)
    except SmiError as error:
        section.skip(str(error))
        links.skip("nvidia-smi does not list the GPUs")
        return [section, links]
    try:
        details = smi.details()
        _compare_details(section, inventory, details)
    except SmiError as error:
        section.skip(f"minor numbers, architecture, addressing mode, fabric: {error}")
    if any(gpu.mig_enabled for gpu in inventory.gpus):
        try:
            _compare_instances(section, inventory, listed, smi.instances())
        except SmiError as error:
            section.skip(f"GPU instances: {error}")
    _check_links(links, inventory, listed, smi)
    return [section, links]


def check_kernel(view: View) -> Section:
    """The kernel driver's file for each GPU in /proc, beside discovery."""
    section = Section("/proc")
    directory = Path(view.machine.paths.proc, "driver/nvidia/gpus")
    files = sorted(directory.glob("*/information"))
    if not files:
        section.skip(f"{directory} has no GPU")
        return section
    known = {gpu.pci_bus_id: gpu for gpu in view.inventory.gpus}
    for file in files:
        facts = _information(file)
        gpu = known.get(_bus_id(file.parent.name))
        section.good(
            gpu is not None, file.parent.name, "the kernel driver has this GPU, and discovery has not"
        )
        if gpu is None:
            continue
        minor, uuid = facts.get("Device Minor"), facts.get("GPU UUID", "?")
        section.same(gpu.uuid, "minor", gpu.minor, int(minor) if minor else None, "/proc")
        section.same(gpu.uuid, "product name", gpu.product_name, facts.get("Model"), "/proc")
        if "?" in uuid:
            section.skip(f"UUID of {file.parent.name}: the kernel driver has not asked the GPU yet")
        else:
            section.same(gpu.uuid, "UUID", gpu.uuid, uuid, "/proc")
    return section


def _information(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _bus_id(text: str | None) -> str | None:
    try:
        return None if text is None else pci_bus_id(text)
    except ValueError:
        return text


def _compare_list(section: Section, inventory: Inventory, listed: list[SmiGpu]) -> None:
    section.same("", "number of GPUs", len(inventory.gpus), len(listed), _SMI)
    ours = {gpu.uuid: gpu for gpu in inventory.gpus}
    for uuid in sorted(ours.keys() - {gpu.uuid for gpu in listed}):
        section.differs(uuid, "nvidia-smi does not list it")
    for smi_gpu in listed:
        gpu = ours.get(smi_gpu.uuid)
        section.good(gpu is not None, smi_gpu.uuid, "only nvidia-smi lists it")
        if gpu is None:
            continue
        section.same(gpu.uuid, "index", gpu.index, smi_gpu.index, _SMI)
        mine = {(mig.uuid, mig.profile.name) for mig in gpu.mig_devices}
        theirs = {(mig.uuid, mig.profile) for mig in smi_gpu.migs}
        section.checked += max(1, len(mine | theirs))
        for uuid, profile in sorted(mine - theirs):
            section.differs(gpu.uuid, f"MIG device {uuid} ({profile}) is not in {_SMI} -L")
        for uuid, profile in sorted(theirs - mine):
            section.differs(gpu.uuid, f"MIG device {uuid} ({profile}) is only in {_SMI} -L")


def _compare_query(section: Section, inventory: Inventory, smi: NvidiaSmi) -> None:
    answers, unknown = smi.query()
    for name in unknown:
        section.skip(f"this nvidia-smi does not know the field {name}")
    for gpu in inventory.gpus:
        theirs = answers.get(gpu.uuid)
        if theirs is None:
            continue
        for field, ours in _our_answers(gpu, inventory).items():
            if field in theirs:
                answer = theirs[field]
                if field == "pci.bus_id":
                    answer = _bus_id(answer)
                section.same(gpu.uuid, field, ours, answer, _SMI)


def _our_answers(gpu: Gpu, inventory: Inventory) -> dict[str, str | None]:
    compute = gpu.cuda_compute_capability
    mode = "Enabled" if gpu.mig_enabled else "Disabled"
    return {
        "name": gpu.product_name,
        "pci.bus_id": gpu.pci_bus_id,
        "memory.total": None if gpu.memory_bytes is None else str(gpu.memory_bytes >> 20),
        "driver_version": inventory.versions.driver,
        "compute_cap": None if compute is None else f"{compute[0]}.{compute[1]}",
        "mig.mode.current": mode if gpu.mig_capable else None,
    }


def _compare_details(section: Section, inventory: Inventory, details: dict[str, SmiDetails]) -> None:
    source = f"{_SMI} -q"
    for gpu in inventory.gpus:
        theirs = details.get(gpu.uuid)
        if theirs is None:
            section.differs(gpu.uuid, f"is not in {source} -x")
            continue
        section.same(gpu.uuid, "minor", gpu.minor, theirs.minor, source)
        section.same(gpu.uuid, "PCI bus ID", gpu.pci_bus_id, theirs.bus_id, source)
        fabric = None if gpu.fabric is None else (gpu.fabric.cluster_uuid, gpu.fabric.clique_id)
        section.same(gpu.uuid, "fabric", fabric, theirs.fabric, source)
        for what, ours, answer in (
            ("architecture", gpu.architecture, theirs.architecture),
            ("brand", gpu.brand, theirs.brand),
            ("addressing mode", gpu.addressing_mode, theirs.addressing),
        ):
            if answer is not None:
                section.same(gpu.uuid, what, _plain(ours), _plain(answer), source)


def _plain(text: str | None) -> str | None:
    """Brands are spelled `NVIDIA RTX` in one place and `NvidiaRTX` in another."""
    return None if text is None else re.sub(r"[^a-z0-9]", "", text.lower())


def _compare_instances(
    section: Section, inventory: Inventory, listed: list[SmiGpu], instances: list[SmiInstance]
) -> None:
    source = f"{_SMI} mig -lgi"
    uuids = {gpu.index: gpu.uuid for gpu in listed}
    theirs = {
        (uuids.get(row.gpu, ""), row.instance): (row.profile_id, row.start, row.size) for row in instances
    }
    used = set()
    for gpu in inventory.gpus:
        for mig in gpu.mig_devices:
            key = (gpu.uuid, mig.gpu_instance_id)
            used.add(key)
            ours = (mig.profile.profile_id, mig.placement.start, mig.placement.size)
            what = f"GPU instance {mig.gpu_instance_id} (profile, start, size)"
            section.same(gpu.uuid, what, ours, theirs.get(key), source)
    for uuid, instance in sorted(theirs.keys() - used):
        section.note(uuid, f"GPU instance {instance} has no compute instance, so it is not a device")


def _check_links(section: Section, inventory: Inventory, listed: list[SmiGpu], smi: NvidiaSmi) -> None:
    try:
        counts = smi.active_links()
        for gpu in inventory.gpus:
            section.same(
                gpu.uuid, "active NVLinks", gpu.nvlink_links or 0, counts.get(gpu.uuid, 0), "nvlink -s"
            )
    except SmiError as error:
        section.skip(f"links: {error}")
    try:
        matrix = smi.matrix()
    except SmiError as error:
        section.skip(f"domains: {error}")
        return
    compare_domains(section, inventory, {gpu.index: gpu.uuid for gpu in listed}, matrix)


def compare_domains(section: Section, inventory: Inventory, uuids: dict[int, str], matrix: Matrix) -> None:
    """Members of a domain must be joined by NVLink pairwise, and the partition must be that of the matrix."""
    pairs: dict[frozenset[str], int] = {}
    for (first, second), cell in matrix.links.items():
        there, back = _NVLINK.match(cell), _NVLINK.match(matrix.links.get((second, first), ""))
        if there is not None and back is not None and first in uuids and second in uuids:
            pairs[frozenset((uuids[first], uuids[second]))] = min(int(there[1]), int(back[1]))
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    domains = inventory.nvlink_domains
    for one, other in combinations(sorted(uuids.values()), 2):
        if one in domains and domains[one] == domains.get(other):
            joined = frozenset((one, other)) in pairs
            section.good(joined, one, f"is in one NVLink domain with {other}, but topo -m shows no NVLink")
    expected = nvlink_domains(inventory.gpus, pairs)
    for uuid in gpus:
        section.same(uuid, "nvlinkDomain", domains.get(uuid), expected.get(uuid), "topo -m")
    for index, numa in matrix.numa.items():
        gpu = gpus.get(uuids.get(index, ""))
        if gpu is not None and gpu.numa_node is None:
            section.note(gpu.uuid, f"topo -m gives NUMA node {numa}, the kernel none")
        elif gpu is not None:
            section.same(gpu.uuid, "NUMA node", gpu.numa_node, numa, "topo -m")
