"""GPUs for virtual machines through the whole daemon: offered, bound for a claim, given back to containers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from dra_driver.model import units
from dra_driver.model.claim import ClaimRef, Prepared
from dra_driver.model.health import HealthTarget
from dra_driver.model.problems import NodeProblem
from tests.fakes.fixtures import logs
from tests.fakes.waiting import eventually
from tests.integration.conftest import DRIVER, Node
from tests.integration.test_process import call

__all__ = ["logs"]

Json = dict[str, Any]
Logs = list[Json]


def without_virtual_functions(make_node: Callable[..., Node]) -> Node:
    """A DGX H100 each of whose GPUs may go to a virtual machine."""
    node = make_node()
    node.machine.set_virtual_functions(0, 0)
    return node


def named(node: Node, index: int) -> tuple[str, str]:
    """The names of a GPU as a whole and for a virtual machine."""
    gpu = node.machine.gpu(index)
    found = {
        entry["attributes"]["type"]["string"]: entry["name"]
        for entry in node.devices()
        if entry["attributes"]["resource.kubernetes.io/pciBusID"]["string"] == gpu.bus_id
    }
    return found["gpu"], found["vfio"]


def types(node: Node, bus_id: str) -> list[str]:
    return sorted(
        entry["attributes"]["type"]["string"]
        for entry in node.devices()
        if entry["attributes"]["resource.kubernetes.io/pciBusID"]["string"] == bus_id
    )


def driver_of(node: Node, index_or_uuid: Any) -> str:
    return node.machine.gpu(index_or_uuid).driver


def nodes_of(node: Node, ref: ClaimRef) -> list[str]:
    specs = [json.loads(path.read_text()) for path in node.cdi.glob(f"*{ref.uid}*")]
    [spec] = [spec for spec in specs if spec["kind"].startswith("k8s.")]
    edits = [spec.get("containerEdits", {}), *(device["containerEdits"] for device in spec["devices"])]
    return [found["path"] for edit in edits for found in edit.get("deviceNodes", ())]


def metric(node: Node, name: str, **labels: str) -> float:
    value = node.driver.metrics.registry.get_sample_value(
        name, {"driver": DRIVER, "node": node.name, **labels}
    )
    assert value is not None
    return float(value)


def test_card_goes_to_a_virtual_machine_and_comes_back_for_containers(make_node: Callable[..., Node]) -> None:
    node = without_virtual_functions(make_node).running(16, passthrough=True)
    whole, passed = named(node, 3)
    uuid, bus_id = node.machine.gpu(3).uuid, node.machine.gpu(3).bus_id
    ref = node.allocated_by_hand("machine", passed)
    prepared = node.ready(ref)
    assert driver_of(node, uuid) == "vfio-pci"
    assert [path for path in nodes_of(node, ref) if path.startswith("/dev/vfio/")]
    assert not [path for path in nodes_of(node, ref) if "nvidia" in path]
    eventually(lambda: types(node, bus_id) == ["vfio"])
    assert len(node.devices()) == 15
    assert node.ready(ref) == prepared
    assert metric(node, "nvidia_dra_prepared_devices", device_type="vfio") == 1
    eventually(lambda: node.driver.problems() == [])
    assert not node.driver.health.monitor.book.state(HealthTarget(uuid)).reasons, (
        "it is neither lost nor unhealthy"
    )
    node.must_unprepare(ref)
    assert driver_of(node, uuid) == "nvidia"
    assert node.machine.gpu(uuid).persistence == 1
    node.wait_devices(16)
    again = node.allocated_by_hand("containers", whole)
    assert isinstance(node.ready(again), Prepared)
    assert any("/dev/nvidia" in path for path in nodes_of(node, again))
    assert node.records() == [f"{again.uid}.json"]
    assert list((node.plugin_dir / "ledger").glob("*.json")) == []


def test_card_of_a_virtual_machine_is_given_to_no_container_and_survives_restarts(
    make_node: Callable[..., Node],
) -> None:
    node = without_virtual_functions(make_node).running(16, passthrough=True)
    whole, passed = named(node, 2)
    uuid = node.machine.gpu(2).uuid
    ref = node.allocated_by_hand("machine", passed)
    prepared = node.ready(ref)
    other = node.allocated_by_hand("containers", whole)
    node.refused(other)
    node.restart_driver(passthrough=True)
    node.wait_devices(15)
    assert node.ready(ref) == prepared
    # Even if passthrough is off, existing cards are returned.
    node.restart_driver(passthrough=False)
    assert node.ready(ref) == prepared
    (node.plugin_dir / "ledger" / f"{uuid}.json").write_text("{")
    node.restart_driver(passthrough=False)
    assert node.ready(ref) == prepared
    node.must_unprepare(ref)
    assert driver_of(node, uuid) == "nvidia"
    node.wait_devices(8)


def test_eight_cards_of_one_claim_close_nvml_once(make_node: Callable[..., Node]) -> None:
    node = without_virtual_functions(make_node).running(16, passthrough=True)
    passed = [named(node, index)[1] for index in range(8)]
    session = node.driver.discovery.nvml.session
    before = session.openings
    ref = node.allocated_by_hand("machine", *passed)
    node.ready(ref)
    assert {gpu.driver for gpu in node.machine.current().present} == {"vfio-pci"}
    assert session.openings - before <= 2, "once for the binding, once for discovery to see what is left"
    node.wait_devices(8)
    eventually(lambda: node.driver.problems() == [])
    node.must_unprepare(ref)
    node.wait_devices(16)
    assert {gpu.driver for gpu in node.machine.current().present} == {"nvidia"}


def refusals(logs: Logs) -> list[Json]:
    return [
        {key: entry[key] for key in ("log_level", "cards", "offered")}
        for entry in logs
        if entry["event"] == "vfio_unavailable"
    ]


def test_passthrough_that_offers_no_gpu_is_a_problem_until_one_is_offered(
    make_node: Callable[..., Node], logs: Logs
) -> None:
    node = without_virtual_functions(make_node)
    node.machine.set_system(iommu=False)
    node.running(8, passthrough=True)
    gpus = [gpu.bus_id for gpu in node.machine.current().present]
    reasons = {card.bus_id: card.problem for card in node.driver.discovery.latest().cards}
    assert set(reasons) == set(gpus)
    [why] = set(reasons.values())
    [problem] = node.driver.passthrough.problems()
    assert problem == NodeProblem(
        "passthrough-unavailable",
        f"no GPU of this node can be used by a virtual machine: {units.named(sorted(gpus))}: {why}",
    )
    eventually(lambda: problem.text in node.driver.problems())
    node.driver.discovery.scan_now(10)
    assert refusals(logs) == [{"log_level": "warning", "cards": reasons, "offered": 0}]

    node.machine.set_system(iommu=True)
    node.machine.set_virtual_functions(1, 2)
    node.driver.discovery.scan_now(10)
    eventually(lambda: node.driver.passthrough.problems() == [])
    eventually(lambda: problem.text not in node.driver.problems())
    [_, later] = refusals(logs)
    assert (set(later["cards"]), later["offered"]) == ({node.machine.gpu(1).bus_id}, 7)


def with_a_machine_that_runs_on(make_node: Callable[..., Node]) -> tuple[Node, str]:
    """A node, and the UUID of its GPU 1, whose claim has ended while a virtual machine still uses it."""
    node = without_virtual_functions(make_node).running(16, passthrough=True)
    _, passed = named(node, 1)
    uuid = node.machine.gpu(1).uuid
    ref = node.allocated_by_hand("machine", passed)
    node.ready(ref)
    node.machine.hold_gpu(uuid, 900, "qemu-system-x86")
    node.must_unprepare(ref)
    return node, uuid


def cleanup_now(node: Node) -> subprocess.CompletedProcess[str]:
    return call("cleanup", "--now", "--cdi-root", node.settings.cdi_root, *node.machine_flags)


def test_command_gives_a_card_back_where_no_daemon_runs(make_node: Callable[..., Node]) -> None:
    node, uuid = with_a_machine_that_runs_on(make_node)
    node.driver.stop()
    busy = cleanup_now(node)
    assert busy.returncode == 1
    assert "qemu-system-x86 (process 900)" in " ".join(busy.stdout.split())
    node.machine.release_gpu(uuid)
    done = cleanup_now(node)
    assert (done.returncode, done.stdout) == (0, "no pending cleanup found\n"), f"{done.stdout} {done.stderr}"
    assert driver_of(node, uuid) == "nvidia"
    assert node.machine.gpu(uuid).persistence == 1


def test_command_has_the_running_daemon_give_a_card_back(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the command, it would only try again after a while."""
    node, uuid = with_a_machine_that_runs_on(make_node)
    monkeypatch.setattr(node.driver.cleaner, "_is_due", lambda gpus, _busy: not node.driver.cleaner._pauses)
    node.machine.release_gpu(uuid)
    done = cleanup_now(node)
    assert (done.returncode, done.stdout) == (0, "no pending cleanup found\n"), f"{done.stdout} {done.stderr}"
    assert driver_of(node, uuid) == "nvidia"


def test_gpu_with_mig_devices_on_demand_goes_to_a_virtual_machine_when_they_are_gone(
    make_node: Callable[..., Node],
) -> None:
    node = without_virtual_functions(make_node).running(8 * 27, passthrough=True, dynamic_mig=True)
    uuid = node.machine.gpu(4).uuid
    _, passed = named(node, 4)
    small = next(
        entry["name"]
        for entry in node.devices()
        if entry["attributes"].get("parentUUID", {}).get("string") == uuid
    )
    part = node.allocated_by_hand("part", small)
    node.ready(part)
    machine = node.allocated_by_hand("machine", passed)
    node.refused(machine)
    assert driver_of(node, uuid) == "nvidia"
    node.must_unprepare(part)
    node.ready(machine)
    assert driver_of(node, uuid) == "vfio-pci"
    eventually(lambda: len(node.devices()) == 8 * 27 - 26)
    node.must_unprepare(machine)
    node.wait_devices(8 * 27)
    node.ready(node.allocated_by_hand("again", small))
