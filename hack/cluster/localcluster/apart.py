"""Isolates another cluster on this machine.

A command runs in new namespaces, with its own processes, mounts, network and control groups. It has no network
connection to the outside. Everything that a cluster writes outside of the cache is in memory. When the command exits,
or when this program is stopped, all processes in the namespaces are killed, and nothing remains.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster import host, processes, shell
from localcluster.layout import CDI_DIRECTORIES, CONTAINER_LOG_LINKS

_NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--cgroup", "--fork", "--kill-child", "--mount-proc")
_JOIN = 'for group; do shift; [ "$group" = -- ] && break; echo $$ >"$group/cgroup.procs"; done; exec "$@"'
_NO_CONTROLLERS = ("rw", "ro", "xattr")
_LIBRARY = Path("/var/lib")
_OWN_BELOW_LIBRARY = ("cni", "gpu-dra-cluster", "gpu-dra-simulator", "kubelet")
_EMPTIED = (CONTAINER_LOG_LINKS, CDI_DIRECTORIES[0])


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A mounted hierarchy of control groups."""

    point: Path
    kind: str
    options: str


def run(argv: Sequence[str]) -> int:
    """Run a command in new namespaces, and return its exit code."""
    shell.require_root("The command `apart`")
    made = [path for path in _EMPTIED if not path.exists()]
    groups = [hierarchy.point / f"gpu-dra-apart-{os.getpid()}" for hierarchy in _hierarchies()]
    inside = [sys.executable, str(Path(__file__).parents[1] / "cluster.py"), "begin-apart", *argv]
    try:
        for path in made:
            path.mkdir(exist_ok=True)
        for group in groups:
            _make_group(group)
        # The root of a cgroup namespace is the group of the process that creates it.
        command = ["bash", "-euc", _JOIN, "join", *map(str, groups), "--", "unshare", *_NAMESPACES, *inside]
        with subprocess.Popen(command) as process:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda _number, _frame: process.kill())
            return process.wait()
    finally:
        for group in groups:
            processes.remove_cgroup(group)
        for path in made:
            host.remove_if_empty(path)


def begin(argv: Sequence[str]) -> None:
    """Prepare the new namespaces for a cluster, then replace this process with the command."""
    hierarchies = _hierarchies()
    _mount("sysfs", Path("/sys"))  # the old one shows the old network
    if len(hierarchies) > 1:
        _mount("tmpfs", Path("/sys/fs/cgroup"))
    for hierarchy in hierarchies:
        hierarchy.point.mkdir(parents=True, exist_ok=True)
        _mount(hierarchy.kind, hierarchy.point, hierarchy.options)
    if [hierarchy.kind for hierarchy in hierarchies] == ["cgroup2"]:
        # A group that contains processes cannot delegate controllers to its children.
        (hierarchies[0].point / "init").mkdir()
        (hierarchies[0].point / "init" / "cgroup.procs").write_text("0")
    for path in (Path("/run"), *_EMPTIED):
        _mount("tmpfs", path)
    _own_library()
    shell.run(["ip", "link", "set", "lo", "up"])
    os.environ.pop("GPU_DRA_CLUSTER_DIR", None)
    os.execvp(argv[0], list(argv))


def _own_library() -> None:
    """Mount a new /var/lib without the directories of clusters, and with links to everything else in the old one."""
    own = [_LIBRARY / name for name in _OWN_BELOW_LIBRARY]
    for point in reversed(host.mount_points()):
        if any(map(point.is_relative_to, own)):
            shell.run(["umount", "--lazy", point])
    behind = Path("/run/var-lib")
    behind.mkdir()
    shell.run(["mount", "--bind", _LIBRARY, behind])
    _mount("tmpfs", _LIBRARY)
    for entry in behind.iterdir():
        if entry.name not in _OWN_BELOW_LIBRARY:
            (_LIBRARY / entry.name).symlink_to(entry)


def _hierarchies() -> list[_Hierarchy]:
    """Return the mounted cgroup hierarchies: the one of cgroup v2, those of cgroup v1, or both."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()
        if kind in ("cgroup", "cgroup2"):
            controllers = [
                word for word in options.split(",") if kind == "cgroup" and word not in _NO_CONTROLLERS
            ]
            found.append(_Hierarchy(Path(before.split()[4]), kind, ",".join(controllers) or "rw"))
    return found


def _make_group(group: Path) -> None:
    """Create a control group with all controllers, into which processes can be moved at once.

    A new cgroup v1 group has no CPUs and no memory nodes, and a new cgroup v2 group has only the controllers that its
    parent delegates.
    """
    if (group.parent / "cgroup.controllers").exists():
        controllers = (group.parent / "cgroup.controllers").read_text().split()
        (group.parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    group.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists() and not (group / "cgroup.controllers").exists():
            (group / name).write_text((group.parent / name).read_text())


def _mount(kind: str, point: Path, options: str = "rw") -> None:
    shell.run(["mount", "-t", kind, "-o", options, kind, point])
