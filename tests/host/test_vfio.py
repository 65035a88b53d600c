"""Cards for virtual machines: what a simulated host shows of them, and how they change their driver on a kernel that is
not kind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.file_lock import LockBusyError
from dra_driver.base.threads import NotAnsweredError, bounded
from dra_driver.errors import DeviceBusyError, RetryableError
from dra_driver.host.vfio import _NO_IOMMU, HostPciControl, VfioCards, VfioModules
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.gpu import Card, uuid_of_bus_id
from dra_driver.model.host import DeviceNode, HostPaths
from dra_driver.passthrough.cards import KnownCards
from dra_driver.simulator import Machine, SimulatedDeviceNodes, SimulatedPciControl, create_machine
from dra_driver.simulator.machine_state import Function
from tests.fakes.tables import tabled
from tests.host.trees import put

GPU, AUDIO = "0000:16:00.0", "0000:16:00.1"
WAIT_S = 20.0


def cards_of(machine: Machine) -> VfioCards:
    root = str(machine.host_root)
    paths = HostPaths(root, root, root, f"{root}/proc", f"{root}/sys")
    return VfioCards(paths, SimulatedDeviceNodes(machine.host_root), SimulatedPciControl(machine))


class Node:
    """Eight L40S; the first one has an audio function, and neither SR-IOV nor persistence."""

    def __init__(self, directory: Path) -> None:
        self.machine = create_machine("l40s-8", directory, device_nodes="described")
        self.machine.set_virtual_functions(0, 0)
        self.machine.set_gpu(0, persistence=0)
        self.cards = cards_of(self.machine)

    @property
    def card(self) -> Card:
        found = self.cards.card(GPU)
        assert found is not None
        return found

    def give(self, wait_s: float = WAIT_S) -> None:
        card, cards = self.card, self.cards
        names = {bus_id: cards.ready_driver(bus_id, wait_s) for bus_id in card.functions}
        for bus_id, name in names.items():
            cards.override(bus_id, name, wait_s)
        for bus_id in names:
            cards.unbind(bus_id, wait_s)
        for bus_id in names:
            cards.probe(bus_id, wait_s)
        cards.verify(card, names[GPU], 0.1)

    def drivers(self) -> list[str | None]:
        return [self.cards.bound_driver(bus_id) for bus_id in (GPU, AUDIO)]


@pytest.fixture
def node(memory_path: Path) -> Iterator[Node]:
    made = Node(memory_path)
    yield made
    made.machine.clear_faults()


# --- what is there ----------------------------------------------------------------------------------


def test_card_is_described_with_all_functions_of_its_group(node: Node) -> None:
    assert node.card == Card(
        bus_id=GPU,
        gpu_uuid=node.machine.gpu(0).uuid,
        device_id=0x26B9,
        iommu_group=20,
        functions=(GPU, AUDIO),
        vfio_driver="vfio-pci",
        driver="nvidia",
        has_iommufd=False,
        product_name="NVIDIA L40S",
        addressable_memory=128 << 30,
        pcie_root="pci0000:10",
        numa_node=0,
    )
    assert [card.problem for card in node.cards.cards()] == [None] * 8


def _beside(pci_class: int, bus_id: str = "0000:99:00.0", **more: object) -> Callable[[Machine], None]:
    def add(machine: Machine) -> None:
        machine.add_function(Function(bus_id, "pci0000:10", 0x1234, pci_class, beside=GPU, **more))  # type: ignore[arg-type]

    return add


SHARES = "its IOMMU group 20 also has PCI function 0000:99:00.0 ({}), which the virtual machine would get too"
PROBLEMS: dict[str, tuple[Callable[[Machine], None], str]] = {
    "no IOMMU": (
        lambda machine: machine.set_system(iommu=False), "the kernel has no IOMMU group for it; enable the IOMMU"
    ),
    "network": (_beside(0x020000, vendor=0x15B3, driver="mlx5_core"), SHARES.format("a network controller")),
    "disk": (_beside(0x010802, vendor=0x144D, driver="nvme"), SHARES.format("a disk controller")),
    "other GPU": (_beside(0x030200), SHARES.format("another GPU")),
    "audio of another card": (_beside(0x040300), SHARES.format("a function of class 0x0403")),
    "NVSwitch": (_beside(0x068000), SHARES.format("a function of class 0x0680")),
    "SR-IOV": (lambda machine: machine.set_virtual_functions(0, 2), "it has 2 virtual functions (SR-IOV); remove them"),
    "no module that maps memory": (
        lambda machine: machine.set_system(vfio_modules=["vfio_pci"]),
        "the kernel module vfio_iommu_type1 is not installed on the node; install the package with the",
    ),
    "no module": (
        lambda machine: machine.set_system(vfio_modules=[]),
        "the kernel module vfio_pci is not installed on the node; install the package with the",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), PROBLEMS.values(), ids=PROBLEMS)
def test_card_that_no_virtual_machine_can_have_says_why(
    node: Node, change: Callable[[Machine], None], said: str
) -> None:
    change(node.machine)
    assert (node.card.problem or "").startswith(said)


def test_looks_wait_for_no_change_of_drivers(node: Node) -> None:
    """While a function changes drivers, kernels before 6.9 block readers of its number of virtual functions,
    forever if an unbind hangs. A pipe without a writer behaves alike.
    """
    count = node.machine.host_root / f"sys/bus/pci/devices/{GPU}/sriov_numvfs"
    count.unlink()
    os.mkfifo(count)
    assert bounded("look at the cards", lambda: node.card.problem, WAIT_S) is None
    node.machine.set_virtual_functions(0, 2)
    assert node.card.problem is not None


@pytest.mark.parametrize("facts", [{"iommufd": True}, {"vfio_loaded": ["vfio_iommu_type1"]}], ids=str)
def test_card_without_an_installed_module_that_maps_memory_is_offered_where_it_is_not_needed(
    node: Node, facts: dict[str, Any]
) -> None:
    node.machine.set_system(vfio_modules=["vfio_pci"], **facts)
    assert node.card.problem is None


@pytest.mark.parametrize("pci_class", [0x060400, 0x060000])
def test_bridges_in_the_group_stay_with_the_kernel(node: Node, pci_class: int) -> None:
    _beside(pci_class, vendor=0x8086, driver="pcieport")(node.machine)
    assert (node.card.problem, node.card.functions) == (None, (GPU, AUDIO))


@pytest.mark.parametrize(("number", "pci_class"), [(2, 0x0C0330), (3, 0x0C8000)], ids=["USB", "USB-C"])
def test_other_functions_of_the_card_go_with_it(node: Node, number: int, pci_class: int) -> None:
    _beside(pci_class, f"0000:16:00.{number}")(node.machine)
    assert (node.card.problem, node.card.functions) == (None, (GPU, AUDIO, f"0000:16:00.{number}"))


def test_card_of_another_driver_says_whose_it_is(node: Node) -> None:
    link = node.machine.host_root / "sys/bus/pci/devices" / GPU / "driver"
    link.unlink()
    link.symlink_to("../../../bus/pci/drivers/nouveau")
    assert (node.card.problem or "").startswith("it is bound to the kernel driver nouveau; unbind it")


def test_card_that_an_administrator_gave_to_vfio_is_bound_and_known_by_its_place(node: Node) -> None:
    before = node.card
    node.machine.give_to(0, "vfio-pci")
    node.machine.reboot()
    uuid = uuid_of_bus_id(GPU)
    assert node.card == replace(before, gpu_uuid=uuid, driver="vfio-pci", product_name=None)
    assert (node.card.is_bound, before.is_bound, uuid) == (
        True,
        False,
        "95bbb385-ae64-55f7-b83c-9ae53c8bcb46",
    )
    assert node.drivers() == ["vfio-pci", "vfio-pci"]
    node.machine.give_to(0, "nvidia")
    assert (node.card, node.drivers()) == (before, ["nvidia", "snd_hda_intel"])


def test_card_whose_companion_the_administrator_forgot_is_of_no_use(node: Node, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", RecordStore(tmp_path / "claims"), "boot-1", reader=lambda _it: None)

    def problem() -> str | None:
        known = KnownCards(node.cards, ledger, lambda gpu: True)
        return known.read(())[0].problem

    node.machine.give_to(0, "vfio-pci")
    node.cards.override(AUDIO, None, 1)
    node.cards.unbind(AUDIO, 1)
    assert problem() is None
    node.cards.bind(AUDIO, "snd_hda_intel", 1)
    assert problem() == (
        f"it is bound to vfio-pci, but PCI function {AUDIO} of its IOMMU group is bound to snd_hda_intel, so a virtual "
        f"machine cannot open the group; bind PCI function {AUDIO} to vfio-pci too, or return the GPU to the NVIDIA "
        "driver"
    )


H100 = """\
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x000003a000000000 0x000003bfffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x000003c002000000 0x000003c003ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x000003d000000000 0x000003dfffffffff 0x000000000014220c
"""


@pytest.mark.parametrize(
    ("listed", "gib"),
    [
        (H100, 256),
        (H100.replace("0x000003bfffffffff", "0x000003a00fffffff"), 0.5),
        ("", None),
        ("x y z\n", None),
    ],
    ids=["H100", "small", "nothing", "no numbers"],
)
def test_addressable_memory_is_that_of_the_64_bit_regions(node: Node, listed: str, gib: float | None) -> None:
    (node.machine.host_root / "sys/bus/pci/devices" / GPU / "resource").write_text(listed)
    assert node.card.addressable_memory == (None if gib is None else int(gib * (1 << 30)))


def test_the_most_exact_module_is_taken_and_its_driver_may_have_another_name(memory_path: Path) -> None:
    machine = create_machine("gb200-nvl72-tray", memory_path, device_nodes="described")
    cards = cards_of(machine)
    bus_id = cards.cards()[1].bus_id
    assert cards.ready_driver(bus_id, WAIT_S) == "nvgrace-gpu-vfio-pci"
    assert [card.vfio_driver for card in cards.cards()] == ["nvgrace-gpu-vfio-pci"] * 4
    machine.set_system(vfio_modules=["vfio_pci"], vfio_loaded=[])
    assert cards.ready_driver(bus_id, WAIT_S) == "vfio-pci"


@tabled("lists", "is_installed")
def test_module_is_installed_where_a_list_of_the_kernel_has_it(
    tmp_path: Path, lists: dict[str, str], is_installed: bool
) -> None:
    put(tmp_path, "proc/sys/kernel/osrelease", "6.8.0-60-generic\n")
    for name, text in lists.items():
        put(tmp_path, f"lib/modules/6.8.0-60-generic/{name}", text)
    modules = VfioModules(str(tmp_path), str(tmp_path / "sys"), str(tmp_path / "proc"))
    assert modules.is_installed("vfio_pci") is is_installed
    assert (modules.best_for("pci:v000010DEd00002330sv*"), modules.has_driver("vfio-pci")) == (
        "vfio_pci",
        False,
    )


# --- there and back ---------------------------------------------------------------------------------


def test_card_in_a_noiommu_group_has_no_iommu(node: Node) -> None:
    put(node.machine.host_root, "/sys/kernel/iommu_groups/20/name", "vfio-noiommu\n")
    card = node.card
    assert (card.iommu_group, card.functions, card.problem) == (-1, (GPU,), _NO_IOMMU)


@pytest.mark.parametrize("iommufd", [False, True])
def test_card_goes_to_vfio_with_all_its_functions_and_comes_back(node: Node, iommufd: bool) -> None:
    node.machine.set_system(iommufd=iommufd)
    before = node.card
    node.give()
    card = node.card
    assert (card.is_bound, card.functions, card.iommu_group) == (True, (GPU, AUDIO), 20)
    assert node.drivers() == ["vfio-pci", "vfio-pci"]
    assert [node.cards.overridden_by(bus_id) for bus_id in card.functions] == ["vfio-pci"] * 2
    group, own = node.cards.node("/dev/vfio/20"), f"/dev/vfio/devices/{node.cards.vfio_device(GPU)}"
    assert group.node.path == "/dev/vfio/20"
    assert (node.cards.node("/dev/vfio/vfio") is not None, node.cards.node(own) is not None) == (
        True,
        iommufd,
    )
    node.give()
    assert node.card == card, "what is done already is not done again"
    for bus_id in reversed(card.functions):
        node.cards.override(bus_id, None, WAIT_S)
        node.cards.unbind(bus_id, WAIT_S)
    node.cards.unbind(GPU, WAIT_S)
    node.cards.bind(GPU, "nvidia", WAIT_S)
    node.cards.bind(GPU, "nvidia", WAIT_S)
    node.cards.probe(AUDIO, WAIT_S)
    assert (node.drivers(), node.card) == (["nvidia", "snd_hda_intel"], before)
    assert (node.cards.overridden_by(GPU), node.cards.node("/dev/vfio/20")) == (None, None)


# --- a kernel that is not kind ----------------------------------------------------------------------


def test_write_that_blocks_is_left_behind_and_reports_when_it_ends(node: Node) -> None:
    node.machine.set_fault("unbind", code="hang", gpu=0)
    with pytest.raises(
        NotAnsweredError, match=rf"the kernel \(unbind PCI function {GPU} from nvidia\) has not answered"
    ) as hangs:
        node.cards.unbind(GPU, 0.05)
    assert (hangs.value.answer.done(), node.drivers()[0]) == (False, "nvidia")
    node.machine.clear_faults()
    assert hangs.value.answer.result(WAIT_S) is None
    assert node.drivers()[0] is None


@pytest.mark.parametrize(
    ("word", "act"),
    [
        ("driver_override", lambda cards: cards.override(GPU, "vfio-pci", WAIT_S)),
        ("unbind", lambda cards: cards.unbind(GPU, WAIT_S)),
        ("bind", lambda cards: cards.bind(GPU, "vfio-pci", WAIT_S)),
        ("drivers_probe", lambda cards: cards.probe(GPU, WAIT_S)),
    ],
)
def test_write_that_fails_is_one_sentence(node: Node, word: str, act: Callable[[VfioCards], None]) -> None:
    node.machine.set_system(vfio_loaded=["vfio_pci"])
    for name, text in (("EBUSY", "Device or resource busy"), ("ENODEV", "No such device")):
        node.machine.set_fault(word, code=name, gpu=0, count=1)
        with pytest.raises(
            RetryableError, match=f"PCI function {GPU}.*: {text}; see the kernel log"
        ) as failed:
            act(node.cards)
        assert isinstance(failed.value, DeviceBusyError) == (name == "EBUSY")


def test_unbind_without_effect_is_reported(node: Node) -> None:
    node.machine.set_fault("unbind", code="no-effect", count=1)
    with pytest.raises(RetryableError, match="the kernel accepted the request but did not unbind it"):
        node.cards.unbind(GPU, WAIT_S)
    node.cards.unbind(GPU, WAIT_S)
    assert node.drivers()[0] is None


def test_probe_without_effect_shows_in_what_is_missing(node: Node) -> None:
    node.machine.set_fault("drivers_probe", code="no-effect")
    with pytest.raises(
        RetryableError, match=f"cannot bind GPU {GPU} to vfio-pci: PCI function {GPU} is bound to no driver"
    ):
        node.give()
    node.machine.clear_faults()
    node.cards.probe(GPU, WAIT_S)
    with pytest.raises(
        RetryableError, match=f"PCI function {AUDIO} is bound to no driver; see the kernel log"
    ):
        node.cards.verify(node.card, "vfio-pci", 0.0)
    node.cards.probe(AUDIO, WAIT_S)
    (node.machine.host_root / "dev/vfio/20").unlink()
    with pytest.raises(RetryableError, match="the device node /dev/vfio/20 is missing"):
        node.cards.verify(node.card, "vfio-pci", 0.0)


def test_driver_without_override_does_not_take_the_card(node: Node) -> None:
    node.machine.set_system(vfio_loaded=["vfio_pci"])
    node.cards.unbind(GPU, WAIT_S)
    with pytest.raises(RetryableError, match=r"cannot bind PCI function .* to vfio-pci: No such device"):
        node.cards.bind(GPU, "vfio-pci", WAIT_S)


def test_module_that_cannot_be_loaded_is_named(node: Node) -> None:
    for code, text in (("ENOEXEC", "exec format error"), ("hang", "it did not finish within 0.05 s")):
        node.machine.set_fault("modprobe", code=code)
        with pytest.raises(
            RetryableError, match=f"load the kernel module vfio_pci .*{text}.*run `modprobe vfio_pci`"
        ):
            node.cards.ready_driver(GPU, 0.05)
        node.machine.clear_faults()
    node.machine.set_fault("modprobe", code="no-effect")
    with pytest.raises(RetryableError, match="vfio_pci is loaded but does not provide the driver vfio-pci"):
        node.cards.ready_driver(GPU, 0.05)
    node.machine.set_system(vfio_modules=[])
    node.machine.clear_faults()
    with pytest.raises(RetryableError, match="Module vfio_pci not found in directory /lib/modules/"):
        node.cards.ready_driver(GPU, 0.05)


def test_users_of_the_card_are_named_and_block_the_unbind(node: Node) -> None:
    assert node.cards.gpu_users(GPU) == []
    node.machine.set_gpu(0, persistence=1)
    exporter = node.machine.open_session("dcgm-exporter")
    node.machine.hold_gpu(0, 812, "python3")
    users = node.cards.gpu_users(GPU)
    assert users[:2] == ["python3 (process 812)", "nvidia-persistenced (process 801)"]
    assert users[2].startswith("dcgm-exporter (process ")
    with pytest.raises(NotAnsweredError) as hangs:
        node.cards.unbind(GPU, 0.05)
    node.machine.close_session(exporter)
    node.machine.release_gpu(0)
    node.machine.set_gpu(0, persistence=0)
    assert hangs.value.answer.result(WAIT_S) is None
    assert (node.cards.gpu_users(GPU), node.drivers()[0]) == ([], None)


def test_users_of_a_gpu_whose_minor_is_not_reported_are_not_known(node: Node) -> None:
    """The NVIDIA driver's file is empty where it cannot wake the GPU."""
    (node.machine.host_root / f"proc/driver/nvidia/gpus/{GPU}/information").write_text("")
    assert node.cards.gpu_users(GPU) is None


# --- this node's kernel -----------------------------------------------------------------------------


def test_value_is_written_to_a_file_that_is_there(tmp_path: Path) -> None:
    control, file = HostPciControl(str(tmp_path)), tmp_path / "driver_override"
    with pytest.raises(FileNotFoundError):
        control.write(str(file), "vfio-pci\n")
    file.touch()
    control.write(str(file), "vfio-pci\n")
    assert file.read_text() == "vfio-pci\n"


WRITER = """
import fcntl, socket, sys, threading
from pathlib import Path
from dra_driver.base.threads import NotAnsweredError, bounded
from dra_driver.host import vfio
from dra_driver.host.vfio import HostPciControl
from dra_driver.journal.locks import GpuLocks
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
writes, start = threading.Event(), vfio.start_program
vfio.start_program = lambda *given, **more: (start(*given, **more), writes.set())[0]
with GpuLocks(Path(sys.argv[2])).hold(["GPU-a"], 5):
    try:
        bounded("unbind", lambda: HostPciControl("/").write(sys.argv[3], "0000:16:00.0"), 0.1)
    except NotAnsweredError as error:
        writes.wait()
        print("hangs", flush=True)
        error.answer.result()
"""


def test_write_that_hangs_keeps_the_lock_of_its_gpu_and_nothing_else_of_a_killed_process(
    tmp_path: Path,
) -> None:
    """A pipe without a reader blocks the opening process, like the kernel for a GPU in use."""
    pipe, socket_path, locks = tmp_path / "unbind", tmp_path / "dra.sock", GpuLocks(tmp_path / "locks")
    os.mkfifo(pipe)
    locks.open()
    command = [sys.executable, "-c", WRITER, str(socket_path), str(tmp_path / "locks"), str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"hangs\n"
        process.kill()
        process.wait()
    with pytest.raises(LockBusyError), locks.hold(["GPU-a"], 0.0):
        pass
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(socket_path))
    assert pipe.read_text() == "0000:16:00.0"
    with locks.hold(["GPU-a"], 20):
        pass


def test_write_whose_process_does_not_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        OSError, match="the process that writes to sysfs failed with exit code 1: it printed nothing"
    ):
        HostPciControl(str(tmp_path)).write(str(tmp_path / "unbind"), "0000:16:00.0")


def test_host_without_modprobe_says_so(tmp_path: Path) -> None:
    with pytest.raises(RetryableError, match=r"modprobe reports .chroot: "):
        HostPciControl(str(tmp_path)).load_module("vfio_pci", WAIT_S)


def test_nodes_are_those_of_the_host_and_not_of_this_container() -> None:
    """A container has the nodes that were there when it started; a card that goes to vfio gets its node later."""

    class Nodes:
        def read(self, path: str) -> DeviceNode | None:
            return DeviceNode(path) if path == "/host-root/dev/vfio/30" else None

    paths = HostPaths("/driver-root", "/run/nvidia/driver", host_root="/host-root")
    node = VfioCards(paths, Nodes(), HostPciControl("/host-root")).node("/dev/vfio/30")
    assert (node.node.path, node.host_path) == ("/dev/vfio/30", "/dev/vfio/30")
