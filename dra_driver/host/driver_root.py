"""The NVIDIA driver's files below a driver root."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from dra_driver.base.atomic import is_settled, stamp_of
from dra_driver.errors import DriverGoneError, NvmlLibraryError, RetryableError, StateError
from dra_driver.host.device_nodes import DeviceNodeReader, DevRoot
from dra_driver.host.driver_programs import BINARY_DIRS, find_program
from dra_driver.host.hook import HookFinder
from dra_driver.host.libraries import (
    INSTALLATION,
    UNUSUAL_DIRS,
    USUAL_DIRS,
    Libraries,
    foreign_files,
    library_directories,
    linker_directories,
    note_of_left_out,
    scan_libraries,
    versioned_nvml_libraries,
)
from dra_driver.host.rooted_tree import RootedTree, join_root, text_of
from dra_driver.model.driver_files import DriverFile, DriverFiles, DriverLink, HostNode
from dra_driver.model.host import HostPaths

Fingerprint = tuple[object, ...]

_BINARIES: list[str] = INSTALLATION["binaries"]
_LDCONFIGS = ("/sbin/ldconfig.real", "/sbin/ldconfig", "/usr/sbin/ldconfig")
_SOCKETS = tuple(
    f"{run}/{daemon}/socket"
    for run in ("/run", "/var/run")
    for daemon in ("nvidia-persistenced", "nvidia-fabricmanager")
)
_FIRMWARE = re.compile(r"^(?:gsp|ucodes).*\.bin\Z")

# Wherever these files are on the host, containers get them in the directories that the loaders of all images search.
# On GKE, Vulkan's files are in the driver root itself.
_CONFIGS = [(group["files"], group["on_host"], group["in_container"]) for group in INSTALLATION["configs"]]
_XORG_TOPS = ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64")
_XORG_TAILS = tuple(
    f"{modules}/{kind}" for modules in ("modules", "modules/updates") for kind in ("drivers", "extensions")
)
_GLX_MODULE = "libglxserver_nvidia.so"
_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
_NEEDED_NODES = {
    "/dev/nvidiactl": "load the nvidia kernel module and run `nvidia-modprobe` on the host",
    "/dev/nvidia-uvm": "load the nvidia-uvm kernel module and run `nvidia-modprobe -u -c=0` on the host",
}
_JETSON_DIRS = tuple(f"/usr/lib/aarch64-linux-gnu/{name}" for name in ("tegra", "nvidia"))
# (system, why containers cannot get its GPU, files that only this system has)
_UNSUPPORTED = (
    (
        "WSL2",
        "its GPUs have no device nodes of their own, and their driver is the NVIDIA driver for Windows",
        ("/dev/dxg", "/usr/lib/wsl/lib"),
    ),
    (
        "Jetson and other Tegra systems",
        "their GPU is not a PCI device, and its driver (nvgpu) has different device nodes and libraries",
        ("/etc/nv_tegra_release", *(f"{directory}/libnvrm_gpu.so" for directory in _JETSON_DIRS)),
    ),
)
_WATCHED = (
    *USUAL_DIRS, *UNUSUAL_DIRS, *BINARY_DIRS, *_SOCKETS, *(f"{top}/{_XORG_TAILS[0]}" for top in _XORG_TOPS),
    "/etc/ld.so.cache", "/lib/firmware/nvidia",
    *dict.fromkeys(
        f"{top}/{path.rpartition('/')[0]}" for paths, tops, _ in _CONFIGS for top in tops for path in paths
    ),
)  # fmt: skip


_FRESH_S = 1.0
"""Pods that start together share one check."""


class DriverRoot:
    def __init__(self, paths: HostPaths, nodes: DeviceNodeReader, *, hook: str | None = None) -> None:
        """Read below the driver root. `hook` is the host path of nvidia-cdi-hook or nvidia-ctk."""
        self._paths = paths
        self._dev = DevRoot(paths, nodes)
        self._hook = HookFinder(paths, hook)
        self._lock = threading.Lock()
        self._known: tuple[Fingerprint, str | None, DriverFiles] | None = None
        self._read_at = 0.0

    def files(self, nvml_version: str | None) -> DriverFiles:
        """Like `scan`, but return the last result while nothing has changed.

        Results are not cached while an installation may be running: two changes within one tick of the file system's
        clock have the same time.
        """
        with self._lock:
            known = self._known
            read_at = self._read_at
        if known is not None and known[1] == nvml_version and time.monotonic() - read_at < _FRESH_S:
            return known[2]
        fingerprint = self.fingerprint()
        if known is not None and known[:2] == (fingerprint, nvml_version):
            with self._lock:
                self._read_at = time.monotonic()
            return known[2]
        # Checked before the scan, so that changes during the scan get a later time.
        is_quiet = all(is_settled(mark[2]) for mark in fingerprint if isinstance(mark, tuple))
        files = self.scan(nvml_version)
        with self._lock:
            self._known = (fingerprint, nvml_version, files) if is_quiet else None
        return files

    def fingerprint(self) -> Fingerprint:
        """Return a value that changes with the driver or toolkit, or when the hook must be checked again."""
        tree = RootedTree(self._paths.driver_root)
        marks: list[object] = [_mark(tree, path) for path in _WATCHED]
        trees = {self._paths.driver_root: tree}
        for root, path in self._hook.places():
            marks.append(_mark(trees.setdefault(root, RootedTree(root)), path))
        marks.extend(self._dev.node(path) for path in _NODES)
        marks.append(self._hook.expirations())
        return tuple(marks)

    def scan(self, nvml_version: str | None) -> DriverFiles:
        """Return the installed NVIDIA driver.

        Raises: RetryableError if a required part or the configured hook is missing, or if the files have a different
        version than the loaded driver (`nvml_version`).
        """
        tree = RootedTree(self._paths.driver_root)
        libraries, found, version = self._libraries(tree, nvml_version)
        nodes, notes = self._common_nodes()
        hook = self._hook.find()
        modules, module_links, foreign_modules = self._xorg_modules(
            tree, version, libraries.driver_directories
        )
        left_out = {**libraries.left_out, **foreign_modules}
        if left_out:
            notes += (note_of_left_out(self._paths.host_driver_root, left_out),)
        return DriverFiles(
            version=version,
            libraries=tuple(found),
            links=(
                *libraries.driver_links({file.container_path: file.host_path for file in found}),
                *module_links,
            ),
            library_dirs=libraries.directories,
            driver_dirs=libraries.driver_directories,
            linker_dirs=linker_directories((path for path, _ in libraries.files)),
            nodes=nodes,
            binaries=self._binaries(tree),
            firmware=self._firmware(tree, version),
            sockets=self._sockets(tree),
            configs=(*self._configs(tree), *modules),
            hook=hook.host_path,
            hook_verbs=hook.verbs,
            ldconfig=next((file.host_path for file in self._found(tree, _LDCONFIGS)), None),
            notes=(*notes, *hook.notes),
        )

    def problem(self, nvml_version: str | None) -> str | None:
        """Return the error that `scan` would raise, except for the hook."""
        try:
            self._libraries(RootedTree(self._paths.driver_root), nvml_version)
            self._common_nodes()
        except (RetryableError, StateError) as error:
            return str(error)
        return None

    def _libraries(
        self, tree: RootedTree, nvml_version: str | None
    ) -> tuple[Libraries, list[DriverFile], str]:
        libraries = scan_libraries(tree, nvml_version)
        try:
            version = self._checked_version(libraries, nvml_version)
            found = [self._file(file, path) for path, file in libraries.files]
            self._check_libraries(found, version)
        except RetryableError as error:
            unsupported = unsupported_system(tree, self._paths.host_driver_root)
            if unsupported is None:
                raise
            raise RetryableError(unsupported) from error
        return libraries, found, version

    def _file(self, resolved: str, container_path: str) -> DriverFile:
        return DriverFile(
            path=join_root(self._paths.driver_root, resolved),
            host_path=join_root(self._paths.host_driver_root, resolved),
            container_path=container_path,
        )

    def _found(self, tree: RootedTree, paths: Iterable[str]) -> tuple[DriverFile, ...]:
        resolved = ((path, tree.file(path)) for path in paths)
        return tuple(self._file(file, path) for path, file in resolved if file is not None)

    def _checked_version(self, libraries: Libraries, nvml_version: str | None) -> str:
        root = self._paths.host_driver_root
        if not libraries.versions and libraries.left_out:
            raise RetryableError(
                f"{note_of_left_out(root, libraries.left_out)}; "
                "install the NVIDIA driver for this machine, or set the driver root to where it is installed"
            )
        if not libraries.versions:
            raise RetryableError(
                f"libcuda.so.<version> is not below the driver root {root}; "
                "install the NVIDIA driver or set the driver root to where it is installed"
            )
        if nvml_version is not None and nvml_version not in libraries.versions:
            raise RetryableError(
                f"driver half upgraded: version {nvml_version} is loaded, but the files below {root} have "
                f"version {', '.join(libraries.versions)}; reload the NVIDIA kernel modules or reboot"
            )
        return libraries.versions[0]

    def _check_libraries(self, libraries: Iterable[DriverFile], version: str) -> None:
        names = {file.container_path.rpartition("/")[2] for file in libraries}
        if f"libnvidia-ml.so.{version}" not in names:
            raise RetryableError(
                f"libnvidia-ml.so.{version} is not below the driver root {self._paths.host_driver_root}; "
                "install the NVIDIA driver again"
            )

    def _common_nodes(self) -> tuple[tuple[HostNode, ...], tuple[str, ...]]:
        nodes = []
        notes = []
        for path in _NODES:
            node = self._dev.node(path)
            if node is not None:
                nodes.append(node)
            elif path in _NEEDED_NODES:
                raise RetryableError(f"device node {path} is missing on the host: {_NEEDED_NODES[path]}")
            else:
                notes.append(f"device node {path} is missing on the host; CUDA does not need it")
        return tuple(nodes), tuple(notes)

    def _binaries(self, tree: RootedTree) -> tuple[DriverFile, ...]:
        found = (find_program(tree.program, name) for name in _BINARIES)
        return tuple(self._file(resolved, path) for path, resolved in filter(None, found))

    def _firmware(self, tree: RootedTree, version: str) -> tuple[DriverFile, ...]:
        kernel = text_of(Path(self._paths.proc, "sys/kernel/osrelease")).strip()
        custom = text_of(Path(self._paths.sys, "module/firmware_class/parameters/path")).strip()
        places = [custom] if custom.startswith("/") else []
        for base in ("/lib/firmware/updates", "/lib/firmware"):
            places.extend([f"{base}/{kernel}", base] if kernel else [base])
        images: dict[str, None] = {}
        for place in places:
            directory = tree.directory(f"{place}/nvidia/{version}")
            names = [entry.name for entry in tree.entries(directory)] if directory is not None else []
            images.update(
                (f"{place}/nvidia/{version}/{name}", None) for name in sorted(names) if _FIRMWARE.match(name)
            )
        return self._found(tree, images)

    def _sockets(self, tree: RootedTree) -> tuple[DriverFile, ...]:
        found: dict[str, str] = {}
        for path in _SOCKETS:
            resolved = tree.file_or_socket(path)
            if resolved is not None:
                found.setdefault(resolved, path)
        return tuple(self._file(resolved, path) for resolved, path in found.items())

    def _xorg_modules(
        self, tree: RootedTree, version: str, driver_dirs: Iterable[str]
    ) -> tuple[list[DriverFile], list[DriverLink], dict[str, str]]:
        """Return the X server's modules, the link through which it loads GLX, and the modules for other
        architectures.
        """
        places: list[str] = []
        for directory in driver_dirs:
            top = directory.rstrip("/")
            places.extend((f"{top}/nvidia/xorg", *(f"{top}/xorg/{tail}" for tail in _XORG_TAILS)))
        places.extend(f"{top}/{tail}" for top in _XORG_TOPS for tail in _XORG_TAILS)
        modules, links = [], []
        foreign: dict[str, str] = {}
        for name in ("nvidia_drv.so", f"{_GLX_MODULE}.{version}"):
            paths = [path for place in places if tree.file(path := f"{place}/{name}") is not None]
            resolved = {path: tree.file(path) or path for path in paths}
            others = foreign_files(tree, resolved.values())
            foreign |= others
            own = (path for path, file in resolved.items() if file not in others)
            module = next(iter(self._found(tree, own)), None)
            if module is None:
                continue
            modules.append(module)
            if name.startswith(_GLX_MODULE):
                directory = module.container_path.rpartition("/")[0]
                links.append(DriverLink(f"{directory}/{_GLX_MODULE}", name, module.host_path))
        return modules, links, foreign

    def _configs(self, tree: RootedTree) -> tuple[DriverFile, ...]:
        found = []
        for paths, tops, top_in_container in _CONFIGS:
            for path in paths:
                resolved = next(filter(None, (tree.file(f"{top}/{path}") for top in tops)), None)
                if resolved is not None:
                    found.append(self._file(resolved, f"{top_in_container}/{path}"))
        return tuple(found)


def unsupported_system(tree: RootedTree, root: str) -> str | None:
    """Return a sentence that names an unsupported system below the driver root."""
    for name, reason, signs in _UNSUPPORTED:
        sign = next((path for path in signs if tree.resolve(path) is not None), None)
        if sign is not None:
            return (
                f"gpu-dra-driver does not support {name} (found {join_root(root, sign)}): {reason}; "
                "exclude this node with a node selector"
            )
    return None


def find_nvml_library(driver_root: str) -> str:
    """Return the path of the NVML library below a driver root, as this process sees it.

    Raises: DriverGoneError; NvmlLibraryError if all libraries found are for another architecture.
    """
    tree = RootedTree(driver_root)
    directories = library_directories(tree)
    linked = (tree.file(f"{directory.rstrip('/')}/libnvidia-ml.so.1") for directory in directories)
    found = [*filter(None, linked), *versioned_nvml_libraries(tree, directories)]
    foreign = foreign_files(tree, found)
    own = next((library for library in found if library not in foreign), None)
    if own is not None:
        return tree.local(own)
    if foreign:
        raise NvmlLibraryError(
            f"{note_of_left_out(driver_root, foreign)}; install the NVIDIA driver for this machine, set the "
            "driver root to where it is installed, or remove these libraries if this node has no GPU"
        )
    unsupported = unsupported_system(tree, driver_root)
    if unsupported is not None:
        raise DriverGoneError(unsupported)
    searched = ", ".join(tree.local(directory) for directory in (*USUAL_DIRS, *UNUSUAL_DIRS))
    raise DriverGoneError(
        f"libnvidia-ml.so.1 is not below the driver root {driver_root}; looked in {searched} and in "
        f"{tree.local('/etc/ld.so.cache')}: install the NVIDIA driver or set the driver root"
    )


def _mark(tree: RootedTree, path: str) -> tuple[int, int, int, int] | None:
    """Return the stamp and the file system: files in different driver images may have the same inode and time."""
    resolved = tree.resolve(path)
    if resolved is None:
        return None
    try:
        status = os.lstat(tree.local(resolved))
    except OSError:
        return None
    return (*stamp_of(status), status.st_dev)
