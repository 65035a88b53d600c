"""Which GPUs can be cut on demand, into what, and what becomes of their NVLink domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pynvml
import pytest

from dra_driver.errors import RetryableError, StateError
from dra_driver.inventory.rules.assembly import nvlink_domains
from dra_driver.model.gpu import Fabric, Gpu
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuInstance, Partitioning, PlacedProfile, Placement
from dra_driver.nvml.mig_reading import read_what_exists
from dra_driver.nvml.scan import ScanMemory
from dra_driver.simulator import machine_names
from tests.fakes.machines import SimulatedNode, read_inventory
from tests.fakes.samples import ONE_G, h100

Make = Callable[[str], SimulatedNode]

TABLE_CALLS = ["nvmlDeviceGetGpuInstanceProfileInfoV", "nvmlDeviceGetGpuInstancePossiblePlacements_v2"]


def always(gpu: Gpu) -> bool:
    return True


def scan(node: SimulatedNode, memory: ScanMemory | None = None) -> Inventory:
    if not node.session.is_open:
        node.session.reopen()
    return read_inventory(always, memory)


@pytest.mark.parametrize("name", machine_names())
def test_partitioning_changes_no_other_value_of_a_gpu(machine: Make, name: str) -> None:
    found = scan(machine(name))
    assert found.faults == ()
    assert [replace(gpu, partitioning=None) for gpu in found.gpus] == list(read_inventory().gpus)
    assert not [gpu for gpu in found.gpus if gpu.partitioning and not gpu.mig_capable]


@pytest.mark.parametrize("name", ["dgx-a100-40gb", "dgx-a100-80gb", "a30-4"])
def test_gpu_whose_mode_needs_a_reset_can_be_cut_once_it_is_on(machine: Make, name: str) -> None:
    node = machine(name)
    node.machine.set_mig_mode(1, True)
    found = [gpu.partitioning for gpu in scan(node).gpus]
    assert [item is not None for item in found] == [index == 1 for index in range(len(found))]
    assert (found[1].offers_whole, found[1].withheld) == (False, ())
    rows = node.machine.current().model_of(node.machine.gpu(1)).mig
    assert sum(len(item.placements) for item in found[1].profiles) == sum(len(row.starts) for row in rows)


def test_only_selected_gpus_can_be_cut(dgx: SimulatedNode) -> None:
    dgx.session.reopen()
    chosen = dgx.machine.gpu(2).uuid
    found = read_inventory(lambda gpu: gpu.uuid == chosen)
    assert [gpu.partitioning is not None for gpu in found.gpus] == [index == 2 for index in range(8)]
    assert not any(gpu.partitioning for gpu in read_inventory(lambda gpu: False).gpus)


def test_gpu_instance_without_a_compute_instance_is_seen(machine: Make) -> None:
    node = machine("h100-mig-static")
    before = scan(node).gpus[1]
    compute = before.mig_devices[0]
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, compute.gpu_instance_id)
    pynvml.nvmlComputeInstanceDestroy(
        pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, compute.compute_instance_id)
    )
    after = scan(node).gpus[1]
    assert after.partitioning == before.partitioning
    assert after.mig_devices == before.mig_devices[1:]


def test_mode_that_goes_off_while_the_gpu_is_read_costs_nothing(
    opened: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened("h100-mig-empty")
    ask = pynvml.nvmlLib.nvmlDeviceGetGpuInstances

    def switch_off_first(handle: Any, *rest: Any) -> int:
        for index in range(7):
            node.machine.set_mig_mode(index, False)
        return int(ask(handle, *rest))

    monkeypatch.setattr(pynvml.nvmlLib, "nvmlDeviceGetGpuInstances", switch_off_first)
    found = read_inventory(always)
    assert [gpu.partitioning and gpu.partitioning.withheld for gpu in found.gpus] == [()] * len(found.gpus)
    assert found.gpus[0].mig_enabled
    assert found.faults == ()


# --- who can be cut ------------------------------------------------------------------------------------


def set_virtualization(node: SimulatedNode, mode: int) -> None:
    with node.machine._change() as state:
        for gpu in state.present:
            gpu.virtualization = mode


def test_guest_of_vgpu_software_cannot_be_cut(machine: Make) -> None:
    node = machine("h100-mig-empty")
    cuttable = {}
    for mode in range(4):
        set_virtualization(node, mode)
        cuttable[mode] = {gpu.partitioning is not None for gpu in scan(node).gpus}
    assert cuttable == {0: {True}, 1: {True}, 2: {False}, 3: {True}}


@pytest.mark.parametrize("code", ["not-supported", "function-not-found"])
def test_gpu_that_does_not_report_its_virtualization_can_be_cut(machine: Make, code: str) -> None:
    node = machine("h100-mig-empty")
    node.machine.set_fault("nvmlDeviceGetVirtualizationMode", code=code)
    found = scan(node)
    assert all(gpu.partitioning for gpu in found.gpus)
    assert found.faults == ()


@pytest.mark.parametrize(("name", "changeable"), [("dgx-h100", True), ("dgx-b200", True), ("a30-4", False)])
def test_generation_decides_where_the_driver_does_not_say_how_the_mode_changes(
    machine: Make, name: str, changeable: bool
) -> None:
    node = machine(name)
    node.machine.set_fault("nvmlDeviceGetFieldValues", code="function-not-found")
    found = scan(node)
    assert {gpu.partitioning is not None and gpu.partitioning.offers_whole for gpu in found.gpus} == {
        changeable
    }
    node.machine.set_fault("nvmlDeviceGetArchitecture", code="not-supported")
    assert not any(gpu.partitioning for gpu in scan(node).gpus)


def test_field_that_is_refused_is_not_an_answer(dgx: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    dgx.session.reopen()

    def refuse(_handle: Any, _count: Any, out: Any) -> int:
        out._obj[0].nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return 0

    monkeypatch.setattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", refuse)
    found = read_inventory(always)
    assert all(gpu.partitioning is not None and gpu.partitioning.offers_whole for gpu in found.gpus)


def test_field_decides_against_the_generation(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = machine("dgx-h100")
    node.machine.set_mig_mode(0, True)
    node.session.reopen()

    def answer(_handle: Any, _count: Any, out: Any) -> int:
        out._obj[0].nvmlReturn = pynvml.NVML_SUCCESS
        return 0

    monkeypatch.setattr(pynvml.nvmlLib, "nvmlDeviceGetFieldValues", answer)
    found = [gpu.partitioning for gpu in read_inventory(always).gpus]
    assert [item is not None for item in found] == [True] + [False] * 7
    assert not found[0].offers_whole


# --- something fails -----------------------------------------------------------------------------------


def test_gpu_that_cannot_be_read_whole_is_not_cut(machine: Make) -> None:
    node = machine("h100-mig-static")
    healthy = scan(node)
    uuid = healthy.gpus[1].uuid
    for function, code in product(
        [*TABLE_CALLS, "nvmlDeviceGetGpuInstances"], ["timeout", "unknown", "invalid-state"]
    ):
        node.machine.set_fault(function, code=code, gpu=uuid)
        memory = ScanMemory()
        found = scan(node, memory)
        assert found.gpus[1].partitioning is None, (function, code)
        assert found.gpus[0] == healthy.gpus[0]
        assert found.gpus[2:] == healthy.gpus[2:]
        assert {fault.subject for fault in found.faults} == {f"GPU {uuid}"}
        node.machine.clear_faults()
        assert scan(node, memory) == healthy


@pytest.mark.parametrize("function", ["*GpuInstanceProfileInfo*", TABLE_CALLS[1]])
def test_driver_without_tables_cuts_nothing(dgx: SimulatedNode, function: str) -> None:
    dgx.session.reopen()
    dgx.machine.set_fault(function, code="function-not-found")
    found = scan(dgx)
    assert not any(gpu.partitioning for gpu in found.gpus)
    assert found.faults == ()


def test_gpu_that_is_lost_while_its_table_is_read_hides_no_other(dgx: SimulatedNode) -> None:
    dgx.session.reopen()
    dgx.machine.set_fault(TABLE_CALLS[1], code="gpu-is-lost", gpu=3)
    found = scan(dgx)
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert all(gpu.partitioning for gpu in found.gpus)


def test_tables_are_read_once_for_a_driver(machine: Make) -> None:
    node = machine("dgx-h100")
    memory = ScanMemory()
    healthy = scan(node, memory)
    for function in TABLE_CALLS:
        node.machine.set_fault(function, code="unknown")
    assert scan(node, memory) == healthy
    node.machine.load_driver("590.1.2")
    node.session.reopen()
    assert not any(gpu.partitioning for gpu in scan(node, memory).gpus)


# --- NVLink domains ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dgx-h100", "hgx-h100-4", "dgx-b200", "gb200-nvl72-tray"])
def test_mode_of_a_gpu_that_can_be_whole_changes_no_domain(machine: Make, name: str) -> None:
    node = machine(name)
    memory = ScanMemory()
    healthy = scan(node, memory)
    assert len(healthy.nvlink_domains) == len(healthy.gpus)
    for index in (0, 2, 0):
        node.machine.set_mig_mode(index, not node.machine.gpu(index).mig_mode)
        assert scan(node, memory).nvlink_domains == healthy.nvlink_domains


@pytest.mark.parametrize("name", ["dgx-h100", "hgx-h100-4"])
def test_first_scan_after_a_start_finds_the_same_domains_by_the_links(machine: Make, name: str) -> None:
    node = machine(name)
    healthy = scan(node)
    node.machine.set_mig_mode(0, True)
    assert scan(node).nvlink_domains == healthy.nvlink_domains


def test_links_and_fabric_are_those_of_before_the_mode_was_on(machine: Make) -> None:
    node = machine("gb200-nvl72-tray")
    memory = ScanMemory()
    healthy = scan(node, memory)
    node.machine.set_mig_mode(1, True)
    node.machine.set_fault("nvmlDeviceGetNvLinkState", code="not-supported", gpu=1)
    node.machine.set_fabric(1, state=1)
    found = scan(node, memory)
    assert found.gpus[1] == replace(healthy.gpus[1], mig_enabled=True)
    node.machine.set_mig_mode(1, False)
    assert (scan(node, memory).gpus[1].nvlink_links, scan(node, memory).gpus[1].fabric) == (None, None)


def test_fabric_that_was_not_ready_before_the_mode_was_on_is_the_one_of_now(machine: Make) -> None:
    """Otherwise the GPU would wait for its fabric forever: only a claim for the whole GPU ends the mode."""
    node = machine("gb200-nvl72-tray")
    memory = ScanMemory()
    node.machine.set_fabric(1, state=2)
    assert scan(node, memory).gpus[1].unready_fabric is not None
    node.machine.set_mig_mode(1, True)
    under_way = scan(node, memory).gpus[1]
    node.machine.set_fabric(1, state=3)
    complete = scan(node, memory).gpus[1]
    node.machine.set_fabric(1, state=0)
    assert [(gpu.fabric is None, gpu.unready_fabric is None) for gpu in (under_way, complete)] == [
        (True, False),
        (False, True),
    ]
    assert scan(node, memory).gpus[1].fabric_registration is None


def test_peer_access_that_the_driver_refused_before_stays_refused(machine: Make) -> None:
    node = machine("dgx-h100")
    memory = ScanMemory()
    node.machine.set_fault("nvmlDeviceGetP2PStatus", code="not_supported")
    by_links = scan(node, memory)
    node.machine.clear_faults()
    apart = Partition(node, {0, 1, 2, 3})
    with apart:
        quads = scan(node, memory)
    assert len(set(by_links.nvlink_domains.values())) == 1
    assert len(set(quads.nvlink_domains.values())) == 2
    node.machine.set_mig_mode(0, True)
    with apart:
        assert scan(node, memory).nvlink_domains == quads.nvlink_domains


def first_call(monkeypatch: pytest.MonkeyPatch, function: str, before: Callable[[], object]) -> None:
    """Do something just before the next call of an NVML function."""
    ask = getattr(pynvml.nvmlLib, function)
    todo = [before]

    def call(*arguments: Any) -> int:
        while todo:
            todo.pop()()
        return int(ask(*arguments))

    monkeypatch.setattr(pynvml.nvmlLib, function, call)
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetP2PStatus"]
)
def test_mode_that_comes_on_while_the_links_are_read_changes_no_domain(
    machine: Make, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """What is read from then on is not that of the GPU out of the mode, and must not be remembered as such."""
    node = machine("dgx-h100")
    memory = ScanMemory()
    healthy = scan(node, memory)
    memory.peers.reopened()

    def switch_on() -> None:
        node.machine.set_mig_mode(0, True)
        node.machine.set_fault("nvmlDeviceGetNvLinkState", code="not-supported", gpu=0)

    with monkeypatch.context() as patch:
        first_call(patch, function, switch_on)
        racing = scan(node, memory)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    assert node.machine.gpu(0).mig_mode
    assert racing.nvlink_domains == healthy.nvlink_domains
    assert racing.gpus[0].nvlink_links == healthy.gpus[0].nvlink_links
    assert scan(node, memory).nvlink_domains == healthy.nvlink_domains
    node.machine.clear_faults()
    node.machine.set_mig_mode(0, False)
    assert scan(node, memory) == healthy


class Partition:
    """A partition of the switch: GPUs within and outside of `members` do not reach each other."""

    def __init__(self, node: SimulatedNode, members: set[int]) -> None:
        self.uuids = {node.machine.gpu(index).uuid for index in members}
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        ask = pynvml.nvmlLib.nvmlDeviceGetP2PStatus

        def answer(first: Any, second: Any, kind: Any, out: Any) -> int:
            sides = {pynvml.nvmlDeviceGetUUID(handle) in self.uuids for handle in (first, second)}
            code = ask(first, second, kind, out)
            if len(sides) > 1:
                out._obj.value = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
            return int(code)

        self.patch.setattr(pynvml.nvmlLib, "nvmlDeviceGetP2PStatus", answer)
        pynvml._nvmlGetFunctionPointer_cache.clear()

    def __exit__(self, *_error: object) -> None:
        self.patch.undo()
        pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.mark.parametrize(("offers_whole", "members"), [(True, 4), (False, 3)])
def test_partitioned_gpu_in_mig_mode_counts_if_it_can_be_whole(offers_whole: bool, members: int) -> None:
    table = (PlacedProfile(ONE_G, (Placement(0, 1),)),)
    cut = Partitioning(table, offers_whole=offers_whole)
    fabric = Fabric("7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11", (1,))
    gpus = [h100(number, fabric=fabric) for number in range(4)]
    gpus[0] = replace(gpus[0], mig_enabled=True, partitioning=cut)
    assert len(nvlink_domains(gpus, {})) == members


# --- the reader that discovery uses ----------------------------------------------------------------------


# --- what is read, and what is not ---------------------------------------------------------------------


class Calls:
    """Counts the calls of NVML."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        find = pynvml._nvmlGetFunctionPointer
        monkeypatch.setattr(
            pynvml, "_nvmlGetFunctionPointer", lambda name: self.names.append(name) or find(name)
        )

    def of(self, work: Callable[[], object]) -> int:
        self.names.clear()
        work()
        return len(self.names)


def test_instances_of_our_own_are_cheap(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = machine("dgx-h100")
    memory = ScanMemory()
    gpus = scan(node, memory).gpus
    for index in range(8):
        node.machine.set_mig_mode(index, True)
        for start in range(7):
            node.machine.create_mig(index, "1g.10gb", start)
    calls = Calls(monkeypatch)
    found: list[Inventory] = []
    full = calls.of(lambda: found.append(read_inventory(always, memory, lambda _uuid, _existing: ())))
    assert not {"nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceProfileInfoV"} & set(
        calls.names
    )
    assert full <= 60 * len(gpus)
    assert not any(gpu.mig_devices for gpu in found[0].gpus)
    assert [len(gpu.partitioning.withheld) for gpu in found[0].gpus if gpu.partitioning] == [7] * 8
    assert calls.of(lambda: read_what_exists(gpus[0])) <= 20


def test_details_are_read_of_others_instances_alone(machine: Make) -> None:
    node = machine("h100-mig-static")
    everything = scan(node).gpus[0].mig_devices
    theirs = everything[1].gpu_instance_id

    def foreign_instances(_uuid: str, existing: Any) -> Any:
        return [instance for instance in existing if instance.gpu_instance_id == theirs]

    found = read_inventory(always, ScanMemory(), foreign_instances)
    assert found.gpus[0].mig_devices == everything[1:2]

    def unreadable(_uuid: str, _existing: Any) -> Any:
        raise StateError("the ledger cannot be read")

    with pytest.raises(StateError, match="the ledger"):
        read_inventory(always, ScanMemory(), unreadable)


def test_existing_instances_are_read_each_time(machine: Make) -> None:
    node = machine("dgx-h100")
    gpu = scan(node).gpus[0]
    assert read_what_exists(gpu) == (False, ())
    node.machine.set_mig_mode(0, True)
    assert read_what_exists(gpu) == (True, ())
    node.machine.create_mig(0, "3g.40gb", 4)
    assert read_what_exists(gpu) == (True, (GpuInstance(1, 9, Placement(4, 4)),))
    node.machine.set_fault("nvmlDeviceGetGpuInstances", code="unknown", gpu=0)
    with pytest.raises(RetryableError):
        read_what_exists(gpu)


@pytest.mark.parametrize("function", ["nvmlDeviceGetGpuInstances", "nvmlDeviceGetFieldValues"])
def test_gpu_that_was_read_before_keeps_its_table_and_its_domain(machine: Make, function: str) -> None:
    node = machine("dgx-h100")
    memory = ScanMemory()
    healthy = scan(node, memory)
    node.machine.set_mig_mode(2, True)
    scan(node, memory)
    node.machine.set_fault(function, code="unknown", gpu=2)
    found = scan(node, memory)
    assert found.unread == {healthy.gpus[2].uuid}
    assert found.gpus[2].partitioning == healthy.gpus[2].partitioning
    assert found.nvlink_domains == healthy.nvlink_domains
    assert found.faults != ()
    node.machine.clear_faults()
    assert scan(node, memory).unread == frozenset()
