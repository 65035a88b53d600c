"""From a simulated host to CDI specs, compared with golden files.

`make golden` rewrites the golden files.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.cdi.rules.spec import claim_spec
from dra_driver.host.driver_programs import find_program
from dra_driver.host.driver_root import DriverRoot, find_nvml_library
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.driver_files import CdiDevice
from dra_driver.model.host import HostPaths
from dra_driver.simulator import SimulatedDeviceNodes, create_machine, machine_names
from tests.cdi.cdi_schema import faults
from tests.fakes.tables import tabled

UID = "dab5ab50-d59a-42a6-af16-cfd4628c0f7a"
GOLDEN = Path(__file__).parent / "golden"


class Host:
    def __init__(self, name: str, directory: Path, *, cdi_hook: bool = True) -> None:
        machine = create_machine(name, directory, device_nodes="described", cdi_hook=cdi_hook)
        root = str(machine.host_root)
        self.root = machine.host_root
        self.paths = HostPaths(root, "/", proc=f"{root}/proc", sys=f"{root}/sys")
        nodes = SimulatedDeviceNodes(machine.host_root)
        self.driver = DriverRoot(self.paths, nodes=nodes)
        self.nodes = GpuNodes(self.paths, nodes=nodes)
        self.sysfs = Sysfs(self.paths.sys, self.paths.proc)

    @property
    def version(self) -> str:
        return (self.root / "sys/module/nvidia/version").read_text().strip()

    def minors(self) -> dict[str, int]:
        """GPU minors by bus ID, as the driver reports them."""
        found = {}
        for file in sorted(self.root.glob("proc/driver/nvidia/gpus/*/information")):
            match = re.search(r"Device Minor:\s*(\d+)", file.read_text())
            found[file.parent.name] = int(match[1])
        return found

    def whole_gpus(self) -> list[CdiDevice]:
        return [
            self.nodes.whole_gpu(f"gpu-{minor}", minor, bus_id) for bus_id, minor in self.minors().items()
        ]

    def mig_devices(self) -> list[CdiDevice]:
        found = []
        for bus_id, minor in self.minors().items():
            mig = self.root / f"proc/driver/nvidia/capabilities/gpu{minor}/mig"
            for file in sorted(mig.glob("gi*/ci*/access")):
                gi, ci = (int(part[2:]) for part in file.parts[-3:-1])
                found.append(self.nodes.mig_device(f"mig-{minor}-{gi}-{ci}", minor, bus_id, gi, ci))
        return found


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_gives_specs_that_runtimes_take(name: str, tmp_path: Path) -> None:
    host = Host(name, tmp_path)
    files = host.driver.scan(host.version)
    assert find_nvml_library(str(host.root)).startswith(str(host.root))
    assert find_program(RootedTree(str(host.root)).program, "nvidia-smi") == (
        "/usr/bin/nvidia-smi",
        "/usr/bin/nvidia-smi",
    )
    devices = [*host.whole_gpus(), *host.mig_devices()]
    assert len(host.minors()) <= len(host.sysfs.gpu_functions())
    spec = claim_spec(UID, "gpu.nvidia.com", files, devices)
    assert faults(spec) == []
    mounts = spec["containerEdits"]["mounts"]
    containers = [mount["containerPath"] for mount in mounts]
    assert len(containers) == len(set(containers))
    for mount in mounts:
        # Every host has /dev/null; a simulated one has the nodes of its machine only.
        assert mount["hostPath"] == "/dev/null" or (host.root / mount["hostPath"].lstrip("/")).exists()


@tabled("name", "kind", "hook")
def test_a_claim_gets_exactly_this(
    name: str, kind: str, hook: bool, tmp_path: Path, is_golden: Callable[[Path, str], None]
) -> None:
    host = Host(name, tmp_path, cdi_hook=hook)
    devices = host.whole_gpus() if kind == "gpu" else host.mig_devices()
    spec = claim_spec(UID, "gpu.nvidia.com", host.driver.scan(host.version), devices[:2])
    golden = GOLDEN / f"{name}-{kind}{'' if hook else '-without-hook'}.json"
    is_golden(golden, json.dumps(spec, indent=1) + "\n")
