"""The container runtime: does it read CDI specs, from the directory that the driver writes to?"""

from __future__ import annotations

import json
import os
import posixpath
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_driver.host.rooted_tree import RootedTree
from dra_driver.services.checks.driver import named
from dra_driver.services.checks.outcome import Finding, fail, ok, skip, warn

JsonObject = dict[str, Any]

DEFAULT_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_CONTAINERD = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/k0s/containerd.toml",
)
_CRIO = ("/etc/crio/crio.conf",)
_CRIO_DIRECTORIES = ("/usr/share/crio/crio.conf.d", "/etc/crio/crio.conf.d")
_CRI_PLUGINS = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
_MOST_SPECS = 5000
_UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What a runtime's configuration says of CDI. `enabled` None: not said; `file` is a path on the host."""

    runtime: str
    file: str
    enabled: bool | None = None
    directories: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RuntimeChecks:
    """`host` is where this process sees the host's `/`, None if it does not; `cdi_root` is the driver's directory."""

    cdi_root: str
    host: str | None

    def runtime(self) -> Finding:
        """Does the runtime read specs from the driver's directory?"""
        if self.host is None:
            return skip(
                "the runtime's configuration is not visible from here; mount the host's / and name it --host-root"
            )
        try:
            found = list(read_configs(self.host))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            return fail(f"its configuration is no TOML: {error}", "repair the file, then restart the runtime")
        if not found:
            if not any(_canonical(self.cdi_root) == _canonical(path) for path in DEFAULT_DIRECTORIES):
                return warn(
                    f"no configuration found; runtimes read {' and '.join(DEFAULT_DIRECTORIES)}, not {self.cdi_root}",
                    f"run the driver with --cdi-root {DEFAULT_DIRECTORIES[1]}",
                )
            return ok(f"no configuration found; {self.cdi_root} is read by default (containerd 2, CRI-O)")
        return min((self._judged(config) for config in found), key=lambda item: _ORDER.index(item.status))

    def _judged(self, config: RuntimeConfig) -> Finding:
        directories = config.directories if config.directories is not None else DEFAULT_DIRECTORIES
        if config.enabled is False:
            return fail(
                f"{config.runtime}: CDI is off ({config.file})",
                f"set enable_cdi = true in {config.file}, then `systemctl restart {config.runtime}`",
            )
        if _canonical(self.cdi_root) not in map(_canonical, directories):
            return fail(
                f"{config.runtime} reads {', '.join(directories) or 'nothing'}, the driver writes to {self.cdi_root}",
                f"run the driver with --cdi-root {directories[-1] if directories else DEFAULT_DIRECTORIES[1]}, or add "
                f"{self.cdi_root} to cdi_spec_dirs in {config.file} and restart {config.runtime}",
            )
        if config.enabled is None and config.runtime == "containerd":
            return warn(
                f"containerd: enable_cdi is not set in {config.file}; off before 2.0, on since",
                f"`containerd --version`; before 2.0 set enable_cdi = true in {config.file} and restart it",
            )
        return ok(f"{config.runtime} reads {', '.join(directories)} ({config.file})")

    def directory(self) -> Finding:
        """Can specs be written?"""
        path = Path(self.cdi_root)
        if not path.exists():
            parent = next(parent for parent in path.parents if parent.exists())
            if os.access(parent, os.W_OK | os.X_OK):
                return ok(f"{path} will be made by the driver")
            return fail(
                f"{path} is not there and {parent} is not writable", f"`mkdir -p {path}` on the node, as root"
            )
        if not path.is_dir():
            return fail(f"{path} is no directory", f"`rm {path}`; the driver makes the directory")
        if not os.access(path, os.W_OK | os.X_OK):
            return fail(
                f"{path} is not writable", "mount it writable into the driver's pod; it has to run as root"
            )
        return ok(f"{path} is writable")

    def specs(self) -> Finding:
        """Specs that define a device twice, which makes runtimes drop both, and specs that cannot be read."""
        broken: list[str] = []
        count = 0
        for directory in self._spec_directories():
            owners: dict[str, str] = {}
            for file in _spec_files(directory):
                count += 1
                if count > _MOST_SPECS:
                    return warn(f"more than {_MOST_SPECS} specs; not all were read", f"clear up {directory}")
                spec = _spec(file)
                if spec is None:
                    broken.append(str(file))
                    continue
                for device in _devices(spec):
                    other = owners.setdefault(device, file.name)
                    if other != file.name:
                        return fail(
                            f"{device} is defined by {other} and {file.name} in {directory}; runtimes drop both",
                            f"find out who wrote them (`ls -l {directory}`) and remove one",
                        )
        if broken:
            return warn(f"not readable as CDI specs: {named(broken)}", f"look at it, then `rm {broken[0]}`")
        return ok(f"{count} specs, no device twice")

    def _spec_directories(self) -> list[Path]:
        """The driver's directory, and those that runtimes read, as this process sees them."""
        found = {_canonical(self.cdi_root): Path(self.cdi_root)}
        if self.host is not None:
            tree = RootedTree(self.host)
            for path in DEFAULT_DIRECTORIES:
                resolved = tree.directory(path)
                if resolved is not None:
                    found.setdefault(_canonical(path), Path(tree.local(resolved)))
        return [path for path in found.values() if path.is_dir()]


_ORDER = ("FAIL", "WARN", "SKIP", "OK")


def read_configs(host: str) -> Iterator[RuntimeConfig]:
    """What containerd and CRI-O on the host are told about CDI. Raises: tomllib.TOMLDecodeError."""
    tree = RootedTree(host)
    for path in _CONTAINERD:
        document = _toml(tree, path)
        if document is not None:
            yield _containerd(tree, path, document)
            break
    merged: JsonObject = {}
    last = None
    for path in (*_CRIO, *_drop_ins(tree)):
        document = _toml(tree, path)
        if document is not None:
            merged |= (document.get("crio") or {}).get("runtime") or {}
            last = path
    if last is not None:
        yield RuntimeConfig("crio", last, merged.get("enable_cdi", True), _paths(merged.get("cdi_spec_dirs")))


def _containerd(tree: RootedTree, path: str, document: JsonObject) -> RuntimeConfig:
    """Imported files win over the main one, as in containerd; what neither says is left to the version's default."""
    config = RuntimeConfig("containerd", path)
    for file, part in [(path, document), *_imports(tree, path, document)]:
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
                    )
    if config.enabled is None and document.get("version") == 3:
        # Only containerd 2 reads this version of the file, and there CDI is on.
        return RuntimeConfig("containerd", config.file, True, config.directories)
    return config


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


def _paths(value: Any) -> tuple[str, ...] | None:
    return tuple(str(path) for path in value) if isinstance(value, list) else None


def _canonical(path: str) -> str:
    """`/var/run` is `/run` everywhere."""
    clean = posixpath.normpath(path)
    return clean.removeprefix("/var") if clean.startswith("/var/run/") else clean


def _spec_files(directory: Path) -> list[Path]:
    return sorted(
        file for file in directory.iterdir() if file.suffix in (".json", ".yaml") and file.name[0] != "."
    )


def _spec(file: Path) -> JsonObject | None:
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".json":
            spec = json.loads(text)
        else:
            import yaml

            spec = yaml.safe_load(text)
    except FileNotFoundError:
        return {}  # a claim was unprepared meanwhile
    except Exception:  # noqa: BLE001  whatever is wrong with it, a runtime cannot use it
        return None
    return spec if isinstance(spec, dict) and isinstance(spec.get("devices", []), list) else None


def _devices(spec: JsonObject) -> Iterator[str]:
    kind = spec.get("kind")
    for device in spec.get("devices") or ():
        if isinstance(device, dict) and device.get("name"):
            yield f"{kind}={device['name']}"
