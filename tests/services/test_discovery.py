from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

import pytest

from dra_driver.errors import NvmlUnavailableError, RetryableError
from dra_driver.model.inventory import DiscoveryFault, Inventory
from dra_driver.services import discovery as module
from dra_driver.services.discovery import Discovery, NvmlState
from tests.core.samples import VERSIONS, h100, inventory

NOT_LOADED = NvmlUnavailableError(
    "initialise NVML: the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)"
)
BARE = tuple(h100(number, pcie_root=None, numa_node=None) for number in range(3))


class Nvml:
    """NVML that shows `inventory`, or fails with `error`."""

    def __init__(self) -> None:
        self.inventory = inventory(*BARE)
        self.error: Exception | None = None
        self.heart: tuple[Hashable, ...] = ("beat",)
        self.opened = self.closed = self.reads = 0

    def reopen(self) -> None:
        self.opened += 1
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1

    def read_inventory(self) -> Inventory:
        self.reads += 1
        return self.inventory

    def pulse(self) -> tuple[Hashable, ...]:
        if self.error is not None:
            raise self.error
        return self.heart


class Host:
    """A host whose sysfs has a place for every GPU."""

    def __init__(self) -> None:
        self.functions = {gpu.pci_bus_id or "" for gpu in BARE}
        self.print: Hashable = "one"
        self.surprises: list[Exception] = []

    def pcie_root(self, bus_id: str) -> str | None:
        return f"pci0000:{int(bus_id[5:7], 16) - 1:02x}"

    def numa_node(self, bus_id: str) -> int | None:
        return 0

    def gpu_functions(self) -> frozenset[str]:
        return frozenset(self.functions)

    def hardware(self) -> Hashable:
        if self.surprises:
            raise self.surprises.pop()
        return self.print

    def instances(self) -> Hashable:
        return ()


class Bench:
    def __init__(self) -> None:
        self.nvml, self.host = Nvml(), Host()
        self.changes: list[Inventory | None] = []
        self.discovery = Discovery(
            self.nvml, self.host, lambda: self.changes.append(self.discovery.inventory)
        )

    def scan(self) -> Inventory | None:
        self.discovery.scan_now(5)
        return self.discovery.inventory


COMPLETE = inventory(*map(h100, range(3)))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("_RETRY_FIRST_S", "_RETRY_MOST_S", "_LOOK_EVERY_S"):
        monkeypatch.setattr(module, name, 0.005)
    made = Bench()
    yield made
    made.discovery.stop()


def eventually(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not check():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.002)


def test_nothing_is_known_before_the_first_scan(bench: Bench) -> None:
    discovery = bench.discovery
    assert (discovery.inventory, discovery.state) == (
        None, NvmlState(False, "devices have not been discovered yet")
    )  # fmt: skip
    assert discovery.unavailable() == "devices have not been discovered yet"


def test_gpus_get_their_place_from_the_host(bench: Bench) -> None:
    assert bench.scan() == COMPLETE
    assert (bench.discovery.state, bench.discovery.unavailable()) == (NvmlState(True, None), None)
    assert bench.changes == [COMPLETE]


def test_gpu_without_a_bus_id_stays_without_a_place(bench: Bench) -> None:
    lonely = replace(BARE[0], pci_bus_id=None)
    bench.nvml.inventory = inventory(lonely)
    bench.host.functions = set()
    assert bench.scan() == inventory(lonely)


def test_change_is_told_only_when_something_changed(bench: Bench) -> None:
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
    assert bench.discovery.state == NvmlState(True, None)
    assert bench.changes == [Inventory(VERSIONS)]


def test_nothing_is_published_when_there_is_no_driver_yet(bench: Bench, logs: list) -> None:
    bench.nvml.error = NOT_LOADED
    for _ in range(3):
        assert bench.scan() is None
    assert bench.discovery.state == NvmlState(False, str(NOT_LOADED))
    assert bench.changes == []
    assert [line["event"] for line in logs] == ["nvml_unavailable"]


def test_devices_appear_when_the_driver_does(bench: Bench) -> None:
    bench.nvml.error = NOT_LOADED
    bench.discovery.start()
    eventually(lambda: bench.nvml.opened >= 2)
    bench.nvml.error = None
    eventually(lambda: bench.changes == [COMPLETE])


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
    original = type(bench.discovery)._tell_faults

    def slow(self: Discovery, found: Inventory) -> None:
        original(self, found)
        states.append(self.state.ready)

    type(bench.discovery)._tell_faults = slow  # type: ignore[method-assign]
    try:
        bench.scan()
    finally:
        type(bench.discovery)._tell_faults = original  # type: ignore[method-assign]
        stop.set()
        watcher.join()
    assert (wrong, states) == ([], [False])


def test_pool_is_not_emptied_when_the_bus_has_gpus_that_nvml_does_not_show(bench: Bench) -> None:
    bench.nvml.inventory = Inventory(VERSIONS)
    assert bench.scan() is None
    assert bench.discovery.unavailable() == (
        "NVML shows no GPU, but the PCI bus has 3 (0000:10:00.0, 0000:11:00.0, 0000:12:00.0); they are not bound "
        "to the NVIDIA driver (yet): see the kernel log, or wait for the driver's installer"
    )
    assert bench.changes == []


def test_cause_is_told_when_no_gpu_answers(bench: Bench) -> None:
    lost = DiscoveryFault("GPU with NVML index 0", "nvmlDeviceGetUUID: the GPU does not answer (GPU is lost)")
    bench.nvml.inventory = Inventory(VERSIONS, faults=(lost,))
    assert bench.scan() is None
    assert bench.discovery.unavailable() == f"no GPU answers NVML: {lost.subject}: {lost.text}"


def test_function_that_nvml_does_not_show_is_a_fault_and_hides_no_gpu(bench: Bench, logs: list) -> None:
    bench.host.functions.add("0000:99:00.0")
    for _ in range(2):
        found = bench.scan()
        assert found is not None
        assert found.gpus == COMPLETE.gpus
        assert found.faults == (
            DiscoveryFault(
                "PCI function 0000:99:00.0",
                "is an NVIDIA GPU that NVML does not show; it is bound to another driver, fell off the bus or is "
                "drained",
            ),
        )
    assert [line["subject"] for line in logs if line["event"] == "discovery_fault"] == [
        "PCI function 0000:99:00.0"
    ]


def test_fault_is_told_again_when_it_comes_again(bench: Bench, logs: list) -> None:
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
    bench.nvml.inventory, bench.host.print = inventory(*BARE[:2]), "two"
    bench.host.functions.remove(BARE[2].pci_bus_id or "")
    eventually(lambda: len(bench.changes) == 2)
    time.sleep(0.05)
    assert bench.nvml.reads == reads + 1


@pytest.mark.parametrize("sign", ["pulse", "error"])
def test_everything_is_read_again_when_nvml_itself_changes(bench: Bench, sign: str) -> None:
    """A lost GPU stays in sysfs."""
    bench.discovery.start()
    eventually(lambda: bench.changes)
    bench.nvml.inventory = inventory(*BARE[:2])
    if sign == "pulse":
        bench.nvml.heart = ("faint",)
    else:
        bench.nvml.error = NOT_LOADED
        eventually(lambda: bench.discovery.unavailable() is not None)
        bench.nvml.error = None
    eventually(lambda: bench.changes[-1] is not None and len(bench.changes[-1].gpus) == 2)


def test_node_without_gpus_and_without_a_driver_is_known_to_be_empty(bench: Bench) -> None:
    bench.nvml.error, bench.host.functions = NOT_LOADED, set()
    assert bench.scan() == Inventory()
    assert (bench.discovery.unavailable(), bench.changes) == (None, [Inventory()])


def test_everything_is_read_again_when_asked_and_from_time_to_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.discovery.start()
    eventually(lambda: bench.nvml.reads == 1)
    bench.discovery.request_rescan()
    eventually(lambda: bench.nvml.reads == 2)
    monkeypatch.setattr(module, "_RESCAN_EVERY_S", 0.01)
    eventually(lambda: bench.nvml.reads >= 4)


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
    assert "discovery_failed" in [line["event"] for line in logs]
    assert bench.discovery.inventory == COMPLETE


@pytest.mark.parametrize("error", [NOT_LOADED, RetryableError("initialise NVML: NVML refused access")])
def test_every_error_of_nvml_becomes_the_state(bench: Bench, error: Exception) -> None:
    bench.nvml.error = error
    bench.scan()
    assert bench.discovery.unavailable() == str(error)


def test_stop_closes_nvml_and_ends_the_thread(bench: Bench) -> None:
    bench.discovery.start()
    eventually(lambda: bench.changes)
    bench.discovery.stop()
    assert not bench.discovery._thread.is_alive()
    assert bench.nvml.closed == 1
