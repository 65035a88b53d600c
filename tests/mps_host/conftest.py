"""A host with simulated control daemons; after each test nothing of it may run or be mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from debian_programs import Programs

from dra_driver.base.atomic import QUARANTINE
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.gpu_nodes import CapabilityNodes, MigCaps
from dra_driver.host.rooted_tree import text_of
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories, MpsMember
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon import HostTools
from dra_driver.mps_host.daemon_compute_mode import ComputeMode
from dra_driver.mps_host.daemon_control import DaemonControl, Timings
from dra_driver.mps_host.daemon_mounts import MountsWherePossible, SelinuxLabels
from dra_driver.mps_host.host_files import MpsHostFiles, MpsLayout
from dra_driver.mps_host.host_supervisor import Supervisor
from dra_driver.simulator import Machine, SimulatedDeviceNodes, create_machine
from tests.fakes.mps_behaviour import behave, misbehave
from tests.fakes.waiting import PATIENCE_S

NO_LABELS = SelinuxLabels(enabled=False)
GROUP = (2, 3, 4)
"""GPUs that one daemon may serve together."""
FAST = Timings(
    start=PATIENCE_S,
    answer=10.0,
    patience=1.0,
    first_backoff=0.02,
    look=0.005,
    idle=0.005,
    longest_backoff=0.1,
    tick=0.02,
    probe=0.1,
    exclusive=0.1,
)
RETRIED_LATER = {"first_backoff": 600.0, "longest_backoff": 600.0}
"""For a test that checks what a failed start leaves behind: the host does not retry the start during the test."""


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """MPS daemons have a /dev/shm of their own."""
    return disk_path


@pytest.fixture(autouse=True)
def logs(monkeypatch):
    """Log lines are kept, not printed. Scripts find this very Python without a wrapper."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}")
    with structlog.testing.capture_logs() as lines:
        yield lines


class Served(Supervisor):
    """A supervisor, and the plugin that uses it."""

    def __init__(self, tools: HostTools) -> None:
        super().__init__(tools)
        files = MpsHostFiles(tools.layout)
        self.ensure, self.stop = files.ensure, files.stop


class MpsHost:
    """A directory, a driver root, and as many supervisors one after the other as a test wants."""

    def __init__(
        self, top: Path, driver_root: Path, make_capability_nodes: Callable[[], None] = lambda: None
    ) -> None:
        self.layout = MpsLayout(top / "mps")
        programs = InstalledPrograms(str(driver_root), self.layout.libraries, 0o755)
        self.tools = HostTools(
            self.layout,
            programs,
            MountsWherePossible(self.layout.root, NO_LABELS),
            ComputeMode(programs),
            make_capability_nodes,
            NO_LABELS,
            FAST,
        )
        self._open: list[Served] = []

    def supervisor(self, **changes: object) -> Served:
        timings = replace(FAST, **{k: v for k, v in changes.items() if k in FAST.__slots__})
        others = {k: v for k, v in changes.items() if k not in FAST.__slots__}
        one = Served(
            replace(
                self.tools, layout=self.layout, timings=timings, **{"closing": threading.Event(), **others}
            )
        )
        one.open()
        self._open.append(one)
        return one

    def pipe(self, device: str = "gpu-2") -> str:
        return self.layout.directories(device).pipe

    def directories(self, device: str = "gpu-2") -> MpsDirectories:
        return self.layout.directories(device)

    def control(self, device: str = "gpu-2") -> DaemonControl:
        """The control daemon of a device that no limits are set for."""
        return DaemonControl(
            self.tools.programs, MpsDaemonSpec(device, "", "gpu", ""), self.directories(device)
        )

    def left(self) -> list[str]:
        """Return everything that a daemon could leave below the host's directory, except files for people."""
        own = {"host.alive", "host.lock", "host.lib", "host.modes", "host.wanted", "host.status"}
        running = (
            path
            for path in self.layout.statuses.iterdir()
            if (text := text_of(path)) and '"state":"failed"' not in text.replace(": ", ":")
        )
        names = [path.name for path in (*self.layout.root.iterdir(), *running)]
        return sorted(name for name in names if name not in own and QUARANTINE not in name)

    def close(self) -> None:
        for one in self._open:
            one.close()
        for path in self.layout.root.iterdir() if self.layout.root.exists() else ():
            if path.is_dir():
                processes.end(processes.users_of(str(path / "pipe")), 2.0)
                self.tools.mounter.unmount(path / "shm")
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class Host(MpsHost):
    """One whose driver root is that of a simulated machine."""

    def __init__(self, top: Path, machine: Machine) -> None:
        self.machine = machine
        root = str(machine.host_root)
        nodes = CapabilityNodes(MigCaps(f"{root}/proc"), root, SimulatedDeviceNodes(machine.host_root))
        super().__init__(top, machine.host_root, nodes.make_missing)

    def spec(self, index: int = 2, **changes: object) -> MpsDaemonSpec:
        uuid = self.machine.gpu(index).uuid
        return replace(MpsDaemonSpec(f"gpu-{index}", uuid, "gpu", uuid), **changes)

    def behave(self, **rules: object) -> None:
        misbehave(self.machine.host_root, **rules)

    def group_spec(
        self, *, limits: tuple[int | None, ...] = (None, None, None), **changes: object
    ) -> MpsDaemonSpec:
        """The one daemon of GPUs 2 to 4, in this order."""
        first, *others = (
            MpsMember(f"gpu-{index}", self.machine.gpu(index).uuid, limit)
            for index, limit in zip(GROUP, limits, strict=True)
        )
        spec = MpsDaemonSpec(first.device, first.gpu_uuid, "gpu", first.gpu_uuid, others=tuple(others))
        return replace(spec, default_memory_limit_mib=limits[0], **changes)

    def compute_mode(self, index: int = 2) -> int:
        return self.machine.compute_mode(self.machine.gpu(index).uuid)

    def modes(self) -> list[int]:
        return [self.compute_mode(index) for index in GROUP]

    def daemons(self) -> tuple[processes.ProcessId, ...]:
        return tuple(user for index in GROUP for user in processes.users_of(self.pipe(f"gpu-{index}")))

    def assert_nothing_left(self) -> None:
        assert (self.left(), self.daemons(), self.modes()) == ([], (), [0, 0, 0])

    def assert_stops_without_a_trace(self, plugin: Any) -> None:
        """The daemon of gpu-2, and it is the last one."""
        plugin.stop("gpu-2", PATIENCE_S)
        self.assert_nothing_left()

    def client(self, device: str = "gpu-2", **environment: str) -> list[str]:
        """What a CUDA program prints that works through the daemon."""
        done = subprocess.run(
            [self.machine.host_root / "usr/bin/mps-client"],
            env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": self.pipe(device), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Machine:
    return create_machine("h100-mig-static", tmp_path_factory.mktemp("machine"), device_nodes="described")


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory with a short path, as sockets need it; finally nothing may be mounted below it."""
    made = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    yield made
    mounted = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(made) in line]
    shutil.rmtree(made)
    assert mounted == []


@pytest.fixture
def host(machine: Machine, top: Path) -> Iterator[Host]:
    version = machine.driver_version
    one = Host(top, machine)
    yield one
    one.close()
    behave(machine.host_root)
    machine.clear_faults()
    if machine.driver_version != version:
        machine.load_driver(version)
    for index in range(8):
        machine.set_compute_mode(machine.gpu(index).uuid, 0)


@pytest.fixture
def real_host(nvidia: Programs, top: Path) -> Iterator[MpsHost]:
    """One with NVIDIA's own programs, and neither a GPU nor a kernel driver."""
    one = MpsHost(top, nvidia.root)
    yield one
    one.close()
