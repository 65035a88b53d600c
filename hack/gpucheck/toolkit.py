"""Compares our spec with the one that NVIDIA's container toolkit makes: what only one of them has, and whether that
matters."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpucheck.cdispec import CLAIM_UID
from gpucheck.findings import Section
from gpucheck.view import Machine, Options, View

JsonObject = dict[str, Any]

_ARGUMENTS = ("cdi", "generate", "--format", "json", "--device-name-strategy", "uuid")
_TIMEOUT_S = 120
_PLACES = ("/usr/bin/nvidia-ctk", "/usr/local/nvidia/toolkit/nvidia-ctk")

# Why something that only the toolkit has does not matter: (kind, pattern, reason).
_HARMLESS_THEIRS = (
    ("mount", r"/nvidia-mps$", "MPS is set up for each claim"),
    ("hook", r"^chmod$", "only old versions of crun need it"),
    (
        "hook",
        r"^update-application-profile$",
        "1.20.0 fails with it where a container's root cannot be written",
    ),
    ("hook", r"^apply-cuda-memory-limits$", "limits of memory belong to the claim"),
    ("env", r"^NVIDIA_CTK_DEBUG=", "it switches messages of the hooks"),
)
_HARMLESS_OURS = (
    ("node", r"^/dev/nvidia-caps/", "the toolkit lists capability nodes only once they are on the host"),
    ("mount", r".", "the toolkit leaves it out"),
    ("link", r".", "the toolkit leaves it out"),
    ("hook", r".", "the toolkit leaves it out"),
    ("env", r".", "the toolkit leaves it out"),
)


@dataclass(slots=True)
class Edits:
    """Container edits by what they do. `mounts` maps container paths to host paths, `nodes` to numbers."""

    nodes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    env: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    hooks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    programs: set[str] = field(default_factory=set)


def read_edits(edits: JsonObject) -> Edits:
    """The edits of a spec or of one of its devices."""
    found = Edits(env=set(edits.get("env") or ()))
    for node in edits.get("deviceNodes") or ():
        found.nodes[node["path"]] = (node.get("major"), node.get("minor"))
    for mount in edits.get("mounts") or ():
        found.mounts[mount["containerPath"]] = mount["hostPath"]
    for hook in edits.get("hooks") or ():
        found.programs.add(hook["path"])
        arguments = [text for text in hook.get("args") or () if text != "hook"][1:]
        verb = arguments[0] if arguments else "?"
        if verb == "create-symlinks":
            found.links.update(text.removeprefix("--link=") for text in arguments if "::" in text)
        else:
            found.hooks[verb] = tuple(sorted(arguments[1:]))
    return found


def find_ctk(view: View, options: Options) -> str | None:
    """The program nvidia-ctk, if this machine has it; a simulated one has none of its own."""
    if options.nvidia_ctk is not None or view.machine.is_simulated:
        return options.nvidia_ctk
    found = next((str(path) for path in map(view.machine.found, _PLACES) if path is not None), None)
    return found or shutil.which("nvidia-ctk")


def check_toolkit(view: View, options: Options, ours: JsonObject | None) -> Section:
    """The section `nvidia-ctk`."""
    section = Section("nvidia-ctk")
    program = find_ctk(view, options)
    if ours is None:
        section.skip("this driver wrote no spec to compare with")
        return section
    if program is None:
        section.skip("nvidia-ctk is not on this machine")
        return section
    try:
        theirs = _generated(program, options.nvidia_driver_root)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        section.skip(f"nvidia-ctk cdi generate: {' '.join(str(error).split())[:300]}")
        return section
    compare_specs(section, view, ours, theirs)
    return section


def _generated(program: str, driver_root: str) -> JsonObject:
    """What the toolkit prints; without --output it writes no file."""
    root = [] if driver_root == "/" else [f"--driver-root={driver_root}"]
    done = subprocess.run(
        [program, *_ARGUMENTS, *root], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"ended with code {done.returncode}: {done.stderr.strip()[-200:]}")
    spec = json.loads(done.stdout)
    if isinstance(spec, dict):
        return spec
    raise ValueError("printed no object")


def compare_specs(section: Section, view: View, ours: JsonObject, theirs: JsonObject) -> None:
    """The part for all containers, then each device."""
    compare = _Comparison(section, view.machine)
    compare.edits(
        "all containers", read_edits(ours["containerEdits"]), read_edits(theirs.get("containerEdits", {}))
    )
    by_name = {device["name"]: device.get("containerEdits", {}) for device in theirs.get("devices") or ()}
    named = {device["name"]: device["containerEdits"] for device in ours["devices"]}
    for device in view.inventory.devices():
        mine = named.get(f"{CLAIM_UID}-{device.name}", {})
        other = by_name.pop(device.uuid, None)
        section.good(other is not None, device.name, f"{device.uuid} is only ours")
        if other is not None:
            compare.edits(device.name, read_edits(mine), read_edits(other))
    for name in sorted(by_name.keys() - {"all"}):
        section.differs(name, "this device is only theirs")


class _Comparison:
    def __init__(self, section: Section, machine: Machine) -> None:
        self._section = section
        self._machine = machine

    def edits(self, subject: str, ours: Edits, theirs: Edits) -> None:
        self._section.checked += len(ours.nodes.keys() | theirs.nodes.keys())
        self._section.checked += len(ours.mounts.keys() | theirs.mounts.keys()) + len(ours.env | theirs.env)
        self._sides(subject, "node", ours.nodes, theirs.nodes)
        for path in sorted(ours.nodes.keys() & theirs.nodes.keys()):
            if None not in theirs.nodes[path] and ours.nodes[path] != theirs.nodes[path]:
                self._section.differs(
                    subject, f"{path}: {ours.nodes[path]} is ours, {theirs.nodes[path]} theirs"
                )
        self._mounts(subject, ours, theirs)
        self._sides(subject, "env", ours.env, theirs.env)
        if ours.programs or not theirs.programs:
            self._hooks(subject, ours, theirs)
        elif any(self._machine.found(program) is not None for program in theirs.programs):
            self._section.differs(subject, f"hook {', '.join(sorted(theirs.programs))} was not found by us")
        else:
            self._section.note(subject, "theirs names hooks whose program is not on the machine")

    def _hooks(self, subject: str, ours: Edits, theirs: Edits) -> None:
        self._section.checked += len(ours.hooks.keys() | theirs.hooks.keys())
        self._sides(subject, "hook", ours.hooks, theirs.hooks)
        self._sides(subject, "link", ours.links, theirs.links)
        for verb in sorted(ours.hooks.keys() & theirs.hooks.keys()):
            only_ours = set(ours.hooks[verb]) - set(theirs.hooks[verb])
            only_theirs = set(theirs.hooks[verb]) - set(ours.hooks[verb])
            if only_theirs:
                self._section.differs(subject, f"hook {verb}: {' '.join(sorted(only_theirs))} is only theirs")
            if only_ours:
                self._section.note(subject, f"hook {verb}: {' '.join(sorted(only_ours))} is only ours")

    def _mounts(self, subject: str, ours: Edits, theirs: Edits) -> None:
        our_files, their_files = _by_file(ours.mounts), _by_file(theirs.mounts)
        missing = [path for path in theirs.mounts if path not in ours.mounts]
        moved = [path for path in missing if _file(path) in our_files]
        for path in sorted(moved):
            elsewhere = our_files[_file(path)]
            self._section.note(subject, f"{_file(path)} is at {elsewhere} in ours, at {path} in theirs")
        self._sides(
            subject,
            "mount",
            [path for path in ours.mounts if path in theirs.mounts or _file(path) not in their_files],
            [path for path in theirs.mounts if path not in moved],
        )
        for path in sorted(ours.mounts.keys() & theirs.mounts.keys()):
            if self._real(ours.mounts[path]) != self._real(theirs.mounts[path]):
                self._section.differs(
                    subject,
                    f"mount {path}: from {ours.mounts[path]} in ours, {theirs.mounts[path]} in theirs",
                )

    def _real(self, host_path: str) -> str:
        found = self._machine.found(host_path)
        return host_path if found is None else str(found.resolve())

    def _sides(self, subject: str, kind: str, ours: Iterable[str], theirs: Iterable[str]) -> None:
        mine, other = set(ours), set(theirs)
        _judged(self._section, subject, kind, other - mine, "theirs", _HARMLESS_THEIRS)
        _judged(self._section, subject, kind, mine - other, "ours", _HARMLESS_OURS)


def _judged(
    section: Section,
    subject: str,
    kind: str,
    values: set[str],
    whose: str,
    harmless: Iterable[tuple[str, str, str]],
) -> None:
    """Each value that matters is one difference; all other values become one note for each reason."""
    by_reason: dict[str, list[str]] = {}
    for value in sorted(values):
        reason = next(
            (text for of_kind, pattern, text in harmless if of_kind == kind and re.search(pattern, value)),
            None,
        )
        if reason is None:
            section.differs(subject, f"{kind} {value} is only {whose}; matters")
        else:
            by_reason.setdefault(reason, []).append(value)
    for reason, alike in by_reason.items():
        section.note(subject, f"{kind} {', '.join(alike)}: only {whose}; does not matter: {reason}")


def _file(path: str) -> str:
    """What names a file wherever it is mounted: sockets are all called `socket`."""
    directory, _, name = path.rpartition("/")
    return f"{directory.rpartition('/')[2]}/{name}" if name == "socket" else name


def _by_file(mounts: Iterable[str]) -> dict[str, str]:
    return {_file(path): path for path in mounts}
