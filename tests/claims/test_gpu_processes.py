"""Who computes on what a claim holds, and when that is not sure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.claims.gpu_processes import GpuProcesses, InUse
from dra_driver.errors import (
    DeviceLostError,
    DraDriverError,
    DriverGoneError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.host.processes import is_of_the_host
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.claim import HeldDevice
from dra_driver.model.mig import Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.nvml.reader import NvmlReader
from dra_driver.simulator import SimulatedLibrary
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import GPU_0, GPU_1, MIG_1G, VFIO_0, hold, record, uuid
from tests.fakes.waiting import PATIENCE_S

ON_DEMAND = replace(hold(MIG_1G), uuid="", placement=Placement(0, 1))
TRAINER = {4711: "process 4711 (python3)"}


class Bench:
    """NVML, ledger and host as tests set them."""

    boot_id = "boot-1"

    def __init__(self, wait_s: float = 10.0) -> None:
        self.records = self
        self.shown: dict[str, Mapping[int, str] | Exception] = {}
        self.requested: list[str] = []
        self.made: dict[str, str] = {}
        self.others: list[ClaimRecord] = []
        self.on_host: set[int] = set()
        self.is_gone = False
        self.hangs: dict[str, threading.Event] = {}
        self.users = GpuProcesses(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            is_of_the_host=self.on_host.__contains__,
            driver_is_gone=lambda: self.is_gone,
            wait_s=wait_s,
        )

    def created_uuid(self, device: str) -> str | None:
        return self.made.get(device)

    def all(self) -> Mapping[str, ClaimRecord]:
        return {other.ref.uid: other for other in self.others}

    def processes(self, name: str) -> Mapping[int, str]:
        self.requested.append(name)
        if name in self.hangs:
            assert self.hangs[name].wait(PATIENCE_S)
        found = self.shown.get(name, {})
        if isinstance(found, Exception):
            raise found
        return found

    def of(self, *held: HeldDevice) -> InUse | None:
        found = record(*held)
        self.others.append(found)
        return self.users.of(found)


def pids(found: InUse | None) -> frozenset[int]:
    assert found is not None
    return found.pids


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_no_one_asks_nvml_for_a_gpu_that_a_virtual_machine_has(bench: Bench) -> None:
    assert bench.of(HeldDevice(VFIO_0, "vfio", "0b1c", uuid(0))) is None
    assert bench.requested == []


def test_users_are_not_known_when_no_thread_starts_and_are_at_the_next_look(
    bench: Bench, threads_that_start: Callable[[str, int], None]
) -> None:
    held = hold(GPU_0)
    bench.shown[held.uuid] = TRAINER
    threads_that_start("ask ", 0)
    with pytest.raises(RetryableError) as unknown:
        bench.of(held)
    assert str(unknown.value) == f"NVML (processes on {GPU_0}) could not be queried: can't start new thread"
    threads_that_start("ask ", 1)
    found = bench.users.of(record(held))
    assert found is not None
    assert found.pids == {4711}


@pytest.mark.parametrize("held", [hold(GPU_0), hold(MIG_1G)], ids=["gpu", "mig"])
def test_process_on_a_device_is_named_with_its_gpu(bench: Bench, held: HeldDevice) -> None:
    assert bench.of(held) is None
    bench.shown[held.uuid] = TRAINER
    text = f"process 4711 (python3) still uses {held.device} (GPU {held.gpu_uuid})"
    assert bench.of(held) == InUse(frozenset({4711}), text)


def test_device_on_demand_is_requested_under_the_uuid_that_it_has_now(bench: Bench) -> None:
    assert (bench.of(ON_DEMAND), bench.requested) == (None, [])
    bench.made[ON_DEMAND.device] = "MIG-made"
    bench.shown["MIG-made"] = TRAINER
    found = bench.of(ON_DEMAND)
    assert found is not None
    assert (found.pids, bench.requested) == ({4711}, ["MIG-made"])


def test_all_devices_count_and_long_lists_are_cut(bench: Bench) -> None:
    bench.shown[uuid(0)] = {pid: f"process {pid}" for pid in range(1, 10)}
    bench.shown[uuid(1)] = {9: "process 9"}
    found = bench.of(hold(GPU_0), hold(GPU_1), hold(MIG_1G))
    assert pids(found) == set(range(1, 10))
    assert found is not None
    assert found.text == (
        "process 1, process 2, process 3, process 4, process 5, process 6, process 7, process 8 and 1 more still "
        f"use {GPU_0} (GPU {uuid(0)}), {GPU_1} (GPU {uuid(1)})"
    )


SHARE = hold(GPU_0, share_id="one")


@pytest.mark.parametrize(
    ("held", "other", "counts"),
    [
        (SHARE, hold(GPU_0, share_id="two"), False),
        (SHARE, hold(GPU_1, share_id="two"), True),
        (SHARE, hold(GPU_0, admin_access=True), True),
        (hold(GPU_0, admin_access=True), hold(GPU_0), False),
        (hold(GPU_0, admin_access=True), hold(GPU_1), False),
        (hold(MIG_1G), hold(MIG_1G, share_id="two"), False),
    ],
    ids=["shared", "other device", "looked on", "looks on", "looks on alone", "shared MIG device"],
)
def test_processes_count_where_no_one_else_holds_the_device(
    bench: Bench, held: HeldDevice, other: HeldDevice, counts: bool
) -> None:
    bench.others.append(record(other, uid="uid-2"))
    bench.shown[held.uuid] = TRAINER
    assert (bench.of(held) is not None) is counts
    assert bench.requested == ([held.uuid] if counts else [])


def test_several_shares_of_one_claim_are_one_device(bench: Bench) -> None:
    bench.shown[uuid(0)] = TRAINER
    found = bench.of(SHARE, hold(GPU_0, share_id="two"))
    assert found is not None
    assert found.text.count(GPU_0) == 1


def test_processes_of_the_host_and_records_of_an_earlier_boot_do_not_count(bench: Bench) -> None:
    bench.shown[uuid(0)] = TRAINER | {99: "process 99 (Xorg)"}
    bench.on_host.add(99)
    assert pids(bench.of(hold(GPU_0))) == {4711}
    bench.on_host.add(4711)
    assert bench.of(hold(GPU_0)) is None
    bench.on_host.clear()
    assert bench.users.of(replace(record(hold(GPU_0)), boot_id="boot-0")) is None


@pytest.mark.parametrize(
    ("error", "is_gone", "is_sure"),
    [
        (DeviceLostError("lost"), False, True),
        (DriverGoneError("not loaded"), True, True),
        (NvmlUnavailableError("no library"), True, True),
        (NvmlUnavailableError("being initialised"), False, False),
        (RetryableError("unknown error"), False, False),
        (StateError("a surprise"), False, False),
        (ValueError("a bug"), False, False),
    ],
)
def test_nvml_that_does_not_report(bench: Bench, error: Exception, is_gone: bool, is_sure: bool) -> None:
    bench.shown[uuid(0)], bench.is_gone = error, is_gone
    if is_sure:
        assert bench.of(hold(GPU_0)) is None
    else:
        with pytest.raises(DraDriverError, match=str(error)):
            bench.of(hold(GPU_0))
    bench.shown[uuid(0)] = TRAINER
    assert bench.of(hold(GPU_0)) is not None, "it is asked anew each time"


def test_known_use_of_one_device_counts_if_another_is_unknown(bench: Bench) -> None:
    bench.shown |= {uuid(0): RetryableError("unknown error"), uuid(1): TRAINER}
    assert pids(bench.of(hold(GPU_0), hold(GPU_1))) == {4711}


def test_hang_costs_a_moment_once_and_no_other_gpu() -> None:
    bench = Bench(wait_s=0.05)
    ended = bench.hangs[uuid(0)] = threading.Event()
    for _ in range(3):
        with pytest.raises(RetryableError, match=f"NVML did not return the processes on {GPU_0}"):
            bench.of(hold(GPU_0))
    assert bench.requested == [uuid(0)], "a query that hangs is not repeated"
    patient = bench.users._calls[uuid(0)]
    assert patient.is_running
    ended.set()
    patient.result(PATIENCE_S)
    bench.shown[uuid(0)] = TRAINER
    bench.users.wait_s = 20.0
    found = bench.of(hold(GPU_0))
    assert found is not None, "what came late is not believed but asked anew"
    assert bench.users._calls == {}


@pytest.fixture
def simulated(memory_path: Path) -> Iterator[SimulatedNode]:
    node = SimulatedNode("hgx-h100-4", memory_path)
    yield node
    node.close()


def test_on_a_machine(simulated: SimulatedNode) -> None:
    """Through the real binding, with the machine's procfs."""
    machine, proc = simulated.machine, simulated.paths.proc
    reader = NvmlReader(lambda: SimulatedLibrary(machine))
    reader.reopen()
    gpu = machine.gpu(0).uuid
    held = record(HeldDevice("gpu-0", "gpu", gpu, gpu))
    users = GpuProcesses(
        reader,
        Bench(),  # type: ignore[arg-type]
        is_of_the_host=lambda pid: is_of_the_host(proc, pid),
        driver_is_gone=lambda: not Sysfs(proc=proc).loaded_driver(),
        wait_s=20.0,
    )
    machine.hold_gpu(0, 99, "Xorg")
    Path(proc, "99").mkdir()
    Path(proc, "99/cgroup").write_text("0::/system.slice/gdm.service\n")
    assert users.of(held) is None
    machine.hold_gpu(0, 4711, "python3")
    assert users.of(held) == InUse(frozenset({4711}), f"process 4711 (python3) still uses gpu-0 (GPU {gpu})")
    machine.set_fault("nvmlDeviceGetComputeRunningProcesses*", code="UNKNOWN")
    with pytest.raises(RetryableError, match="list the processes on GPU-"):
        users.of(held)
    machine.clear_faults()
    machine.lose_gpu(0)
    assert users.of(held) is None
    reader.session.close()
    with pytest.raises(RetryableError, match="NVML is not initialised"):
        users.of(held)
    machine.unload_driver()
    assert users.of(held) is None
