"""Every check of `doctor`: OK, a warning, a failure with its remedy, or skipped."""

from __future__ import annotations

import errno
import inspect
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import grpc
import pytest
import yaml
from playground.apiserver.server import PlaygroundApiServer

from dra_driver.app.settings import Settings
from dra_driver.base.file_lock import hold_file
from dra_driver.cli.checks.check import BOUND_S, Check, Shared, folded, not_written, run_checks
from dra_driver.cli.checks.cluster import ClusterChecks, required_permissions
from dra_driver.cli.checks.driver import DriverChecks
from dra_driver.cli.checks.kubelet import KubeletChecks
from dra_driver.cli.checks.passthrough import PassthroughChecks
from dra_driver.cli.checks.runtime import RuntimeChecks
from dra_driver.cli.doctor import _NVML_WAIT_S
from dra_driver.cli.rules.findings import Finding, Outcome, fail, ok, skip, warn
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.rules.node_view import NodeView, SeenGpu, SeenProcess
from dra_driver.cli.state_on_disk import read_state
from dra_driver.errors import ApiRejectedError, NvmlLibraryError, NvmlUnavailableError
from dra_driver.health.store import HealthStore
from dra_driver.host import imex
from dra_driver.host.device_nodes import DevCharLinks
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.kube.api_errors import PathNotFoundError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint, load_endpoint
from dra_driver.kubelet.grpc_server import unary
from dra_driver.kubelet.pb import cri_v1_pb2
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.gpu import UnreadyFabric
from dra_driver.model.host import DeviceNode
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.model.mig import MigLayouts, Partitioning, Placement
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.model.problems import FailingClaim, NodeProblem, ProblemCode
from dra_driver.model.record import ClaimRecord
from dra_driver.model.remedies import reset
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.model.steps import CreateMig, SetTimeSlice, Step
from dra_driver.mps_host.host_files import WANTED_FILE, mps_layout
from dra_driver.reporting.node_problems import Reported
from dra_driver.simulator import SimulatedDeviceNodes
from tests.fakes.machines import SimulatedNode
from tests.fakes.tables import data_of, tabled
from tests.fakes.waiting import PATIENCE_S
from tests.kubelet.support import serve

ROOT = Path(__file__).parents[2]
DRIVER, NODE = "gpu.nvidia.com", "node-a"
CompareFinding = Callable[[Finding], None]
_DIFFERS = re.compile(
    rf"{re.escape(gettempdir())}/(pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?(memory\d+/)?[\w-]+|k-\w+)"
    r"|/dev/shm/gpu-dra-\w+/\w+|(?<=127.0.0.1:)\d+"
)
"""Directories and ports."""
Look = Callable[[], Finding | Sequence[Finding]]
HEALTHY = NodeView(
    NODE,
    DRIVER,
    "",
    gpus=tuple(SeenGpu(f"gpu-{number}", f"GPU-{number}", health="ok") for number in range(8)),
)


def settings(**more: Any) -> Settings:
    return Settings(node_name=NODE, driver_name=DRIVER, **more)


def says(finding: Finding, status: str, *parts: str) -> None:
    """The status, and all parts in what was seen and the remedy. What is not fine has a remedy."""
    text = f"{finding.seen} -> {finding.remedy}"
    assert finding.status == status, text
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert (finding.remedy is not None) == (status in ("WARN", "FAIL"))


@pytest.fixture
def assert_golden(
    request: pytest.FixtureRequest, is_golden: Callable[[Path, str], None]
) -> Iterator[CompareFinding]:
    """Take findings; all of a test are compared with a golden file, without what differs from run to run."""
    found: list[str] = []

    def tell(finding: Finding) -> None:
        says(finding, finding.status)
        text = f"{finding.status} {finding.seen}" + (f"\n  -> {finding.remedy}" if finding.remedy else "")
        found.append(f"{_DIFFERS.sub('...', text)}\n")

    yield tell
    is_golden(Path(__file__).parent / "golden/doctor" / f"{request.node.originalname}.txt", "".join(found))


CLASSES = (ClusterChecks, DriverChecks, KubeletChecks, PassthroughChecks, RuntimeChecks)


@pytest.mark.parametrize("checks", CLASSES, ids=lambda found: found.__name__)
def test_each_method_with_a_finding_is_a_check_of_doctor(checks: type) -> None:
    methods = {
        name
        for name, method in vars(checks).items()
        if not name.startswith("_") and "Finding" in str(getattr(method, "__annotations__", {}).get("return"))
    }
    listed = set(re.findall(r"\bself\.(\w+)", inspect.getsource(checks.all)))
    assert methods
    assert methods <= listed


# --- running them -------------------------------------------------------------------------------


def test_a_check_that_hangs_holds_nothing_up(assert_golden: CompareFinding) -> None:
    release = threading.Event()

    def hang() -> Finding:
        release.wait(PATIENCE_S)
        return ok("late")

    (outcome,) = run_checks([Check("e", hang)], bound_s=0.05)
    release.set()
    assert_golden(outcome.finding)


def test_a_check_that_waits_twice_for_nvml_still_has_time_for_saved_state() -> None:
    """For the list of GPUs, and then for what they report."""
    assert 2 * _NVML_WAIT_S + 1 <= BOUND_S


def test_a_check_that_crashes_is_its_own_failure(assert_golden: CompareFinding) -> None:
    def crash() -> Finding:
        raise ZeroDivisionError("a\nb")

    def refuse() -> Finding:
        raise NvmlUnavailableError("NVML is away; load it")

    def unreadable() -> Finding:
        raise PermissionError(13, "Permission denied", "/etc/x")

    looks: dict[str, Look] = {"a": crash, "b": refuse, "c": lambda: ok("fine"), "d": unreadable}
    outcomes = run_checks([Check(name, look) for name, look in looks.items()])
    found = {outcome.check: outcome.finding for outcome in outcomes}
    assert list(found) == list(looks)
    assert_golden(found["a"])
    assert_golden(found["b"])
    assert_golden(found["c"])
    assert_golden(found["d"])


def test_a_check_of_several_things_has_a_line_for_each() -> None:
    outcomes = run_checks([Check("a", lambda: [ok("one"), ok("two")]), Check("b", lambda: ok("three"))])
    assert outcomes == [Outcome("a", ok("one")), Outcome("a", ok("two")), Outcome("b", ok("three"))]


def test_checks_that_cannot_run_for_one_cause_are_one_line() -> None:
    away = skip("not checked without the API server")
    outcomes = [
        Outcome("API server", fail("it is away", "start it")),
        Outcome("node", away),
        Outcome("device plugin", skip("not visible from here")),
        Outcome("clock", away),
        Outcome("disk", ok("fine")),
        Outcome("tape", ok("fine")),
        Outcome("slices", away),
    ]
    assert folded(outcomes) == [
        outcomes[0],
        Outcome("3 checks", skip("not checked without the API server: node, clock, slices")),
        outcomes[2],
        outcomes[4],
        outcomes[5],
    ]


def test_checks_of_the_api_server_that_are_late_are_one_line_with_its_remedy(
    cluster: ClusterChecks, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(answers, "request", lambda *_a, **_m: release.wait(30) or {}, raising=False)
    monkeypatch.setattr(answers, "check_group", lambda: release.wait(30), raising=False)
    lines = folded(run_checks([*cluster.all(), Check("disk", lambda: ok("fine"))], bound_s=0.1))
    release.set()
    assert [line.check for line in lines] == ["8 checks", "disk"]
    says(
        lines[0].finding,
        "WARN",
        "not checked within 0.1 s, probably because the API server",
        "slices",
        "/readyz",
    )
    assert "dmesg" not in str(lines[0].finding.remedy)


def test_data_shared_by_checks_is_read_once_and_its_error_fails_all_of_them() -> None:
    calls: list[int] = []

    def read() -> int:
        calls.append(1)
        raise NvmlUnavailableError("away")

    shared = Shared(read)
    for _ in range(3):
        with pytest.raises(NvmlUnavailableError):
            shared.get()
    assert calls == [1]


# --- the NVIDIA driver --------------------------------------------------------------------------


class Hiding:
    """Device nodes, with some removed or added."""

    def __init__(self, reader: Any, gone: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> None:
        self._reader, self._gone, self._added = reader, gone, added

    def read(self, path: str) -> DeviceNode | None:
        name = path.rpartition("/")[2]
        if name in self._added:
            return DeviceNode(path, "c", 195, 99)
        return None if name in self._gone else self._reader.read(path)


@pytest.fixture(scope="module")
def _dgx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SimulatedNode, Inventory]]:
    made = SimulatedNode("dgx-h100", tmp_path_factory.mktemp("dgx"))
    yield made, made.read()
    made.close()


class Host:
    """The checks of one machine, with parts to break."""

    def __init__(self, node: SimulatedNode, inventory: Inventory) -> None:
        self.node, self.inventory = node, inventory

    def checks(self, inventory: Inventory | Exception | None = None, **more: Any) -> DriverChecks:
        answer = self.inventory if inventory is None else inventory

        def read() -> Inventory:
            if isinstance(answer, Exception):
                raise answer
            return answer

        nodes = more.pop("nodes", SimulatedDeviceNodes(self.node.machine.host_root))
        paths = replace(self.node.paths, **more.pop("paths", {}))
        node_view = more.pop("node_view", lambda: HEALTHY)
        users = more.pop("gpu_users", lambda: None)
        return DriverChecks(paths, nodes, Shared(read), node_view, settings(**more), users)


@pytest.fixture
def host(_dgx: tuple[SimulatedNode, Inventory]) -> Host:
    return Host(*_dgx)


def pci(host: Host, tmp_path: Path, driver: str | None) -> dict[str, str]:
    """The machine's /sys with its first GPU bound to another driver."""
    sys = tmp_path / "sys"
    shutil.copytree(host.node.paths.sys, sys, symlinks=True)
    bus_id = host.inventory.gpus[0].pci_bus_id
    link = sys / "bus/pci/devices" / str(bus_id) / "driver"
    link.unlink()
    if driver is not None:
        (sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        link.symlink_to(sys / "bus/pci/drivers" / driver)
    return {"sys": str(sys)}


def test_links_in_dev_char_are_checked(host: Host, tmp_path: Path) -> None:
    links = DevCharLinks(host.node.paths, SimulatedDeviceNodes(host.node.machine.host_root))
    for link in Path(links.directory).iterdir():
        link.unlink()
    found = host.checks().dev_char_links()
    assert (found.status, found.seen) == (
        "WARN",
        f"19 links missing or wrong in {links.directory}: 195:0, 195:1, 195:2, 195:254 and 15 more; with some versions "
        "of runc and systemd, `systemctl daemon-reload` removes GPUs from running containers",
    )
    links.make()
    assert host.checks().dev_char_links().status == "OK"
    assert host.checks(paths={"dev_root": str(tmp_path)}).dev_char_links().status == "SKIP"


def test_a_machine_in_order(assert_golden: CompareFinding, host: Host) -> None:
    DevCharLinks(host.node.paths, SimulatedDeviceNodes(host.node.machine.host_root)).make()
    found = {outcome.check: outcome.finding for outcome in run_checks(host.checks().all())}
    statuses = {name: finding.status for name, finding in found.items()}
    assert statuses == data_of(__file__)["a machine in order"]
    assert found["NVML"].seen == "8 GPUs answer, NVIDIA driver 580.95.05, CUDA 13.0"
    assert_golden(found["nvidia-cdi-hook"])


def test_memory_that_no_one_claims_is_a_warning_for_each_process(
    assert_golden: CompareFinding, host: Host
) -> None:
    stray = SeenProcess("gpu-6b45fc99", 4711, "train", 2 << 30, is_unclaimed=True)
    zombie = SeenProcess("gpu-6b45fc99", 4712, "", is_unclaimed=True)
    mine = SeenProcess("gpu-6b45fc99", 4713, "python3", 512 << 20, pod="ml/small-0")
    health = replace(HEALTHY, processes=(stray, zombie, mine))
    first, second = host.checks(node_view=lambda: health).gpu_processes()
    assert_golden(first)
    assert_golden(second)
    assert reset() in str(first.remedy)
    assert_golden(host.checks().gpu_processes()[0])


@pytest.mark.parametrize(
    ("release", "name"), [("6.6.87.2-microsoft-standard-WSL2", "WSL2"), ("5.15.148-tegra", "NVIDIA Jetson")]
)
def test_node_whose_gpu_is_not_a_pci_device_is_named(
    host: Host, tmp_path: Path, release: str, name: str
) -> None:
    file = tmp_path / "sys/kernel/osrelease"
    file.parent.mkdir(parents=True)
    file.write_text(f"{release}\n")
    nothing = {"sys": str(tmp_path / "none"), "proc": str(tmp_path)}
    says(host.checks(paths=nothing).gpus_on_the_bus(), "FAIL", name, "not a PCI device", "device plugin")


def test_a_node_without_gpu_misses_nothing(assert_golden: CompareFinding, host: Host, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("driver_root", "sys", "proc", "dev_root"), str(tmp_path))
    away = NvmlUnavailableError("libnvidia-ml is away; x")
    checks = host.checks(away, paths=nothing, node_view=lambda: replace(HEALTHY, gpus=()))
    found = {outcome.check: outcome.finding for outcome in run_checks(checks.all())}
    assert_golden(found.pop("GPUs"))
    assert {finding.status for finding in found.values()} == {"SKIP"}
    assert_golden(found["driver root"])


@tabled("users", "on_demand", "status", "parts")
def test_agents_that_keep_gpus_from_mig_mode(
    host: Host, users: list[str] | None, on_demand: bool, status: str, parts: tuple[str, ...]
) -> None:
    checks = host.checks(dynamic_mig=on_demand, gpu_users=lambda: users)
    says(checks.gpu_agents(), status, *parts)


def test_agents_do_not_matter_where_mig_mode_is_on(host: Host) -> None:
    gpus = tuple(replace(gpu, mig_enabled=True, partitioning=Partitioning(())) for gpu in host.inventory.gpus)
    checks = host.checks(
        replace(host.inventory, gpus=gpus),
        dynamic_mig=True,
        gpu_users=lambda: ["nv-hostengine (process 812)"],
    )
    says(checks.gpu_agents(), "OK", "nv-hostengine (process 812)", "MIG mode is on already")


@pytest.fixture
def tray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(imex, "_TIMEOUT_S", 0.3)
    made = SimulatedNode("gb200-nvl72-tray", tmp_path / "machine")
    yield Host(made, made.discover())
    made.close()


def test_imex_in_order(assert_golden: CompareFinding, tray: Host) -> None:
    def requested(**more: Any) -> Finding:
        checks = tray.checks(imex_channel=0, **more)
        [look] = [check.look for check in checks.all() if check.name == "IMEX"]
        return look()

    assert_golden(requested())
    first, *others = tray.inventory.gpus
    one_outside = replace(tray.inventory, gpus=(replace(first, fabric=None), *others))
    assert_golden(requested(inventory=one_outside))
    assert_golden(tray.checks(imex_channel="all").imex())
    tray.node.machine.set_system(imex="ready", imex_channels=5000)
    assert_golden(tray.checks(imex_channel="all").imex())
    assert "IMEX" not in [check.name for check in tray.checks().all()]


@tabled("state", "channels", "parts")
def test_imex_that_claims_would_wait_for(
    tray: Host, state: str, channels: int, parts: tuple[str, ...]
) -> None:
    tray.node.machine.set_system(imex=state, imex_channels=channels)
    says(tray.checks(imex_channel=2).imex(), "FAIL", *parts)


def test_imex_with_a_fabric_that_claims_would_wait_for(assert_golden: CompareFinding, tray: Host) -> None:
    first, *others = tray.inventory.gpus
    unready = replace(first, fabric=None, unready_fabric=UnreadyFabric("pending", "it is in progress"))
    assert_golden(
        tray.checks(imex_channel=0, inventory=replace(tray.inventory, gpus=(unready, *others))).imex()
    )


def test_imex_without_a_fabric(assert_golden: CompareFinding, host: Host) -> None:
    assert_golden(host.checks(imex_channel=0).imex())


def test_checks_that_need_nvml_are_skipped_without_it(host: Host) -> None:
    checks = host.checks(NvmlUnavailableError("away; x"), imex_channel=0)
    names = ("GPU processes", "IMEX", "MIG mode", "GPU memory")
    found = [one.finding for one in run_checks(checks.all()) if one.check in names]
    assert found == [skip("not checked without NVML")] * 4


def test_host_devices_that_are_missing(assert_golden: CompareFinding, host: Host) -> None:
    def requested(*kinds: Any) -> Finding:
        [look] = [
            check.look for check in host.checks(host_devices=kinds).all() if check.name == "host devices"
        ]
        return look()

    assert_golden(requested("nvswitch"))
    assert_golden(requested("gds", "nvswitch", "mofed"))
    assert "host devices" not in [check.name for check in host.checks().all()]


def test_a_library_that_cannot_be_loaded_is_reported_on_a_node_without_gpu(
    assert_golden: CompareFinding, host: Host, tmp_path: Path
) -> None:
    nothing = {"sys": str(tmp_path), "proc": str(tmp_path), "dev_root": str(tmp_path)}
    checks = host.checks(NvmlLibraryError("cannot load the NVML library; x"), paths=nothing)
    found = {outcome.check: outcome.finding for outcome in run_checks(checks.all())}
    assert_golden(found["NVML"])


@tabled("driver", "status", "parts")
def test_gpus_that_are_bound_elsewhere(
    host: Host, tmp_path: Path, driver: str | None, status: str, parts: tuple[str, ...]
) -> None:
    says(host.checks(paths=pci(host, tmp_path, driver)).gpus_on_the_bus(), status, *parts)


def test_a_kernel_module_that_is_not_loaded(
    assert_golden: CompareFinding, host: Host, tmp_path: Path
) -> None:
    checks = host.checks(paths={"proc": str(tmp_path)})
    assert_golden(checks.kernel_driver())


def test_a_driver_root_that_lacks_something(
    assert_golden: CompareFinding, host: Host, tmp_path: Path
) -> None:
    def at(root: Path) -> Finding:
        return host.checks(paths={"driver_root": str(root)}).driver_root()

    assert_golden(at(tmp_path / "nope"))
    assert_golden(at(tmp_path))
    library = tmp_path / "usr/lib/x86_64-linux-gnu"
    library.mkdir(parents=True)
    real = next(Path(host.node.paths.driver_root).rglob("libnvidia-ml.so.5*"))
    (library / "libnvidia-ml.so.1").write_bytes(real.read_bytes())
    assert_golden(at(tmp_path))
    cuda = next(Path(host.node.paths.driver_root).rglob("libcuda.so.5*"))
    (library / "libcuda.so.570.1.1").write_bytes(cuda.read_bytes())
    assert_golden(at(tmp_path))
    (library / "libcuda.so.580.95.05").write_bytes(cuda.read_bytes())
    assert_golden(at(tmp_path))
    (library / "libcuda.so.570.1.1").unlink()
    of_another_machine = b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x16\x00"
    (library / "libnvidia-ml.so.580.95.05").write_bytes(of_another_machine)
    assert_golden(at(tmp_path))
    for name in ("libnvidia-ml.so.1", "libcuda.so.580.95.05"):
        (library / name).write_bytes(of_another_machine)
    assert_golden(at(tmp_path))
    nothing = {"sys": str(tmp_path), "proc": str(tmp_path), "dev_root": str(tmp_path)}
    with pytest.raises(NvmlLibraryError) as caught:
        find_nvml_library(str(tmp_path))
    found = {one.check: one.finding for one in run_checks(host.checks(caught.value, paths=nothing).all())}
    assert_golden(found["NVML"])


def test_nvml(assert_golden: CompareFinding, host: Host, tmp_path: Path) -> None:
    gone = NvmlUnavailableError(
        "libnvidia-ml.so.1 is not below the driver root /; looked in /usr and much else"
    )
    assert_golden(host.checks(gone).nvml())
    fault = DiscoveryFault("GPU with NVML index 3", "GPU is lost")
    unread = replace(host.inventory, faults=(fault, fault))
    assert_golden(host.checks(unread).nvml())
    _, second, *rest = host.inventory.gpus
    hidden = replace(host.inventory, gpus=(second, *rest), faults=(fault,))
    assert_golden(host.checks(hidden).nvml())
    two = replace(host.inventory, gpus=tuple(rest))
    assert_golden(host.checks(two).nvml())
    version = tmp_path / "driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.1  Tue\n")
    other = host.checks(paths={"proc": str(tmp_path)}).nvml()
    assert_golden(other)


@tabled("gone", "status", "parts")
def test_device_nodes(host: Host, gone: tuple[str, ...], status: str, parts: tuple[str, ...]) -> None:
    nodes = Hiding(SimulatedDeviceNodes(host.node.machine.host_root), gone)
    says(host.checks(nodes=nodes).device_nodes(), status, *parts)


def test_a_device_node_without_gpu(assert_golden: CompareFinding, host: Host, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia42").write_text("")
    names = ("nvidiactl", "nvidia-uvm", "nvidia42", *(f"nvidia{gpu.minor}" for gpu in host.inventory.gpus))
    nodes = Hiding(SimulatedDeviceNodes(host.node.machine.host_root), added=names)
    checks = host.checks(nodes=nodes, paths={"dev_root": str(tmp_path)})
    assert_golden(checks.device_nodes())
    without_nvml = replace(checks, inventory=host.checks(NvmlUnavailableError("x")).inventory)
    assert_golden(without_nvml.device_nodes())
    # A GPU under vfio keeps its node.
    bound = {"dev_root": str(tmp_path), **pci(host, tmp_path, "vfio-pci")}
    assert_golden(host.checks(nodes=nodes, paths=bound).device_nodes())


def test_gpu_without_minor_number_is_not_called_lost(host: Host, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").write_text("")
    first, *rest = host.inventory.gpus
    names = ("nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.minor}" for gpu in host.inventory.gpus))
    nodes = Hiding(SimulatedDeviceNodes(host.node.machine.host_root), added=names)
    assert first.minor == 0
    fault = DiscoveryFault(f"GPU {first.uuid}", "it is not published: NVML reports no minor number")
    found = replace(host.inventory, gpus=(replace(first, minor=None), *rest), faults=(fault,))
    checks = host.checks(found, nodes=nodes, paths={"dev_root": str(tmp_path)})
    says(checks.nvml(), "FAIL", f"{fault.subject}: {fault.text}")
    says(checks.device_nodes(), "OK", "and the device nodes of 7 GPUs")


def test_mig_mode_without_devices(assert_golden: CompareFinding, host: Host) -> None:
    first, *rest = host.inventory.gpus
    empty = replace(host.inventory, gpus=(replace(first, mig_enabled=True), *rest))
    checks = host.checks(empty)
    assert_golden(checks.mig_mode())
    assert_golden(replace(checks, settings=settings(dynamic_mig=True)).mig_mode())


def test_the_hook_that_was_requested(assert_golden: CompareFinding, host: Host, tmp_path: Path) -> None:
    root = host.node.paths.driver_root
    assert_golden(host.checks(nvidia_cdi_hook_path=f"{root}/opt/hook").cdi_hook())
    (tmp_path / "usr/bin").mkdir(parents=True)
    hook = tmp_path / "usr/bin/nvidia-cdi-hook"
    hook.write_text("#!/bin/sh\nprintf 'COMMANDS:\\n   create-symlinks x\\n   enable-cuda-compat y\\n'\n")
    hook.chmod(0o755)
    paths = {"driver_root": str(tmp_path), "host_driver_root": "/"}
    assert_golden(host.checks(paths=paths).cdi_hook())
    hook.write_text("#!/bin/sh\nexit 3\n")
    assert_golden(host.checks(paths=paths).cdi_hook())


def test_no_persistence_daemon(assert_golden: CompareFinding, host: Host, tmp_path: Path) -> None:
    checks = host.checks(paths={"driver_root": str(tmp_path)})
    assert_golden(checks.persistence())  # an administrator switched the mode on, with `nvidia-smi -pm 1`
    without = tuple(replace(gpu, persistence=False) for gpu in host.inventory.gpus)
    off = replace(host.inventory, gpus=(without[0], *host.inventory.gpus[1:]))
    assert_golden(host.checks(off, paths={"driver_root": str(tmp_path)}).persistence())
    confidential = replace(host.inventory, confidential_compute="ppcie", gpus=without)
    checks = host.checks(confidential, paths={"driver_root": str(tmp_path)})
    assert_golden(checks.persistence())


def test_memory_of_gpus_that_is_memory_of_the_host(
    assert_golden: CompareFinding, host: Host, tmp_path: Path
) -> None:
    tray = SimulatedNode("gb200-nvl72-tray", tmp_path)
    try:
        found = host.checks(tray.read()).gpu_memory()
    finally:
        tray.close()
    assert_golden(found)


# --- the container runtime ----------------------------------------------------------------------


@tabled("files", "cdi_root", "status", "parts")
def test_runtime_configuration_is_checked(
    tmp_path: Path, files: dict[str, str], cdi_root: str, status: str, parts: tuple[str, ...]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    says(RuntimeChecks(cdi_root, str(tmp_path)).runtime(), status, *parts)
    says(RuntimeChecks(cdi_root, None).runtime(), "SKIP", "--host-root")


@tabled("answers", "files", "status", "part")
def test_runtime_that_answers_is_judged_by_its_answer(
    answers: dict[str, Any], files: dict[str, str], status: str, part: str
) -> None:
    """On its CRI socket: a configuration, a code of gRPC, or nothing."""
    with TemporaryDirectory(prefix="r-") as directory, ExitStack() as stack:
        root = Path(directory)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        for name, answer in answers.items():
            (root / name).parent.mkdir(parents=True)
            serve_status(stack, root / name, answer)
        says(RuntimeChecks("/var/run/cdi", directory).runtime(), status, part)


def serve_status(stack: ExitStack, path: Path, answer: Any) -> None:
    """A runtime's socket. With a number it answers after so many seconds."""
    released = threading.Event()
    stack.callback(released.set)

    def status(request: cri_v1_pb2.StatusRequest, context: grpc.ServicerContext) -> cri_v1_pb2.StatusResponse:
        if isinstance(answer, int):
            released.wait(answer)
        if isinstance(answer, str):
            context.abort(grpc.StatusCode[answer], "no")
        assert request.verbose
        return cri_v1_pb2.StatusResponse(info={"config": json.dumps(answer)})

    methods = {"/runtime.v1.RuntimeService/Status": unary("Status", status, cri_v1_pb2.StatusRequest)}
    server = serve(path, methods)
    stack.callback(server.stop, 0)


def test_the_directory_for_specs(assert_golden: CompareFinding, tmp_path: Path) -> None:
    checks = RuntimeChecks(str(tmp_path / "cdi"), str(tmp_path))
    assert_golden(checks.directory())
    (tmp_path / "cdi").mkdir()
    assert_golden(checks.directory())


def test_a_file_in_the_place_of_the_cdi_directory(assert_golden: CompareFinding, tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("")
    assert_golden(RuntimeChecks(str(tmp_path / "cdi"), None).directory())


# --- the kubelet's directories ------------------------------------------------------------------


def checks_of(root: Path) -> KubeletChecks:
    of_root = settings(
        cdi_root=str(root / "cdi"),
        kubelet_registrar_directory_path=str(root / "reg"),
        kubelet_plugins_directory_path=str(root / "plugins"),
    )
    return KubeletChecks(of_root, lambda: read_state(of_root.plugin_directory))


@pytest.fixture
def kubelet() -> Iterator[KubeletChecks]:
    """Checks of empty directories, with paths that are short enough for sockets."""
    with TemporaryDirectory(prefix="k-", dir="/tmp") as directory:
        root = Path(directory)
        (root / "reg").mkdir()
        (root / "plugins" / DRIVER).mkdir(parents=True)
        yield checks_of(root)


def listen(stack: ExitStack, path: Path) -> None:
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    server.listen(8)


def test_the_kubelets_directories(assert_golden: CompareFinding, kubelet: KubeletChecks) -> None:
    assert_golden(kubelet.directories())
    for name in ("kubelet_registrar_directory_path", "kubelet_plugins_directory_path"):
        elsewhere = replace(kubelet.settings, **{name: f"{getattr(kubelet.settings, name)}/x"})
        assert_golden(replace(kubelet, settings=elsewhere).directories())


def test_records(assert_golden: CompareFinding, kubelet: KubeletChecks) -> None:
    assert_golden(kubelet.records())
    store = RecordStore(kubelet.settings.plugin_directory / "claims")
    store.open("boot-1")
    for number, phase in enumerate(("prepared", "preparing")):
        ref = ClaimRef("ns", f"c{number}", f"uid-{number}")
        store.save(ClaimRecord(AllocatedClaim(ref, ()), phase, "boot", (), ()))  # type: ignore[arg-type]
    assert_golden(kubelet.records())
    (kubelet.settings.plugin_directory / "claims/uid-9.json.unreadable-1").write_text("x")
    assert_golden(kubelet.records())
    cdi = Path(kubelet.settings.cdi_root)
    for place, name in (
        (cdi, f"k8s.{DRIVER}-claim_uid-1.yaml"),
        (cdi, "k8s.other.example.com-claim_uid-1.json"),
        (kubelet.settings.plugin_directory, "health.json"),
        (kubelet.settings.plugin_directory / "locks", "GPU-1.lock"),
        (kubelet.settings.plugin_directory / "ledger", "GPU-1.json"),
        (kubelet.settings.plugin_directory / "mps", "gpu-1.json"),
        (kubelet.settings.plugin_directory / "dra-device-metadata/ns_c1/gpu", "metadata.json"),
    ):
        (place / f"{name}.unreadable-1").mkdir(parents=True)
    assert_golden(kubelet.records())
    broken = kubelet.settings.plugin_directory / "claims/uid-8.json"
    broken.write_text("x")
    assert_golden(kubelet.records())
    assert broken.read_text() == "x"


@pytest.mark.parametrize("file", ["ledger/GPU-1.json", "claims/uid-8.json", "mig-layout.json"])
def test_cleanup_and_layout_are_not_known_when_a_file_cannot_be_read(
    kubelet: KubeletChecks, file: str
) -> None:
    assert (kubelet.cleanup().status, kubelet.mig_layout().status) == ("OK", "OK")
    path = kubelet.settings.plugin_directory / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    text = "not known, because some of the plugin's files cannot be read: see `records`"
    assert (kubelet.records().status, kubelet.cleanup(), kubelet.mig_layout()) == (
        "FAIL",
        skip(text),
        skip(text),
    )


TIME_SLICE = SetTimeSlice("GPU-2", 3)
MIG_DEVICE = CreateMig("gpu-1-mig-1g10gb-19-0", "GPU-1", None, 19, "1g.10gb", Placement(0, 1))


@pytest.mark.parametrize(
    ("steps", "status", "what"),
    [
        ((TIME_SLICE,), "WARN", "reset the time slice"),
        ((TIME_SLICE, MIG_DEVICE), "FAIL", "destroy MIG device"),
    ],
)
def test_pending_cleanup_fails_if_it_withholds_a_device(
    kubelet: KubeletChecks, steps: tuple[Step, ...], status: str, what: str
) -> None:
    ended = ClaimRecord(AllocatedClaim(ClaimRef("ns", "c", "u"), ()), "preparing", "boot-1", (), ())
    state = NodeState(boot_id="boot-1", cleanups=[PendingCleanup("u", ended, (step,), 0) for step in steps])
    says(replace(kubelet, node_state=lambda: state).cleanup(), status, what)


def test_records_of_a_boot_that_is_not_known_are_not_called_prepared(kubelet: KubeletChecks) -> None:
    store = RecordStore(kubelet.settings.plugin_directory / "claims")
    store.open("boot-1")
    store.save(ClaimRecord(AllocatedClaim(ClaimRef("ns", "c", "uid-1"), ()), "prepared", "boot-1", (), ()))
    assert kubelet.records() == warn(
        "the ID of this boot cannot be read, so a claim that is shown as prepared may be from before the last reboot",
        "mount the node's /proc",
    )


def test_the_mps_host(assert_golden: CompareFinding, kubelet: KubeletChecks) -> None:
    assert_golden(kubelet.mps_host())
    layout = mps_layout(kubelet.settings.plugin_directory)
    for directory in (layout.wanted_directory, layout.statuses):
        directory.mkdir(parents=True)
    layout.lock.touch()
    assert_golden(kubelet.mps_host())
    with hold_file(layout.lock, 0.0, "it"):
        assert_golden(kubelet.mps_host())
        layout.lock.write_text('{"version": 2}')
        assert_golden(kubelet.mps_host())
        layout.lock.write_text('{"version": 1}')
        assert_golden(kubelet.mps_host())
        layout.wanted("gpu-1").write_bytes(WANTED_FILE.write(MpsDaemonSpec("gpu-1", "GPU-1", "gpu", "GPU-1")))
        assert_golden(kubelet.mps_host())
    assert_golden(kubelet.mps_host())


# --- the cluster --------------------------------------------------------------------------------


class Answers:
    """An API client with answers by method and path; what is not there is not served."""

    call, check_group = ApiClient.call, ApiClient.check_group

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}}
        self.denied: set[str] = set()
        self.requested: list[dict[str, Any]] = []

    def request(
        self, _method: str, path: str, *, action: str, body: Any = None, **_more: Any
    ) -> dict[str, Any]:
        if path.endswith("/selfsubjectaccessreviews"):
            wanted = body["spec"]["resourceAttributes"]
            self.requested.append(wanted)
            name = f"{wanted['verb']} {wanted['resource']}"
            return {"status": {"allowed": name not in self.denied}}
        answer = self.answers.get(path)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            raise ApiRejectedError(f"{action}: not found (HTTP 404)", status=404)
        return answer

    endpoint = type("Endpoint", (), {"server": "https://api:6443"})


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def cluster(answers: Answers) -> ClusterChecks:
    return ClusterChecks(Shared(lambda: answers), settings())  # type: ignore[arg-type, return-value]


@tabled("is_served", "status", "parts")
def test_the_api_server(
    cluster: ClusterChecks,
    answers: Answers,
    is_served: bool,
    status: str,
    parts: tuple[str, ...],
) -> None:
    missing = PathNotFoundError(
        "the server does not serve resource.k8s.io/v1: use Kubernetes 1.34 or later", status=404
    )
    answers.answers["/apis/resource.k8s.io/v1"] = {} if is_served else missing
    [outcome] = run_checks([Check("API server", cluster.api_server)])
    says(outcome.finding, status, *parts)


def test_an_api_server_that_is_not_queried(assert_golden: CompareFinding, cluster: ClusterChecks) -> None:
    assert_golden(replace(cluster, configured=False).api_server())


def test_permissions(assert_golden: CompareFinding, cluster: ClusterChecks, answers: Answers) -> None:
    assert_golden(cluster.permissions())
    answers.denied = {"patch events", "create events"}
    assert_golden(cluster.permissions())
    answers.denied = {"delete resourceslices", "create events"}
    assert_golden(cluster.permissions())
    answers.denied = {"confine drivers"}
    assert_golden(cluster.permissions())
    answers.denied = {"watch nodes"}
    assert_golden(replace(cluster, settings=settings(mig_layouts=MigLayouts(from_label=True))).permissions())


def test_checked_permissions_are_exactly_those_of_the_cluster_role(
    cluster: ClusterChecks, answers: Answers
) -> None:
    cluster.permissions()
    requested = {
        (
            a.get("group", ""),
            "/".join(filter(None, (a["resource"], a.get("subresource")))),
            a["verb"],
            a.get("name"),
        )
        for a in answers.requested
    }
    documents = yaml.safe_load_all((ROOT / "daemonset/install.yaml").read_text())
    role = next(item for item in documents if item["kind"] == "ClusterRole")
    given = {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }
    assert requested == given
    assert len(requested) == len(required_permissions(DRIVER))


def node_with(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": NODE, "uid": "u"}, "status": status}


def test_the_node_and_what_a_device_plugin_offers_there(
    assert_golden: CompareFinding, cluster: ClusterChecks, answers: Answers
) -> None:
    path = f"/api/v1/nodes/{NODE}"
    assert_golden(cluster.node_object())
    answers.answers[path] = node_with(nodeInfo={"kubeletVersion": "v1.36.1"}, allocatable={"cpu": "8"})
    assert_golden(cluster.node_object())
    info = {"kubeletVersion": "v1.36.1", "containerRuntimeVersion": "containerd://2.1.4"}
    answers.answers[path] = node_with(nodeInfo=info)
    assert cluster.node_object().version == "containerd://2.1.4"
    answers.answers[path] = node_with(nodeInfo={"containerRuntimeVersion": "docker://29.4.0"})
    says(
        cluster.node_object(),
        "FAIL",
        "Docker (cri-dockerd), which cannot give containers the devices of claims",
    )
    ill = {"conditions": [{"type": "Ready", "status": "False"}]}
    answers.answers[path] = node_with(**ill, allocatable={"nvidia.com/mig-x": "0"})
    assert_golden(cluster.node_object())
    answers.answers[path] = node_with(**ill, allocatable={"nvidia.com/gpu": "8", "nvidia.com/mig-x": "0"})
    assert_golden(cluster.node_object())


@tabled("kubelet", "runtime", "status", "parts")
def test_versions_of_the_node(
    cluster: ClusterChecks, answers: Answers, kubelet: str, runtime: str, status: str, parts: tuple[str, ...]
) -> None:
    info = {"kubeletVersion": kubelet, "containerRuntimeVersion": runtime}
    answers.answers[f"/api/v1/nodes/{NODE}"] = node_with(nodeInfo=info)
    says(cluster.node_object(), status, *parts)


def test_node_without_slices_fails_only_if_it_has_a_gpu(server: PlaygroundApiServer, tmp_path: Path) -> None:
    assert against(server, tmp_path).slices().status == "FAIL"
    assert against(server, tmp_path, has_gpus=lambda: False).slices().status == "OK"


@pytest.fixture
def server() -> Iterator[PlaygroundApiServer]:
    with PlaygroundApiServer() as made:
        made.add("nodes", {"metadata": {"name": NODE}})
        yield made


def against(server: PlaygroundApiServer, directory: Path, **more: Any) -> ClusterChecks:
    server.write_kubeconfig(directory / "kubeconfig")
    client = ApiClient(load_endpoint(directory / "kubeconfig"))
    return ClusterChecks(Shared(lambda: client), settings(), **more)


def test_api_server_that_is_slow_is_a_warning_with_its_address(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = ApiClient(Endpoint(server=address), timeout_s=0.2)
        found = ClusterChecks(Shared(lambda: client), settings()).api_server()
    says(found, "WARN", f"{address} did not answer in time", "/readyz")


def test_classes_and_slices(
    assert_golden: CompareFinding, server: PlaygroundApiServer, tmp_path: Path
) -> None:
    checks = against(server, tmp_path)
    assert_golden(checks.api_server())
    assert_golden(checks.device_classes())
    for name in ("gpu.nvidia.com", "mig.nvidia.com"):
        for renamed in (f"timeslice.{name}", f"team-a-{name}-x"):
            server.add("deviceclasses", {"metadata": {"name": renamed}, "spec": {}}, group="resource.k8s.io")
    assert_golden(checks.device_classes())
    for name in ("gpu.nvidia.com", "mig.nvidia.com"):
        server.add("deviceclasses", {"metadata": {"name": name}, "spec": {}}, group="resource.k8s.io")
    assert_golden(checks.device_classes())
    assert_golden(checks.slices())
    taint = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
    for pool, devices in ((NODE, [{"name": "gpu-1", "taints": [taint]}, {"name": "gpu-2"}]), ("other", [])):
        spec = {
            "driver": DRIVER, "nodeName": NODE, "devices": devices,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
        }  # fmt: skip
        server.add(
            "resourceslices", {"metadata": {"name": f"s-{pool}"}, "spec": spec}, group="resource.k8s.io"
        )
        if pool == NODE:
            assert_golden(checks.slices())
    assert_golden(checks.slices())


@tabled("off", "options", "status", "parts")
def test_feature_gates(
    tmp_path: Path, off: tuple[str, ...], options: dict[str, bool], status: str, parts: tuple[str, ...]
) -> None:
    with PlaygroundApiServer(gates=dict.fromkeys(off, False)) as server:
        server.add("nodes", {"metadata": {"name": NODE}})
        shared = {"sharing": share_all(SharingRule("shares", 4))} if options.pop("sharing", False) else {}
        checks = replace(against(server, tmp_path), settings=settings(**options, **shared))
        says(checks.feature_gates(), status, *parts)
        assert server.writes() == []
        assert server.objects("deviceclasses") == []


def test_checks_are_one_line_when_the_api_server_has_no_access_reviews(
    server: PlaygroundApiServer, tmp_path: Path
) -> None:
    checks = against(server, tmp_path, claims=lambda: [ClaimRef("default", "a", "u")])
    lines = folded(run_checks(checks.all()))
    why = "not checked: this API server does not support access reviews"
    assert [line for line in lines if line.finding.status == "SKIP"] == [
        Outcome("3 checks", skip(f"{why}: permissions, admission policy, claim policy"))
    ]


def test_an_api_server_that_is_away_is_one_failure(
    assert_golden: CompareFinding, server: PlaygroundApiServer, tmp_path: Path
) -> None:
    checks = against(server, tmp_path)
    server.stop()
    found = {o.check: o.finding for o in run_checks(checks.all())}
    assert_golden(found.pop("API server"))
    assert {finding.status for finding in found.values()} == {"SKIP"}
    (line,) = folded([Outcome(name, finding) for name, finding in found.items()])
    assert line.check == "7 checks"
    assert_golden(line.finding)


# --- what the plugin itself reports --------------------------------------------------------------


def shown(code: ProblemCode, text: str) -> NodeProblem:
    return NodeProblem(code, text)


def test_findings_fail_if_pods_get_no_devices_and_otherwise_warn(tmp_path: Path) -> None:
    claim = FailingClaim(ClaimRef("ml", "train", "u"), "prepare", 0, 9, 3, "no room; end its pods")
    reported = Reported(
        (
            shown("plugin-not-running", "gpu-dra-driver is not running; look at its pods"),
            shown("foreign-driver", "other-reg.sock is of another driver; remove that driver"),
            shown("not-registered", "the kubelet refused the plugin: because"),
            shown("health-unknown", "the health is not known; restart it"),
            shown("claims-failing", "a claim fails"),
            shown("claim-in-use", "a process uses it; kill it"),
            shown("check-failed", "a check failed; why"),
        ),
        (claim,),
    )
    checks = KubeletChecks(settings(), NodeState, lambda: reported)
    found = checks.plugin()
    assert [(one.status, one.seen) for one in found] == [
        ("FAIL", "Prepare of claim ml/train fails (tried 3 times): no room"),
        ("FAIL", "gpu-dra-driver is not running"),
        ("FAIL", "other-reg.sock is of another driver"),
        ("FAIL", "the kubelet refused the plugin: because"),
        ("WARN", "the health is not known"),
        ("FAIL", "a process uses it"),
        ("WARN", "a check failed"),
    ]
    assert [one.remedy for one in found[:3]] == ["end its pods", "look at its pods", "remove that driver"]
    assert "kubectl -n gpu-dra-driver logs" in str(found[3].remedy)
    assert replace(checks, reported=Reported).plugin() == [
        ok("the plugin is running and reports no problems")
    ]
    silent = Reported((shown("gpu-unresponsive", "GPU-1 does not answer; reboot the node"),), ())
    assert replace(checks, reported=lambda: silent).plugin() == [
        Finding("FAIL", "GPU-1 does not answer", "reboot the node")
    ]
    [skipped] = replace(checks, reported=None).plugin()
    assert skipped.status == "SKIP"


def test_file_of_a_newer_release_keeps_pods_away_unless_it_has_only_health(tmp_path: Path) -> None:
    def status(problem: NodeProblem) -> str:
        reported = Reported((problem,), ())
        return KubeletChecks(settings(), NodeState, lambda: reported).plugin()[0].status

    file = tmp_path / "health.json"
    file.write_text('{"version": 99}')
    store = HealthStore(file)
    assert store.load() is None
    [of_health] = store.problems()
    assert (status(of_health), status(replace(of_health, subject="records"))) == ("WARN", "FAIL")


def test_directory_on_a_full_disk_fails_though_its_permissions_allow_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not_written(tmp_path) is None

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    found = not_written(tmp_path)
    assert found is not None
    assert (found.status, "No space left" in found.seen, "df -h" in str(found.remedy)) == ("FAIL", True, True)
    assert list(tmp_path.iterdir()) == []
