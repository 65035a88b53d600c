"""What an installed NVIDIA driver consists of, and what one device adds to a container."""

from __future__ import annotations

from dataclasses import dataclass

from dra_driver.model.host import DeviceNode

NO_HOOK = "none"
"""In the place of the hook's path: CDI specs have no hooks. With some runtimes NVIDIA's fail in a user namespace."""

BASE_HOOK_VERBS = ("create-symlinks", "update-ldcache")
"""The verbs that every nvidia-cdi-hook knows."""

MORE_HOOK_VERBS = ("enable-cuda-compat", "disable-device-node-modification", "update-application-profile")
"""Verbs that only newer ones know. An older hook fails with such a verb, and then the container fails too."""


@dataclass(frozen=True, slots=True)
class DriverFile:
    """A file with its three paths: for this process, for the container runtime on the host, and in the container."""

    path: str
    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class DriverLink:
    """A symbolic link to make in the container at `path`; `host_path` is the file it leads to."""

    path: str
    target: str
    host_path: str


@dataclass(frozen=True, slots=True)
class HostNode:
    """A device node to give to a container at `node.path`; `host_path` is where the runtime finds it."""

    node: DeviceNode
    host_path: str


@dataclass(frozen=True, slots=True)
class CdiMount:
    """A bind mount into a container."""

    host_path: str
    container_path: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """The parts of a driver installation that every container with a GPU gets.

    `library_dirs` are the container paths of all directories with libraries, `driver_dirs` those of the NVIDIA driver's
    own directories without their subdirectories; `linker_dirs` are where dynamic linkers of images look by default.
    `hook` and `ldconfig` are host paths, None if there is none; the hook knows the verbs `hook_verbs`. `notes` name
    missing parts that CUDA does not need."""

    version: str
    libraries: tuple[DriverFile, ...]
    nodes: tuple[HostNode, ...]
    links: tuple[DriverLink, ...] = ()
    binaries: tuple[DriverFile, ...] = ()
    firmware: tuple[DriverFile, ...] = ()
    sockets: tuple[DriverFile, ...] = ()
    configs: tuple[DriverFile, ...] = ()
    library_dirs: tuple[str, ...] = ()
    driver_dirs: tuple[str, ...] = ()
    linker_dirs: tuple[str, ...] = ()
    hook: str | None = None
    hook_verbs: tuple[str, ...] = BASE_HOOK_VERBS
    ldconfig: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """One device of a claim as its containers get it.

    `nodes` are necessary, `drm` nodes serve graphics; `links` are (path, target) pairs; `env` entries
    have the form `NAME=value`. With `admin_access` the claim only looks at the device.
    """

    name: str
    nodes: tuple[HostNode, ...]
    drm: tuple[HostNode, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    env: tuple[str, ...] = ()
    mounts: tuple[CdiMount, ...] = ()
    admin_access: bool = False
