"""The CDI spec that Prepare would write for a claim of all devices: is all of it there?"""

from __future__ import annotations

import platform
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dra_driver.cdi.companions import CompanionFinder
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.spec_step import CdiSteps
from dra_driver.claims.rules.plan import plan_claim
from dra_driver.errors import DraDriverError
from dra_driver.host.driver_programs import installed_programs
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.libraries import UNUSUAL_DIRS, USUAL_DIRS
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult
from dra_driver.model.host import DeviceNode
from dra_driver.model.inventory import OfferedDevice
from dra_driver.mps.layout import mps_layout
from gpucheck.findings import Section
from gpucheck.view import NODE, Machine, Options, View

JsonObject = dict[str, Any]

CLAIM_UID = "00000000-0000-4000-8000-000000000000"
_NOWHERE = Path("/nonexistent")
"""A check writes no spec, and its claim uses no MPS."""
_CAPS = "/dev/nvidia-caps/"
_CUDA_NEEDS = ("libcuda.so.", "libnvidia-ml.so.", "libnvidia-ptxjitcompiler.so.")
_ELF = b"\x7fELF\x02"
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_CACHE_ENTRY = re.compile(rb"(/[\x21-\x7e]+/lib[\x21-\x7e]*\.so[\x21-\x7e]*)\x00")


class _NothingMade:
    """The MIG devices on demand of a check, which makes none."""

    def created_instance(self, device: str) -> None:
        return None

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> None:
        return None


class SpecMaker:
    """Makes specs through the planning and the CDI step of the daemon."""

    def __init__(self, view: View, options: Options) -> None:
        paths, nodes = view.machine.paths, view.machine.nodes
        self._view = view
        self._driver = options.driver_name
        self._installation = DriverRoot(paths, nodes=nodes, hook=options.nvidia_cdi_hook_path)
        self._steps = CdiSteps(
            options.driver_name,
            CdiDirectory(_NOWHERE, options.driver_name),
            self._installation,
            GpuNodes(paths, nodes=nodes),
            lambda: view.inventory.versions.driver,
            mps_layout(_NOWHERE).directories,
            _NothingMade(),
            CompanionFinder(paths, installed_programs(paths.driver_root, _NOWHERE), nodes=nodes),
        )

    def spec(self, devices: list[OfferedDevice]) -> JsonObject:
        """The spec of a claim that these devices were allocated to. Raises: DraDriverError."""
        claim = AllocatedClaim(
            ClaimRef("default", "all-devices", CLAIM_UID),
            tuple(
                DeviceResult(f"device-{number}", self._driver, NODE, device.name)
                for number, device in enumerate(devices)
            ),
        )
        plan = plan_claim(claim, self._view.inventory, NODE, self._driver, ())
        return self._steps.spec(plan)

    def notes(self) -> tuple[str, ...]:
        """What the driver's installation lacks that CUDA does not need. Raises: DraDriverError."""
        return self._installation.files(self._view.inventory.versions.driver).notes


def check_spec(view: View, options: Options) -> tuple[Section, JsonObject | None]:
    """The section, and the spec of all devices if it could be made."""
    section = Section("CDI spec")
    maker = SpecMaker(view, options)
    devices = list(view.inventory.devices())
    if not devices:
        section.skip("no device is on offer: the GPUs are in MIG mode and have no MIG devices")
        return section, None
    try:
        spec = maker.spec(devices)
        notes = maker.notes()
    except DraDriverError as error:
        section.differs("all devices", f"cannot be prepared: {error}")
        _find_culprits(section, maker, devices)
        return section, None
    section.checked += 1
    for note in notes:
        section.note("driver", note)
    _check_mounts(section, view.machine, spec)
    _check_nodes(section, view.machine, spec)
    _check_hooks(section, view.machine, spec)
    _check_libraries(section, view, spec)
    return section, spec


def _find_culprits(section: Section, maker: SpecMaker, devices: list[OfferedDevice]) -> None:
    """Which devices cannot be prepared alone, if some can."""
    failed: dict[str, str] = {}
    for device in devices:
        try:
            maker.spec([device])
        except DraDriverError as error:
            failed[device.name] = str(error)
    if len(failed) < len(devices):
        for name, text in failed.items():
            section.differs(name, f"cannot be prepared: {text}")


def all_edits(spec: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """(subject, container edits): those of the spec and those of each device."""
    yield "all containers", spec.get("containerEdits", {})
    for device in spec["devices"]:
        yield device["name"].removeprefix(f"{CLAIM_UID}-"), device["containerEdits"]


def _check_mounts(section: Section, machine: Machine, spec: JsonObject) -> None:
    for subject, edits in all_edits(spec):
        seen: set[str] = set()
        for mount in edits.get("mounts", ()):
            target = mount["containerPath"]
            section.good(target not in seen, subject, f"{target} is mounted twice")
            seen.add(target)
            section.checked += 1
            wrong = _mount_fault(machine, mount)
            if wrong is not None:
                section.differs(subject, f"mount {mount['hostPath']}: {wrong}")


def _mount_fault(machine: Machine, mount: JsonObject) -> str | None:
    path = machine.found(mount["hostPath"])
    if path is None:
        return "is not on the host"
    mode = path.stat().st_mode
    if "ro" not in mount.get("options", ()):
        # Paths too long for a socket are plain files on a simulated machine.
        is_right = stat.S_ISSOCK(mode) or (machine.is_simulated and stat.S_ISREG(mode))
        return None if is_right else "is mounted writable like a socket but is none"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    if ".so" in path.name and not machine.is_simulated:
        return _library_fault(path)
    return None


def _library_fault(path: Path) -> str | None:
    """Whether it is a 64-bit library for this processor."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not header.startswith(_ELF):
        return "is no 64-bit library"
    expected = _ELF_MACHINES.get(platform.machine())
    found = int.from_bytes(header[18:20], "little")
    return None if expected in (None, found) else f"is a library for another processor (ELF machine {found})"


def _check_nodes(section: Section, machine: Machine, spec: JsonObject) -> None:
    absent_caps = 0
    for subject, edits in all_edits(spec):
        for node in edits.get("deviceNodes", ()):
            section.checked += 1
            found = _node(machine, node.get("hostPath", node["path"]))
            if found is None and node["path"].startswith(_CAPS):
                absent_caps += 1
            elif found is None:
                section.differs(subject, f"device node {node['path']} is not on the host")
            else:
                _check_numbers(section, subject, node, found)
    if absent_caps:
        section.note(
            "MIG", f"{absent_caps} capability nodes are not on the host; runtimes make them themselves"
        )


def _check_numbers(section: Section, subject: str, node: JsonObject, found: DeviceNode) -> None:
    for what, ours, theirs in (
        ("type", node["type"], found.type),
        ("major", node["major"], found.major),
        ("minor", node["minor"], found.minor),
    ):
        if ours != theirs:
            section.differs(subject, f"{node['path']}: {what} {ours} in the spec, {theirs} on the host")


def _node(machine: Machine, host_path: str) -> DeviceNode | None:
    return next(filter(None, map(machine.nodes.read, machine.local(host_path))), None)


def _check_hooks(section: Section, machine: Machine, spec: JsonObject) -> None:
    programs: dict[str, str] = {}
    for _, edits in all_edits(spec):
        for hook in edits.get("hooks", ()):
            programs[hook["path"]] = "hook"
            arguments = hook.get("args", [])
            if "--ldconfig-path" in arguments:
                programs[arguments[arguments.index("--ldconfig-path") + 1]] = "ldconfig"
    for program, role in programs.items():
        path = machine.found(program)
        section.good(
            path is not None and path.is_file() and path.stat().st_mode & 0o111,
            role,
            f"{program} is not a program on the host",
        )


def _check_libraries(section: Section, view: View, spec: JsonObject) -> None:
    """Are there libraries of this driver on the machine that no container would get?"""
    version = view.inventory.versions.driver
    mounts = [mount for _, edits in all_edits(spec) for mount in edits.get("mounts", ())]
    placed = {Path(local).resolve() for mount in mounts for local in view.machine.local(mount["hostPath"])}
    names = {mount["containerPath"].rpartition("/")[2] for mount in mounts}
    for library in _CUDA_NEEDS:
        section.good(any(name.startswith(library) for name in names), "driver", f"{library}* is not mounted")
    if version is None:
        section.skip("driver libraries left out: the driver's version is not known")
        return
    section.checked += 1
    for path in sorted(_driver_libraries(view.machine, f".so.{version}")):
        if path not in placed and path.name not in names:
            section.differs("driver", f"library {path} is on the host but in no container")


def _driver_libraries(machine: Machine, suffix: str) -> set[Path]:
    """Files of the driver's version in the directories and in the linker's cache, as this process sees them."""
    tree = RootedTree(machine.paths.driver_root)
    found: set[str] = set()
    for directory in filter(None, map(tree.directory, (*USUAL_DIRS, *UNUSUAL_DIRS))):
        found.update(
            f"{directory.rstrip('/')}/{entry.name}"
            for entry in tree.entries(directory)
            if entry.name.startswith("lib") and entry.name.endswith(suffix)
        )
    found.update(path for path in map(tree.file, _cached(tree)) if path is not None and path.endswith(suffix))
    files = (Path(tree.local(path)).resolve() for path in found if not _is_32_bit(tree.local(path)))
    return {path for path in files if path.is_file()}


def _cached(tree: RootedTree) -> list[str]:
    cache = tree.file("/etc/ld.so.cache")
    if cache is None:
        return []
    try:
        return [match.decode("ascii") for match in _CACHE_ENTRY.findall(Path(tree.local(cache)).read_bytes())]
    except OSError:
        return []


def _is_32_bit(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(5) == b"\x7fELF\x01"
    except OSError:
        return False
