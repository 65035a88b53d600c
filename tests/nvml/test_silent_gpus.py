"""GPUs that do not answer while they are read: what is known of them stays, and they hold up no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from dra_driver.inventory.rules.assembly import with_nvlink_domains
from dra_driver.model.gpu import READINGS
from dra_driver.model.host import GpuFingerprint
from dra_driver.model.inventory import Inventory
from dra_driver.nvml import calls
from dra_driver.nvml.calls import NOT_ANSWERED, GpuWalk
from dra_driver.nvml.readings import read_gpu
from dra_driver.nvml.scan import ScanMemory, read_nvml_fingerprint
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.machines import SimulatedNode, read_inventory, silence
from tests.fakes.waiting import PATIENCE_S, eventually

Make = Callable[[str], SimulatedNode]
THIRD = 3


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ANSWERS_WITHIN_S", 0.5)
    monkeypatch.setattr(calls, "_OTHERS_ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(calls, "_ALL_ANSWER_WITHIN_S", 0.1)


def hang(node: SimulatedNode) -> None:
    node.machine.set_fault("nvmlDeviceGet[!HUM]*", delay_s=60, gpu=THIRD)


def without_faults(found: Inventory) -> tuple[object, ...]:
    return found.gpus, found.nvlink_domains


def test_gpu_that_hangs_stays_as_it_was_and_is_called_once(node: SimulatedNode) -> None:
    memory = ScanMemory()
    whole = read_inventory(memory=memory)
    hang(node)
    for _ in range(3):
        found = read_inventory(memory=memory)
        assert without_faults(found) == without_faults(whole)
        assert [fault.subject for fault in found.faults] == [f"GPU {whole.gpus[THIRD].uuid}"]
        assert found.faults[0].text.startswith("the plugin shows its last known state: it did not answer")
    assert sum(thread.name == "gpu-walk" for thread in threading.enumerate()) == 1


def test_gpu_that_was_never_read_and_hangs_is_a_fault_and_hides_no_other(node: SimulatedNode) -> None:
    hang(node)
    found = read_inventory(memory=ScanMemory())
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert [fault.subject for fault in found.faults] == [f"GPU with NVML index {THIRD}"]
    assert found.hanging == 1


def test_gpu_that_answers_nothing_stays_as_it_was(node: SimulatedNode) -> None:
    memory = ScanMemory()
    whole = read_inventory(memory=memory)
    before = read_nvml_fingerprint(memory)
    silence(node.machine, THIRD)
    found = read_inventory(memory=memory)
    assert without_faults(found) == without_faults(whole)
    assert found.faults
    assert read_nvml_fingerprint(memory) == before, (
        "that a GPU does not say what it is does not mean that it changed"
    )


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72-tray"])
def test_each_query_that_fails_keeps_the_value_that_was_read_before(name: str, opened: Make) -> None:
    node = opened(name)
    memory = ScanMemory()
    whole = read_inventory(memory=memory)
    nvml = HangingNvml()
    called = nvml.calls_of(lambda: read_gpu(THIRD))
    nvml.leave()
    queries = called.keys() - {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"}
    assert len(queries) > 12
    kept = []
    for query in sorted(queries):
        node.machine.set_fault(query, code="unknown", gpu=THIRD)
        found = read_inventory(memory=memory)
        node.machine.clear_faults()
        kept.append((query, bool(found.faults), without_faults(found) == without_faults(whole)))
    assert kept == [(query, True, True) for query in sorted(queries)]


def test_peer_access_that_cannot_be_read_keeps_the_nvlink_domain(node: SimulatedNode) -> None:
    memory = ScanMemory()
    whole = read_inventory(memory=memory)
    node.machine.set_fault("nvmlDeviceGetP2PStatus", code="unknown")
    found = read_inventory(memory=memory)
    assert found.nvlink_domains == whole.nvlink_domains
    assert any("NVLink peer access" in fault.text for fault in found.faults)


def test_peer_access_that_was_never_read_gives_no_nvlink_domain(node: SimulatedNode) -> None:
    """Two links up do not say that a switch joins them."""
    node.machine.set_fault("nvmlDeviceGetP2PStatus", code="unknown")
    found = with_nvlink_domains(read_inventory(memory=ScanMemory()))
    assert found.nvlink_domains == {}
    assert any("NVLink peer access" in fault.text for fault in found.faults)


def test_peer_access_query_that_hangs_keeps_the_nvlink_domain_and_holds_up_nothing(
    node: SimulatedNode,
) -> None:
    memory = ScanMemory()
    whole = read_inventory(memory=memory)
    node.machine.set_fault("nvmlDeviceGetP2PStatus", delay_s=60, gpu=THIRD)
    first, later = (
        f"NVLink peer access: {NOT_ANSWERED}",
        f"the plugin shows its last known state: {NOT_ANSWERED}",
    )
    for expected in (first, later):
        found = read_inventory(memory=memory)
        assert without_faults(found) == without_faults(whole)
        assert [(one.subject, one.text) for one in found.faults] == [
            (f"GPU {whole.gpus[THIRD].uuid}", expected)
        ]
    assert sum(thread.name == "gpu-walk" for thread in threading.enumerate()) == 1


def test_peer_access_query_that_hangs_from_the_start_gives_that_gpu_no_nvlink_domain(
    node: SimulatedNode,
) -> None:
    node.machine.set_fault("nvmlDeviceGetP2PStatus", delay_s=60, gpu=THIRD)
    found = with_nvlink_domains(read_inventory(memory=ScanMemory()))
    assert set(found.nvlink_domains) == {gpu.uuid for gpu in found.gpus if gpu.index != THIRD}


def test_fingerprint_of_a_gpu_that_hangs_is_that_of_before(node: SimulatedNode) -> None:
    memory = ScanMemory()
    before = read_nvml_fingerprint(memory)
    node.machine.set_fault("nvmlDeviceGetMigMode", delay_s=60, gpu=THIRD)
    for _ in range(3):
        assert read_nvml_fingerprint(memory) == before
    assert [gpu.index for gpu in read_inventory(memory=memory).gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert sum(thread.name == "gpu-walk" for thread in threading.enumerate()) == 1, (
        "the scan does not call it"
    )
    node.machine.lose_gpu(5)
    assert read_nvml_fingerprint(memory)[5] is None


def test_gpu_that_hangs_from_the_start_is_not_lost(node: SimulatedNode) -> None:
    """Reopening NVML, which is done to find a lost GPU again, would reset the settings of other GPUs."""
    node.machine.set_fault("nvmlDeviceGetUUID", delay_s=60, gpu=THIRD)
    memory = ScanMemory()
    found = read_nvml_fingerprint(memory)
    assert (None in found, found[THIRD]) == (False, GpuFingerprint(""))
    assert read_nvml_fingerprint(memory) == found
    node.machine.clear_faults()
    eventually(lambda: read_nvml_fingerprint(memory)[THIRD] != GpuFingerprint(""))
    _, gpu, _ = read_gpu(THIRD)
    current = {name: getattr(gpu, name) for name, reading in READINGS.items() if reading.kept_current}
    assert read_nvml_fingerprint(memory)[THIRD] == GpuFingerprint(gpu.uuid, current)


def test_discovery_keeps_a_gpu_that_hangs_and_reports_no_problem_of_the_node(node: SimulatedNode) -> None:
    discovery = node.discovery()
    discovery.scan_now(0)
    whole = discovery.inventory
    assert whole is not None
    hang(node)
    for _ in range(2):
        discovery.scan_now(0)
        found = discovery.inventory
        assert (found.gpus, found.lost, found.nvlink_domains) == (whole.gpus, (), whole.nvlink_domains)
    assert discovery.problems() == []


def test_walk_in_which_all_hang_costs_the_limit_once() -> None:
    """As when one call blocks all of NVML."""
    gate, called = threading.Event(), []

    def read(index: int) -> int:
        called.append(index)
        gate.wait(PATIENCE_S)
        return index

    walk = GpuWalk()
    assert walk.each(range(4), read) == {}
    assert walk.each(range(4), read) == {}
    assert called == [0, 1, 2, 3], "one outstanding call for each GPU"
    gate.set()
    found: dict[int, int] = {}
    while len(found) < 4:
        time.sleep(0.01)
        found |= {index: answer.result() for index, answer in walk.each(range(4), read).items()}
    assert found == {0: 0, 1: 1, 2: 2, 3: 3}


def test_gpu_without_minor_number_is_not_published_and_is_a_fault(machine: Make) -> None:
    """As on WSL2: its device node is not known, so that every Prepare would fail."""
    file = Path(__file__).parents[1] / "data/machines/no-minor-number.yaml"
    found = machine(str(file)).discover()
    assert found.gpus == ()
    [fault] = [one for one in found.faults if "minor number" in one.text and one.subject.startswith("GPU ")]
    assert fault.text.startswith("it is not published: NVML reports no minor number")


@pytest.mark.parametrize("architecture", [11, 12, 15])
def test_device_that_is_not_a_gpu_is_not_in_the_inventory(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, architecture: int
) -> None:
    """As a DLA or NPU that NVML lists among the GPUs."""
    really = pynvml.nvmlDeviceGetArchitecture
    uuid = node.machine.gpu(THIRD).uuid

    def kind(handle: object) -> int:
        return architecture if pynvml.nvmlDeviceGetUUID(handle) == uuid else int(really(handle))

    monkeypatch.setattr(pynvml, "nvmlDeviceGetArchitecture", kind)
    found = read_inventory(memory=ScanMemory())
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert found.faults == ()


def test_device_whose_architecture_was_never_read_is_not_published_until_it_is(node: SimulatedNode) -> None:
    memory = ScanMemory()
    uuid = node.machine.gpu(THIRD).uuid
    node.machine.set_fault("nvmlDeviceGetArchitecture", code="unknown", gpu=THIRD)
    found = read_inventory(memory=memory)
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2, 4, 5, 6, 7]
    [fault] = found.faults
    assert fault.subject == f"GPU with NVML index {THIRD}"
    assert fault.text.startswith("it is not published, because it may not be a GPU: architecture: ")
    assert found.unread == {uuid}, "so that it is read again soon"
    node.machine.clear_faults()
    identified = read_inventory(memory=memory)
    assert (len(identified.gpus), identified.faults, identified.unread) == (8, (), frozenset())
    node.machine.set_fault("nvmlDeviceGetArchitecture", code="unknown", gpu=THIRD)
    assert read_inventory(memory=memory).gpus == identified.gpus
