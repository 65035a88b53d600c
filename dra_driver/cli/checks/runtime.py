"""The container runtime: does it read CDI specs, from the directory that gpu-dra-driver writes to?"""

from __future__ import annotations

import posixpath
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dra_driver.cli.checks.check import Check, not_written
from dra_driver.cli.rules.findings import Finding, fail, ok, skip
from dra_driver.cli.rules.runtime_config import (
    RuntimeConfig,
    containerd_config,
    crio_config,
    judge_runtimes,
)
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
