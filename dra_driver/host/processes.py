"""To whom a process belongs, as far as its cgroup shows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from uuid import UUID

from dra_driver.host.rooted_tree import names_in, text_of
from dra_driver.model.gpu import ProcessOrigin

# `…/kubepods-burstable-pod0a1b2c3d_….slice/…` or `…/burstable/pod0a1b2c3d-…/…`
_POD = re.compile(r"[/-]pod[0-9a-f]{8}([-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}(?=[/.]|$)")
# A process outside our own cgroup namespace has a path that begins with `/..`.
_HOST = re.compile(r"(/\.\.)*/(system\.slice|user\.slice|init\.scope)(/|$)")


# The scope or directory of a container: `…/docker-0a1b….scope`, `…/docker/0a1b…`.
_CONTAINER = re.compile(r"[/:-][0-9a-f]{64}(?=[/.\s]|$)")
# The kernel writes this behind the path of a file that is gone, and of a control group of which only zombies are left.
_IS_GONE = " (deleted)"

_GPU_NODE = re.compile(r"/dev/nvidia(ctl|\d+)\Z")
_ALWAYS_THERE = frozenset({"nvidia-persiste", "nv-fabricmanage", "nvidia-cuda-mps"})
"""Names as the kernel cuts them: nvidia-persistenced and nv-fabricmanager, for which the NVIDIA driver makes way, and
the daemons and servers of MPS, which end with their claims."""
_OWN_NAMES = ("gpu-dra-driver", "dra_driver")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the host's namespace, always the same."""
_START_TIME = 18
"""Its place in `stat` after the state."""


def any_runs(proc: str, pod_uids: Collection[str]) -> bool | None:
    """Whether a process of one of these pods runs on this host; None if that cannot be told: this process does not see
    all processes, no process shows its pod, or there are no such pods."""
    if not pod_uids:
        return None
    pids = _all_processes(proc)
    if pids is None:
        return None
    shows_pods = False
    for pid in pids:
        text = _cgroups(proc, pid)
        if _is_of_pods(text, pod_uids):
            return True
        shows_pods = shows_pods or _POD.search(text) is not None
    return False if shows_pods else None


def gpu_users(proc: str, pod_uids: Collection[str], below: str | None = None) -> list[str] | None:
    """Name and process of each program that has a GPU's device file open, such as `nv-hostengine (process 812)`, in the
    order of their IDs; None if that cannot be told, because this process does not see all processes.

    gpu-dra-driver, what must run beside it on every node, and processes of the given pods are left out; with `below`,
    a directory of this process, device files elsewhere too.
    """
    pids = _all_processes(proc)
    if pids is None:
        return None
    found = []
    for pid in pids:
        name = text_of(f"{proc}/{pid}/comm").strip()
        if name in _ALWAYS_THERE or not _has_open(proc, pid, partial(_is_gpu_node, below)):
            continue
        if _is_of_this_driver(proc, pid) or _is_of_pods(_cgroups(proc, pid), pod_uids):
            continue
        found.append(f"{name or 'a program'} (process {pid})")
    return found


def users_of(proc: str, nodes: Collection[str], *, others_only: bool = False) -> list[str] | None:
    """Name and process of each program that has one of these device nodes open, whoever it is, as `gpu_users`. With
    `others_only` without gpu-dra-driver and what must run beside it on every node."""
    pids = _all_processes(proc)
    if pids is None:
        return None
    # In another mount namespace the same node may have a longer path.
    ends = tuple(nodes)
    users = {
        pid: text_of(f"{proc}/{pid}/comm").strip()
        for pid in pids
        if _has_open(proc, pid, lambda file: file.endswith(ends))
    }
    return [
        f"{name or 'a program'} (process {pid})"
        for pid, name in users.items()
        if not (others_only and (name in _ALWAYS_THERE or _is_of_this_driver(proc, pid)))
    ]


def _is_gpu_node(below: str | None, file: str) -> bool:
    node = _GPU_NODE.search(file)
    return node is not None and below in (None, file[: node.start()])


def _has_open(proc: str, pid: int, is_wanted: Callable[[str], bool]) -> bool:
    directory = f"{proc}/{pid}/fd"
    for name in names_in(directory):
        with suppress(OSError):
            file = os.readlink(f"{directory}/{name}")  # noqa: PTH115  no Path objects wanted
            # A process that has a node open keeps it, though it is removed.
            if is_wanted(file.removesuffix(_IS_GONE)):
                return True
    return False


def _is_of_this_driver(proc: str, pid: int) -> bool:
    command = text_of(f"{proc}/{pid}/cmdline")
    # This process may have another name, such as a test's. So has its child until it runs a program of its own.
    is_own = command != "" and command == text_of(f"{proc}/self/cmdline")
    return is_own or any(name in word for word in command.split("\0")[:4] for name in _OWN_NAMES)


def _all_processes(proc: str) -> list[int] | None:
    """The IDs of all processes of the host; None if this process does not see them all."""
    if not sees_all_processes(proc):
        return None
    return sorted(int(name) for name in names_in(proc) if name.isdecimal())


def sees_all_processes(proc: str) -> bool:
    """Whether this process is in the PID namespace of the host."""
    return pid_namespace(proc) == _INITIAL_PID_NAMESPACE


def pid_namespace(proc: str) -> str:
    """The PID namespace of this process, such as `pid:[4026531836]`; empty if that is not known."""
    try:
        return os.readlink(f"{proc}/self/ns/pid")  # noqa: PTH115  no Path objects wanted
    except OSError:
        return ""


def start_of_living(proc: str, pid: int) -> int | None:
    """When a process started, in clock ticks of the boot; None if it has ended. One that was killed has, though a
    thread of it may hang in the kernel and keep its files and locks."""
    state, *fields = text_of(f"{proc}/{pid}/stat").rpartition(")")[2].split() or ["X"]
    return int(fields[_START_TIME]) if state not in "ZX" and len(fields) > _START_TIME else None


def _cgroups(proc: str, pid: int) -> str:
    return text_of(f"{proc}/{pid}/cgroup")


def _cgroup_paths(proc: str, pid: int) -> list[str]:
    return [line.split(":", 2)[-1] for line in _cgroups(proc, pid).splitlines()]


def _is_of_pods(cgroup: str, pod_uids: Collection[str]) -> bool:
    """Whether the text of a process's cgroups names one of the pods. The systemd driver of a runtime writes `_` for
    `-`."""
    return any(f"pod{name}" in cgroup for uid in pod_uids for name in (uid, uid.replace("-", "_")))


def is_of_the_host(proc: str, pid: int) -> bool:
    """Whether a process is in a service or a login session of the host and in no pod, such as a display server; False
    if that is not known."""
    paths = _cgroup_paths(proc, pid)
    return any(_HOST.match(path) for path in paths) and not any(_POD.search(path) for path in paths)


def origin(proc: str, pid: int) -> ProcessOrigin:
    """Where a process runs, and in which pod."""
    paths = [path for path in _cgroup_paths(proc, pid) if not path.endswith(_IS_GONE)]
    pod = next(filter(None, map(_POD.search, paths)), None)
    if pod is not None:
        return ProcessOrigin("container", str(UUID(re.sub("[-_]", "", pod[0].partition("pod")[2]))))
    if any(map(_CONTAINER.search, paths)):
        return ProcessOrigin("container")
    return ProcessOrigin("host" if any(map(_HOST.match, paths)) else "unknown")
