"""The attributes of a GPU that not every GPU and driver reports alike: multiprocessors and confidential computing."""

from __future__ import annotations

from collections.abc import Callable

import pynvml
import pytest

from dra_driver.model.gpu import Chassis
from dra_driver.nvml import readings
from dra_driver.nvml.calls import supported
from dra_driver.nvml.health_polls import read_health
from dra_driver.nvml.readings import accepts_work, confidential_mode, read_gpu
from tests.fakes.machines import SimulatedNode, read_inventory
from tests.fakes.tables import tabled

Make = Callable[[str], SimulatedNode]


@tabled("name", "count")
def test_multiprocessors_of_the_machines_gpus(machine: Make, name: str, count: int) -> None:
    assert {gpu.multiprocessors for gpu in machine(name).read().gpus} == {count}


@pytest.mark.parametrize("known", [{(7, 5): 63}, {}])
def test_multiprocessors_are_unknown_for_an_unknown_architecture(
    machine: Make, monkeypatch: pytest.MonkeyPatch, known: dict[tuple[int, int], int]
) -> None:
    monkeypatch.setattr(readings, "_CORES_PER_MULTIPROCESSOR", known)
    found = machine("t4-4").read()
    assert ({gpu.multiprocessors for gpu in found.gpus}, found.faults) == ({None}, ())


@pytest.fixture
def node(opened: Make) -> SimulatedNode:
    return opened("hgx-h100-4")


@pytest.mark.parametrize("mode", ["off", "on", "devtools", "ppcie"])
def test_the_mode_and_whether_the_gpus_accept_work(node: SimulatedNode, mode: str) -> None:
    for ready in (False, True):
        node.machine.set_system(confidential_compute=mode, confidential_ready=ready)
        assert (supported(confidential_mode), accepts_work()) == (mode, ready or mode == "off")
    assert read_inventory().confidential_compute == mode


@pytest.mark.parametrize(("name", "mode"), [("t4-4", None), ("a30-4", "off"), ("dgx-b200", "off")])
def test_gpus_that_do_not_know_it(opened: Make, name: str, mode: str | None) -> None:
    opened(name)
    assert (supported(confidential_mode), accepts_work()) == (mode, None if mode is None else True)
    inventory = read_inventory()
    assert (inventory.confidential_compute, inventory.faults) == (mode, ())


@pytest.mark.parametrize(
    ("driver", "mode", "reported"),
    [("535.183.01", "ppcie", "off"), ("535.183.01", "devtools", "devtools"), ("525.147.05", "on", None)],
)
def test_drivers_that_do_not_report_all(machine: Make, driver: str, mode: str, reported: str | None) -> None:
    made = machine("hgx-h100-4")
    made.machine.set_system(confidential_compute=mode)
    made.machine.load_driver(driver)
    made.session.reopen()
    assert supported(confidential_mode) == reported
    assert read_inventory().faults == ()


def test_a_mode_that_is_not_known_is_reported_and_keeps_no_pod_away(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(settings: object) -> int:
        settings._obj.ccFeature = 3  # type: ignore[attr-defined]
        return pynvml.NVML_SUCCESS

    monkeypatch.setattr(pynvml, "nvmlSystemGetConfComputeSettings", get)
    inventory = read_inventory()
    assert (inventory.confidential_compute, len(inventory.gpus)) == (None, 4)
    assert [(fault.subject, fault.text) for fault in inventory.faults] == [
        ("NVML", "confidential computing: NVML reports the unknown mode 3")
    ]
    polled = read_health(node.machine.gpu(0).uuid)
    assert (polled.accepts_work, polled.failed) == (None, {"accepts_work"})


def test_the_loss_of_one_gpu_is_not_that_of_all(node: SimulatedNode) -> None:
    node.machine.set_fault("nvmlSystemGetConfCompute*", code="gpu-is-lost")
    inventory = read_inventory()
    assert (inventory.confidential_compute, len(inventory.gpus)) == (None, 4)
    assert [fault.text.partition(":")[0] for fault in inventory.faults] == ["confidential computing"]
    assert read_health(node.machine.gpu(0).uuid).accepts_work is None


@pytest.mark.parametrize(
    ("platform", "found", "fault"),
    [
        ({"serial": "1821025190042", "slot": 0, "tray": 255}, Chassis("1821025190042", 0, 255), None),
        ({"serial": "3136434J5234567A", "slot": 200, "tray": 7}, Chassis("3136434J5234567A", 200, 7), None),
        ({"serial": "", "slot": 3, "tray": 2}, None, None),
        ({}, None, None),
        ({"serial": "18é", "slot": 3, "tray": 2}, None, "platform: 'ascii' codec can't decode byte 0xc3"),
    ],
)
def test_chassis_is_read_byte_by_byte_and_unknown_without_a_serial_number(
    node: SimulatedNode, platform: dict[str, object], found: Chassis | None, fault: str | None
) -> None:
    node.machine.set_gpu(0, chassis=platform)
    _, gpu, log = read_gpu(0)
    assert gpu.chassis == found
    assert [one.text.partition(" in position")[0] for one in log.faults] == ([fault] if fault else [])
