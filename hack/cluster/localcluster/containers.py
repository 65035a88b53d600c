"""Taking every container away, whether or not containerd still answers.

A container's processes all descend from its shim, which adopts orphans, and a
shim names our socket on its command line: so exactly ours are found.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from localcluster import processes
from localcluster.errors import ClusterError
from localcluster.layout import Layout

_CGROUPS = Path("/sys/fs/cgroup")


def kill_all(layout: Layout) -> None:
    """Kill each shim of ours with everything below it."""
    tree = processes.children()
    shims = [pid for pid in processes.all_pids() if _is_shim(layout, pid)]
    doomed: list[int] = []
    for pid in shims:
        doomed.extend(_descendants(tree, pid))
    found = [processes.identify(pid) for pid in doomed]
    processes.stop([process for process in found if process], grace_seconds=0)


def remove_shim_sockets(layout: Layout) -> None:
    """Shims keep their sockets in a directory of all containerds of the host."""
    for note in layout.containerd_state.glob("io.containerd.runtime.v2.task/*/*/bootstrap.json"):
        try:
            address = str(json.loads(note.read_text())["address"])
        except (OSError, ValueError, KeyError):
            continue
        Path(address.removeprefix("unix://")).unlink(missing_ok=True)


def remove_cgroups() -> None:
    """Remove the pods' control groups."""
    for root in (_CGROUPS / "kubepods", *_CGROUPS.glob("*/kubepods")):
        remove_cgroup(root)


def remove_cgroup(root: Path) -> None:
    """Remove one control group with those below it; they empty a moment after the processes die."""
    deadline = time.monotonic() + 60.0
    while root.is_dir() and not _remove_group(root):
        if time.monotonic() > deadline:
            raise ClusterError(f"Control group {root} is still in use.")
        time.sleep(0.05)


def _is_shim(layout: Layout, pid: int) -> bool:
    words = processes.command_line(pid)
    return (
        bool(words)
        and Path(words[0]).name == "containerd-shim-runc-v2"
        and str(layout.containerd_socket) in words
        and processes.sees_our_files(pid)
    )


def _descendants(tree: dict[int, list[int]], pid: int) -> list[int]:
    found = [pid]
    for child in tree.get(pid, []):
        found.extend(_descendants(tree, child))
    return found


def _remove_group(root: Path) -> bool:
    """Remove a tree of control groups from its leaves; False while one is in use."""
    try:
        for child in root.iterdir():
            if child.is_dir() and not _remove_group(child):
                return False
        root.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
