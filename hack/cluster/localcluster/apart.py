"""Isolates another cluster on this machine.

A command runs in new namespaces, with its own processes, mounts, network and control groups. It has no network
connection to the outside. Everything that a cluster writes outside of the cache is in memory. When the command exits,
or when this program is stopped, all processes in the namespaces are killed, and nothing remains.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster import host, processes, shell
from localcluster.layout import CDI_DIRECTORIES, CONTAINER_LOG_LINKS
from localcluster.shell import ClusterError

_NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
_JOIN = 'for group; do shift; [ "$group" = -- ] && break; echo $$ >"$group/cgroup.procs"; done; exec "$@"'
_BELOW = "init"
"""The control group v2 of the first processes, below the root of their namespace."""
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
        # The root of a cgroup namespace is the group of the process that creates it. A cgroup v2 group that contains
        # processes cannot delegate controllers, so the process leaves this root before it starts others.
        below = [path for group in groups if (path := group / _BELOW).exists()]
        command = [*_joined(groups), "unshare", "--cgroup", *_joined(below), "unshare", *_NAMESPACES, *inside]
        with host.kept(_EMPTIED), subprocess.Popen(command) as process:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda _number, _frame: process.kill())
            return process.wait()
    finally:
        for group in groups:
            processes.remove_cgroup(group)
        for path in made:
            host.remove_if_empty(path)


def _joined(groups: Sequence[Path]) -> list[str]:
    """Return the words to put before a command, so that it runs in these control groups."""
    return ["bash", "-euc", _JOIN, "join", *map(str, groups), "--"]


def begin(argv: Sequence[str]) -> None:
    """Prepare the new namespaces for a cluster, then replace this process with the command."""
    hierarchies = _hierarchies()
    _mount("sysfs", Path("/sys"))  # the old one shows the old network
    if len(hierarchies) > 1:
        _mount("tmpfs", Path("/sys/fs/cgroup"))
    for hierarchy in hierarchies:
        hierarchy.point.mkdir(parents=True, exist_ok=True)
        _mount(hierarchy.kind, hierarchy.point, hierarchy.options)
        # From now on, systemd cannot take a controller away from the group above.
        _delegate(hierarchy.point)
    for path in (Path("/run"), *_EMPTIED):
        _mount("tmpfs", path)
    _own_library()
    shell.run(["ip", "link", "set", "lo", "up"])
    os.environ.pop("GPU_DRA_CLUSTER_DIR", None)
    os.execvp(argv[0], list(argv))


def _own_library() -> None:
    """Mount a new /var/lib without the directories of clusters, and with links to everything else in the old one."""
    host.unmount_below([_LIBRARY / name for name in _OWN_BELOW_LIBRARY])
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
    _delegate(group.parent)
    group.mkdir()
    if (group / "cgroup.controllers").exists():
        (group / _BELOW).mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (group / name).exists() and not (group / "cgroup.controllers").exists():
            (group / name).write_text((group.parent / name).read_text())


def _delegate(group: Path) -> None:
    """Let the children of a cgroup v2 group use all its controllers. Does nothing for cgroup v1.

    Only the root of the machine's hierarchy can do that while it contains processes: that root is /sys/fs/cgroup on a
    host with systemd, whatever the group of this process is. Raises: ClusterError if the group is another one, such
    as that of a container, and contains processes.
    """
    if not (group / "cgroup.controllers").exists():
        return
    delegated = (group / "cgroup.subtree_control").read_text().split()
    missing = [name for name in (group / "cgroup.controllers").read_text().split() if name not in delegated]
    if not missing:
        return
    try:
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise ClusterError(
            f"The control group {group} contains processes and is not the root of the machine's hierarchy, so "
            f"groups below it get no {', '.join(missing)}. Run this outside of containers, or move the processes: "
            f"mkdir {group}/others; for pid in $(cat {group}/cgroup.procs); do echo $pid >{group}/others/cgroup.procs; "
            "done"
        ) from error


def _mount(kind: str, point: Path, options: str = "rw") -> None:
    shell.run(["mount", "-t", kind, "-o", options, kind, point])
