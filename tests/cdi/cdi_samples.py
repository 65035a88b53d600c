"""A driver and devices for tests of CDI specs."""

from pathlib import Path
from typing import Any

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.spec_step import CdiSteps, ExtraDeviceFinder
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.model.driver_files import (
    BASE_HOOK_VERBS,
    MORE_HOOK_VERBS,
    CdiDevice,
    CdiMount,
    DriverFile,
    DriverFiles,
    DriverLink,
    HostNode,
)
from dra_driver.model.host import DeviceNode, HostPaths
from dra_driver.mps_host.host_files import mps_layout
from tests.fakes.preparing import no_programs

UID = "dab5ab50-d59a-42a6-af16-cfd4628c0f7a"
DRIVER = "gpu.nvidia.com"
LIB = "/usr/lib64"


def file(path: str) -> DriverFile:
    return DriverFile(f"/driver-root{path}", f"/run/nvidia/driver{path}", path)


def node(path: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> HostNode:
    return HostNode(DeviceNode(path, "c", major, minor, mode, 0, gid), path)


def driver(
    hook: str | None = "/usr/bin/nvidia-cdi-hook",
    libraries: int = 1,
    verbs: tuple[str, ...] = (*BASE_HOOK_VERBS, *MORE_HOOK_VERBS),
) -> DriverFiles:
    names = ("libcuda", *(f"libnvidia-part{index}" for index in range(libraries - 1)))
    files = tuple(file(f"{LIB}/{name}.so.570.1") for name in names)
    return DriverFiles(
        version="570.1",
        libraries=files,
        links=tuple(
            DriverLink(f"{LIB}/{name}.so.1", f"{name}.so.570.1", found.host_path)
            for name, found in zip(names, files, strict=True)
        ),
        binaries=(file("/usr/bin/nvidia-smi"),),
        sockets=(file("/run/nvidia-persistenced/socket"),),
        library_dirs=(LIB,),
        driver_dirs=(LIB,),
        nodes=(node("/dev/nvidiactl", 195, 255), node("/dev/nvidia-uvm", 511, 0)),
        linker_dirs=("/usr/lib/x86_64-linux-gnu", "/usr/lib64"),
        hook=hook,
        hook_verbs=verbs,
        ldconfig="/run/nvidia/driver/sbin/ldconfig",
    )


def gpu(minor: int) -> CdiDevice:
    return CdiDevice(
        name=f"gpu-0000000{minor}",
        nodes=(HostNode(DeviceNode(f"/dev/nvidia{minor}", "c", 195, minor), f"/host/dev/nvidia{minor}"),),
        drm=(node(f"/dev/dri/renderD{128 + minor}", 226, 128 + minor, 0o660, 109),),
        links=((f"/dev/dri/by-path/pci-0000:0{minor}:00.0-render", f"../renderD{128 + minor}"),),
    )


def mig() -> CdiDevice:
    return CdiDevice(
        name="mig-a",
        nodes=(node("/dev/nvidia0", 195, 0), node("/dev/nvidia-caps/nvidia-cap21", 236, 21, 0o444)),
        env=("CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",),
        mounts=(CdiMount("/var/mps/pipe", "/tmp/nvidia-mps", ("rw", "nosuid", "nodev", "bind")),),
    )


def steps_over(directory: Path, specs: CdiDirectory, paths: HostPaths, nodes: Any, **parts: Any) -> CdiSteps:
    """The step of CDI specs over the host of `paths`, for a plugin below `directory`."""
    made = {
        "driver_version": lambda: None,
        "ledger": None,
        "cards": None,
        "extra_devices": ExtraDeviceFinder(paths, no_programs, nodes=nodes),
        **parts,
    }
    found = (DriverRoot(paths, nodes=nodes), GpuNodes(paths, nodes=nodes))
    return CdiSteps(DRIVER, specs, *found, mps=mps_layout(directory / "plugin"), **made)
