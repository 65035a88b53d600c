"""The CDI spec of a claim of all devices, beside the host's files and beside that of NVIDIA's container toolkit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dra_driver.cdi.companions import CompanionFinder
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.spec_step import CdiSteps
from dra_driver.claims.rules.plan import plan_claim
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult
from dra_driver.mps.layout import mps_layout
from gpucheck.machine import Report, View

JsonObject = dict[str, Any]
Edits = dict[tuple[str, str], Any]
"""By kind and what; the value of a device node is (major, minor)."""

SPEC, TOOLKIT = "CDI spec", "nvidia-ctk"
CLAIM_UID = "00000000-0000-4000-8000-000000000000"
_NOWHERE = Path("/nonexistent")
"""A check writes no spec, and its claim uses no MPS."""
_COMMAND = ("cdi", "generate", "--format", "json", "--device-name-strategy", "uuid")
_TIMEOUT_S = 120
_CUDA_NEEDS = ("libcuda.so.", "libnvidia-ml.so.", "libnvidia-ptxjitcompiler.so.")
_CAPS = "/dev/nvidia-caps/"
# What the toolkit alone has and why that does not matter, by kind and pattern.
_HARMLESS = (
    ("mount", r"^nvidia-mps$", "MPS is set up for each claim"),
    ("hook", r"^chmod\b", "only old versions of crun need it"),
    ("hook", r"^update-application-profile\b", "1.20.0 fails where a container's root cannot be written"),
    ("hook", r"^apply-cuda-memory-limits\b", "limits of memory belong to the claim"),
    ("env", r"^NVIDIA_CTK_DEBUG=", "it switches messages of the hooks"),
)


class _NothingMade:
    """The MIG devices on demand of a check, which makes none."""

    def created_instance(self, device: str) -> None:
        return None

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> None:
        return None


def spec_of_all(view: View) -> JsonObject:
    """The spec that Prepare would write. Raises: DraDriverError."""
    paths, nodes, settings = view.platform.paths, view.platform.nodes, view.settings
    driver = settings.driver_name
    steps = CdiSteps(
        driver,
        CdiDirectory(_NOWHERE, driver),
        DriverRoot(paths, nodes=nodes, hook=settings.nvidia_cdi_hook_path),
        GpuNodes(paths, nodes=nodes),
        lambda: view.inventory.versions.driver,
        mps_layout(_NOWHERE).directories,
        _NothingMade(),
        CompanionFinder(paths, InstalledPrograms(paths.driver_root, _NOWHERE), nodes=nodes),
    )
    results = tuple(
        DeviceResult(f"device-{number}", driver, settings.node_name, device.name)
        for number, device in enumerate(view.inventory.devices())
    )
    claim = AllocatedClaim(ClaimRef("default", "all-devices", CLAIM_UID), results)
    return steps.spec(plan_claim(claim, view.inventory, settings.node_name, driver, ()))


def parts(spec: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """(name, container edits): those of the spec and those of each device."""
    yield "all containers", spec.get("containerEdits") or {}
    for device in spec.get("devices") or ():
        yield device["name"].removeprefix(f"{CLAIM_UID}-"), device.get("containerEdits") or {}


def check_spec(report: Report, view: View, spec: JsonObject) -> None:
    """Whether everything that the spec names is on the host."""
    files: set[str] = set()
    for name, edits in parts(spec):
        for mount in edits.get("mounts", ()):
            path = mount["hostPath"]
            files.add(path.rpartition("/")[2])
            good = any(map(_is_mountable, view.places(path)))
            report.good(SPEC, good, f"{name}: mount {path}: is not a file or socket on the host")
        for node in edits.get("deviceNodes", ()):
            found = view.node(node.get("hostPath", node["path"]))
            if found is None:
                # Runtimes make capability nodes themselves.
                is_cap = node["path"].startswith(_CAPS)
                report.good(SPEC, is_cap, f"{name}: device node {node['path']} is not on the host")
            else:
                ours = tuple(node[key] for key in ("type", "major", "minor"))
                report.same(SPEC, f"{name}: {node['path']}", ours, (found.type, found.major, found.minor))
        for hook in edits.get("hooks", ()):
            is_there = any(Path(place).is_file() for place in view.places(hook["path"]))
            report.good(SPEC, is_there, f"{name}: {hook['path']} is not a program on the host")
    for library in _CUDA_NEEDS if files else ():
        report.good(
            SPEC, any(map(str.startswith, files, [library] * len(files))), f"{library}* is not mounted"
        )


def _is_mountable(place: str) -> bool:
    path = Path(place)
    return path.is_file() or path.is_socket()


def check_toolkit(report: Report, view: View, ours: JsonObject, given: str | None) -> JsonObject | None:
    """The toolkit's spec, once compared; it prints it, and writes no file."""
    root = view.settings.nvidia_driver_root
    with report.trying(TOOLKIT):
        program = given or (None if view.settings.simulate else shutil.which("nvidia-ctk"))
        if program is None:
            raise ValueError("nvidia-ctk is not on this machine")
        command = [program, *_COMMAND, *([] if root == "/" else [f"--driver-root={root}"])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
            theirs = json.loads(done.stdout)
        except (subprocess.SubprocessError, ValueError) as error:
            raise ValueError(f"nvidia-ctk cdi generate: {error}") from error
        if not isinstance(theirs, dict):
            raise ValueError("nvidia-ctk cdi generate: printed no object")  # noqa: TRY004
        compare_specs(report, view, ours, theirs)
        return theirs
    return None


def compare_specs(report: Report, view: View, ours: JsonObject, theirs: JsonObject) -> None:
    """The part for all containers, then each device."""
    names = {device.uuid: device.name for device in view.inventory.devices()}
    mine = {name: read_edits(edits) for name, edits in parts(ours)}
    other = {names.get(name, name): read_edits(edits) for name, edits in parts(theirs) if name != "all"}
    for name in sorted(mine.keys() ^ other.keys()):
        report.good(TOOLKIT, False, f"{name}: this device is only {'ours' if name in mine else 'theirs'}")
    for name in sorted(mine.keys() & other.keys()):
        _compare(report, name, mine[name], other[name])


def _compare(report: Report, name: str, ours: Edits, theirs: Edits) -> None:
    for key in sorted(ours.keys() | theirs.keys()):
        kind, what = key
        if key not in ours:
            whys = (why for of, pattern, why in _HARMLESS if of == kind and re.search(pattern, what))
            if (why := next(whys, None)) is None:
                report.good(TOOLKIT, False, f"{name}: {kind} {what} is only theirs; matters")
            else:
                report.note(TOOLKIT, f"{name}: {kind} {what} is only theirs; does not matter: {why}")
        elif key in theirs:
            given = (ours[key], theirs[key]) if None not in (theirs[key] or ()) else (None, None)
            report.same(TOOLKIT, f"{name}: {kind} {what}", *given)
        elif kind == "node" and not what.startswith(
            _CAPS
        ):  # which the toolkit lists once they are on the host
            report.good(TOOLKIT, False, f"{name}: node {what} is only ours; matters")
        else:
            report.note(TOOLKIT, f"{name}: {kind} {what} is only ours; does not matter")


def read_edits(edits: JsonObject) -> Edits:
    """What the edits of a spec or of one of its devices do. A file may lie elsewhere in the container."""
    found: Edits = {("env", text): None for text in edits.get("env") or ()}
    for node in edits.get("deviceNodes") or ():
        found["node", node["path"]] = (node.get("major"), node.get("minor"))
    for mount in edits.get("mounts") or ():
        directory, _, file = mount["containerPath"].rpartition("/")
        # Sockets are all called `socket`.
        found["mount", f"{directory.rpartition('/')[2]}/{file}" if file == "socket" else file] = None
    for hook in edits.get("hooks") or ():
        verb, *arguments = [text for text in hook.get("args", ())[1:] if text != "hook"] or ["?"]
        links = [text.removeprefix("--link=") for text in arguments if "::" in text]
        if verb == "create-symlinks":
            found |= {("link", text): None for text in links}
        else:
            found |= {("hook", f"{verb} {text}".strip()): None for text in ("", *arguments)}
    return found
