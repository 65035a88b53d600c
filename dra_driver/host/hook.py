"""nvidia-cdi-hook, installed by the container toolkit or the chart (`cdiHook.enabled`), and its verbs."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence

from dra_driver.base.atomic import stamp_or_none
from dra_driver.base.bounded_program import run_program
from dra_driver.errors import RetryableError
from dra_driver.host.rooted_tree import RootedTree, join_root
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.driver_files import BASE_HOOK_VERBS, MORE_HOOK_VERBS, NO_HOOK, exit_text
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
_RECHECK_AFTER_S = 30.0
"""After a failure of the hook, which a busy host or a mount may have caused."""
_LONGEST_CAUSE = 200
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMANDS = re.compile(r"^COMMANDS:\n((?:[ \t]+.*\n|\n)*)", re.MULTILINE)
_VERB = re.compile(r"^[ \t]+([a-z][a-z0-9-]*)", re.MULTILINE)
_VERSION = re.compile(r"^VERSION:\n[ \t]+v?(\d+)\.(\d+)\.(\d+)[ \t]*$", re.MULTILINE)
# In 1.20.0 this verb fails if the container's root is not writable, and then the container fails.
_SINCE = {"update-application-profile": (1, 20, 1)}
_CHROOT_FAILED, _CANNOT_RUN = 125, 126
_NONE = (
    "nvidia-cdi-hook was not found on the host: GPUs work, but containers get more mounts and start "
    "slower; install the NVIDIA container toolkit, set cdiHook.enabled in the chart, or set "
    "--nvidia-cdi-hook-path (and --host-root in a pod)"
)


@dataclass(frozen=True, slots=True)
class Hook:
    """`notes` say why no program is usable, or what was not checked."""

    host_path: str | None
    verbs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _View:
    """`root` is the directory's path for this process, `prefix` its path for the runtime."""

    root: str
    prefix: str
    places: tuple[str, ...] = _PLACES

    def inside(self, host_path: str) -> str | None:
        prefix = self.prefix.rstrip("/")
        return host_path[len(prefix) :] if host_path.startswith(f"{prefix}/") else None


class HookFinder:
    """Searches the host's `/`, then the plugin's own directory, where the chart installs the hook, then the driver
    root.

    The hook runs with the host's libraries, so a copy in a driver container is the last choice.
    """

    def __init__(self, paths: HostPaths, configured: str | None) -> None:
        """Search for `configured`, a host path; None: in the usual places; `none`: no hook."""
        views = [_View(paths.driver_root, paths.host_driver_root)]
        if paths.host_root is not None:
            views.insert(0, _View(paths.host_root, "/"))
        self._host = next((view for view in views if view.prefix == "/"), None)
        self._installed: _View | None = None
        if paths.plugin_directory is not None:
            self._installed = _View(paths.plugin_directory, paths.plugin_directory, (f"/{_NAME}",))
            views.insert(0 if self._host is None else 1, self._installed)
        self._views = tuple(dict.fromkeys(views))
        self._configured = configured
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[object, _Answer]] = {}
        self._expirations = 0

    def places(self) -> Iterator[tuple[str, str]]:
        """Yield (root, path below it) of every file on which `find` depends."""
        for view in self._views:
            if self._configured is None:
                yield from ((view.root, path) for path in view.places)
            else:
                inside = view.inside(self._configured)
                if inside is not None:
                    yield view.root, inside

    def expirations(self) -> int:
        """Return a number that grows when results of `find` have expired."""
        with self._lock:
            due = [path for path, (_, answer) in self._answers.items() if answer.is_due]
            for path in due:
                del self._answers[path]
            self._expirations += bool(due)
            return self._expirations

    def find(self) -> Hook:
        """Return the configured hook, else the first one found.

        Raises: RetryableError if the configured hook does not exist.
        """
        if self._configured == NO_HOOK:
            return Hook(None)
        views = [view for view in self._views if os.path.isdir(view.root)]  # noqa: PTH112
        if self._configured is not None:
            return self._configured_hook(self._configured, views)
        notes: tuple[str, ...] = ()
        for view in views:
            tree = RootedTree(view.root)
            resolved = next(filter(None, (tree.file(path) for path in view.places)), None)
            if resolved is None:
                continue
            hook = self._checked(join_root(view.prefix, resolved), view, resolved)
            if hook.host_path is not None:
                return hook
            notes = hook.notes
        return Hook(None, notes=notes or (_NONE,))

    def _configured_hook(self, host_path: str, views: list[_View]) -> Hook:
        places = [(view, inside) for view in views if (inside := view.inside(host_path)) is not None]
        for view, inside in places:
            resolved = RootedTree(view.root).file(inside)
            if resolved is not None:
                return self._checked(host_path, view, resolved)
        if places or not host_path.startswith("/"):
            raise RetryableError(
                f"{_FLAG} {host_path} is not a file on the host: install the NVIDIA container toolkit there, "
                "or set the flag to the absolute path of the hook"
            )
        note = (
            f"{_FLAG} {host_path} is not visible to this process, so the plugin uses it without a check; to "
            "check it, mount the host's root and set --host-root"
        )
        return Hook(host_path, BASE_HOOK_VERBS, (note,))

    def _checked(self, host_path: str, view: _View, resolved: str) -> Hook:
        """One thread at a time runs the program, again only after a change or an expired failure."""
        local = join_root(view.root, resolved)
        with self._lock:
            identity = (local, stamp_or_none(local))
            of, answer = self._answers.get(host_path, (None, None))
            if answer is None or of != identity or answer.is_due:
                answer = self._answer(host_path, view, resolved)
                self._answers[host_path] = identity, answer
        if answer.problem is None:
            return Hook(host_path, answer.verbs)
        if view is self._installed and answer.code and self._configured is None:
            note = (
                f"{host_path} does not run on the host ({answer.problem}) and is not used: GPUs work, but containers "
                "get more mounts and start slower; docs/cdi.md says what a host needs"
            )
            return Hook(None, notes=(note,))
        verbs = " and ".join(answer.verbs)
        note = f"{host_path} does not list its verbs ({answer.problem}); only {verbs} are used"
        return Hook(host_path, answer.verbs, (note,))

    def _answer(self, host_path: str, view: _View, resolved: str) -> _Answer:
        """Run the program directly, then with its root as `/`: operators install scripts that call a program by its
        host path.

        The program that `cdiHook.enabled` installs runs with the host's `/`, which must have its loader and libraries.
        """
        arguments = ["hook", "--help"] if host_path.endswith("/nvidia-ctk") else ["--help"]
        local = [join_root(view.root, resolved), *arguments]
        host = self._host
        if view is not self._installed:
            in_its_root = ["chroot", view.root, resolved, *arguments]
            return _answer_of([local, in_its_root] if view.root.rstrip("/") else [local])
        if host is not None and RootedTree(host.root).file(host_path) is not None:
            answer = _answer_of([["chroot", host.root, host_path, *arguments]])
            if answer.code != _CHROOT_FAILED:
                return answer
        return _answer_of([local])


@dataclass(frozen=True, slots=True)
class _Answer:
    """The verbs that are safe to use, and why the program failed. `code` is 126 if it could not be started, 0 if it did
    not finish in time. Valid until `due_at` (time.monotonic()).
    """

    verbs: tuple[str, ...]
    problem: str | None = None
    code: int = 0
    due_at: float = math.inf

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.due_at


def _answer_of(commands: Sequence[list[str]]) -> _Answer:
    """Return the first success, else the first fault."""
    deadline = time.monotonic() + _BOUND_S
    faults: list[_Answer] = []
    for command in commands:
        due_at = time.monotonic() + _RECHECK_AFTER_S
        try:
            timeout_s = max(0.01, deadline - time.monotonic())
            code, text = run_program(command, {"PATH": _PATH}, timeout_s=timeout_s, slot=_NAME)
        except TimeoutError:
            problem, code = f"it did not finish within {_BOUND_S:g} s", 0
        except OSError as error:
            problem, code = error.strerror or "it cannot be started", _CANNOT_RUN
        else:
            if not code:
                listed, version = _listed_verbs(text), _version(text)
                more = (
                    verb for verb in MORE_HOOK_VERBS if verb in listed and _SINCE.get(verb, ()) <= version
                )
                return _Answer((*BASE_HOOK_VERBS, *more))
            cause = _last_line(text)
            problem, due_at = f"it failed with {exit_text(code)}{cause and f': {cause}'}", math.inf
        faults.append(_Answer(BASE_HOOK_VERBS, problem, code, due_at))
    return replace(faults[0], due_at=min(fault.due_at for fault in faults))


def _version(text: str) -> tuple[int, ...]:
    found = _VERSION.search(text)
    return tuple(int(part) for part in found.groups()) if found is not None else ()


def _listed_verbs(text: str) -> set[str]:
    section = _COMMANDS.search(text + "\n")
    return set(_VERB.findall(section[1])) if section is not None else set()


def _last_line(said: str) -> str:
    """Return the line in which the loader or chroot reports why a program does not run."""
    lines = said.strip().splitlines()
    return "".join(filter(str.isprintable, lines[-1]))[:_LONGEST_CAUSE].strip() if lines else ""
