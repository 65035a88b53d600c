"""Finds the programs that use GPUs, and the pod to which a process belongs, by its cgroup.

`proc` is a `/proc` directory. Raises: StateError if this process cannot read the processes now.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from uuid import UUID

from dra_driver.base.atomic import refuse_own_limit
from dra_driver.errors import StateError
from dra_driver.model.gpu import ProcessOrigin

# `…/kubepods-burstable-pod0a1b2c3d_….slice/…` or `…/burstable/pod0a1b2c3d-…/…`
_POD = re.compile(r"[/-]pod[0-9a-f]{8}([-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}(?=[/.]|$)")
# The path of a process outside this cgroup namespace begins with `/..`.
_HOST = re.compile(r"(/\.\.)*/(system\.slice|user\.slice|init\.scope)(/|$)")


# The scope or directory of a container: `…/docker-0a1b….scope`, `…/docker/0a1b…`.
_CONTAINER = re.compile(r"[/:-][0-9a-f]{64}(?=[/.\s]|$)")
# The kernel appends this to the path of a deleted file, and of a control group with only zombies.
_IS_GONE = " (deleted)"

_GPU_NODE = re.compile(r"/dev/nvidia(ctl|\d+)\Z")
_ALWAYS_THERE = frozenset({"nvidia-persiste", "nv-fabricmanage", "nvidia-cuda-mps"})
"""As the kernel truncates them: two daemons that release a GPU on request, and MPS, which stops with its claims."""
_OWN_NAMES = ("gpu-dra-driver", "dra_driver")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The same on every Linux kernel."""
_FLAGS, _START_TIME = 5, 18
_EXITING = 0x4
"""PF_EXITING. The numbers above are positions in `stat`, counted after the state."""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  runs for every process of the host
            return file.read()
    except OSError as error:
        refuse_own_limit(path, error)
        return ""


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208  avoids Path objects
    except OSError as error:
        refuse_own_limit(directory, error)
        return []


def any_runs(proc: str, pod_uids: Collection[str]) -> bool | None:
    """Whether a process of one of these pods runs on this host.

    None if unknown, also if no process has a pod's cgroup. Raises no StateError.
    """
    with suppress(StateError):
        pids = _all_processes(proc) if pod_uids else None
        shows_pods = False
        for pid in pids or ():
            text = _cgroups(proc, pid)
            if _is_of_pods(text, pod_uids):
                return True
            shows_pods = shows_pods or _POD.search(text) is not None
        return False if shows_pods else None
    return None


def gpu_users(proc: str, pod_uids: Collection[str], below: str | None = None) -> list[str] | None:
    """Return the programs that have a GPU's device file open, such as `nv-hostengine (process 812)`, sorted by PID.

    Leaves out gpu-dra-driver itself, programs that run on every node, and processes of the given pods. With `below`, a
    root directory, only files in its `/dev` count. None if this process does not see all processes.
    """
    return _users(
        proc,
        partial(_is_gpu_node, below),
        lambda pid, name: _may_stay(proc, pid, name) or _is_of_pods(_cgroups(proc, pid), pod_uids),
    )


def users_of(proc: str, nodes: Collection[str], *, others_only: bool = False) -> list[str] | None:
    """Return the programs that have one of these nodes open, as `gpu_users` does.

    With `others_only`, leaves out gpu-dra-driver and programs that run on every node.
    """
    # In another mount namespace the same node may have a longer path.
    ends = tuple(nodes)
    return _users(
        proc,
        lambda file: file.endswith(ends),
        lambda pid, name: others_only and _may_stay(proc, pid, name),
    )


def _users(
    proc: str, is_wanted: Callable[[str], bool], is_left_out: Callable[[int, str], bool]
) -> list[str] | None:
    pids = _all_processes(proc)
    if pids is None:
        return None
    users = {pid: _text(f"{proc}/{pid}/comm").strip() for pid in pids if _has_open(proc, pid, is_wanted)}
    return [
        f"{name or 'a program'} (process {pid})" for pid, name in users.items() if not is_left_out(pid, name)
    ]


def _may_stay(proc: str, pid: int, name: str) -> bool:
    return name in _ALWAYS_THERE or _is_of_this_driver(proc, pid)


def _is_gpu_node(below: str | None, file: str) -> bool:
    node = _GPU_NODE.search(file)
    return node is not None and below in (None, file[: node.start()])


def _has_open(proc: str, pid: int, is_wanted: Callable[[str], bool]) -> bool:
    directory = f"{proc}/{pid}/fd"
    for name in _names(directory):
        with suppress(OSError):
            file = os.readlink(f"{directory}/{name}")  # noqa: PTH115  avoids Path objects
            # A node may have been deleted while a process has it open.
            if is_wanted(file.removesuffix(_IS_GONE)):
                return True
    return False


def _is_of_this_driver(proc: str, pid: int) -> bool:
    command = _text(f"{proc}/{pid}/cmdline")
    # In tests, the command line of this process has another name. A child process has the same command line until it
    # runs another program.
    is_own = command != "" and command == _text(f"{proc}/self/cmdline")
    return is_own or any(name in word for word in command.split("\0")[:4] for name in _OWN_NAMES)


def _all_processes(proc: str) -> list[int] | None:
    """None if this process does not see all processes of the host."""
    if not sees_all_processes(proc):
        return None
    return sorted(int(name) for name in _names(proc) if name.isdecimal())


def sees_all_processes(proc: str) -> bool:
    return pid_namespace(proc) == _INITIAL_PID_NAMESPACE


def pid_namespace(proc: str) -> str:
    """Return for example `pid:[4026531836]`; empty if unknown."""
    try:
        return os.readlink(f"{proc}/self/ns/pid")  # noqa: PTH115  avoids Path objects
    except OSError:
        return ""


def start_time(proc: str, pid: int) -> int | None:
    """Return the start of a process, in clock ticks since boot; None if it has ended.

    A killed process counts as ended, even if one of its threads hangs in the kernel and keeps files and locks.
    """
    state, *fields = _text(f"{proc}/{pid}/stat").rpartition(")")[2].split() or ["X"]
    if state in "ZX" or len(fields) <= _START_TIME or int(fields[_FLAGS]) & _EXITING:
        return None
    return None if state == "D" and _is_killed(proc, pid) else int(fields[_START_TIME])


def _is_killed(proc: str, pid: int) -> bool:
    """Whether SIGKILL waits for the first thread, which will never leave the kernel again."""
    lines = _text(f"{proc}/{pid}/status").splitlines()
    pending = next((line.split()[1] for line in lines if line.startswith("SigPnd:")), "0")
    return bool(int(pending, 16) & 1 << signal.SIGKILL - 1)


def _cgroups(proc: str, pid: int) -> str:
    return _text(f"{proc}/{pid}/cgroup")


def _cgroup_paths(proc: str, pid: int) -> list[str]:
    with suppress(StateError):
        return [line.split(":", 2)[-1] for line in _cgroups(proc, pid).splitlines()]
    return []


def _is_of_pods(cgroup: str, pod_uids: Collection[str]) -> bool:
    """With systemd, runtimes write `_` instead of `-`."""
    return any(f"pod{name}" in cgroup for uid in pod_uids for name in (uid, uid.replace("-", "_")))


def is_of_the_host(proc: str, pid: int) -> bool:
    """Whether a process belongs to a service, such as a display server, or login session of the host."""
    paths = _cgroup_paths(proc, pid)
    return any(_HOST.match(path) for path in paths) and not any(_POD.search(path) for path in paths)


def origin(proc: str, pid: int) -> ProcessOrigin:
    paths = [path for path in _cgroup_paths(proc, pid) if not path.endswith(_IS_GONE)]
    pod = next(filter(None, map(_POD.search, paths)), None)
    if pod is not None:
        return ProcessOrigin("container", str(UUID(re.sub("[-_]", "", pod[0].partition("pod")[2]))))
    if any(map(_CONTAINER.search, paths)):
        return ProcessOrigin("container")
    return ProcessOrigin("host" if any(map(_HOST.match, paths)) else "unknown")
