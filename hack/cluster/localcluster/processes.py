"""Starts and stops daemons that outlive this program, by their PID files.

The PID alone does not identify a process, because it can be reused after the process exits.
Therefore a PID file also contains the process's start time, and both must match.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster.layout import Layout
from localcluster.shell import ClusterError


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified by its PID and start time, because a later process can have the same PID."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        found = identify(self.pid)
        return found == self


def identify(pid: int) -> Process | None:
    """Return the running process with this PID; None if there is none, or if it is a zombie without other threads.

    The first thread of a killed process may be a zombie while other threads still exit and hold ports.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may contain spaces and parentheses, so count from its end.
    fields = stat.rpartition(")")[2].split()
    is_gone = fields[0] == "Z" and int(fields[17]) <= 1
    return None if is_gone else Process(pid, int(fields[19]))


def start(
    argv: Sequence[str | Path], *, environment: Mapping[str, str], log: Path, pid_file: Path
) -> Process:
    """Start a daemon in its own session, and append its output to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        str(argv[0]),
        [str(word) for word in argv],
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGPIPE, signal.SIGTERM],
    )
    process = identify(pid)
    if process is None:
        raise ClusterError(f"{argv[0]} exited immediately: see {log}.")
    _remember(process, pid_file)
    return process


def recall(pid_file: Path) -> Process | None:
    """Return the process that a PID file names; None if it is not running any more."""
    try:
        process = Process(**json.loads(pid_file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return process if process.alive else None


def stop(processes: Sequence[Process], *, grace_seconds: float = 4.0) -> None:
    """Send SIGTERM to all processes, wait for them, then kill the remaining ones."""
    if grace_seconds > 0:
        _signal(processes, signal.SIGTERM)
        if _wait_gone(processes, grace_seconds):
            return
    _signal(processes, signal.SIGKILL)
    if not _wait_gone(processes, 60.0):
        left = [process.pid for process in processes if process.alive]
        raise ClusterError(f"Processes {left} are still running after SIGKILL.")


def all_pids() -> list[int]:
    """Return the PIDs of all processes on this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def children() -> dict[int, list[int]]:
    """Return the direct children of each process on this machine, by PID."""
    found: dict[int, list[int]] = {}
    for pid in all_pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        found.setdefault(parent, []).append(pid)
    return found


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process, with the program first; empty for kernel threads and exited processes."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").rstrip("\0").split("\0")


def sees_our_files(pid: int) -> bool:
    """Whether a process is in this process's mount namespace; otherwise its paths mean other files."""
    try:
        return Path(f"/proc/{pid}/ns/mnt").samefile("/proc/self/ns/mnt")
    except OSError:
        return False


def _remember(process: Process, pid_file: Path) -> None:
    unfinished = pid_file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(process)))
    unfinished.replace(pid_file)


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        if process.alive:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue


def _wait_gone(processes: Sequence[Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        for process in processes:
            _reap(process.pid)
        if not any(process.alive for process in processes):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _reap(pid: int) -> None:
    """Collect the exit status of a child process, so that it does not stay a zombie in a long test run."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


# --- containers -------------------------------------------------------------------------------------
#
# The functions below find the cluster's containers even if containerd does not answer. All processes of a container
# descend from its shim, which adopts orphans, and the command line of a shim contains the socket of its containerd.

_CGROUPS = Path("/sys/fs/cgroup")


def kill_all(layout: Layout) -> None:
    """Kill the shims of the cluster's containers, with all their descendants."""
    tree = children()
    shims = [pid for pid in all_pids() if _is_shim(layout, pid)]
    doomed: list[int] = []
    for pid in shims:
        doomed.extend(_descendants(tree, pid))
    found = [identify(pid) for pid in doomed]
    stop([process for process in found if process], grace_seconds=0)


def remove_shim_sockets(layout: Layout) -> None:
    """Remove the sockets of the cluster's shims, which are in one directory with those of other containerds."""
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
    """Remove a control group and its children. Wait, because they become empty shortly after their processes exit."""
    deadline = time.monotonic() + 60.0
    while root.is_dir() and not _remove_tree(root):
        if time.monotonic() > deadline:
            raise ClusterError(f"Control group {root} is still in use.")
        time.sleep(0.05)


def _is_shim(layout: Layout, pid: int) -> bool:
    words = command_line(pid)
    return (
        bool(words)
        and Path(words[0]).name == "containerd-shim-runc-v2"
        and str(layout.containerd_socket) in words
        and sees_our_files(pid)
    )


def _descendants(tree: dict[int, list[int]], pid: int) -> list[int]:
    found = [pid]
    for child in tree.get(pid, []):
        found.extend(_descendants(tree, child))
    return found


def _remove_tree(root: Path) -> bool:
    """Remove a tree of control groups, starting at its leaves; return False if one is in use."""
    try:
        for child in root.iterdir():
            if child.is_dir() and not _remove_tree(child):
                return False
        root.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
