"""The container runtime: does it read CDI specs, from the directory that gpu-dra-driver writes to?"""

from __future__ import annotations

import posixpath
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.base.installation import helm_set
from dra_driver.cli.checks.check import Check, not_written
from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn, worst
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.host import HostPaths
from dra_driver.model.schema import JsonObject

_CONTAINERD = (
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/k0s/containerd.toml",
    "/etc/containerd/config.toml",
)
"""That of a distribution comes first: where there is one, the last file is Docker's."""
_CRIO = ("/etc/crio/crio.conf",)
_CRIO_DIRECTORIES = ("/usr/share/crio/crio.conf.d", "/etc/crio/crio.conf.d")
_UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class RuntimeChecks:
    """`host` is where this process sees the host's `/`, None if nowhere; `cdi_root` is the directory of our specs."""

    cdi_root: str
    host: str | None

    def runtime(self) -> Finding:
        """Does the runtime read specs from the directory of ours?"""
        if self.host is None:
            return skip(
                "the runtime's configuration is not visible from here; mount the host's / and name it --host-root"
            )
        try:
            found = list(read_configs(self.host))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            return fail(
                f"its configuration is not valid TOML: {error}", "repair the file, then restart the runtime"
            )
        return judge_runtimes(found, self.cdi_root)

    def directory(self) -> Finding:
        """Can specs be written?"""
        path = Path(self.cdi_root)
        if not path.exists():
            parent = next(parent for parent in path.parents if parent.exists())
            return not_written(parent) or ok(f"{path} does not exist yet; gpu-dra-driver makes it")
        if not path.is_dir():
            return fail(f"{path} is not a directory", f"`rm {path}`; gpu-dra-driver makes the directory")
        return not_written(path) or ok(f"a file can be written to {path}")

    def all(self) -> list[Check]:
        """From the runtime's configuration to the directory that it reads."""
        return [
            Check("runtime", self.runtime),
            Check("CDI directory", self.directory),
        ]


def host_directory(paths: HostPaths, *, simulated: bool, in_pod: bool) -> str | None:
    """Where this process sees the host's `/`: the mount for it, the driver root if the NVIDIA driver is installed
    there, or its own `/` outside of a pod. None if it does not see it."""
    if simulated or paths.host_root is not None:
        return paths.host_root or paths.driver_root
    if paths.host_driver_root == "/":
        return paths.driver_root
    return None if in_pod else "/"


def read_configs(host: str) -> Iterator[RuntimeConfig]:
    """What the files of containerd and CRI-O on the host say about CDI. Raises: tomllib.TOMLDecodeError."""
    tree = RootedTree(host)
    for path in _CONTAINERD:
        document = _toml(tree, path)
        if document is not None:
            imported = _imports(tree, path, document)
            yield containerd_config(path, document, imported)
            break
    documents = ((path, _toml(tree, path)) for path in (*_CRIO, *_drop_ins(tree)))
    crio = crio_config([(path, document) for path, document in documents if document is not None])
    if crio is not None:
        yield crio


def _imports(tree: RootedTree, path: str, document: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for pattern in document.get("imports") or ():
        place = posixpath.join(posixpath.dirname(path), str(pattern))
        directory, name = posixpath.split(place)
        resolved = tree.directory(directory)
        if resolved is None:
            continue
        for file in sorted(Path(tree.local(resolved)).glob(name or _UNNAMED)):
            inside = posixpath.join(directory, file.name)
            part = _toml(tree, inside)
            if part is not None:
                yield inside, part


def _drop_ins(tree: RootedTree) -> Iterator[str]:
    for directory in _CRIO_DIRECTORIES:
        resolved = tree.directory(directory)
        names = sorted(entry.name for entry in tree.entries(resolved)) if resolved is not None else []
        yield from (f"{directory}/{name}" for name in names if not name.startswith("."))


def _toml(tree: RootedTree, path: str) -> JsonObject | None:
    resolved = tree.file(path)
    if resolved is None:
        return None
    return tomllib.loads(Path(tree.local(resolved)).read_text("utf-8"))


DEFAULT_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_CRI_PLUGINS = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")

Toml = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What a runtime's configuration says of CDI. `enabled` None: not said; `file` is a path on the host, and `version`
    that of containerd's configuration."""

    runtime: str
    file: str
    enabled: bool | None = None
    directories: tuple[str, ...] | None = None
    version: int = 3


def containerd_config(path: str, document: Toml, imported: Iterable[tuple[str, Toml]]) -> RuntimeConfig:
    """The main file with those that it imports, which win, as in containerd. What none of them says is left to the
    default of containerd's version."""
    version = document.get("version")
    number = version if isinstance(version, int) else 1
    config = RuntimeConfig("containerd", path, version=number)
    for file, part in [(path, document), *imported]:
        plugins = part.get("plugins") or {}
        for name in _CRI_PLUGINS:
            cri = plugins.get(name)
            if isinstance(cri, dict):
                enabled, directories = cri.get("enable_cdi"), _paths(cri.get("cdi_spec_dirs"))
                if enabled is not None or directories is not None:
                    config = RuntimeConfig(
                        "containerd",
                        file,
                        config.enabled if enabled is None else bool(enabled),
                        config.directories if directories is None else directories,
                        number,
                    )
    if config.enabled is None and number >= 3:
        # Only containerd 2 reads these versions of the file, and there CDI is on.
        return RuntimeConfig("containerd", config.file, True, config.directories, number)
    return config


def crio_config(documents: Sequence[tuple[str, Toml]]) -> RuntimeConfig | None:
    """The main file and its drop-ins by path, in CRI-O's order: later ones win. None without any."""
    if not documents:
        return None
    merged: dict[str, Any] = {}
    for _, document in documents:
        merged |= (document.get("crio") or {}).get("runtime") or {}
    last = documents[-1][0]
    return RuntimeConfig("crio", last, merged.get("enable_cdi", True), _paths(merged.get("cdi_spec_dirs")))


def judge_runtimes(found: Sequence[RuntimeConfig], cdi_root: str) -> Finding:
    """The worst that is to be said of the runtimes, if gpu-dra-driver writes its specs to `cdi_root`."""
    if not found:
        if not any(canonical(cdi_root) == canonical(path) for path in DEFAULT_DIRECTORIES):
            return warn(
                f"no configuration found; runtimes read {' and '.join(DEFAULT_DIRECTORIES)}, not {cdi_root}",
                helm_set(f"cdiDirectory={DEFAULT_DIRECTORIES[1]}"),
            )
        return ok(f"no configuration found; {cdi_root} is read by default (containerd 2, CRI-O)")
    return worst(_judged(config, cdi_root) for config in found)


_RANCHER = "/var/lib/rancher/{}/agent/etc/containerd/config-v3.toml.tmpl"
_OWN_FILES = (
    ("/rancher/k3s/", _RANCHER.format("k3s"), "systemctl restart k3s-agent || systemctl restart k3s"),
    ("/rancher/rke2/", _RANCHER.format("rke2"), "systemctl restart rke2-agent || systemctl restart rke2-server"),
    ("/microk8s/", "/var/snap/microk8s/current/args/containerd-template.toml", "snap restart microk8s"),
    ("/etc/k0s/", "/etc/k0s/containerd.d/cdi.toml", "k0s stop && k0s start"),
)  # fmt: skip
"""By a part of the path of the file that is read: the file that a person edits, and what restarts the runtime. The file
that is read is generated from it."""


def _edited(config: RuntimeConfig) -> tuple[str, str]:
    # Of containerd 1, which has version 2 of the file, the template of k3s and RKE2 has another name.
    old = "config-v3" if config.version < 3 else ""
    own = [
        (file.replace(old, "config") if old else file, restart)
        for part, file, restart in _OWN_FILES
        if part in config.file
    ]
    return own[0] if own else (config.file, f"systemctl restart {config.runtime}")


def _judged(config: RuntimeConfig, cdi_root: str) -> Finding:
    file, restart = _edited(config)
    directories = config.directories if config.directories is not None else DEFAULT_DIRECTORIES
    if config.enabled is False:
        return fail(
            f"{config.runtime}: CDI is off ({config.file})",
            f"set enable_cdi = true in {file}, then `{restart}`",
        )
    if canonical(cdi_root) not in map(canonical, directories):
        other = directories[-1] if directories else DEFAULT_DIRECTORIES[1]
        return fail(
            f"{config.runtime} reads {', '.join(directories) or 'nothing'}, gpu-dra-driver writes to {cdi_root}",
            f"{helm_set(f'cdiDirectory={other}')}, or add {cdi_root} to cdi_spec_dirs in {file}, "
            f"then `{restart}`",
        )
    if config.enabled is None and config.runtime == "containerd":
        return warn(
            f"containerd: enable_cdi is not set in {config.file}; off before 2.0, on since",
            f"set enable_cdi = true in {file}, then `{restart}`",
        )
    return ok(f"{config.runtime} reads {', '.join(directories)} ({config.file})")


def _paths(value: Any) -> tuple[str, ...] | None:
    return tuple(str(path) for path in value) if isinstance(value, list) else None


def canonical(path: str) -> str:
    """`/var/run` is `/run` everywhere."""
    clean = posixpath.normpath(path)
    return clean.removeprefix("/var") if clean.startswith("/var/run/") else clean
