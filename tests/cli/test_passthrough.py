"""What `doctor` and `top` say of GPUs for virtual machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dra_driver.app.settings import Settings
from dra_driver.cli.checks.check import Shared
from dra_driver.cli.checks.driver import DriverChecks
from dra_driver.cli.checks.passthrough import PassthroughChecks
from dra_driver.cli.rules.findings import Finding
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.rules.node_view import NodeView, NvmlFacts, SeenGpu, node_view
from dra_driver.cli.top import drawn, node_picture
from dra_driver.host.vfio import VfioCards
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.gpu import FunctionBefore, OwnedCard
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import BindVfio
from dra_driver.passthrough.cards import KnownCards
from dra_driver.simulator import SimulatedDeviceNodes, SimulatedPciControl
from dra_driver.simulator.machine_state import Function
from tests.fakes.machines import SimulatedNode
from tests.fakes.samples import claim
from tests.fakes.tables import tabled


class Host:
    """A DGX H100 and the checks on it."""

    def __init__(self, directory: Path) -> None:
        self.simulated = SimulatedNode("dgx-h100", directory / "machine")
        self.machine = self.simulated.machine
        self.machine.set_virtual_functions(0, 0)
        self.nodes = SimulatedDeviceNodes(self.machine.host_root)
        self.vfio = VfioCards(self.simulated.paths, self.nodes, SimulatedPciControl(self.machine))
        self.ledger = Ledger(directory / "ledger", RecordStore(directory / "claims"), "boot-1")
        self.ledger.open()
        self.known = KnownCards(self.vfio, self.ledger, lambda _gpu: True)

    def checks(self, *records: ClaimRecord, is_on: bool = True) -> PassthroughChecks:
        state = NodeState(records=records, boot_id="boot-1")
        return PassthroughChecks(self.vfio, lambda: self.known.read(()), lambda: state, is_on)

    def seen(self, *records: ClaimRecord) -> list[tuple[str, str, str | None]]:
        return [(one.status, one.seen, one.remedy) for one in self.checks(*records).passthrough()]

    def bind(self, index: int) -> BindVfio:
        """As this plugin does it for claim uid-1."""
        gpu = self.machine.gpu(index)
        self.machine.give_to(gpu.uuid, "vfio-pci")
        name = f"vfio-{gpu.bus_id.replace(':', '-').replace('.', '-')}"
        functions = (FunctionBefore(gpu.bus_id, "nvidia"),)
        self.ledger.save(OwnedCard(gpu.uuid, gpu.bus_id, "boot-1", functions, True))
        return BindVfio(name, gpu.uuid, gpu.bus_id, "vfio-pci")


@pytest.fixture
def host(memory_path: Path) -> Iterator[Host]:
    made = Host(memory_path)
    yield made
    made.simulated.close()


def test_cards_that_can_go(host: Host) -> None:
    assert host.seen() == [("OK", "8 cards for virtual machines, 0 bound to vfio now", None)]
    step = host.bind(0)
    host.machine.give_to(1, "vfio-pci")
    record = ClaimRecord(claim(step.device), "prepared", "boot-1", (), (step,))
    assert host.seen(record) == [
        (
            "OK",
            "8 cards for virtual machines, 2 bound to vfio now (1 by an administrator, left unchanged by "
            "gpu-dra-driver)",
            None,
        )
    ]


def test_each_card_that_cannot_go_is_named(host: Host) -> None:
    gpu = host.machine.gpu(2)
    nic = Function("0000:99:00.0", gpu.pcie, 0x1021, 0x020000, vendor=0x15B3, beside=gpu.bus_id)
    host.machine.add_function(nic)
    host.machine.set_virtual_functions(3, 4)
    (network, virtual, rest) = host.checks().passthrough()
    assert (network.status, virtual.status, rest.status) == ("WARN", "WARN", "OK")
    assert gpu.bus_id in network.seen
    assert "0000:99:00.0 (a network controller)" in network.seen
    assert "ACS" in (network.remedy or "")
    assert host.machine.gpu(3).bus_id in virtual.seen
    assert "sriov-manage" in (virtual.remedy or "")
    assert rest.seen.startswith("6 cards")


@tabled("facts", "part")
def test_host_that_gives_no_card(host: Host, facts: dict[str, object], part: str) -> None:
    host.machine.set_system(**facts)
    found = host.checks().passthrough()
    assert [one.status for one in found] == ["WARN"] * 8
    assert all(part in f"{one.seen} {one.remedy}" for one in found)


def test_processes_of_the_host_must_be_seen(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedPciControl, "users_of", lambda *_: None)
    status, _, remedy = host.seen()[0]
    assert status == "FAIL"
    assert "hostPID: true" in (remedy or "")


def test_card_of_a_claim_without_a_record_is_named(host: Host) -> None:
    step = host.bind(0)
    status, seen, _ = host.seen()[0]
    assert status == "FAIL"
    assert step.pci_bus_id in seen


def test_nothing_is_checked_while_it_is_off(host: Host) -> None:
    assert host.checks(is_on=False).all() == []
    assert [check.name for check in host.checks().all()] == ["passthrough"]
    step = host.bind(0)
    record = ClaimRecord(claim(step.device), "prepared", "boot-1", (), (step,))
    assert [check.name for check in host.checks(record, is_on=False).all()] == ["passthrough"]


def driver_checks(host: Host, *, passthrough: bool, users: Callable[[], list[str]] = list) -> DriverChecks:
    return DriverChecks(
        host.simulated.paths,
        host.nodes,
        Shared(host.simulated.discover),
        lambda: NodeView("node-a", "gpu.nvidia.com", ""),
        Settings(node_name="node-a", passthrough=passthrough),
        users,
    )


def test_node_whose_gpus_are_all_under_vfio_needs_no_nvidia_driver(host: Host) -> None:
    for index in range(8):
        host.machine.give_to(host.machine.current().gpus[index].uuid, "vfio-pci")
    host.machine.unload_driver()
    first, *others = driver_checks(host, passthrough=True).all()
    found = first.look()
    assert isinstance(found, Finding)
    assert (found.status, found.seen) == (
        "OK",
        "8 on the PCI bus, 8 bound to vfio for virtual machines",
    )
    for check in others:
        look = check.look()
        assert isinstance(look, Finding)
        assert (look.status, look.seen) == ("SKIP", "every GPU of this node is bound to vfio")


def test_programs_that_keep_gpus_from_virtual_machines(host: Host) -> None:
    found = driver_checks(host, passthrough=True, users=lambda: ["dcgm (process 1)"]).gpu_agents()
    assert found.status == "FAIL"
    assert "no virtual machine can get these GPUs: dcgm (process 1)" in found.seen
    assert driver_checks(host, passthrough=False).gpu_agents().status == "SKIP"


def test_top_shows_a_card_under_vfio_as_neither_lost_nor_unknown(host: Host) -> None:
    step = host.bind(0)
    inventory = host.simulated.discover(host.known)
    now = datetime(2026, 8, 7, tzinfo=UTC)
    view = node_view("node-a", "gpu.nvidia.com", now, NvmlFacts(inventory), plugin_runs=False)
    [seen] = [gpu for gpu in view.gpus if gpu.uuid == step.gpu_uuid]
    assert seen == SeenGpu(
        inventory.gpu_names[step.gpu_uuid], step.gpu_uuid, None, health="vfio", pci_bus_id=step.pci_bus_id
    )
    assert len(view.gpus) == 8
    text = drawn(node_picture(view, 160), 160, is_colored=False)
    [row] = [line for line in text if step.pci_bus_id in line]
    assert row.rstrip().endswith("vfio")
