"""The power goes at any moment of a Prepare and an Unprepare. The node boots with anything that its disk may hold then,
and the next instance of the plugin ends where one on a fresh node would.

Whatever unsynced writes are lost, no file is unreadable, and what was taken back stays away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.atomic import (
    make_directory,
    remove_file,
    sync_removals,
    write_atomically,
)
from dra_driver.cdi.directory import temporary_files
from dra_driver.cdi.metadata_files import MetadataSteps
from dra_driver.claims.planner import Identity
from dra_driver.health.store import HealthStore, KeptHealth
from dra_driver.journal.executor import StepDispatcher
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, Failed, Prepared
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, SharingRule, share_all
from dra_driver.model.steps import RunMps, SetTimeSlice, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.mps_host.daemon_processes import ProcessId
from dra_driver.mps_host.daemon_records import DaemonRecord, DaemonRecords
from dra_driver.mps_host.host_files import encode_wanted, mps_layout, wanted_files
from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps
from dra_driver.slices.leadership import InstanceLeadership
from tests.fakes.powerloss import Disk, Tree, covering
from tests.fakes.preparing import Claims, Node
from tests.fakes.samples import DRIVER, GPU_0, MIG_1G, MIXED, NODE, claim, result
from tests.health.test_store import BAD, PART

Shape = Mapping[str, bytes | None]

SHARE = "0f9a6a37-30a8-4a9f-8ff0-0d0a4ba10001"
LASTING = {
    "claims",
    "claims/.boot",
    "ledger",
    "ledger/.boot",
    "cdi",
    "plugin",
    "plugin/dra-device-metadata",
    "plugin/mps",
    "plugin/mps/host.wanted",
    "locks",
}
VERSIONS = ("v1beta1", "v1alpha1")


def config(**sharing: Any) -> tuple[DeviceConfig, ...]:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    return (DeviceConfig("FromClaim", (), DRIVER, parameters),)


@dataclass(frozen=True)
class Kind:
    """A claim and the node's settings. `lasts` is whether its record is to outlive the power from before its first step
    on."""

    wanted: AllocatedClaim
    lasts: bool = False
    metadata: tuple[str, ...] = ()
    sharing: SharingPolicy = NO_SHARING


TIME_SLICES = config(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
MPS = config(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 50})
KINDS = {
    "GPU": Kind(claim(GPU_0)),
    "shares": Kind(
        claim(result(GPU_0, share_id=SHARE, consumed_capacity={"shares": "1"}), MIG_1G),
        sharing=share_all(SharingRule("shares", 10)),
    ),
    "metadata": Kind(claim(GPU_0, result(MIG_1G, "part")), metadata=VERSIONS),
    "time slices": Kind(claim(GPU_0, configs=TIME_SLICES), lasts=True),
    "MPS": Kind(claim(GPU_0, configs=MPS), lasts=True),
    "MPS and metadata": Kind(claim(GPU_0, configs=MPS), lasts=True, metadata=VERSIONS),
}


class Boot:
    """What the GPUs know until the power goes: time slices by GPU, and the MPS daemons that run."""

    def __init__(self) -> None:
        self.time_slices: dict[str, int] = {}
        self.daemons: set[str] = set()

    def set_time_slice(self, gpu_uuid: str, level: int, timeout_s: float = 20.0) -> None:
        self.time_slices = {key: value for key, value in self.time_slices.items() if key != gpu_uuid}
        if level:
            self.time_slices[gpu_uuid] = level


class MpsHost:
    """Real records, written when the supervisor writes them; daemons are names. It takes over what it finds."""

    def __init__(self, directory: Path, boot: Boot, boot_id: str) -> None:
        self.layout = mps_layout(directory)
        self.records = DaemonRecords(self.layout)
        self.boot = boot
        self.boot_id = boot_id
        self.layout.root.mkdir(parents=True, exist_ok=True)
        make_directory(self.layout.wishes, 0o700)
        self.known = self.records.all()
        for device, record in tuple(self.known.items()):
            if self.layout.is_unwanted(device):
                self._take_down(device)
            else:
                self._run(record.spec)
        for spec in wanted_files(self.layout).all().values():
            self._run(spec)

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float) -> MpsDaemonStatus:
        if wanted_files(self.layout).get(spec.device) != spec:
            write_atomically(self.layout.wanted(spec.device), encode_wanted(spec), durable=False)
        self._run(spec)
        return MpsDaemonStatus(spec.device, "ready", spec)

    def runs(self, spec: MpsDaemonSpec) -> bool:
        return spec.device in self.boot.daemons

    def stop(self, device: str, timeout_s: float) -> None:
        remove_file(self.layout.wanted(device))
        sync_removals(self.layout.wishes)
        self._take_down(device)

    def _run(self, spec: MpsDaemonSpec) -> None:
        if spec.device not in self.boot.daemons:
            self._write(DaemonRecord(spec, self.boot_id))
            (self.layout.directory(spec.device) / "pipe").mkdir(parents=True, exist_ok=True)
            self._write(replace(self.known[spec.device], modes_before={spec.gpu_uuid: 0}))
            self.boot.daemons.add(spec.device)
            self._write(replace(self.known[spec.device], process=ProcessId(4711, 1)))

    def _take_down(self, device: str) -> None:
        self.boot.daemons.discard(device)
        shutil.rmtree(self.layout.directory(device), ignore_errors=True)
        self.records.forget(device)
        self.known.pop(device, None)

    def _write(self, record: DaemonRecord) -> None:
        self.records.save(record)
        self.known[record.spec.device] = record


class PoweredNode(Node):
    """An instance of the plugin with the steps and the rules of what is synced of the real one."""

    def __init__(
        self, directory: Path, kind: Kind, *, boot_id: str = "boot-2", claims: Claims | None = None
    ) -> None:
        super().__init__(directory, MIXED, boot_id=boot_id, claims=claims, metadata=kind.metadata)
        self.boot = Boot()
        self.mps = MpsHost(directory / "plugin", self.boot, boot_id)
        runner = StepDispatcher({
            WriteCdiSpec: self.steps,
            WriteDeviceMetadata: MetadataSteps(self.metadata_files, lambda: MIXED, lambda device: None),
            SetTimeSlice: TimeSliceSteps(self.boot, self.records),
            RunMps: MpsSteps(self.mps, lambda _device: None),
        })  # fmt: skip
        self.work_with(runner)
        self.serve(Identity(DRIVER, NODE, kind.sharing, kind.metadata))
        for top in (directory, directory / "plugin"):
            self.cleaner.temporary += temporary_files(top, directory / "cdi", DRIVER)
        self.cleaner.clear_temporary()
        assert self.cleaner.clean_all() == []

    def shape(self) -> tuple[Shape, dict[str, int], set[str]]:
        """Everything on disk that is not there for good, and what the GPUs know."""
        found = {
            str(path.relative_to(self.directory)): None if path.is_dir() else path.read_bytes()
            for path in self.directory.rglob("*")
            if path.parent.name != "locks"
        }
        left = {name: content for name, content in found.items() if name not in LASTING}
        return left, self.boot.time_slices, self.boot.daemons


EMPTY: tuple[Shape, dict[str, int], set[str]] = ({}, {}, set())


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def losses(directory: Path, kind: Kind, volatile: set[str]) -> dict[str, set[Tree]]:
    """What the disk may hold after a power loss in the life of one claim, by what was promised until then."""
    disk = Disk(fresh(directory), volatile)
    with disk.recording():
        node = PoweredNode(directory, kind, boot_id="boot-1")
        assert isinstance(node.prepare(kind.wanted), Prepared)
        disk.promise("prepared")
        disk.promise("unpreparing")
        assert node.unprepare(kind.wanted) is None
        disk.promise("unprepared")
    assert node.shape() == EMPTY
    return disk.losses


@pytest.fixture(params=["CDI specs on disk", "CDI specs in memory"])
def volatile(request: pytest.FixtureRequest) -> set[str]:
    """Lock files tell nothing over a boot; what they hold then is a test of its own."""
    return {"locks"} | ({"cdi"} if request.param == "CDI specs in memory" else set())


@pytest.mark.parametrize("name", KINDS)
def test_the_next_boot_ends_where_a_fresh_node_would(
    memory_path: Path, name: str, volatile: set[str], logs: list[dict[str, Any]]
) -> None:
    """Whatever was asked and answered until then, the kubelet asks again."""
    kind, directory = KINDS[name], memory_path / "disk"
    trees = set().union(*losses(directory, kind, volatile).values())
    whole = PoweredNode(fresh(directory), kind)
    answer = whole.prepare(kind.wanted)
    uninterrupted = whole.shape()
    disk = Disk(directory)
    logs.clear()
    for tree in covering(trees, 250):
        disk.restore(tree)
        node = PoweredNode(directory, kind)
        assert (node.unprepare(kind.wanted), node.shape()) == (None, EMPTY), tree
        disk.restore(tree)
        node = PoweredNode(directory, kind)
        assert (node.prepare(kind.wanted), node.shape()) == (answer, uninterrupted), tree
        assert (node.unprepare(kind.wanted), node.shape()) == (None, EMPTY), tree
        assert not list(node.mps.layout.root.glob("*.unreadable*")), tree
    assert [line for line in logs if line["log_level"] in ("warning", "error")] == []


@pytest.mark.parametrize("name", KINDS)
def test_what_unprepare_took_back_stays_away(memory_path: Path, name: str, volatile: set[str]) -> None:
    """The kubelet does not ask again: nothing is left that holds the device, or that nobody would ever remove."""
    kind, directory = KINDS[name], memory_path / "disk"
    for tree in losses(directory, kind, volatile)["unprepared"]:
        Disk(directory).restore(tree)
        node = PoweredNode(directory, KINDS["GPU"])
        assert node.shape() == EMPTY, tree
        assert isinstance(node.prepare(claim(GPU_0, uid="uid-2")), Prepared)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.lasts])
def test_a_record_whose_steps_outlive_files_is_there_once_prepare_answered(
    memory_path: Path, name: str, volatile: set[str]
) -> None:
    found = losses(memory_path / "disk", KINDS[name], volatile)
    records = [dict(tree).get("claims/uid-1.json") for tree in found["prepared"]]
    phases = {json.loads(record or b"{}").get("phase") for record in records}
    # Either will do, as both name every step: that the record says `prepared` is not synced on purpose.
    assert phases == {"preparing", "prepared"}


def test_a_record_that_names_files_only_may_be_lost_since_no_container_outlives_the_power(
    memory_path: Path, volatile: set[str]
) -> None:
    """After a boot the kubelet prepares a claim anew before it starts a container; until then nobody uses the device,
    and another claim may have it. Two never have it."""
    kind, directory = KINDS["GPU"], memory_path / "disk"
    found = losses(directory, kind, volatile)["prepared"]
    lost = [tree for tree in found if "claims/uid-1.json" not in dict(tree)]
    assert lost
    for tree in lost:
        Disk(directory).restore(tree)
        node = PoweredNode(directory, kind)
        assert isinstance(node.prepare(claim(GPU_0, uid="uid-2")), Prepared), tree
        assert isinstance(node.prepare(kind.wanted), Failed), tree
        assert node.unprepare(kind.wanted) is None
        assert node.unprepare(claim(GPU_0, uid="uid-2")) is None
        assert node.shape() == EMPTY, tree


KEPT = [
    KeptHealth(f"boot-{number}", "580.95.05", states)
    for number, states in enumerate([(), (BAD,), (BAD, PART)])
]


def test_kept_health_may_be_an_older_one_since_the_gpus_are_looked_at_again_but_is_never_unreadable(
    memory_path: Path, logs: list[dict[str, Any]]
) -> None:
    directory = fresh(memory_path / "disk")
    disk = Disk(directory)
    with disk.recording():
        store = HealthStore(directory / "health.json")
        for kept in KEPT:
            store.save(kept)
    loaded = []
    for tree in disk.losses["nothing"]:
        disk.restore(tree)
        loaded.append(HealthStore(directory / "health.json").load())
    assert all(kept in (None, *KEPT) for kept in loaded)
    assert all(kept in loaded for kept in (None, *KEPT))
    assert logs == []


def test_turns_to_publish_are_free_after_a_power_loss_since_locks_end_with_the_boot(
    memory_path: Path,
) -> None:
    directory = fresh(memory_path / "disk")
    disk = Disk(directory)
    with disk.recording():
        turn = InstanceLeadership(directory / "publishers", "pod-1")
        turn.announce()
        turn.withdraw()
    for tree in disk.losses["nothing"]:
        disk.restore(tree)
        following = InstanceLeadership(directory / "publishers", "pod-2")
        following.announce()
        assert following.is_ours(), tree
        assert len(list((directory / "publishers").iterdir())) == 1, tree
        following.withdraw()
