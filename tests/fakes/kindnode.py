"""An instance of the plugin with every kind of step, on a simulated machine: real records, ledger, locks, CDI specs,
metadata files and NVML binding. `restarted` is the next instance over the same directory and machine."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest

from dra_driver.app.steps import GpuSteps
from dra_driver.cdi.directory import CdiDirectory, temporary_files
from dra_driver.cdi.metadata_files import MetadataFiles, MetadataSteps
from dra_driver.cdi.spec_step import CdiSteps, ExtraDeviceFinder
from dra_driver.claims.rules.plan import Identity
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.errors import NvmlInUseError, PermanentError, RetryableError
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.vfio import VfioCards
from dra_driver.journal import lanes
from dra_driver.journal.executor import StepDispatcher
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.mig.mode import MigContext, MigHolders
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, DeviceResult
from dra_driver.model.driver_files import DriverFiles
from dra_driver.model.gpu import Card, Gpu
from dra_driver.model.inventory import DynamicMigDevice, VfioDevice
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.model.sharing import GpuSelector, SharingEntry, SharingPolicy, SharingRule
from dra_driver.model.steps import StartMaintenance, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.mps_host.daemon_compute_mode import DEFAULT, EXCLUSIVE_PROCESS
from dra_driver.mps_host.host_files import DaemonRecord, DaemonRecords, mps_layout
from dra_driver.nvml.gpu_users import PersistenceModes
from dra_driver.nvml.limits import GpuLimits
from dra_driver.nvml.mig_changes import MigHardware
from dra_driver.passthrough.cards import KnownCards
from dra_driver.passthrough.steps import VfioSteps
from dra_driver.simulator import SimulatedDeviceNodes, SimulatedPciControl
from dra_driver.simulator.machine_files import TIMESLICE, Policies
from dra_driver.simulator.machine_state import Function, State
from dra_driver.simulator.machine_state import Gpu as SimulatedGpu
from dra_driver.simulator.pci import functions
from tests.fakes.clock import Clock
from tests.fakes.journal import Journaled
from tests.fakes.machines import SimulatedNode
from tests.fakes.preparing import (
    Claims,
    Crash,
    Devices,
    Outcomes,
    Users,
    claims_of,
    maintenance_steps,
    no_programs,
)
from tests.fakes.samples import DRIVER, NODE, claim, result
from tests.fakes.waiting import eventually

MACHINE = "h100-mig-static"
FOR_MACHINES = 3
"""Index of the GPU for virtual machines. It has an audio function in its group."""
ON_DEMAND = (6, 7)
"""Indexes of the GPUs with MIG devices on demand; those on 0 and 1 were created by hand."""
ADDED = range(8, 13)
"""Indexes of the GPUs that the machine has in addition, so that a claim with eight GPUs leaves some."""
EFFECTS = frozenset({
    "set_mode", "create", "create_compute", "destroy_compute", "destroy",
    "set_time_slice", "set_power", "lock_clock", "unlock_clock", "ensure", "stop", "write", "load_module", "set",
})  # fmt: skip
"""What changes silicon, settings, daemons, and drivers in the kernel."""
_SHARE_IDS = ("9f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4", "0f6a2c3e-0d5f-4a6b-8b7a-7f3c1ad296f4")


@dataclass(frozen=True)
class Saved:
    """A simulated machine, and the files of its settings."""

    machine: State
    policies: Mapping[Path, str]


class _LookedAtOnce(DriverRoot):
    """The NVIDIA driver's files, cached because nothing here changes them and each search takes four
    milliseconds.
    """

    _installed: DriverFiles | None = None

    def files(self, nvml_version: str | None) -> DriverFiles:
        self._installed = self._installed or self.scan(nvml_version)
        return self._installed


class Site:
    """What outlives the plugin: the machine, and the MPS host, whose daemons here are records and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.simulated = SimulatedNode(MACHINE, directory, lambda gpu: gpu.index in ON_DEMAND)
        self.machine = self.simulated.machine
        self.policies = Policies(self.machine.host_root)
        self.nodes = SimulatedDeviceNodes(self.machine.host_root)
        self.driver_root = _LookedAtOnce(self.simulated.paths, nodes=self.nodes)
        gpu = self.machine.gpu(FOR_MACHINES)
        audio = f"{gpu.bus_id.partition('.')[0]}.1"
        # An administrator keeps this function for its driver.
        for _ in ADDED:
            self.machine.add_gpu("h100-sxm")
        self.simulated.session.reopen()
        self.machine.add_function(
            Function(audio, gpu.pcie, 0x22BA, 0x040300, driver="snd_hda_intel", override="snd_hda_intel")
        )
        self.inventory = self.simulated.discover(self.cards(directory / "none"))
        self._gpus = {gpu.index: gpu for gpu in self.inventory.gpus}
        self._first = self.saved()
        self.detachment: str | None = None
        self.found: dict[tuple[str, ...], Any] = {}
        """What all tests with a kind of claim would find again."""

    def cards(self, plugin: Path) -> KnownCards:
        """The cards as the plugin with this directory shows them."""
        host = VfioCards(self.simulated.paths, self.nodes, SimulatedPciControl(self.machine))
        kept = Ledger(
            plugin / LEDGER, RecordStore(plugin / "claims"), "boot-1", reader=lambda _unreadable: None
        )
        bus_id = self.machine.gpu(FOR_MACHINES).bus_id
        return KnownCards(host, kept, lambda gpu: gpu.pci_bus_id == bus_id)

    @property
    def card(self) -> Card:
        """What virtual machines may get."""
        [card] = self.inventory.cards
        return card

    def drivers(self) -> dict[str, str]:
        """The driver of each function of the card, by the number of the function."""
        found = functions(self.machine.current())
        return {bus_id[-1]: found[bus_id].driver for bus_id in self.card.functions}

    def for_machine(self, index: int) -> str:
        return self._name(index, lambda offered: isinstance(offered, VfioDevice))

    def gpu(self, index: int) -> Gpu:
        return self._gpus[index]

    def whole(self, index: int) -> str:
        return self._name(index, lambda offered: offered.uuid == self.gpu(index).uuid)

    def static(self, index: int, profile: str, start: int) -> str:
        return self._name(
            index,
            lambda offered: (
                not isinstance(offered, DynamicMigDevice)
                and hasattr(offered, "mig")
                and (offered.mig.profile.name, offered.mig.placement.start) == (profile, start)
            ),
        )

    def possible(self, index: int, profile: str, start: int) -> str:
        return self._name(
            index,
            lambda offered: (
                isinstance(offered, DynamicMigDevice)
                and (offered.profile.name, offered.placement.start) == (profile, start)
            ),
        )

    def _name(self, index: int, suits: Callable[[Any], bool]) -> str:
        [name] = [
            name
            for name, offered in self.inventory.by_name.items()
            if offered.gpu.index == index and suits(offered)
        ]
        return name

    def settings(self) -> list[tuple[object, ...]]:
        """Of each GPU: MIG mode, instances with compute instances, compute mode, length of time slices, limits."""
        state = self.machine.current()
        return [
            (
                bool(gpu.mig_mode),
                sorted((item.id, item.profile_id, item.start, len(item.compute)) for item in gpu.instances),
                self.machine.compute_mode(gpu.uuid),
                self.policies.get(TIMESLICE, gpu.uuid),
                bool(gpu.persistence),
                gpu.power_limit_mw or state.model_of(gpu).power_limit_w * 1000,
                gpu.locked_mhz,
            )
            for gpu in state.present
        ] + [(bus_id, item.driver, item.override) for bus_id, item in sorted(functions(state).items())]

    def made_uuids(self) -> dict[str, str]:
        """Return a name for each UUID of devices on demand, by place, because UUIDs change each time."""
        return {
            compute.uuid: f"MIG-at-{index}-{instance.start}"
            for index in ON_DEMAND
            for instance in self.machine.gpu(index).instances
            for compute in instance.compute
        }

    def saved(self) -> Saved:
        files = (path for path in self.policies.directory.glob("*/*") if path.parent.name != "sessions")
        return Saved(self.machine.current(), {path: path.read_text() for path in files})

    def put_back(self, saved: Saved) -> None:
        """What a claim may change is as it was then."""
        now, then = self.saved(), saved.machine
        if _parts(now.machine) != _parts(then):
            with self.machine._change() as state:
                state.gpus, state.functions, state.system = _parts(then)
                state.events = []  # otherwise hundreds of claims would add events that are written with each change
        if now.policies != saved.policies:
            self.policies.reset()
            for path, text in saved.policies.items():
                path.write_text(text)
        eventually(self._reopened)

    def reset(self) -> None:
        """Reset the machine as a reboot does: only what was created by hand at the start remains."""
        self.put_back(self._first)

    def _reopened(self) -> bool:
        """An operation that hung in the test before may still close NVML for a moment."""
        with suppress(NvmlInUseError):
            self.simulated.session.reopen()
            return True
        return False

    @contextmanager
    def detached(self) -> Iterator[None]:
        """NVML is kept closed, as between `gpu-dra-driver detach` and `detach --end`."""
        self.detachment = "NVML is closed until later"
        self.simulated.session.release(self.detachment)
        try:
            yield
        finally:
            self.detachment = None
            self.simulated.session.reopen()

    def close(self) -> None:
        self.simulated.close()


def _parts(machine: State) -> tuple[list[SimulatedGpu], list[Function], dict[str, Any]]:
    """What a claim may change."""
    return machine.gpus, machine.functions, machine.system


@dataclass
class TimeSliceSettings:
    """nvidia-smi's part, without a process for each call."""

    site: Site

    def set_time_slice(self, gpu_uuid: str, level: int, timeout_s: float = 20.0) -> None:
        if self.site.detachment is not None:
            raise RetryableError(self.site.detachment)
        self.site.policies.set(TIMESLICE, gpu_uuid, level)


class RecordedMpsHost:
    """The MPS host as the plugin sees it: a daemon is its record file, and a GPU's compute mode."""

    def __init__(self, site: Site, plugin_directory: Path) -> None:
        self._site = site
        self._layout = mps_layout(plugin_directory)
        self._layout.root.mkdir(parents=True, exist_ok=True)
        self._records = DaemonRecords(self._layout)

    def runs(self, spec: MpsDaemonSpec) -> bool:
        known = self.daemons().get(spec.device)
        return known is not None and known.spec == spec

    def daemons(self) -> Mapping[str, DaemonRecord]:
        found = self._records.all()
        assert not list(self._layout.root.glob("*.unreadable*"))
        return found

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float) -> MpsDaemonStatus:
        known = self.daemons().get(spec.device)
        if known is not None and known.spec.uuid == spec.uuid and known.spec != spec:
            raise PermanentError(f"the MPS daemon of {spec.device} runs with different settings")
        if known is None or known.spec != spec:
            before = dict.fromkeys(spec.gpu_uuids, DEFAULT) if spec.kind == "gpu" else {}
            self._records.save(DaemonRecord(spec, before))
        for gpu_uuid in spec.gpu_uuids if spec.kind == "gpu" else ():
            self._site.machine.set_compute_mode(gpu_uuid, EXCLUSIVE_PROCESS)
        return MpsDaemonStatus(spec.device, "ready", spec)

    def stop(self, device: str, timeout_s: float) -> None:
        known = self.daemons().get(device)
        if known is not None and known.spec.kind == "gpu":
            for uuid, mode in known.modes_before.items():
                self._site.machine.set_compute_mode(uuid, mode)
        self._records.forget(device)


class Change(NamedTuple):
    """A durable change: the GPUs of its lane (none outside the lanes), its number in the lane, and its name."""

    lane: frozenset[str]
    number: int
    name: str


class Deaths:
    """Counts durable changes: effects, and changes of directories, files and disk below a directory. Dies
    right after the change `at`, or with `fault` raises an error instead of that change. Lanes work at the same time, so
    each has numbers of its own; an int is the number among the changes of all. A dead process changes nothing.
    """

    FILES = ("replace", "rename", "unlink", "rmdir", "mkdir", "link")
    DESCRIPTORS = ("fsync",)

    def __init__(self) -> None:
        self.at: Change | int | None = None
        self.fault = False
        self.done: list[Change] = []
        self.before: Callable[[], None] = lambda: None
        """Called before each effect; a hang begins there."""
        self._is_dead = False
        self._guard = threading.Lock()
        self._within: ContextVar[bool] = ContextVar("within an effect", default=False)

    def effects_of(self, subject: Any) -> Any:
        return _Effects(subject, self)

    def effect(self, name: str, function: Callable[[], Any]) -> Any:
        """The machine's own writes for it do not count."""
        self.before()
        within = self._within.set(True)
        try:
            return self._counted(name, function)
        finally:
            self._within.reset(within)

    @contextmanager
    def watching(
        self, directory: Path, at: Change | int | None = None, *, fault: bool = False
    ) -> Iterator[list[Change]]:
        self.at, self.fault, self.done = at, fault, []
        with pytest.MonkeyPatch.context() as patch:
            for name in (*self.FILES, *self.DESCRIPTORS):
                patch.setattr(os, name, partial(self._called, name, getattr(os, name), str(directory)))
            yield self.done

    def _called(self, name: str, function: Any, top: str, *args: Any, **options: Any) -> Any:
        subject, call = args[0], partial(function, *args, **options)
        # Names relative to a descriptor belong to a tree that is being removed.
        is_ours = not isinstance(subject, str | os.PathLike) or str(subject).startswith(top) or options
        return self._counted(name, call) if is_ours and not self._within.get() else call()

    def _counted(self, name: str, function: Callable[[], Any]) -> Any:
        operation = lanes._operation.get()
        lane = frozenset() if operation is None else operation.gpu_uuids
        with self._guard:
            self._end_if_dead()
            change = Change(lane, 1 + sum(one.lane == lane for one in self.done), name)
            if self.fault and self.at in (change, len(self.done) + 1):
                self.done.append(change)
                raise (
                    RetryableError("not today")
                    if name in EFFECTS
                    else OSError(errno.EIO, os.strerror(errno.EIO))
                )
        answer = function()
        with self._guard:
            self.done.append(change)
            self._is_dead |= not self.fault and self.at in (change, len(self.done))
            self._end_if_dead()
        return answer

    def _end_if_dead(self) -> None:
        if self._is_dead:
            raise Crash


class _Effects:
    def __init__(self, subject: Any, deaths: Deaths) -> None:
        self._subject = subject
        self._deaths = deaths

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._subject, name)
        if name not in EFFECTS:
            return found

        return lambda *args, **options: self._deaths.effect(name, partial(found, *args, **options))


class KindNode(Journaled):
    """One instance of the plugin below `directory`."""

    def __init__(
        self, site: Site, directory: Path, *, boot_id: str = "boot-1", metadata: tuple[str, ...] = ()
    ) -> None:
        self.site = site
        self.directory = directory
        self.metadata = metadata
        self.deaths = Deaths()
        self.claims = Claims()
        plugin = self.plugin = directory / "plugin"
        self.clock = Clock()
        self.open_journal(plugin, boot_id, clock=self.clock)
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        self.metadata_files = MetadataFiles(plugin, directory / "cdi", DRIVER)
        self.metadata_files.create()
        self.mps = RecordedMpsHost(site, plugin)
        context = MigContext(
            self.deaths.effects_of(MigHardware(nullcontext)),
            self.ledger,
            MigHolders(self.records, SpecsWithoutRecord(self.records, self.specs).lost_devices),
            lambda *_what: None,
            operation=nullcontext,
            clock=self.clock,
            pause=self.clock.pause,
        )
        self.maintenance = maintenance_steps(self, plugin)
        gpus = self._gpu_steps(context)
        self.mode = gpus.mig_mode
        self.work_with(StepDispatcher(self._runners(gpus)), gpus.restorers)
        self.cleaner.temporary = temporary_files(plugin, directory / "cdi", DRIVER)
        self.outcomes = Outcomes()
        self.service = claims_of(
            self, Identity(DRIVER, NODE, sharing(site), metadata), Devices(site.inventory), Users()
        ).service

    def without_record(self) -> Collection[str]:
        return SpecsWithoutRecord(self.records, self.specs).uids()

    def restarted(self, **options: Any) -> KindNode:
        """The next instance, after the first check at its start."""
        node = self.again(**options)
        node.maintenance.open()
        node.cleaner.clear_temporary()
        assert node.cleaner.clean_all() == []
        return node

    def again(self, **options: Any) -> Self:
        """The next instance, before its first check."""
        node = type(self)(
            self.site, self.directory, **{"boot_id": self.boot_id, "metadata": self.metadata, **options}
        )
        node.claims.allocated |= self.claims.allocated
        return node

    def prepare(self, wanted: AllocatedClaim, deadline_s: float | None = None) -> Any:
        self.claims.add(wanted)
        return self.service.prepare([wanted.ref], deadline_s)[wanted.ref.uid]

    def unprepare(self, wanted: AllocatedClaim) -> Any:
        return self.service.unprepare([wanted.ref], None)[wanted.ref.uid]

    @contextmanager
    def dying(self, at: Change | int | None, *, fault: bool = False) -> Iterator[list[Change]]:
        with self.deaths.watching(self.directory, at, fault=fault) as done:
            yield done

    def state(self) -> dict[str, object]:
        """Return everything that a claim may leave: files and directories without locks, and the GPUs.
        Values that only change their name have the same name here.
        """
        names = {str(self.directory): "", **self.site.made_uuids()}
        kept = [
            path
            for path in self.directory.rglob("*")
            if not {"locks", ".boot"} & set(path.parts) and (path.is_file() or path.is_dir())
        ]
        files = {
            str(path.relative_to(self.directory)): _renamed(path, names)
            for path in sorted(kept)
            if not _is_fixed(path.relative_to(self.directory))
        }
        return {**files, "GPUs": self.site.settings()}

    def _gpu_steps(self, context: MigContext) -> GpuSteps:
        site, counted = self.site, self.deaths.effects_of
        vfio = VfioSteps(
            self._vfio(),
            self.ledger,
            site.simulated.nvml,
            lambda _what, patience: site.simulated.session.closed(patience),
            counted(PersistenceModes(nullcontext)),
            self._look_again,
            lambda: site.detachment,
            self.lanes,
        )
        smi = counted(TimeSliceSettings(site))
        limits = counted(GpuLimits(nullcontext))
        return GpuSteps(context, site.simulated.paths.proc, vfio, smi, counted(self.mps), limits)

    def _runners(self, gpus: GpuSteps) -> dict[type, Any]:
        site, paths = self.site, self.site.simulated.paths
        return {
            **gpus.runners,
            StartMaintenance: self.maintenance,
            WriteDeviceMetadata: MetadataSteps(
                self.metadata_files, SimpleNamespace(latest=lambda: site.inventory), self.ledger
            ),
            WriteCdiSpec: CdiSteps(
                DRIVER,
                self.specs,
                site.driver_root,
                GpuNodes(paths, nodes=site.nodes),
                lambda: site.inventory.versions.driver,
                mps_layout(self.plugin),
                self.ledger,
                ExtraDeviceFinder(paths, no_programs, nodes=site.nodes),
                self._vfio(),
            ),
        }

    def _look_again(self, wait_s: float | None) -> None:
        if wait_s is not None and self.site.detachment is None:
            self.site.simulated.session.reopen()

    def _vfio(self) -> VfioCards:
        control = self.deaths.effects_of(SimulatedPciControl(self.site.machine))
        return VfioCards(self.site.simulated.paths, self.site.nodes, control)


def _is_fixed(path: Path) -> bool:
    """Whether it is a directory that the plugin creates once."""
    return path.parent in (Path(), Path("plugin")) and path.suffix != ".json"


def _renamed(path: Path, names: Mapping[str, str]) -> str:
    if path.is_dir():
        return "directory"
    text = re.sub('"until":"[^"]*"', '"until":"later"', path.read_text())
    for name, shown in names.items():
        text = text.replace(name, shown)
    return text


# --- kinds of claims -------------------------------------------------------------------------------


def sharing(site: Site) -> SharingPolicy:
    """GPU 5 is shared by memory, enforced by MPS; the others are exclusive."""
    by_memory = SharingRule("memory", enforce="mps")
    return SharingPolicy((SharingEntry(GpuSelector(uuids=frozenset({site.gpu(5).uuid})), by_memory),))


def parameters(kind: str = "GpuConfig", *requests: str, **shared: Any) -> DeviceConfig:
    return _opaque(kind, requests, sharing=shared)


def _opaque(kind: str, requests: tuple[str, ...] = (), **fields: Any) -> DeviceConfig:
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **fields}
    return DeviceConfig("FromClaim", requests, DRIVER, body)


POWER = {"power": {"limitWatts": 500}}
CLOCKS = {"clocks": {"graphicsMHz": {"max": 1200}, "memoryMHz": {"min": 2619}}}


def maintenance_parameters(**fields: Any) -> dict[str, Any]:
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MaintenanceConfig", **fields}


MPS = {
    "strategy": "MPS",
    "mpsConfig": {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "4Gi"},
}
TIME_SLICING = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}


def share(site: Site, number: int) -> DeviceResult:
    return result(site.whole(5), share_id=_SHARE_IDS[number], consumed_capacity={"memory": "10Gi"})


@dataclass(frozen=True)
class Kind:
    """A claim, other claims that are prepared before and stay, and whether containers get device metadata."""

    wanted: Callable[[Site], AllocatedClaim]
    beside: Callable[[Site], tuple[AllocatedClaim, ...]] = lambda _site: ()
    metadata: tuple[str, ...] = ()


_BOTH = ("v1beta1", "v1alpha1")


def _several(site: Site) -> AllocatedClaim:
    return claim(
        result(site.whole(2), "first"),
        result(site.static(1, "1g.10gb", 0), "second/small"),
        result(site.whole(3), "third"),
        configs=(parameters("GpuConfig", "third", **TIME_SLICING),),
    )


def _small(site: Site, **changes: Any) -> DeviceResult:
    return result(site.possible(7, "1g.10gb", 3), **changes)


KINDS: Mapping[str, Kind] = {
    "plain": Kind(lambda site: claim(site.whole(2))),
    "several requests": Kind(_several),
    "static MIG": Kind(lambda site: claim(site.static(0, "3g.40gb", 4))),
    "admin access": Kind(
        lambda site: claim(
            result(site.whole(2), admin_access=True),
            result(site.possible(7, "1g.10gb", 3), admin_access=True),
        )
    ),
    "time-slicing": Kind(lambda site: claim(site.whole(2), configs=(parameters(**TIME_SLICING),))),
    "eight GPUs with an interval": Kind(
        lambda site: claim(
            *(site.whole(index) for index in (2, 3, 6, *ADDED)), configs=(parameters(**TIME_SLICING),)
        )
    ),
    "power limit": Kind(lambda site: claim(site.whole(2), configs=(_opaque("GpuConfig", **POWER),))),
    "locked clocks": Kind(lambda site: claim(site.whole(2), configs=(_opaque("GpuConfig", **CLOCKS),))),
    "second share with limits": Kind(
        lambda site: claim(share(site, 0), configs=(_opaque("GpuConfig", **POWER, **CLOCKS),)),
        lambda site: (
            claim(share(site, 1), uid="uid-beside", configs=(_opaque("GpuConfig", **POWER, **CLOCKS),)),
        ),
    ),
    "MPS settings": Kind(lambda site: claim(site.whole(3), configs=(parameters(**MPS),))),
    "MPS over several GPUs": Kind(
        lambda site: claim(site.whole(3), site.whole(6), configs=(parameters(**MPS),))
    ),
    "share": Kind(lambda site: claim(share(site, 0))),
    "second share": Kind(
        lambda site: claim(share(site, 0)), lambda site: (claim(share(site, 1), uid="uid-beside"),)
    ),
    "MIG on demand": Kind(lambda site: claim(_small(site))),
    "second MIG on demand": Kind(
        lambda site: claim(_small(site)),
        lambda site: (claim(site.possible(7, "2g.20gb", 0), uid="uid-beside"),),
    ),
    "two MIG devices on demand": Kind(
        lambda site: claim(_small(site), result(site.possible(7, "2g.20gb", 0), "large"))
    ),
    "whole GPU with MIG on demand": Kind(lambda site: claim(site.whole(6))),
    "maintenance": Kind(
        lambda site: claim(
            result(site.whole(2), admin_access=True),
            configs=(DeviceConfig("FromClaim", (), DRIVER, maintenance_parameters()),),
        )
    ),
    "virtual machine": Kind(lambda site: claim(site.for_machine(FOR_MACHINES))),
    "metadata": Kind(_several, metadata=_BOTH),
    "MIG on demand with MPS and metadata": Kind(
        lambda site: claim(_small(site), configs=(parameters("MigDeviceConfig", **MPS),)), metadata=_BOTH
    ),
}
"""Every kind of claim that has steps, or a record, of its own."""


def documents(directory: Path) -> dict[str, Any]:
    """Every JSON file below a directory."""
    return {
        str(path.relative_to(directory)): json.loads(path.read_text())
        for path in sorted(directory.rglob("*.json"))
    }


@pytest.fixture(scope="module")
def site(make_memory_path: Callable[[], Path]) -> Iterator[Site]:
    """A machine for all tests of a file, since rendering one takes longer than a test."""
    one = Site(make_memory_path() / "machine")
    yield one
    one.close()
