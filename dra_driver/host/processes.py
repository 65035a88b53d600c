"""To whom a process belongs, as far as its cgroup shows."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

# `…/kubepods-burstable-pod0a1b2c3d_….slice/…` or `…/burstable/pod0a1b2c3d-…/…`
_POD = re.compile(r"[/-]pod[0-9a-f]{8}([-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}(?=[/.]|$)")
# A process outside our own cgroup namespace has a path that begins with `/..`.
_HOST = re.compile(r"(/\.\.)*/(system\.slice|user\.slice|init\.scope)(/|$)")


_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the host's namespace, always the same."""


def any_runs(proc: str, pod_uids: Collection[str]) -> bool | None:
    """Whether a process of one of these pods runs on this host; None if that cannot be told: this process does not see
    all processes, no process shows its pod, or there are no such pods."""
    if not pod_uids:
        return None
    try:
        if os.readlink(f"{proc}/self/ns/pid") != _INITIAL_PID_NAMESPACE:  # noqa: PTH115  no Path objects wanted
            return None
        pids = [name for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208
    except OSError:
        return None
    # The systemd driver of a runtime writes `_` for `-`.
    wanted = {f"pod{name}" for uid in pod_uids for name in (uid, uid.replace("-", "_"))}
    shows_pods = False
    for pid in pids:
        try:
            text = Path(proc, pid, "cgroup").read_text("utf-8", errors="replace")
        except OSError:  # it ended
            continue
        if any(name in text for name in wanted):
            return True
        shows_pods = shows_pods or _POD.search(text) is not None
    return False if shows_pods else None


def is_of_the_host(proc: str, pid: int) -> bool:
    """Whether a process is in a service or a login session of the host and in no pod, such as a display server; False
    if that is not known."""
    try:
        lines = Path(proc, str(pid), "cgroup").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return False
    paths = [line.split(":", 2)[-1] for line in lines]
    return any(_HOST.match(path) for path in paths) and not any(_POD.search(path) for path in paths)
