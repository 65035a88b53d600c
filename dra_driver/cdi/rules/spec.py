"""CDI specs: one per claim. A spec lists the NVIDIA driver's files once, and the device nodes of each device.

If a claim's record is lost, only the spec says which devices the claim has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dra_driver.errors import ClaimRefusedError, RetryableError
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.driver_files import CdiDevice, CdiMount, DriverFile, DriverFiles, HostNode
from dra_driver.model.ids import is_uid
from dra_driver.model.mps import MpsDirectories, MpsShared
from dra_driver.model.plan import device_of_cdi_name, share_of_cdi_name

CLASS = "claim"
COMMON = "containerEdits"
"""The NVIDIA driver's files: most of a spec, and usually equal in all specs."""

_FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_SOCKET_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
_COMMON_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_WORLD_RW = 0o006
_LIBRARY_SUBDIRS = ("gbm", "vdpau")

ADMIN_ACCESS = "DRA_ADMIN_ACCESS=true"
"""Kubernetes' example driver sets the same variable."""
MAINTENANCE = "MAINTENANCE_GPUS="
"""The UUIDs of a maintenance claim's GPUs: a privileged container, which can reset a GPU, sees all GPUs."""

# Without these, an installed NVIDIA container runtime would inject GPUs too: it reads which GPUs to inject from
# the environment or, if so configured, from mounts.
_NO_SECOND_INJECTION = "NVIDIA_VISIBLE_DEVICES=void"
_NO_INJECTION_BY_MOUNT = CdiMount(
    "/dev/null", "/var/run/nvidia-container-devices/void", ("ro", "nosuid", "nodev", "bind")
)
PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  CUDA's default path, inside the container
_SHM_DIRECTORY = "/dev/shm"  # noqa: S108
_MOUNT_OPTIONS = ("rw", "nosuid", "nodev", "bind")


def checked_claim_uid(claim_uid: str) -> str:
    """Return a UID that can be part of names of files and CDI devices. Raises: ClaimRefusedError."""
    if not is_uid(claim_uid):
        raise ClaimRefusedError(
            f"claim UID {claim_uid!r} cannot be part of a file name, so the claim is refused"
        )
    return claim_uid


def spec_kind(driver_name: str) -> str:
    return f"k8s.{driver_name}/{CLASS}"


def device_name(claim_uid: str, device: str) -> str:
    """Include the UID, because runtimes cache specs, so a name must not be reused."""
    return f"{claim_uid}-{device}"


def cdi_id(driver_name: str, claim_uid: str, device: str) -> str:
    return f"{spec_kind(driver_name)}={device_name(claim_uid, device)}"


def file_stem(driver_name: str, claim_uid: str) -> str:
    return f"k8s.{driver_name}-{CLASS}_{checked_claim_uid(claim_uid)}"


def encode(spec: dict[str, Any], common: bytes | None = None) -> bytes:
    """Return the content of a spec file. Equal specs yield equal bytes.

    `common` is the encoded `containerEdits` field, if it was encoded before.
    """
    parts = (
        encoded(key) + b":" + (common if common is not None and key == COMMON else encoded(value))
        for key, value in spec.items()
    )
    return b"{" + b",".join(parts) + b"}\n"


def encoded(part: Any) -> bytes:
    return json.dumps(part, separators=(",", ":")).encode("ascii")


def claim_spec(
    claim_uid: str,
    driver_name: str,
    driver: DriverFiles,
    devices: Sequence[CdiDevice],
    common: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the spec of a claim's devices. Equal devices are listed once. `common` may be a cached result of
    `common_edits`.

    Raises: RetryableError if a required device node is missing; ClaimRefusedError if the claim has no device, or two
    different devices with the same name.
    """
    edits = common_edits(driver) if common is None else common
    return _spec(claim_uid, driver_name, {COMMON: edits}, devices, driver.hook)


def vfio_spec(claim_uid: str, driver_name: str, devices: Sequence[CdiDevice]) -> dict[str, Any]:
    """Return the spec of devices for virtual machines. Raises: as `claim_spec`.

    Each device is complete by itself, because Kata reads them one by one.
    """
    alone = [replace(device, env=(_NO_SECOND_INJECTION, *device.env)) for device in devices]
    return _spec(claim_uid, driver_name, {}, alone, None)


def _spec(
    claim_uid: str,
    driver_name: str,
    common: dict[str, Any],
    devices: Sequence[CdiDevice],
    hook: str | None,
) -> dict[str, Any]:
    checked_claim_uid(claim_uid)
    spec: dict[str, Any] = {
        "cdiVersion": "",
        "kind": spec_kind(driver_name),
        **common,
        "devices": [
            {
                "name": device_name(claim_uid, device.name),
                "containerEdits": _device_edits(device, hook),
            }
            for device in _distinct(claim_uid, devices)
        ],
    }
    spec["cdiVersion"] = minimum_version(spec)
    return spec


def minimum_version(spec: dict[str, Any]) -> str:
    """Return the lowest CDI version that has all fields of the spec, because older runtimes refuse newer versions."""
    edits = [spec.get(COMMON, {}), *(device["containerEdits"] for device in spec["devices"])]
    if any("additionalGids" in edit for edit in edits):
        return "0.7.0"
    if any("hostPath" in node for edit in edits for node in edit.get("deviceNodes", ())):
        return "0.5.0"
    if any(device["name"][:1].isdecimal() for device in spec["devices"]):
        return "0.5.0"
    return "0.3.0"


def _check_common_nodes(driver: DriverFiles) -> None:
    present = {node.node.path for node in driver.nodes}
    for path in _COMMON_NODES:
        if path not in present:
            raise RetryableError(
                f"device node {path} is missing on the host, and no container can use a GPU without it; "
                "load the NVIDIA kernel modules and run `nvidia-modprobe -u -c=0` on the host"
            )


def _distinct(claim_uid: str, devices: Sequence[CdiDevice]) -> list[CdiDevice]:
    """Merge equal devices: two requests may have the same device, one of them with adminAccess."""
    by_name: dict[str, CdiDevice] = {}
    for device in devices:
        if not device.nodes:
            raise RetryableError(
                f"device {device.name} has no device node on the host, so its container would have no GPU; "
                "load the NVIDIA driver and run `nvidia-modprobe` on the host"
            )
        if by_name.setdefault(device.name, device) != device:
            raise ClaimRefusedError(
                f"claim {claim_uid} has device {device.name} twice with different settings; "
                "use the same configuration for both requests"
            )
    if not by_name:
        raise ClaimRefusedError(f"claim {claim_uid} has no device of this driver; a CDI spec needs one")
    return [by_name[name] for name in sorted(by_name)]


def common_edits(driver: DriverFiles) -> dict[str, Any]:
    """Return the edits that every container gets. Raises: RetryableError if a required device node is missing."""
    _check_common_nodes(driver)
    env = [_NO_SECOND_INJECTION]
    if driver.driver_dirs:
        env.append(f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(driver.driver_dirs)}")
    files = (*driver.libraries, *driver.binaries, *driver.firmware, *driver.configs)
    mounts = [
        *_file_mounts(files, _FILE_OPTIONS),
        *_file_mounts(driver.sockets, _SOCKET_OPTIONS),
        _cdi_mount(_NO_INJECTION_BY_MOUNT),
    ]
    if driver.hook is None:
        taken = {file.container_path for file in files}
        mounts.extend(
            _mount(host_path, path, _FILE_OPTIONS)
            for path, host_path in _names_without_hook(driver).items()
            if path not in taken
        )
    edits: dict[str, Any] = {"env": env, **_node_edits(driver.nodes), "mounts": mounts}
    if driver.hook is not None:
        edits["hooks"] = _common_hooks(driver, driver.hook)
    return edits


def with_nodes(edits: dict[str, Any], nodes: Sequence[HostNode]) -> dict[str, Any]:
    return {**edits, "deviceNodes": [*edits["deviceNodes"], *(_node(node) for node in nodes)]}


def node_paths(spec: Mapping[str, Any]) -> list[str]:
    edits = [spec.get(COMMON, {}), *(device["containerEdits"] for device in spec["devices"])]
    return [node["path"] for edit in edits for node in edit.get("deviceNodes", ())]


def _names_without_hook(driver: DriverFiles) -> dict[str, str]:
    """Return the file to mount at each path, if no hook creates links or runs ldconfig in the container.

    Every library is mounted under all its names, at its host path and in each default directory of common dynamic
    linkers, because an image of another distribution may not search the directories of this host.
    """
    names = {link.path: link.host_path for link in driver.links}
    known = [(file.container_path, file.host_path) for file in driver.libraries]
    # X server modules are not loaded by a dynamic linker.
    modules = {file.host_path for file in driver.configs}
    known.extend((path, host_path) for path, host_path in names.items() if host_path not in modules)
    for path, host_path in known:
        directory, _, name = path.rpartition("/")
        below = directory.rpartition("/")[2]
        tail = f"{below}/{name}" if below in _LIBRARY_SUBDIRS else name
        for linker_dir in driver.linker_dirs:
            names.setdefault(f"{linker_dir}/{tail}", host_path)
    return names


def _common_hooks(driver: DriverFiles, hook: str) -> list[dict[str, Any]]:
    """Put the hook for links first, because enable-cuda-compat and ldconfig need the links."""
    hooks = []
    if driver.links:
        hooks.append(_symlink_hook(hook, ((link.path, link.target) for link in driver.links)))
    if "enable-cuda-compat" in driver.hook_verbs:
        hooks.append(_hook(hook, "enable-cuda-compat", [f"--host-driver-version={driver.version}"]))
    ldconfig = ["--ldconfig-path", driver.ldconfig] if driver.ldconfig is not None else []
    folders = [text for directory in driver.library_dirs for text in ("--folder", directory)]
    hooks.append(_hook(hook, "update-ldcache", [*ldconfig, *folders]))
    if "disable-device-node-modification" in driver.hook_verbs:
        hooks.append(_hook(hook, "disable-device-node-modification", []))
    if "update-application-profile" in driver.hook_verbs:
        hooks.append(_hook(hook, "update-application-profile", []))
    return hooks


def _device_edits(device: CdiDevice, hook: str | None) -> dict[str, Any]:
    edits = _node_edits((*device.nodes, *device.drm))
    env = [*device.env, *((ADMIN_ACCESS,) if device.admin_access else ())]
    if env:
        edits["env"] = env
    if device.mounts:
        edits["mounts"] = [_cdi_mount(mount) for mount in device.mounts]
    if device.links and hook is not None:
        edits["hooks"] = [_symlink_hook(hook, device.links)]
    return edits


def _node_edits(nodes: Sequence[HostNode]) -> dict[str, Any]:
    """Add the groups that a non-root user needs to open the nodes."""
    edits: dict[str, Any] = {"deviceNodes": [_node(node) for node in nodes]}
    gids = {node.node.gid for node in nodes if node.node.mode & _WORLD_RW != _WORLD_RW} - {0}
    if gids:
        edits["additionalGids"] = sorted(gids)
    return edits


def _node(node: HostNode) -> dict[str, Any]:
    """Include type and numbers, so that the runtime does not look the node up on the host."""
    device = node.node
    entry: dict[str, Any] = {"path": device.path}
    if node.host_path != device.path:
        entry["hostPath"] = node.host_path
    entry.update(
        type=device.type, major=device.major, minor=device.minor, fileMode=device.mode, permissions="rwm"
    )
    if device.uid:
        entry["uid"] = device.uid
    if device.gid:
        entry["gid"] = device.gid
    return entry


def _file_mounts(files: Iterable[DriverFile], options: Sequence[str]) -> list[dict[str, Any]]:
    return [_mount(file.host_path, file.container_path, options) for file in files]


def _cdi_mount(mount: CdiMount) -> dict[str, Any]:
    return _mount(mount.host_path, mount.container_path, mount.options)


def _mount(host_path: str, container_path: str, options: Sequence[str]) -> dict[str, Any]:
    return {"hostPath": host_path, "containerPath": container_path, "options": list(options)}


def _symlink_hook(hook: str, links: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return _hook(
        hook, "create-symlinks", [text for path, target in links for text in ("--link", f"{target}::{path}")]
    )


def _hook(hook: str, verb: str, args: Sequence[str]) -> dict[str, Any]:
    program = hook.rpartition("/")[2]
    command = [program, "hook", verb] if program == "nvidia-ctk" else [program, verb]
    return {
        "hookName": "createContainer",
        "path": hook,
        "args": [*command, *args],
        "env": ["NVIDIA_CTK_DEBUG=false"],
    }


def with_mps(device: CdiDevice, usage: MpsShared, directories: MpsDirectories) -> CdiDevice:
    """Add the MPS daemon's pipe and shared memory, and the claim's limits.

    The limits are environment variables because several claims may share the daemon. CUDA can only lower the daemon's
    own limits. If the daemon has several GPUs, each device sets the limits of all, by the daemon's device numbers,
    because the runtime keeps only one value of the variable.
    """
    env = [f"CUDA_MPS_PIPE_DIRECTORY={PIPE_DIRECTORY}"]
    limits = usage.memory_limits_mib or (usage.memory_limit_mib,)
    by_number = [f"{number}={limit}M" for number, limit in enumerate(limits) if limit is not None]
    if by_number:
        env.append(f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={','.join(by_number)}")
    if usage.active_thread_percentage is not None:
        env.append(f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={usage.active_thread_percentage}")
    mounts = (
        CdiMount(directories.pipe, PIPE_DIRECTORY, _MOUNT_OPTIONS),
        CdiMount(directories.shm, _SHM_DIRECTORY, _MOUNT_OPTIONS),
    )
    return replace(device, env=(*device.env, *env), mounts=(*device.mounts, *mounts))


@dataclass(frozen=True, slots=True)
class SpecDevice:
    """`in_maintenance` are the UUIDs of the GPUs that the claim takes out of service."""

    device: str
    share_id: str | None = None
    admin_access: bool = False
    uses_mps: bool = False
    in_maintenance: tuple[str, ...] = ()


def devices_of(claim_uid: str, spec: Mapping[str, Any] | None) -> tuple[SpecDevice, ...]:
    devices = (spec or {}).get("devices")
    return tuple(
        _device(str(entry["name"]).removeprefix(f"{claim_uid}-"), entry)
        for entry in (devices if isinstance(devices, list) else ())
        if isinstance(entry, dict) and "name" in entry
    )


def _device(name: str, entry: Mapping[str, Any]) -> SpecDevice:
    edits = entry.get("containerEdits")
    env, mounts = _listed(edits, "env"), _listed(edits, "mounts")
    return SpecDevice(
        device_of_cdi_name(name),
        share_of_cdi_name(name),
        ADMIN_ACCESS in env,
        any(isinstance(mount, dict) and mount.get("containerPath") == PIPE_DIRECTORY for mount in mounts),
        tuple(
            uuid
            for one in env
            if isinstance(one, str) and one.startswith(MAINTENANCE)
            for uuid in one.removeprefix(MAINTENANCE).split(",")
        ),
    )


def _listed(edits: object, field: str) -> list[object]:
    found = edits.get(field) if isinstance(edits, dict) else None
    return found if isinstance(found, list) else []
