"""Compares what discovery found with nvidia-smi and with the kernel driver's files."""

from __future__ import annotations

import re
import shutil
from itertools import combinations
from pathlib import Path

from dra_driver.errors import DraDriverError
from dra_driver.host.driver_programs import find_program
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.inventory.rules.nvlink import nvlink_domains
from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import pci_bus_id
from dra_driver.model.inventory import Inventory
from gpucheck.machine import Report, View
from gpucheck.smi import Facts, NvidiaSmi, SmiError, SmiGpu

SMI, LINKS, KERNEL = "nvidia-smi", "NVLink", "/proc"


def find_smi(view: View, given: str | None) -> NvidiaSmi | None:
    """The nvidia-smi that belongs to the driver root; elsewhere on the path where the root is `/`."""
    root = view.platform.paths.driver_root
    tree = RootedTree(root)
    found = find_program(tree.program, SMI)
    installed = tree.local(found[1]) if found is not None else None
    program = given or installed or (shutil.which(SMI) if root == "/" else None)
    if program is None:
        return None
    try:
        is_elsewhere = root != "/" and view.settings.simulate is None
        directory = str(Path(find_nvml_library(root)).parent) if is_elsewhere else None
    except DraDriverError:
        directory = None
    return NvidiaSmi(program, directory)


def check_smi(report: Report, view: View, smi: NvidiaSmi | None) -> None:
    """Lists, attributes, MIG devices and NVLinks."""
    inventory = view.inventory
    with report.trying(SMI):
        if smi is None:
            raise SmiError(f"there is no nvidia-smi below the driver root {view.platform.paths.driver_root}")
        listed = smi.gpus()
        _compare_list(report, inventory, listed)
        _compare_query(report, inventory, smi)
        with report.trying(SMI):
            _compare_details(report, inventory, smi.details())
        if any(gpu.mig_enabled for gpu in inventory.gpus):
            with report.trying(SMI):
                _compare_instances(report, inventory, listed, smi)
        with report.trying(LINKS):
            counts = {gpu.uuid: gpu.links for gpu in smi.gpus("nvlink", "-s")}
            for gpu in inventory.gpus:
                what = f"{gpu.uuid}: active NVLinks"
                report.same(LINKS, what, gpu.nvlink_links or 0, counts.get(gpu.uuid, 0))
        with report.trying(LINKS):
            _compare_domains(report, inventory, {gpu.index: gpu.uuid for gpu in listed}, *smi.matrix())


def check_kernel(report: Report, view: View) -> None:
    """The kernel driver's file for each GPU in /proc."""
    known = {gpu.pci_bus_id: gpu for gpu in view.inventory.gpus}
    with report.trying(KERNEL):
        for file in sorted(Path(view.platform.paths.proc, "driver/nvidia/gpus").glob("*/information")):
            lines = (line.partition(":") for line in file.read_text(errors="replace").splitlines())
            facts = {key.strip(): value.strip() for key, _, value in lines}
            gpu = known.get(_bus_id(file.parent.name))
            report.good(KERNEL, gpu, f"{file.parent.name}: the kernel driver has this GPU, discovery has not")
            if gpu is not None:
                minor, uuid = facts.get("Device Minor"), facts.get("GPU UUID", "?")
                report.same(KERNEL, f"{gpu.uuid}: minor", gpu.minor, int(minor) if minor else None)
                report.same(KERNEL, f"{gpu.uuid}: product name", gpu.product_name, facts.get("Model"))
                if "?" not in uuid:  # which stands there until the kernel driver asks the GPU
                    report.same(KERNEL, f"{gpu.uuid}: UUID", gpu.uuid, uuid)


def _compare_list(report: Report, inventory: Inventory, listed: list[SmiGpu]) -> None:
    theirs = {gpu.uuid: gpu for gpu in listed}
    uuids = {gpu.uuid for gpu in inventory.gpus}
    for uuid in sorted(uuids ^ theirs.keys()):
        report.good(SMI, False, f"{uuid}: is only {'in nvidia-smi -L' if uuid in theirs else 'ours'}")
    for gpu in inventory.gpus:
        if (other := theirs.get(gpu.uuid)) is not None:
            report.same(SMI, f"{gpu.uuid}: index", gpu.index, other.index)
            ours = sorted((mig.uuid, mig.profile.name) for mig in gpu.mig_devices)
            report.same(SMI, f"{gpu.uuid}: MIG devices", ours, sorted(other.migs))


def _compare_query(report: Report, inventory: Inventory, smi: NvidiaSmi) -> None:
    answers, unknown = smi.query()
    for name in unknown:
        report.note(SMI, f"this nvidia-smi does not know the field {name}")
    for gpu in inventory.gpus:
        for name, answer in answers.get(gpu.uuid, {}).items():
            theirs = _bus_id(answer) if name == "pci.bus_id" else answer
            report.same(SMI, f"{gpu.uuid}: {name}", _our_answers(gpu, inventory)[name], theirs)


def _our_answers(gpu: Gpu, inventory: Inventory) -> Facts:
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


def _compare_details(report: Report, inventory: Inventory, details: dict[str, Facts]) -> None:
    for gpu in inventory.gpus:
        fabric = gpu.fabric
        ours = {
            "minor": None if gpu.minor is None else str(gpu.minor),
            "PCI bus ID": gpu.pci_bus_id,
            "fabric": None if fabric is None else f"{fabric.cluster_uuid} {fabric.clique_id}",
            "architecture": gpu.architecture,
            "brand": gpu.brand,
            "addressing mode": gpu.addressing_mode,
        }
        for name, theirs in details.get(gpu.uuid, {}).items():
            if theirs is not None or name in ("minor", "fabric"):
                report.same(SMI, f"{gpu.uuid}: {name}", _plain(ours[name]), _plain(theirs))


def _plain(text: str | None) -> str | None:
    """Brands are spelled `NVIDIA RTX` in one place and `NvidiaRTX` in another."""
    return None if text is None else re.sub(r"[^a-z0-9 :.-]|(?<=[a-z]) (?=[a-z])", "", text.lower())


def _compare_instances(report: Report, inventory: Inventory, listed: list[SmiGpu], smi: NvidiaSmi) -> None:
    uuids = {gpu.index: gpu.uuid for gpu in listed}
    theirs = {(uuids.get(gpu, ""), row[0]): row[1:] for gpu, row in smi.instances()}
    for gpu in inventory.gpus:
        for mig in gpu.mig_devices:
            ours = (mig.profile.profile_id, mig.placement.start, mig.placement.size)
            what = f"{gpu.uuid}: GPU instance {mig.gpu_instance_id} (profile, start, size)"
            report.same(SMI, what, ours, theirs.get((gpu.uuid, mig.gpu_instance_id)))


def _compare_domains(
    report: Report,
    inventory: Inventory,
    uuids: dict[int, str],
    links: dict[tuple[int, int], int],
    numa: dict[int, int],
) -> None:
    """Members of a domain must be joined by NVLink pairwise, and the domains must be those of the matrix."""
    pairs = {
        frozenset((uuids[one], uuids[other])): min(count, links[other, one])
        for (one, other), count in links.items()
        if (other, one) in links and {one, other} <= uuids.keys()
    }
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    domains = inventory.nvlink_domains
    for one, other in combinations(sorted(uuids.values()), 2):
        if one in domains and domains[one] == domains.get(other):
            is_joined = frozenset((one, other)) in pairs
            report.good(LINKS, is_joined, f"{one} and {other} share a domain, but topo -m shows no NVLink")
    expected = nvlink_domains(inventory.gpus, pairs)
    for uuid in gpus:
        report.same(LINKS, f"{uuid}: nvlinkDomain", domains.get(uuid), expected.get(uuid))
    for index, node in numa.items():
        gpu = gpus.get(uuids.get(index, ""))
        if gpu is not None and gpu.numa_node is not None:
            report.same(LINKS, f"{gpu.uuid}: NUMA node", gpu.numa_node, node)


def _bus_id(text: str | None) -> str | None:
    try:
        return None if text is None else pci_bus_id(text)
    except ValueError:
        return text
