"""nvidia-cdi-hook: where the container toolkit has installed it on the host, and which verbs it knows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from dra_driver.errors import RetryableError
from dra_driver.host.rooted_tree import RootedTree, join_root
from dra_driver.model.driver_files import BASE_HOOK_VERBS, MORE_HOOK_VERBS
from dra_driver.model.host import HostPaths

_NAME = "nvidia-cdi-hook"
_PLACES = tuple(
    f"{directory}/{_NAME}"
    for directory in (
        "/usr/bin",
        "/usr/local/bin",
        "/usr/local/nvidia/toolkit",
        "/home/kubernetes/bin/nvidia/toolkit",
    )
)
_FLAG = "--nvidia-cdi-hook-path"
_BOUND_S = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMANDS = re.compile(r"^COMMANDS:\n((?:[ \t]+.*\n|\n)*)", re.MULTILINE)
_VERB = re.compile(r"^[ \t]+([a-z][a-z0-9-]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Hook:
    """`host_path` is what the runtime runs; `notes` say what could not be checked."""

    host_path: str
    verbs: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _View:
    """A part of the host: `root` as this process sees it, `prefix` as the runtime does."""

    root: str
    prefix: str

    def inside(self, host_path: str) -> str | None:
        """The path below this root for a host path; None if this root does not show it."""
        prefix = self.prefix.rstrip("/")
        return host_path[len(prefix) :] if host_path.startswith(f"{prefix}/") else None


class HookFinder:
    """Looks for the hook below the host's `/`, then in the driver root. The hook runs on the host with the host's
    libraries, so a copy in a driver container is only the second choice."""

    def __init__(self, paths: HostPaths, configured: str | None) -> None:
        """`configured` is the host path of nvidia-cdi-hook or nvidia-ctk from the configuration, None to search."""
        views = [_View(paths.driver_root, paths.host_driver_root)]
        if paths.host_root is not None:
            views.insert(0, _View(paths.host_root, "/"))
        self._views = tuple(dict.fromkeys(views))
        self._configured = configured
        self._lock = threading.Lock()
        self._answer: tuple[tuple[object, ...], tuple[tuple[str, ...], str | None]] | None = None

    def places(self) -> Iterator[tuple[str, str]]:
        """(root, path below it) of every file on which the result of `find` depends."""
        for view in self._views:
            if self._configured is None:
                yield from ((view.root, path) for path in _PLACES)
            else:
                inside = view.inside(self._configured)
                if inside is not None:
                    yield view.root, inside

    def find(self) -> Hook | None:
        """The hook; None if none is configured and none is in a usual directory.

        Raises: RetryableError if the configured one does not exist.
        """
        views = [view for view in self._views if os.path.isdir(view.root)]  # noqa: PTH112
        if self._configured is not None:
            return self._configured_hook(self._configured, views)
        for view in views:
            tree = RootedTree(view.root)
            for path in _PLACES:
                resolved = tree.file(path)
                if resolved is not None:
                    return self._asked(join_root(view.prefix, resolved), view.root, resolved)
        return None

    def _configured_hook(self, host_path: str, views: list[_View]) -> Hook:
        places = [(view.root, inside) for view in views if (inside := view.inside(host_path)) is not None]
        for root, inside in places:
            resolved = RootedTree(root).file(inside)
            if resolved is not None:
                return self._asked(host_path, root, resolved)
        if places or not host_path.startswith("/"):
            raise RetryableError(
                f"{_FLAG} {host_path} is not a file on the host: install the NVIDIA container toolkit there, "
                "or give the absolute path at which it is"
            )
        note = (
            f"{_FLAG} {host_path} lies where this process does not see the host, so it is used without a check; "
            "to have it checked, mount the host's root and name it with --host-root"
        )
        return Hook(host_path, BASE_HOOK_VERBS, (note,))

    def _asked(self, host_path: str, root: str, resolved: str) -> Hook:
        """The hook with its verbs. The program runs once, and again when its file was replaced; one thread at a
        time."""
        arguments = ["hook", "--help"] if host_path.endswith("/nvidia-ctk") else ["--help"]
        local = join_root(root, resolved)
        with self._lock:
            key = (host_path, local, *_identity(local))
            if self._answer is None or self._answer[0] != key:
                self._answer = (key, _known_verbs(root, resolved, arguments))
            verbs, problem = self._answer[1]
        if problem is None:
            return Hook(host_path, verbs)
        note = f"{host_path} does not tell its verbs ({problem}); only {' and '.join(verbs)} are used"
        return Hook(host_path, verbs, (note,))


def _known_verbs(root: str, resolved: str, arguments: list[str]) -> tuple[tuple[str, ...], str | None]:
    """The verbs that are safe to use, and why the program did not tell them.

    The program is first run as it is, which works for static programs and most others. If that fails, it is run with
    its root as `/`: toolkits of operators are scripts that call a program by its host path.
    """
    attempts = [[join_root(root, resolved), *arguments]]
    if root.rstrip("/"):
        attempts.append(["chroot", root, resolved, *arguments])
    deadline = time.monotonic() + _BOUND_S
    problem = None
    for command in attempts:
        text, failure = _output(command, deadline)
        problem = problem or failure
        if failure is None:
            listed = _listed_verbs(text)
            return (*BASE_HOOK_VERBS, *(verb for verb in MORE_HOOK_VERBS if verb in listed)), None
    return BASE_HOOK_VERBS, problem


def _listed_verbs(text: str) -> set[str]:
    section = _COMMANDS.search(text.replace("\r\n", "\n") + "\n")
    return set(_VERB.findall(section[1])) if section is not None else set()


def _output(command: list[str], deadline: float) -> tuple[str, str | None]:
    """What a program prints, and why it failed. The deadline ends every process that it started."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": _PATH},
            start_new_session=True,
        ) as process:
            try:
                out, _ = process.communicate(timeout=max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                return "", f"it did not end within {_BOUND_S:g} s"
    except OSError as error:
        return "", error.strerror or "it cannot be run"
    if process.returncode:
        return "", f"it ends with code {process.returncode}"
    return out.decode("utf-8", errors="replace"), None


def _identity(path: str) -> tuple[object, ...]:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
