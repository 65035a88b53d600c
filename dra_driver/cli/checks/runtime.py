"""Checks that the container runtime reads CDI specs from gpu-dra-driver's directory."""

from __future__ import annotations

import json
import posixpath
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dra_driver.base.installation import helm_set
from dra_driver.cli.checks.check import Check, not_written
from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn, worst
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.host import HostPaths
from dra_driver.model.schema import JsonObject

DEFAULT_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_CONTAINERD = (
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/k0s/containerd.toml",
    "/etc/containerd/config.toml",
)
"""If a file of a distribution exists, /etc/containerd/config.toml belongs to Docker, so it comes last."""
_CRI_PLUGINS = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
_CRIO_FILE = "/etc/crio/crio.conf"
_CRIO_DIRECTORIES = ("/usr/share/crio/crio.conf.d", "/etc/crio/crio.conf.d")
_SOCKETS = (
    ("containerd", "/run/k3s/containerd/containerd.sock"),
    ("containerd", "/var/snap/microk8s/common/run/containerd.sock"),
    ("containerd", "/run/k0s/containerd.sock"),
    ("containerd", "/run/containerd/containerd.sock"),
    ("crio", "/run/crio/crio.sock"),
    ("docker", "/run/cri-dockerd.sock"),
)
"""In the order of the configuration files. RKE2 uses the socket of k3s."""
_ANSWER_WITHIN_S = 2.0
DOCKER = (
    "the runtime is Docker (cri-dockerd), which cannot give containers the devices of claims",
    "set up the node with containerd or CRI-O (`kubeadm join --cri-socket`)",
)

Toml = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """`enabled` is None if the setting is missing; `version` is that of containerd's file format."""

    runtime: str
    file: str
    enabled: bool | None = None
    directories: tuple[str, ...] | None = None
    version: int = 3


@dataclass(frozen=True, slots=True)
class RuntimeChecks:
    """`host` is where this process sees the host's `/`, None if it cannot."""

    cdi_root: str
    host: str | None

    def runtime(self) -> Finding:
        if self.host is None:
            return skip(
                "the runtime's configuration is not visible from here; mount the host's / and set --host-root"
            )
        tree = RootedTree(self.host)
        answers = answering(tree)
        try:
            found = {config.runtime: config for config in read_configs(tree)}
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            return fail(
                f"the configuration is not valid TOML: {error}", "repair the file, then restart the runtime"
            )
        # If a runtime is running, files of other runtimes are ignored.
        known = [_with_answer(found.get(name), name, answer or {}) for name, answer in answers.items()]
        silent = [name for name, answer in answers.items() if answer is None]
        if silent:
            return warn(
                f"{silent[0]} did not answer within {_ANSWER_WITHIN_S:g} s",
                f"check `systemctl status {silent[0]}` on the node, then run doctor again",
            )
        return judge_runtimes(known or list(found.values()), self.cdi_root)

    def directory(self) -> Finding:
        path = Path(self.cdi_root)
        if not path.exists():
            parent = next(parent for parent in path.parents if parent.exists())
            return not_written(parent) or ok(f"{path} does not exist yet; gpu-dra-driver creates it")
        if not path.is_dir():
            return fail(
                f"{path} is not a directory",
                f"run `rm {path}`; gpu-dra-driver then creates the directory",
            )
        return not_written(path) or ok(f"gpu-dra-driver can write to {path}")

    def all(self) -> list[Check]:
        return [
            Check("runtime", self.runtime),
            Check("CDI directory", self.directory),
        ]


def host_directory(paths: HostPaths, *, simulated: bool, in_pod: bool) -> str | None:
    if simulated or paths.host_root is not None:
        return paths.host_root or paths.driver_root
    if paths.host_driver_root == "/":
        return paths.driver_root
    return None if in_pod else "/"


def answering(tree: RootedTree) -> Mapping[str, JsonObject | None]:
    """Return the configurations that runtimes report through their CRI sockets, by name; None if late.

    Runtimes that do not run or serve CRI, such as Docker's containerd, are left out.
    """
    import grpc

    from dra_driver.kubelet.grpc_server import call_method
    from dra_driver.kubelet.pb import cri_v1_pb2 as cri

    found: dict[str, JsonObject | None] = {}
    for name, path in _SOCKETS:
        socket = None if name in found else tree.file_or_socket(path)
        if socket is not None:
            try:
                answer = call_method(
                    Path(tree.local(socket)),
                    "/runtime.v1.RuntimeService/Status",
                    cri.StatusRequest(verbose=True),
                    cri.StatusResponse,
                    _ANSWER_WITHIN_S,
                )
                config = json.loads(answer.info.get("config", "{}"))
                found[name] = config.get("crio", config)
            except ValueError:
                found[name] = {}
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    found[name] = None
    return found


def _with_answer(config: RuntimeConfig | None, name: str, answer: JsonObject) -> RuntimeConfig:
    """Merge a runtime's answer into its configuration. containerd and CRI-O spell the same keys differently."""
    config = config or RuntimeConfig(name, _CRIO_FILE if name == "crio" else _CONTAINERD[-1])
    settings = {key.lower(): value for key, value in answer.items()}
    enabled, directories = settings.get("enablecdi"), _paths(settings.get("cdispecdirs"))
    return replace(
        config,
        enabled=config.enabled if enabled is None else bool(enabled),
        directories=config.directories if directories is None else directories,
    )


def read_configs(tree: RootedTree) -> Iterator[RuntimeConfig]:
    """Yield the settings of containerd and CRI-O. Raises: tomllib.TOMLDecodeError."""
    for path in _CONTAINERD:
        document = _toml(tree, path)
        if document is not None:
            if not any("cri" in str(name) for name in document.get("disabled_plugins") or ()):
                yield containerd_config(path, document, _imports(tree, path, document))
            break
    documents = {path: _toml(tree, path) for path in (_CRIO_FILE, *_drop_ins(tree))}
    crio = crio_config({path: document for path, document in documents.items() if document is not None})
    if crio is not None:
        yield crio


def _imports(tree: RootedTree, path: str, document: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for pattern in document.get("imports") or ():
        place = posixpath.join(posixpath.dirname(path), str(pattern))
        directory, name = posixpath.split(place)
        resolved = tree.directory(directory)
        if resolved is None or not name:
            continue
        for file in sorted(Path(tree.local(resolved)).glob(name)):
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


def containerd_config(path: str, document: Toml, imported: Iterable[tuple[str, Toml]]) -> RuntimeConfig:
    version = document.get("version")
    config = RuntimeConfig("containerd", path, version=version if isinstance(version, int) else 1)
    for file, part in [(path, document), *imported]:
        plugins = part.get("plugins") or {}
        for cri in filter(None, map(plugins.get, _CRI_PLUGINS)):
            enabled, directories = cri.get("enable_cdi"), _paths(cri.get("cdi_spec_dirs"))
            if enabled is not None:
                config = replace(config, file=file, enabled=bool(enabled))
            if directories is not None:
                config = replace(config, file=file, directories=directories)
    # Only containerd 2 reads files of version 3, and it enables CDI by default.
    return replace(config, enabled=True) if config.enabled is None and config.version >= 3 else config


def crio_config(documents: Mapping[str, Toml]) -> RuntimeConfig | None:
    if not documents:
        return None
    merged: dict[str, Any] = {}
    for document in documents.values():
        merged |= (document.get("crio") or {}).get("runtime") or {}
    return RuntimeConfig(
        "crio", list(documents)[-1], merged.get("enable_cdi", True), _paths(merged.get("cdi_spec_dirs"))
    )


def judge_runtimes(found: Sequence[RuntimeConfig], cdi_root: str) -> Finding:
    others = [config for config in found if config.runtime != "docker"]
    if found and not others:
        return fail(*DOCKER)
    if not found:
        if not any(canonical(cdi_root) == canonical(path) for path in DEFAULT_DIRECTORIES):
            return warn(
                f"no configuration found; runtimes read {' and '.join(DEFAULT_DIRECTORIES)} by default, not {cdi_root}",
                helm_set(f"cdiDirectory={DEFAULT_DIRECTORIES[1]}"),
            )
        return ok(f"no configuration found; containerd 2 and CRI-O read {cdi_root} by default")
    return worst(_judged(config, cdi_root) for config in others)


_RANCHER = "/var/lib/rancher/{}/agent/etc/containerd/config-v3.toml.tmpl"
_OWN_FILES = (
    ("/rancher/k3s/", _RANCHER.format("k3s"), "systemctl restart k3s-agent || systemctl restart k3s"),
    ("/rancher/rke2/", _RANCHER.format("rke2"), "systemctl restart rke2-agent || systemctl restart rke2-server"),
    ("/microk8s/", "/var/snap/microk8s/current/args/containerd-template.toml", "snap restart microk8s"),
    ("/etc/k0s/", "/etc/k0s/containerd.d/cdi.toml", "k0s stop && k0s start"),
)  # fmt: skip
"""Part of a generated file's path, the file to edit instead, and the restart command."""


def _edited(config: RuntimeConfig) -> tuple[str, str]:
    # With containerd 1, whose files have version 2, k3s and RKE2 name the template differently.
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
            f"{config.runtime} reads {', '.join(directories) or 'nothing'}, but gpu-dra-driver writes to {cdi_root}",
            f"{helm_set(f'cdiDirectory={other}')}, or add {cdi_root} to cdi_spec_dirs in {file}, "
            f"then `{restart}`",
        )
    if config.enabled is None and config.runtime == "containerd":
        return warn(
            f"containerd: enable_cdi is not set in {config.file}; the default is off before containerd 2.0, and on "
            "from 2.0",
            f"set enable_cdi = true in {file}, then `{restart}`",
        )
    return ok(f"{config.runtime} reads {', '.join(directories)} ({config.file})")


def _paths(value: Any) -> tuple[str, ...] | None:
    return tuple(str(path) for path in value) if isinstance(value, list) else None


def canonical(path: str) -> str:
    clean = posixpath.normpath(path)
    return clean.removeprefix("/var") if clean.startswith("/var/run/") else clean
