"""What the containers of a claim need to work through an MPS daemon, with the claim's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dra_driver.model.driver_files import CdiDevice, CdiMount
from dra_driver.model.mps import MpsDirectories
from dra_driver.model.sharing_mode import MpsShared

PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  where CUDA looks by itself, inside the container
_SHM_DIRECTORY = "/dev/shm"  # noqa: S108
_MOUNT_OPTIONS = ("rw", "nosuid", "nodev", "bind")


def with_mps(device: CdiDevice, usage: MpsShared, directories: MpsDirectories) -> CdiDevice:
    """The device with the daemon's pipe and shared memory, and the claim's limits.

    The limits are in the environment, because they belong to the claim, and several claims may share the daemon. CUDA
    can only tighten the daemon's own limits. A device goes by its number in the daemon. Each device of a daemon of
    several GPUs brings the limits of all: the runtime keeps one of the variables.
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


def uses_mps(spec: Mapping[str, Any] | None) -> bool:
    """Whether a device of a CDI spec works through MPS."""
    devices = (spec or {}).get("devices") or []
    mounts = [mount for device in devices for mount in device.get("containerEdits", {}).get("mounts") or []]
    return any(mount.get("containerPath") == PIPE_DIRECTORY for mount in mounts)
