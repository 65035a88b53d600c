"""Compares what discovery found with nvidia-smi, and the CDI spec with what is on the host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
from dra_driver.model.ids import pci_bus_id
from dra_driver.mps_host.host_files import mps_layout
from gpucheck.machine import Report, View

READS = (("-L",), ("-q", "-x"), ("topo", "-m"))
"""The only arguments with which nvidia-smi is run; none changes anything."""
_TIMEOUT_S = 120
NOT_IN_EACH_RELEASE = ("product_architecture", "product_brand", "addressing_mode")
_UNKNOWN = {"", "N/A", "[N/A]", "Not Supported", "Unknown Error", "GPU requires reset"}
_NOWHERE = Path("/nonexistent")
"""A check writes no spec, and its claim uses no MPS."""


def ask_smi(program: str, arguments: tuple[str, ...], library_dir: str | None = None) -> str:
    """The answer of nvidia-smi; a lost GPU makes the exit code bad, but the others are listed all the same.

    `library_dir` is where it finds NVML if that is in no usual place. Raises: ValueError, OSError.
    """
    if arguments not in READS:
        raise AssertionError(f"nvidia-smi {' '.join(arguments)} is not known to change nothing")
    environment = {**os.environ, "LC_ALL": "C"} | ({"LD_LIBRARY_PATH": library_dir} if library_dir else {})
    done = subprocess.run(
        [program, *arguments],
        capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S, env=environment,
    )  # fmt: skip
    if done.returncode != 0 and not re.search(r"GPU-[0-9a-f]{8}-", done.stdout):
        what = f"nvidia-smi {' '.join(arguments)} ended with code {done.returncode}"
        raise ValueError(f"{what}: {done.stderr or done.stdout}")
    return done.stdout


def check_smi(report: Report, view: View, given: str | None) -> None:
    """GPUs and MIG devices, attributes, NVLink domains, each against another answer of nvidia-smi."""
    for arguments, compare in zip(READS, (_compare_list, _compare_facts, _compare_domains), strict=True):
        with report.trying("nvidia-smi"):
            compare(report, view, ask_smi(*_smi(view, given, arguments)))


def _smi(
    view: View, given: str | None, arguments: tuple[str, ...]
) -> tuple[str, tuple[str, ...], str | None]:
    """The nvidia-smi that belongs to the driver root; elsewhere on the path where the root is `/`."""
    root = view.platform.paths.driver_root
    tree = RootedTree(root)
    found = find_program(tree.program, "nvidia-smi")
    installed = tree.local(found[1]) if found is not None else None
    program = given or installed or (shutil.which("nvidia-smi") if root == "/" else None)
    if program is None:
        raise ValueError(f"there is no nvidia-smi below the driver root {root}")
    is_elsewhere = root != "/" and view.settings.simulate is None
    return program, arguments, str(Path(find_nvml_library(root)).parent) if is_elsewhere else None


def _compare_list(report: Report, view: View, answer: str) -> None:
    """`-L`: index and UUID of each GPU, profile and UUID of each MIG device."""
    lines = re.findall(
        r"^(GPU \d+):.*\(UUID: (GPU-[^)]+)\)|^ +MIG (\S+) .*\(UUID: (MIG-[^)]+)\)", answer, re.M
    )
    theirs = {(gpu or f"MIG {profile}", uuid or mig) for gpu, uuid, profile, mig in lines}
    ours = {(f"GPU {gpu.index}", gpu.uuid) for gpu in view.inventory.gpus}
    ours |= {(f"MIG {mig.profile.name}", mig.uuid) for gpu in view.inventory.gpus for mig in gpu.mig_devices}
    report.good("nvidia-smi", ours & theirs, "nvidia-smi -L has nothing in common with ours")
    for name, uuid in sorted(ours ^ theirs):
        where = "in nvidia-smi -L" if (name, uuid) in theirs else "ours"
        report.good("nvidia-smi", False, f"{name} {uuid}: is only {where}")


def _compare_facts(report: Report, view: View, answer: str) -> None:
    log = ElementTree.fromstring(answer)
    report.same(
        "nvidia-smi", "driver_version", view.inventory.versions.driver, log.findtext("driver_version")
    )
    theirs = {gpu.findtext("uuid"): gpu for gpu in log.iter("gpu")}
    for gpu in view.inventory.gpus:
        if (shown := theirs.get(gpu.uuid)) is None:
            report.good("nvidia-smi", False, f"{gpu.uuid}: is only ours")
            continue
        fabric = gpu.fabric and f"{gpu.fabric.cluster_uuid} {gpu.fabric.clique_id}"
        answers = {path: (shown.findtext(path) or "").strip().strip("[]") for path in facts(gpu)}
        for path, text in (answers | _fabric(shown)).items():
            if text not in _UNKNOWN or path not in NOT_IN_EACH_RELEASE:
                ours = fabric if path == "fabric" else facts(gpu)[path]
                known = None if text in _UNKNOWN else text
                report.same("nvidia-smi", f"{gpu.uuid}: {path}", _plain(ours), _plain(known))


def facts(gpu: Gpu) -> dict[str, object]:
    """What discovery found, by the paths of nvidia-smi's XML."""
    return {
        "product_name": gpu.product_name,
        "pci/pci_bus_id": gpu.pci_bus_id,
        "fb_memory_usage/total": gpu.memory_bytes and f"{gpu.memory_bytes >> 20} MiB",
        "mig_mode/current_mig": ("Enabled" if gpu.mig_enabled else "Disabled") if gpu.mig_capable else None,
        "minor_number": gpu.minor,
        "product_architecture": gpu.architecture,
        "product_brand": gpu.brand,
        "addressing_mode": gpu.addressing_mode,
    }


def _fabric(gpu: ElementTree.Element) -> dict[str, str]:
    """Cluster and clique, from releases that know them; unknown unless the GPU has joined one."""
    found = [gpu.findtext(f"fabric/{name}") for name in ("clusterUUID", "clusterUuid")]
    for cluster in filter(None, found):
        is_joined = gpu.findtext("fabric/state") == "Completed" and set(cluster) - set("0-")
        return {"fabric": f"{cluster} {gpu.findtext('fabric/cliqueId')}" if is_joined else ""}
    return {}


def _plain(value: object) -> str | None:
    """Bus IDs as the driver writes them; brands are spelled `NVIDIA RTX` in one place and `NvidiaRTX` in another."""
    try:
        return None if value is None else pci_bus_id(str(value))
    except ValueError:
        return re.sub(r"[^a-z0-9 :.-]|(?<=[a-z]) (?=[a-z])", "", str(value).lower())


def _compare_domains(report: Report, view: View, answer: str) -> None:
    """The domains must be those that follow from the matrix of `topo -m`."""
    inventory = view.inventory
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in answer.splitlines()]
    columns = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    links = {
        (name, column): int(cell[2:])
        for name, *cells in filter(None, lines)
        for column, cell in zip(columns, cells, strict=False)
        if re.fullmatch(r"NV\d+", cell) and name.startswith("GPU") and column.startswith("GPU")
    }
    uuids = {f"GPU{gpu.index}": gpu.uuid for gpu in inventory.gpus}
    pairs = {
        frozenset((uuids[one], uuids[other])): min(count, links[other, one])
        for (one, other), count in links.items()
        if (other, one) in links and {one, other} <= uuids.keys()
    }
    expected = nvlink_domains(inventory.gpus, pairs)
    for gpu in inventory.gpus:
        ours = inventory.nvlink_domains.get(gpu.uuid)
        report.same("NVLink", f"{gpu.uuid}: nvlinkDomain", ours, expected.get(gpu.uuid))


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
        mps_layout(_NOWHERE),
        None,  # a check makes no MIG device
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
    for edits in (spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])):
        for mount in edits.get("mounts", ()):
            path = mount["hostPath"]
            # Every Linux has /dev/null; it covers a directory that no container may see.
            good = path == os.devnull or any(one.is_file() or one.is_socket() for one in _places(view, path))
            report.good("CDI spec", good, f"mount {path}: is not a file or socket on the host")
        for node in edits.get("deviceNodes", ()):
            path = node.get("hostPath", node["path"])
            found = next(filter(None, map(view.platform.nodes.read, map(str, _places(view, path)))), None)
            if found is not None:
                ours = tuple(node[key] for key in ("type", "major", "minor"))
                report.same("CDI spec", node["path"], ours, (found.type, found.major, found.minor))
            else:  # runtimes make capability nodes themselves
                is_cap = node["path"].startswith("/dev/nvidia-caps/")
                report.good("CDI spec", is_cap, f"device node {node['path']} is not on the host")
        for hook in edits.get("hooks", ()):
            is_there = any(place.is_file() for place in _places(view, hook["path"]))
            report.good("CDI spec", is_there, f"{hook['path']} is not a program on the host")


def _places(view: View, host_path: str) -> list[Path]:
    """Where this process may find a path of the host, the likeliest place first."""
    paths = view.platform.paths
    root = paths.host_driver_root.rstrip("/")
    host = host_path if paths.dev_root is None else join_root(paths.dev_root, host_path)
    if not host_path.startswith(f"{root}/"):
        return [Path(host)]
    return [Path(join_root(paths.driver_root, host_path.removeprefix(root))), Path(host)]
