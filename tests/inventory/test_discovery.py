from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.errors import (
    DriverGoneError,
    NvmlInUseError,
    NvmlLibraryError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.host.driver_root import find_nvml_library
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory import discovery as module
from dra_driver.inventory.discovery import Discovery
from dra_driver.model.gpu import CHANGED_BY_MIG, Card, Fabric, FabricRegistration, Gpu, UnreadyFabric
from dra_driver.model.health import NvLinks, PolledHealth
from dra_driver.model.host import GpuFingerprint, HostFingerprint, NvmlFingerprint
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.model.mig import GpuInstance, Partitioning, PlacedProfile, Placement
from dra_driver.model.problems import NodeProblem
from dra_driver.nvml.reader import NvmlReader
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import ONE_G, VERSIONS, VFIO_0, VFIO_1, bound, h100, inventory, mig
from tests.fakes.waiting import eventually
from tests.host.trees import VERSION, driver_root, put_elf_libraries

NOT_LOADED = NvmlUnavailableError(
    "initialise NVML: the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)"
)
VFIO_2 = "vfio-0000-12-00-0"
BARE = tuple(h100(number, pcie_root=None, numa_node=None) for number in range(3))


def fingerprint_of(uuid: str, minor: int, *, mig_enabled: bool = False, **more: Hashable) -> GpuFingerprint:
    return GpuFingerprint(uuid, {"minor": minor, "mig_capable": True, "mig_enabled": mig_enabled, **more})


class Nvml:
    """NVML that shows `inventory`, or fails with `error`."""

    is_open, pauses = True, 0
    changes_for_s = 0.0

    def __init__(self) -> None:
        self.session = self
        self.inventory = inventory(*BARE)
        self.error: Exception | None = None
        self.fingerprint: NvmlFingerprint = tuple(
            fingerprint_of(gpu.uuid, number) for number, gpu in enumerate(BARE)
        )
        self.opened = self.openings = self.closed = self.reads = 0
        self.existing: dict[str, tuple[bool, tuple[GpuInstance, ...]]] = {}
        self.requested: list[str] = []
        self.on_open: Callable[[], object] = lambda: None

    def reopen(self) -> None:
        self.opened += 1
        self.on_open()
        if self.error is not None:
            raise self.error
        self.openings += 1

    def close(self) -> None:
        self.closed += 1

    def kept_open(self) -> AbstractContextManager[int]:
        return nullcontext(self.opened)

    def change_lasts_s(self) -> float:
        return self.changes_for_s

    def read_inventory(self) -> Inventory:
        self.reads += 1
        return self.inventory

    def read_what_exists(self, gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        self.requested.append(gpu.uuid)
        return self.existing[gpu.uuid]

    def nvml_fingerprint(self) -> NvmlFingerprint:
        if self.error is not None:
            raise self.error
        return self.fingerprint


class Host:
    """A host whose sysfs has an entry for every GPU, with all files of the NVIDIA driver except those in
    `lacks`.
    """

    def __init__(self) -> None:
        self.functions = {gpu.pci_bus_id or "" for gpu in BARE}
        self.unbound: set[str] = set()
        self.hardware: Hashable = "one"
        self.version = "570.124.06"
        self.lacks: str | None = None
        self.shown: dict[int, Hashable] = {}
        self.surprises: list[Exception] = []

    def pcie_root(self, bus_id: str) -> str | None:
        return f"pci0000:{int(bus_id[5:7], 16) - 1:02x}"

    def numa_node(self, bus_id: str) -> int | None:
        return 0

    def problem(self, nvml_version: str | None) -> str | None:
        return self.lacks

    def gpu_functions(self) -> frozenset[str]:
        return frozenset(self.functions)

    def is_bound(self, bus_id: str) -> bool:
        return bus_id in self.functions - self.unbound

    def fingerprint(self) -> HostFingerprint:
        if self.surprises:
            raise self.surprises.pop()
        return HostFingerprint(self.hardware, self.version, dict(self.shown))

    def loaded_driver(self) -> str:
        return self.version


class Ours:
    """The instances and MIG modes of this driver."""

    def __init__(self) -> None:
        self.slots: set[tuple[int, int]] = set()
        self.modes: set[str] = set()

    def foreign_instances(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        return tuple(instance for instance in existing if instance.slot not in self.slots)

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        return gpu_uuid in self.modes


class Bench:
    def __init__(self) -> None:
        self.nvml, self.host = Nvml(), Host()
        self.changes: list[Inventory | None] = []
        self.reported: list[str] = []
        self.ours = Ours()
        self.discovery = Discovery(
            self.nvml,
            self.host,
            lambda: self.changes.append(self.discovery.inventory),
            lambda: self.reported.append("driver"),
            self.ours,
            lambda: self.reported.append("hardware"),
            files=self.host,
        )

    def scan(self) -> Inventory | None:
        self.discovery.scan_now(5)
        return self.discovery.inventory

    def look(self) -> bool:
        """As each second; whether everything was read."""
        reads = self.discovery._scans_begun
        self.discovery._look()
        return self.discovery._scans_begun > reads


COMPLETE = inventory(*map(h100, range(3)))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("_RETRY_FIRST_S", "_RETRY_MAX_S", "_CHECK_EVERY_S"):
        monkeypatch.setattr(module, name, 0.005)
    made = Bench()
    yield made
    made.discovery.stop()


def test_gpus_get_their_place_from_the_host(bench: Bench) -> None:
    assert bench.scan() == COMPLETE
    assert bench.discovery.unavailable() is None
    assert bench.changes == [COMPLETE]


def test_gpu_without_a_bus_id_stays_without_a_place(bench: Bench) -> None:
    lonely = replace(BARE[0], pci_bus_id=None)
    bench.nvml.inventory = inventory(lonely)
    bench.host.functions = set()
    assert bench.scan() == inventory(lonely)


def test_change_is_reported_only_when_something_changed(bench: Bench) -> None:
    for _ in range(3):
        bench.scan()
    assert len(bench.changes) == 1
    bench.nvml.inventory = inventory(*BARE[:2])
    bench.host.functions.remove(BARE[2].pci_bus_id or "")
    bench.scan()
    bench.scan()
    assert bench.changes == [COMPLETE, inventory(*map(h100, range(2)))]


def test_node_without_gpus_has_an_empty_inventory(bench: Bench) -> None:
    bench.nvml.inventory, bench.host.functions = Inventory(VERSIONS), set()
    assert bench.scan() == Inventory(VERSIONS)
    assert bench.discovery.unavailable() is None
    assert bench.changes == [Inventory(VERSIONS)]


def test_nothing_is_published_when_there_is_no_driver_yet(bench: Bench, logs: list) -> None:
    bench.nvml.error = NOT_LOADED
    for _ in range(3):
        assert bench.scan() is None
    assert bench.discovery.unavailable() == str(NOT_LOADED)
    assert bench.changes == []
    assert [line["event"] for line in logs] == ["nvml_unavailable"]


def test_devices_are_withdrawn_when_the_driver_is_unloaded_and_come_back(bench: Bench) -> None:
    bench.scan()
    bench.nvml.error = NOT_LOADED
    assert bench.scan() == Inventory(VERSIONS)
    assert bench.discovery.unavailable() == str(NOT_LOADED)
    bench.scan()
    bench.nvml.error = None
    assert bench.scan() == COMPLETE
    assert bench.changes == [COMPLETE, Inventory(VERSIONS), COMPLETE]


def test_ready_state_is_never_seen_with_the_devices_of_before(bench: Bench) -> None:
    """Prepare reads both without a lock."""
    bench.scan()
    bench.nvml.error = NOT_LOADED
    bench.scan()
    bench.nvml.error = None
    wrong: list[object] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            ready = bench.discovery.unavailable() is None
            if ready and not (bench.discovery.inventory or Inventory()).gpus:
                wrong.append(ready)

    watcher = threading.Thread(target=look)
    watcher.start()
    states: list[bool] = []
    original = type(bench.discovery)._log_faults

    def slow(self: Discovery, found: Inventory) -> None:
        original(self, found)
        states.append(self.unavailable() is None)

    type(bench.discovery)._log_faults = slow  # type: ignore[method-assign]
    try:
        bench.scan()
    finally:
        type(bench.discovery)._log_faults = original  # type: ignore[method-assign]
        stop.set()
        watcher.join()
    assert (wrong, states) == ([], [False])


def test_pool_is_not_emptied_when_the_bus_has_gpus_that_nvml_does_not_show(bench: Bench) -> None:
    bench.nvml.inventory = Inventory(VERSIONS)
    assert bench.scan() is None
    assert bench.discovery.unavailable() == (
        "NVML shows no GPU, but the PCI bus has 3 GPUs (0000:10:00.0, 0000:11:00.0, 0000:12:00.0), perhaps not "
        "bound to the NVIDIA driver yet: see the kernel log, or wait for the driver's installer"
    )
    assert bench.changes == []


def test_cause_is_reported_when_no_gpu_answers(bench: Bench) -> None:
    lost = DiscoveryFault("GPU with NVML index 0", "nvmlDeviceGetUUID: the GPU does not answer (GPU is lost)")
    bench.nvml.inventory = Inventory(VERSIONS, faults=(lost,))
    assert bench.scan() is None
    assert bench.discovery.unavailable() == f"NVML cannot read any GPU: {lost.subject}: {lost.text}"


def test_function_that_nvml_does_not_show_is_a_fault_and_hides_no_gpu(bench: Bench, logs: list) -> None:
    bench.host.functions.add("0000:99:00.0")
    for _ in range(2):
        found = bench.scan()
        assert found.gpus == COMPLETE.gpus
        assert found.faults == (
            DiscoveryFault(
                "GPU 0000:99:00.0",
                "it is missing from NVML; it may be lost, drained, or bound to another driver",
            ),
        )
    assert [line["subject"] for line in logs if line["event"] == "discovery_fault"] == ["GPU 0000:99:00.0"]


def test_card_under_vfio_is_on_offer_and_no_fault(bench: Bench) -> None:
    there = bound(2)
    bench.discovery.cards = lambda gpus: (there,)
    bench.nvml.inventory = inventory(*BARE[:2])
    found = bench.scan()
    assert (found.faults, found.lost, found.cards) == ((), (), (there,))
    assert VFIO_2 in found.by_name
    bench.discovery.cards = lambda gpus: (replace(there, driver="snd_hda_intel"),)
    found = bench.scan()
    assert [fault.subject for fault in found.faults] == ["GPU 0000:12:00.0"]


def test_gpu_that_goes_to_vfio_is_not_lost(bench: Bench) -> None:
    bench.scan()
    bench.discovery.cards = lambda gpus: (bound(2),)
    bench.nvml.inventory = inventory(*BARE[:2])
    bench.host.unbound.add("0000:12:00.0")
    found = bench.scan()
    assert (found.faults, found.lost) == ((), ())


@pytest.mark.parametrize("error", [NOT_LOADED, None])
def test_node_whose_cards_are_all_under_vfio_is_known(bench: Bench, error: Exception | None) -> None:
    cards = tuple(map(bound, range(3)))
    bench.discovery.cards = lambda gpus: cards
    bench.nvml.inventory, bench.nvml.error = Inventory(VERSIONS), error
    found = bench.scan()
    assert bench.discovery.unavailable() is None
    assert [device.name for device in found.devices()] == [VFIO_0, VFIO_1, VFIO_2]


def test_node_with_one_gpu_that_is_not_under_vfio_needs_nvml(bench: Bench) -> None:
    bench.discovery.cards = lambda gpus: (bound(0), bound(1))
    bench.nvml.error = NOT_LOADED
    assert bench.scan() is None
    assert bench.discovery.unavailable() == str(NOT_LOADED)


def test_cards_are_withdrawn_with_the_gpus_while_nvml_is_away(bench: Bench) -> None:
    bench.discovery.cards = lambda gpus: (bound(2),)
    bench.nvml.inventory = inventory(*BARE[:2])
    bench.scan()
    bench.nvml.error, bench.host.hardware = NOT_LOADED, "two"
    found = bench.scan()
    assert list(found.devices()) == []


@pytest.mark.parametrize("has_nvml", [True, False])
def test_ledger_of_cards_that_cannot_be_read_changes_nothing_else(bench: Bench, has_nvml: bool) -> None:
    bench.scan()

    def fails(_gpus: Sequence[Gpu]) -> tuple[Card, ...]:
        raise StateError("cannot list the passthrough ledger files in /x: I/O error")

    bench.discovery.cards = fails
    if has_nvml:
        assert bench.scan() == COMPLETE
        assert bench.discovery.unavailable() is None
    else:
        bench.nvml.error, bench.host.hardware = NOT_LOADED, "two"
        bench.scan()
        assert bench.discovery.unavailable() == str(NOT_LOADED)


def test_fault_is_reported_again_when_it_comes_again(bench: Bench, logs: list) -> None:
    for functions in ({"0000:99:00.0"}, set(), {"0000:99:00.0"}):
        bench.host.functions = {gpu.pci_bus_id or "" for gpu in BARE} | functions
        bench.scan()
    assert [line["event"] for line in logs].count("discovery_fault") == 2


def test_everything_is_read_again_when_the_fingerprint_changes(bench: Bench) -> None:
    bench.discovery.start()
    eventually(lambda: bench.changes)
    reads = bench.nvml.reads
    time.sleep(0.05)
    assert bench.nvml.reads == reads
    bench.nvml.inventory, bench.host.hardware = inventory(*BARE[:2]), "two"
    bench.host.functions.remove(BARE[2].pci_bus_id or "")
    eventually(lambda: len(bench.changes) == 2)
    time.sleep(0.05)
    assert bench.nvml.reads == reads + 1


@pytest.mark.parametrize("change", ["fingerprint", "error"])
def test_everything_is_read_again_when_nvml_itself_changes(bench: Bench, change: str) -> None:
    """A lost GPU stays in sysfs."""
    bench.discovery.start()
    eventually(lambda: bench.changes)
    bench.nvml.inventory = inventory(*BARE[:2])
    if change == "fingerprint":
        bench.nvml.fingerprint = (*bench.nvml.fingerprint[:2], None)
    else:
        bench.nvml.error = NOT_LOADED
        eventually(lambda: bench.discovery.unavailable() is not None)
        bench.nvml.error = None
    eventually(lambda: bench.changes[-1] is not None and len(bench.changes[-1].gpus) == 2)


def test_node_without_gpus_and_without_a_driver_is_known_to_be_empty(bench: Bench) -> None:
    bench.nvml.error, bench.host.functions = NOT_LOADED, set()
    assert bench.scan() == Inventory()
    assert (bench.discovery.unavailable(), bench.changes) == (None, [Inventory()])


def test_library_that_cannot_be_loaded_is_trouble_also_where_the_bus_shows_no_gpu(bench: Bench) -> None:
    bench.nvml.error, bench.host.functions = NvmlLibraryError("cannot load the NVML library"), set()
    bench.scan()
    assert bench.discovery.unavailable() == "cannot load the NVML library"
    assert bench.discovery.problem() == "cannot load the NVML library"


def test_a_library_of_another_architecture_alone_is_reported_where_the_bus_shows_no_gpu(
    tmp_path: Path, logs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.host.libraries.MACHINE", "x86_64")
    driver_root(tmp_path)
    put_elf_libraries(tmp_path, "/usr/lib/x86_64-linux-gnu", "aarch64")
    reader = NvmlReader(lambda: find_nvml_library(str(tmp_path)))
    host = Sysfs(str(tmp_path / "sys"), str(tmp_path / "proc"))
    discovery = Discovery(reader, host, list, list, None, list)
    for _ in range(2):
        discovery.scan_now(5)
    library = f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{VERSION}"
    reported = (
        f"1 library below the driver root {tmp_path} is not used, because this machine is x86_64: for example, "
        f"{library} is for aarch64; install the NVIDIA driver for this machine"
    )
    assert (discovery.problem() or "").startswith(reported)
    assert [line["reason"].startswith(reported) for line in logs if line["event"] == "nvml_unavailable"] == [
        True
    ]


def test_missing_files_of_the_nvidia_driver_are_reported_with_the_devices(bench: Bench, logs: list) -> None:
    bench.host.lacks = "libcuda.so.<version> is not below the driver root /"
    for _ in range(2):
        found = bench.scan()
        assert (found.gpus, bench.discovery.unavailable()) == (COMPLETE.gpus, None)
    reported = f"no claim can be prepared: {bench.host.lacks}"
    assert bench.discovery.problems() == [NodeProblem("driver-files-missing", reported)]
    assert [(line["subject"], line["reason"]) for line in logs if line["event"] == "discovery_fault"] == [
        ("NVIDIA driver", reported)
    ]
    bench.host.lacks = None
    bench.scan()
    assert bench.discovery.problems() == []
    bench.host.lacks, bench.nvml.inventory, bench.host.functions = (
        "nobody needs it",
        Inventory(VERSIONS),
        set(),
    )
    bench.scan()
    assert bench.discovery.problems() == [], "a node without GPUs needs no files"


def test_everything_is_read_again_when_requested_and_from_time_to_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.discovery.start()
    eventually(lambda: bench.nvml.reads == 1)
    bench.discovery.request_rescan()
    eventually(lambda: bench.nvml.reads == 2)
    monkeypatch.setattr(module, "_RESCAN_EVERY_S", 0.01)
    eventually(lambda: bench.nvml.reads >= 4)


FABRIC = Fabric("7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11", (3,))
PENDING, BROKEN = UnreadyFabric("pending", "not started"), UnreadyFabric("broken", "error 999")
UNREADY = replace(BARE[0], unready_fabric=PENDING)
COMPLETED = replace(BARE[0], fabric=FABRIC)
CUT = replace(COMPLETED, partitioning=Partitioning(()))


@pytest.mark.parametrize(
    ("known", "polled", "is_other"),
    [
        (UNREADY, PENDING, False),
        (UNREADY, UnreadyFabric("pending", "in progress"), True),
        (UNREADY, FABRIC, True),
        (UNREADY, None, True),  # complete on a board of its own
        (BARE[0], None, False),
        (BARE[0], PENDING, True),
        (COMPLETED, FABRIC, False),
        (COMPLETED, replace(FABRIC, cliques=(4,)), True),
        (COMPLETED, PENDING, True),
        (COMPLETED, None, True),
        # What a GPU says in MIG mode is not what it was out of it.
        (CUT, None, False),
        (CUT, PENDING, False),
        (CUT, replace(FABRIC, cliques=(4,)), True),
        (replace(UNREADY, partitioning=CUT.partitioning), FABRIC, True),
    ],
)
def test_everything_is_read_again_when_a_poll_finds_another_fabric(
    bench: Bench, known: Gpu, polled: FabricRegistration, is_other: bool
) -> None:
    bench.nvml.inventory = inventory(known, *BARE[1:])
    bench.discovery.health_polled(known.uuid, registered(polled))
    bench.scan()
    for uuid, registration in ((known.uuid, polled), ("GPU-of-somebody", FABRIC)):
        bench.discovery.health_polled(uuid, registered(registration))
    bench.discovery.health_polled(known.uuid, PolledHealth())
    assert bench.look() == is_other
    assert not bench.look()


def registered(registration: FabricRegistration) -> PolledHealth:
    return PolledHealth(fabric="ready", fabric_registration=registration)


@pytest.mark.parametrize(("up", "is_other"), [(18, False), (17, True), (0, True)])
def test_everything_is_read_again_when_a_poll_finds_another_number_of_nvlinks(
    bench: Bench, up: int, is_other: bool
) -> None:
    known = replace(BARE[0], nvlink_links=18)
    bench.nvml.inventory = inventory(known, *BARE[1:])
    bench.scan()
    bench.discovery.health_polled(known.uuid, PolledHealth(nvlinks=NvLinks(tuple(range(up)))))
    assert bench.look() == is_other
    assert not bench.look()


def test_time_since_when_a_fabric_is_not_ready_lasts_as_long_as_its_state(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr(module.time, "time", lambda: now)

    def since(unready: UnreadyFabric | None, fabric: Fabric | None = None) -> int | None:
        bench.nvml.inventory = inventory(replace(BARE[0], unready_fabric=unready, fabric=fabric), *BARE[1:])
        found = (bench.scan() or Inventory()).gpus[0].unready_fabric
        return None if found is None else found.since

    seen = [since(PENDING)]
    now += 60
    seen += [since(UnreadyFabric("pending", "in progress")), since(BROKEN)]
    now += 60
    seen += [since(BROKEN), since(None, FABRIC), since(PENDING)]
    assert seen == [1_800_000_000, 1_800_000_000, 1_800_000_060, 1_800_000_060, None, 1_800_000_120]


@pytest.mark.parametrize("where", ["scan", "fingerprint"])
def test_surprise_does_not_end_the_thread(bench: Bench, logs: list, where: str) -> None:
    bench.discovery.start()
    eventually(lambda: bench.changes)
    if where == "scan":
        bench.nvml.error = ValueError("a bug")
        bench.discovery.request_rescan()
        eventually(lambda: bench.discovery.unavailable() == "discovery failed unexpectedly; see the log")
        bench.nvml.error = None
    else:
        bench.host.surprises = [ValueError("a bug")]
        eventually(lambda: not bench.host.surprises)
    eventually(lambda: bench.discovery.unavailable() is None)
    assert ("worker_failed", "discovery") in [(line["event"], line.get("worker")) for line in logs]
    assert bench.discovery.inventory == COMPLETE


def test_stop_closes_nvml_and_ends_the_thread(bench: Bench) -> None:
    bench.discovery.start()
    eventually(lambda: bench.changes)
    bench.discovery.stop()
    assert not bench.discovery._worker._thread.is_alive()
    assert bench.nvml.closed == 1


# --- the driver, and the hardware ---------------------------------------------------------------------


def test_driver_is_loaded_once_however_often_the_hardware_changes(bench: Bench) -> None:
    bench.scan()
    assert bench.reported == ["driver"]
    bench.host.hardware = "two"
    assert bench.look()
    assert (bench.nvml.opened, bench.reported) == (2, ["driver", "hardware"])
    bench.nvml.error = RetryableError("initialise NVML: unknown error")
    bench.scan()
    bench.nvml.error = None
    bench.scan()
    assert bench.reported == ["driver", "hardware", "hardware"]
    assert not bench.look()


@pytest.mark.parametrize("version", ["570.124.06", "580.95.05"])
def test_driver_that_went_and_came_is_loaded_again(bench: Bench, version: str) -> None:
    bench.scan()
    bench.nvml.error, bench.host.version = DriverGoneError("initialise NVML: not loaded"), ""
    bench.scan()
    bench.nvml.error, bench.host.version = None, version
    bench.scan()
    assert bench.reported == ["driver", "driver"]


def test_driver_that_was_replaced_between_two_checks_is_loaded_again(bench: Bench) -> None:
    bench.scan()
    bench.host.version = "580.95.05"
    assert bench.look()
    assert (bench.nvml.opened, bench.reported) == (2, ["driver", "driver"])


def test_driver_that_nvml_itself_loads_is_loaded_once(bench: Bench) -> None:
    bench.host.version = ""
    bench.nvml.on_open = lambda: setattr(bench.host, "version", "570.124.06")
    bench.scan()
    assert not bench.look()
    assert (bench.nvml.opened, bench.reported) == (1, ["driver"])


def test_shutdown_of_nvml_that_hangs_in_a_lane_is_a_problem_until_it_ends(bench: Bench) -> None:
    bench.scan()
    bench.nvml.changes_for_s = 31.0
    [problem] = bench.discovery.problems()
    assert (problem.code, problem.text[:34]) == ("gpus-unavailable", "NVML has not answered for 31 s; a ")
    assert bench.discovery.unavailable() is None, "claims that need no NVML go on"
    bench.nvml.changes_for_s = 0.0
    assert bench.discovery.problems() == []


def test_new_session_waits_until_no_gpu_is_being_changed(bench: Bench, logs: list) -> None:
    bench.scan()
    bench.host.hardware, bench.nvml.error = "two", NvmlInUseError("a change to a GPU is under way")
    bench.nvml.nvml_fingerprint = lambda: bench.nvml.fingerprint  # type: ignore[method-assign]
    for opened in (2, 3):
        assert bench.look()
        assert (bench.nvml.opened, bench.discovery.unavailable()) == (opened, None)
    assert (bench.nvml.reads, bench.reported, bench.changes) == (3, ["driver"], [COMPLETE])
    assert [line["event"] for line in logs].count("nvml_in_use") == 1
    bench.nvml.error = None
    assert bench.look()
    assert (bench.reported, bench.look()) == (["driver", "hardware"], False)


# --- MIG devices on demand ------------------------------------------------------------------------------

SMALL = tuple(Placement(start, 1) for start in range(7))
OURS, THEIRS = GpuInstance(7, 19, SMALL[0]), GpuInstance(9, 19, SMALL[3])


def cut(number: int, *withheld: GpuInstance, **changes: object) -> Gpu:
    """A GPU to be cut on demand, as NVML shows it."""
    partitioning = Partitioning((PlacedProfile(ONE_G, SMALL),), (), withheld)
    return replace(BARE[number], partitioning=partitioning, **changes)


@pytest.fixture
def cut_bench(bench: Bench) -> Bench:
    """GPU 1 is cut on demand, the others are not."""
    bench.nvml.inventory = inventory(BARE[0], cut(1), BARE[2])
    bench.ours.slots = {OURS.slot}
    bench.scan()
    return bench


def make(bench: Bench, *instances: GpuInstance, minor: int = 1) -> None:
    """GPU 1 is in MIG mode with these instances."""
    uuid = BARE[1].uuid
    seen = bench.nvml.fingerprint
    bench.nvml.fingerprint = (seen[0], fingerprint_of(uuid, minor, mig_enabled=True), seen[2])
    bench.host.shown = {minor: tuple(item.gpu_instance_id for item in instances)}
    bench.nvml.existing[uuid] = (True, instances)
    bench.nvml.inventory = inventory(BARE[0], cut(1, *instances, mig_enabled=True, minor=minor), BARE[2])


def test_our_own_instance_costs_a_check_its_gpu_alone(cut_bench: Bench) -> None:
    cut_bench.ours.modes = {BARE[1].uuid}
    make(cut_bench, OURS, minor=5)
    assert not cut_bench.look()
    assert cut_bench.nvml.requested == [BARE[1].uuid]
    assert not cut_bench.look()
    assert cut_bench.nvml.requested == [BARE[1].uuid] * 2, "NVML may show it later than the host"
    assert not cut_bench.look()
    assert cut_bench.nvml.requested == [BARE[1].uuid] * 2, "what was looked at is known"
    cut_bench.scan()
    assert len(cut_bench.changes) == 1, "neither the mode nor the minor number is a change"
    now = cut_bench.discovery.inventory
    assert now.gpus[1].minor == 5


@pytest.mark.parametrize("instances", [(OURS, THEIRS), (THEIRS,)])
def test_instance_of_someone_else_is_read_with_everything(
    cut_bench: Bench, instances: tuple[GpuInstance, ...]
) -> None:
    cut_bench.ours.modes = {BARE[1].uuid}
    make(cut_bench, *instances)
    assert cut_bench.look()
    now = cut_bench.discovery.inventory
    assert now.gpus[1].partitioning.withheld == (THEIRS,)
    cut_bench.host.shown = {1: "a compute instance in somebody else's GPU instance"}
    assert cut_bench.look()


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "on demand"])
@pytest.mark.parametrize("changed", ["uuid", "minor", "mig_capable", "mig_enabled", "later"])
def test_changed_value_of_a_fingerprint_is_noticed(cut_bench: Bench, changed: str, number: int) -> None:
    """`later` is a value that a later release keeps current."""
    nvml = cut_bench.nvml
    nvml.existing[BARE[1].uuid] = (False, ())
    before = [fingerprint_of(gpu.uuid, minor, later=0) for minor, gpu in enumerate(BARE)]
    nvml.fingerprint = tuple(before)
    cut_bench.scan()
    assert (cut_bench.look(), nvml.requested) == (False, [])
    values = before[number].values
    before[number] = (
        GpuFingerprint("other", values)
        if changed == "uuid"
        else replace(before[number], values={**values, changed: "other"})
    )
    nvml.fingerprint = tuple(before)
    is_mig = number == 1 and changed in CHANGED_BY_MIG
    assert (cut_bench.look(), nvml.requested) == (not is_mig, [BARE[1].uuid] if is_mig else [])


def test_mode_that_someone_else_switched_on_is_read_with_everything(cut_bench: Bench) -> None:
    make(cut_bench)
    assert cut_bench.look()
    assert len(cut_bench.changes) == 2


def test_instances_of_other_gpus_are_read_with_everything(cut_bench: Bench) -> None:
    reads = cut_bench.nvml.reads
    for shown in ({0: "of a GPU that is not cut"}, {0: "of it", 42: "of no known GPU"}):
        cut_bench.host.shown = shown
        assert cut_bench.look()
    assert cut_bench.nvml.reads == reads + 2
    assert cut_bench.look(), "NVML may show it later than the host"
    cut_bench.nvml.existing = {BARE[1].uuid: (False, ())}
    cut_bench.host.shown = {**cut_bench.host.shown, 1: "of a GPU that is cut"}
    assert not cut_bench.look()


@pytest.mark.parametrize("mode_is_ours", [True, False])
def test_an_instance_that_the_host_shows_before_nvml_is_found(cut_bench: Bench, mode_is_ours: bool) -> None:
    uuid = BARE[1].uuid
    cut_bench.ours.modes = {uuid} if mode_is_ours else set()
    make(cut_bench, THEIRS)
    cut_bench.nvml.existing[uuid] = (True, ())
    cut_bench.nvml.inventory = inventory(BARE[0], cut(1, mig_enabled=True), BARE[2])
    assert cut_bench.look() is not mode_is_ours
    make(cut_bench, THEIRS)
    assert cut_bench.look()
    now = cut_bench.discovery.inventory
    assert now.gpus[1].partitioning.withheld == (THEIRS,)


def test_failed_check_reads_everything(cut_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_gpu: Gpu) -> tuple[bool, tuple[GpuInstance, ...]]:
        raise RetryableError("list the GPU instances: unknown error")

    monkeypatch.setattr(cut_bench.nvml, "read_what_exists", fails)
    cut_bench.ours.modes = {BARE[1].uuid}
    make(cut_bench, OURS)
    assert cut_bench.look()


@pytest.mark.parametrize("kind", ["unread", "mode"])
def test_gpu_that_could_not_be_read_once_stays_as_it_was(cut_bench: Bench, kind: str) -> None:
    """Otherwise its own instances would be published as foreign, and the whole GPU too."""
    cut_bench.ours.modes = {BARE[1].uuid}
    make(cut_bench, OURS)
    before = cut_bench.scan()
    fault = DiscoveryFault(f"GPU {BARE[1].uuid}", "MIG mode: unknown error")
    blind = replace(
        BARE[1], mig_enabled=kind == "unread", mig_devices=(mig(1, ONE_G, 0, 1, OURS.gpu_instance_id),)
    )
    cut_bench.nvml.inventory = replace(
        inventory(BARE[0], blind, BARE[2]),
        faults=(fault,),
        unread=frozenset({BARE[1].uuid} if kind == "unread" else ()),
    )
    after = cut_bench.scan()
    assert [list(found.by_name) for found in (before, after)] == [list(before.by_name)] * 2
    assert after.gpus[1].partitioning == before.gpus[1].partitioning
    assert not after.gpus[1].mig_devices


def test_our_own_instance_is_on_offer_not_even_by_a_gpu_that_was_never_read(bench: Bench) -> None:
    bench.ours.slots = {OURS.slot}
    migs = (mig(1, ONE_G, 0, 1, OURS.gpu_instance_id), mig(1, ONE_G, 3, 1, THEIRS.gpu_instance_id))
    blind = replace(BARE[1], mig_enabled=True, mig_devices=migs)
    bench.nvml.inventory = replace(inventory(BARE[0], blind), unread=frozenset({blind.uuid}))
    found = bench.scan()
    assert found.gpus[1].mig_devices == migs[1:]


def test_gpu_that_could_not_be_read_is_retried_sooner(
    cut_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RESCAN_INCOMPLETE_S", 0.01)
    cut_bench.nvml.inventory = replace(cut_bench.nvml.inventory, unread=frozenset({BARE[1].uuid}))
    reads = cut_bench.nvml.reads
    cut_bench.discovery.start()
    eventually(lambda: cut_bench.nvml.reads >= reads + 3)


def test_virtual_functions_of_a_gpu_are_not_hidden_gpus(machine: Callable[[str], SimulatedNode]) -> None:
    """SR-IOV: NVML lists only physical functions, so new virtual functions are no reason to reopen NVML."""
    node = machine("l40s-8")
    before = node.host.fingerprint()
    node.machine.set_virtual_functions(0, 4)
    found = node.discover()
    assert (len(found.gpus), found.faults) == (8, ())
    assert node.host.fingerprint() == before
    assert len(list((node.machine.host_root / "sys/bus/pci/devices").glob("*/physfn"))) == 4


def test_settings_may_be_lost_when_a_gpu_answers_again_or_nvml_was_closed_without_persistence_mode(
    bench: Bench,
) -> None:
    """Otherwise the GPU would keep the NVIDIA driver's default limit, and others would look as if changed."""
    persistent = [replace(gpu, persistence=True) for gpu in BARE]
    for index, (gpus, reported) in enumerate([
        (persistent, 1),
        (persistent[:2], 1),
        (persistent, 2),
        (persistent, 2),
        ([persistent[0], BARE[1]], 2),
        ([persistent[0], BARE[1]], 3),  # NVML is reopened at each scan while a GPU is lost
    ]):  # fmt: skip
        bench.nvml.inventory = inventory(*gpus)
        bench.scan()
        assert len(bench.reported) == reported, (index, bench.reported)
