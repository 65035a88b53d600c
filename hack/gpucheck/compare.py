"""Compares what discovery found with nvidia-smi, and the CDI spec with what is on the host."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.extra_devices import ExtraDeviceFinder
from dra_driver.cdi.spec_step import CdiSteps
from dra_driver.claims.rules.plan import plan_claim
from dra_driver.host.driver_programs import InstalledPrograms, find_program
from dra_driver.host.driver_root import DriverRoot, find_nvml_library
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.rooted_tree import RootedTree, join_root
from dra_driver.inventory.rules.nvlink import nvlink_domains
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.mps_host.host_files import mps_layout
from gpucheck.machine import Report, View
from gpucheck.smi import Facts, NvidiaSmi, SmiError, SmiGpu, bus_id

SMI, LINKS, SPEC = "nvidia-smi", "NVLink", "CDI spec"
_NOWHERE = Path("/nonexistent")
"""A check writes no spec, and its claim uses no MPS."""


def check_smi(report: Report, view: View, given: str | None) -> None:
    """Lists, attributes, MIG devices and NVLinks."""
    inventory = view.inventory
    with report.trying(SMI):
        smi = _smi(view, given)
        listed = smi.gpus("-L")
        _compare_list(report, inventory, listed)
        with report.trying(SMI):
            _compare_facts(report, inventory, smi.query())
        with report.trying(SMI):
            _compare_facts(report, inventory, smi.details())
        if any(gpu.mig_enabled for gpu in inventory.gpus):
            with report.trying(SMI):
                _compare_instances(report, inventory, {gpu.uuid: gpu.index for gpu in listed}, smi)
        with report.trying(LINKS):
            counts = {gpu.uuid: gpu.links for gpu in smi.gpus("nvlink", "-s")}
            for gpu in inventory.gpus:
                what = f"{gpu.uuid}: active NVLinks"
                report.same(LINKS, what, gpu.nvlink_links or 0, counts.get(gpu.uuid, 0))
        with report.trying(LINKS):
            _compare_domains(report, inventory, {gpu.index: gpu.uuid for gpu in listed}, smi.matrix())


def _smi(view: View, given: str | None) -> NvidiaSmi:
    """The nvidia-smi that belongs to the driver root; elsewhere on the path where the root is `/`. Raises: SmiError."""
    root = view.platform.paths.driver_root
    tree = RootedTree(root)
    found = find_program(tree.program, SMI)
    installed = tree.local(found[1]) if found is not None else None
    program = given or installed or (shutil.which(SMI) if root == "/" else None)
    if program is None:
        raise SmiError(f"there is no nvidia-smi below the driver root {root}")
    is_elsewhere = root != "/" and view.settings.simulate is None
    return NvidiaSmi(program, str(Path(find_nvml_library(root)).parent) if is_elsewhere else None)


def _compare_list(report: Report, inventory: Inventory, listed: list[SmiGpu]) -> None:
    theirs = {gpu.uuid: gpu for gpu in listed}
    ours = {gpu.uuid: gpu for gpu in inventory.gpus}
    for uuid in sorted(ours.keys() ^ theirs.keys()):
        report.good(SMI, False, f"{uuid}: is only {'in nvidia-smi -L' if uuid in theirs else 'ours'}")
    for uuid in ours.keys() & theirs.keys():
        report.same(SMI, f"{uuid}: index", ours[uuid].index, theirs[uuid].index)
        migs = sorted((mig.uuid, mig.profile.name) for mig in ours[uuid].mig_devices)
        report.same(SMI, f"{uuid}: MIG devices", migs, sorted(theirs[uuid].migs))


def _compare_facts(report: Report, inventory: Inventory, theirs: dict[str, Facts]) -> None:
    for gpu in inventory.gpus:
        ours = _our_facts(gpu, inventory)
        for name, answer in theirs.get(gpu.uuid, {}).items():
            if answer is not None or name not in ("architecture", "brand", "addressing mode"):
                report.same(SMI, f"{gpu.uuid}: {name}", _plain(ours[name]), _plain(bus_id(answer)))


def _our_facts(gpu: Gpu, inventory: Inventory) -> Facts:
    compute, fabric = gpu.cuda_compute_capability, gpu.fabric
    mode = "Enabled" if gpu.mig_enabled else "Disabled"
    return {
        "name": gpu.product_name,
        "pci.bus_id": gpu.pci_bus_id,
        "memory.total": None if gpu.memory_bytes is None else str(gpu.memory_bytes >> 20),
        "driver_version": inventory.versions.driver,
        "compute_cap": None if compute is None else f"{compute[0]}.{compute[1]}",
        "mig.mode.current": mode if gpu.mig_capable else None,
        "minor": None if gpu.minor is None else str(gpu.minor),
        "fabric": None if fabric is None else f"{fabric.cluster_uuid} {fabric.clique_id}",
        "architecture": gpu.architecture,
        "brand": gpu.brand,
        "addressing mode": gpu.addressing_mode,
    }


def _plain(text: str | None) -> str | None:
    """Brands are spelled `NVIDIA RTX` in one place and `NvidiaRTX` in another."""
    return None if text is None else re.sub(r"[^a-z0-9 :.-]|(?<=[a-z]) (?=[a-z])", "", text.lower())


def _compare_instances(report: Report, inventory: Inventory, indexes: dict[str, int], smi: NvidiaSmi) -> None:
    theirs = smi.instances()
    for gpu in inventory.gpus:
        for mig in gpu.mig_devices:
            ours = (mig.profile.profile_id, mig.placement.start, mig.placement.size)
            what = f"{gpu.uuid}: GPU instance {mig.gpu_instance_id} (profile, start, size)"
            report.same(SMI, what, ours, theirs.get((indexes.get(gpu.uuid, -1), mig.gpu_instance_id)))


def _compare_domains(
    report: Report, inventory: Inventory, uuids: dict[int, str], links: dict[tuple[int, int], int]
) -> None:
    """The domains must be those of the matrix."""
    pairs = {
        frozenset((uuids[one], uuids[other])): min(count, links[other, one])
        for (one, other), count in links.items()
        if (other, one) in links and {one, other} <= uuids.keys()
    }
    expected = nvlink_domains(inventory.gpus, pairs)
    for gpu in inventory.gpus:
        report.same(
            LINKS, f"{gpu.uuid}: nvlinkDomain", inventory.nvlink_domains.get(gpu.uuid), expected.get(gpu.uuid)
        )


def spec_of_all(view: View) -> dict[str, Any]:
    """The spec that Prepare would write for a claim of all devices. Raises: DraDriverError."""
    paths, nodes, settings = view.platform.paths, view.platform.nodes, view.settings
    driver = settings.driver_name
    steps = CdiSteps(
        driver,
        CdiDirectory(_NOWHERE, driver),
        DriverRoot(paths, nodes=nodes, hook=settings.nvidia_cdi_hook_path),
        GpuNodes(paths, nodes=nodes),
        lambda: view.inventory.versions.driver,
        mps_layout(_NOWHERE).directories,
        lambda _device: None,  # a check makes no MIG device
        ExtraDeviceFinder(paths, InstalledPrograms(paths.driver_root, _NOWHERE), nodes=nodes),
    )
    results = tuple(
        DeviceResult(f"device-{number}", driver, settings.node_name, device.name)
        for number, device in enumerate(view.inventory.devices())
    )
    claim = AllocatedClaim(ClaimRef("default", "all-devices", "0" * 8), results)
    return steps.spec(plan_claim(claim, view.inventory, settings.node_name, driver, ()))


def check_spec(report: Report, view: View, spec: dict[str, Any]) -> None:
    """Whether everything that the spec names is on the host."""
    everything = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
    for edits in everything:
        for mount in edits.get("mounts", ()):
            path = mount["hostPath"]
            # Every Linux has /dev/null; it covers a directory that no container may see.
            good = path == os.devnull or any(one.is_file() or one.is_socket() for one in _places(view, path))
            report.good(SPEC, good, f"mount {path}: is not a file or socket on the host")
        for node in edits.get("deviceNodes", ()):
            path = node.get("hostPath", node["path"])
            found = next(filter(None, map(view.platform.nodes.read, map(str, _places(view, path)))), None)
            if found is not None:
                ours = tuple(node[key] for key in ("type", "major", "minor"))
                report.same(SPEC, node["path"], ours, (found.type, found.major, found.minor))
            else:  # runtimes make capability nodes themselves
                is_cap = node["path"].startswith("/dev/nvidia-caps/")
                report.good(SPEC, is_cap, f"device node {node['path']} is not on the host")
        for hook in edits.get("hooks", ()):
            is_there = any(place.is_file() for place in _places(view, hook["path"]))
            report.good(SPEC, is_there, f"{hook['path']} is not a program on the host")


def _places(view: View, host_path: str) -> list[Path]:
    """Where this process may find a path of the host, the likeliest place first."""
    paths = view.platform.paths
    root = paths.host_driver_root.rstrip("/")
    host = host_path if paths.dev_root is None else join_root(paths.dev_root, host_path)
    if not host_path.startswith(f"{root}/"):
        return [Path(host)]
    return [Path(join_root(paths.driver_root, host_path.removeprefix(root))), Path(host)]
