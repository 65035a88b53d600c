"""To whom a process belongs, as far as its cgroup shows."""

from __future__ import annotations

import re
from pathlib import Path

# `…/kubepods-burstable-pod0a1b2c3d_….slice/…` or `…/burstable/pod0a1b2c3d-…/…`
_POD = re.compile(r"[/-]pod[0-9a-f]{8}([-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12}(?=[/.]|$)")
# A process outside our own cgroup namespace has a path that begins with `/..`.
_HOST = re.compile(r"(/\.\.)*/(system\.slice|user\.slice|init\.scope)(/|$)")


def is_of_the_host(proc: str, pid: int) -> bool:
    """Whether a process is in a service or a login session of the host and in no pod, such as a display server; False
    if that is not known."""
    try:
        lines = Path(proc, str(pid), "cgroup").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return False
    paths = [line.split(":", 2)[-1] for line in lines]
    return any(_HOST.match(path) for path in paths) and not any(_POD.search(path) for path in paths)
