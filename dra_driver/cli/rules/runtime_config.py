"""What a container runtime's configuration says of CDI, and whether our specs are read with it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.cli.rules.findings import HELM_SET, Finding, fail, ok, warn, worst

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
                HELM_SET.format(f"cdiDirectory={DEFAULT_DIRECTORIES[1]}"),
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
            f"{HELM_SET.format(f'cdiDirectory={other}')}, or add {cdi_root} to cdi_spec_dirs in {file}, "
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
