"""MIG devices that NVML temporarily or permanently refuses to create, through a whole Prepare."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.claims.rules.plan import Identity
from dra_driver.claims.waiting import WaitTimeouts
from dra_driver.errors import NvmlTransientError
from dra_driver.journal.executor import StepDispatcher
from dra_driver.mig.rules.counters import partitioned
from dra_driver.model.claim import AllocatedClaim, Failed, HeldDevice, Prepared
from dra_driver.model.inventory import DynamicMigDevice
from dra_driver.model.mig import GpuInstance, OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, LeaveMigMode, WriteCdiSpec
from tests.fakes.machines import SimulatedNode
from tests.fakes.mignode import UNTOUCHED, MigNode, make_idle
from tests.fakes.preparing import Claims, Devices, Outcomes, SpecSteps, Users, claims_of, noted_waits
from tests.fakes.samples import DRIVER, NODE, claim, h100, inventory
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S, eventually
from tests.mig.migtables import MODELS, table

CREATE_GPU_INSTANCE = "nvmlDeviceCreateGpuInstanceWithPlacement"
CREATE_COMPUTE_INSTANCE = "nvmlGpuInstanceCreateComputeInstance"
CREATIONS = {
    CREATE_GPU_INSTANCE: "create a GPU instance",
    CREATE_COMPUTE_INSTANCE: "create a compute instance",
}
QUICK = WaitTimeouts(retry_s=0.001, stop_s=0)
LONG_S = 36000.0


class Node(MigNode):
    """A GPU with MIG on demand, and the whole of Prepare and Unprepare above it."""

    def __init__(self, simulated: SimulatedNode, directory: Path, patience: WaitTimeouts = QUICK) -> None:
        super().__init__(simulated, directory)
        cut = partitioned(table(MODELS["h100-sxm"]), (), offers_whole=True)
        self.inventory = inventory(h100(0, uuid=self.gpu_uuid, pci_bus_id=None, partitioning=cut))
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        steps = {CreateMig: self.devices, LeaveMigMode: self.devices, WriteCdiSpec: SpecSteps(self.specs)}
        self.work_with(StepDispatcher(steps), [self.mode])
        self.claims = Claims()
        self.node_devices = Devices(self.inventory)
        self.outcomes = Outcomes()
        parts = claims_of(self, Identity(DRIVER, NODE), self.node_devices, Users(), patience)
        self.service, self.preparer, self.waiter = parts.service, parts.preparer, parts.waiter
        self.waiting = noted_waits(parts.waiter)

    def device(self, profile: str, start: int) -> str:
        [name] = [
            name
            for name, device in self.inventory.by_name.items()
            if isinstance(device, DynamicMigDevice)
            and (device.profile.name, device.placement.start) == (profile, start)
        ]
        return name

    def requested(self, wanted: AllocatedClaim, deadline_s: float = LONG_S) -> Any:
        """Prepare it, like the kubelet."""
        self.claims.add(wanted)
        return self.service.prepare([wanted.ref], deadline_s)[wanted.ref.uid]

    def no_more(self, wanted: AllocatedClaim) -> Any:
        """Unprepares it, like the kubelet."""
        return self.service.unprepare([wanted.ref], LONG_S)[wanted.ref.uid]

    @property
    def leftovers(self) -> tuple[object, ...]:
        return self.state(), list(self.specs.list())


@pytest.fixture
def make(h100: SimulatedNode, tmp_path: Path) -> Callable[..., Node]:
    def one(patience: WaitTimeouts = QUICK) -> Node:
        make_idle(h100, mig_mode=False)
        return Node(h100, tmp_path, patience)

    return one


@pytest.fixture
def node(make: Callable[..., Node]) -> Node:
    return make()


def small(node: Node, start: int = 3, uid: str = "uid-1") -> AllocatedClaim:
    return claim(node.device("1g.10gb", start), uid=uid)


def error_of(answer: object) -> str:
    assert isinstance(answer, Failed), answer
    return answer.error


class Attempt:
    """A Prepare in a thread of its own."""

    def __init__(self, node: Node, wanted: AllocatedClaim) -> None:
        self._answer: object = None

        def run() -> None:
            self._answer = node.requested(wanted)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def answer(self) -> object:
        self._thread.join(PATIENCE_S)
        return self._answer


def waiting(node: Node, wanted: AllocatedClaim) -> Attempt:
    """A Prepare that NVML refuses again and again, and that waits between its tries."""
    node.machine.set_fault(CREATE_COMPUTE_INSTANCE, code="insufficient-resources")
    attempt = Attempt(node, wanted)
    eventually(lambda: wanted.ref.uid in node.waiting)
    return attempt


# --- what passes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["insufficient-resources", "in-use", "timeout", "not-ready", "invalid-state", "unknown"]
)
@pytest.mark.parametrize("function", CREATIONS)
@pytest.mark.parametrize("count", [1, 3])
def test_refusal_that_passes_is_healed_within_the_call(
    node: Node, function: str, code: str, count: int, logs: list
) -> None:
    node.machine.set_fault(function, code=code, count=count)
    wanted = small(node)
    assert isinstance(node.requested(wanted), Prepared)
    assert node.outcomes.reported == [("prepare", None)]
    assert [name for _, name, error in node.reported if error] == [node.device("1g.10gb", 3)] * count
    assert node.reported[-1] == ("create", node.device("1g.10gb", 3), None)
    [reported] = [line for line in logs if line["event"] == "prepare_waits"]
    assert CREATIONS[function] in reported["reason"]
    assert node.on_gpu() == (True, [(10, 19, 3, 1)])
    assert node.no_more(wanted) is None
    assert node.leftovers == (UNTOUCHED, [])


@pytest.mark.parametrize("code", ["in-use", "unknown", "not-ready"])
def test_mode_that_is_refused_for_now_is_switched_within_the_call(node: Node, code: str) -> None:
    node.machine.set_fault("nvmlDeviceSetMigMode", code=code, count=2)
    assert isinstance(node.requested(small(node)), Prepared)
    assert [error is None for kind, _, error in node.reported_modes if kind == "mode-on"] == [
        False,
        False,
        True,
    ]


class Stubborn:
    """Hardware that refuses to create one profile this many times."""

    def __init__(self, node: Node, profile_id: int, times: float) -> None:
        self._node = node
        self._create = node.hardware.create
        self._profile_id = profile_id
        self.left = times
        self.seen: list[tuple[object, ...]] = []
        node.hardware.create = self.create  # type: ignore[method-assign]

    def create(self, gpu_uuid: str, pci_bus_id: str | None, profile_id: int, placement: Any) -> int:
        if profile_id == self._profile_id and self.left > 0:
            self.left -= 1
            record = self._node.record_of()
            self.seen.append((record.phase, self._node.on_gpu()))
            raise NvmlTransientError("create a GPU instance: Insufficient Resources")
        return self._create(gpu_uuid, pci_bus_id, profile_id, placement)


def three(node: Node) -> AllocatedClaim:
    """Devices in the order of creation; the last one's profile ID is 9."""
    return claim(node.device("1g.10gb", 6), node.device("2g.20gb", 4), node.device("3g.40gb", 0))


def waiting_with_two(node: Node) -> tuple[Attempt, Stubborn]:
    stubborn = Stubborn(node, 9, float("inf"))
    attempt = Attempt(node, three(node))
    eventually(lambda: "uid-1" in node.waiting)
    return attempt, stubborn


def made(node: Node) -> list[tuple[int, int]]:
    return sorted(row[1:3] for row in node.on_gpu()[1])


def test_mode_and_finished_devices_stay_between_the_tries(node: Node) -> None:
    stubborn = Stubborn(node, 9, 5)
    assert isinstance(node.requested(three(node)), Prepared)
    assert len(set(map(str, stubborn.seen))) == 1
    [(phase, (is_on, instances)), *_] = stubborn.seen
    assert (phase, is_on, [row[3] for row in instances]) == ("preparing", True, [1, 1])
    assert node.reported_modes == [("mode-on", node.gpu_uuid, None)]
    assert [kind for kind, _, error in node.reported if not error] == ["create"] * 3
    assert made(node) == [(9, 0), (14, 4), (19, 6)]
    assert node.no_more(three(node)) is None
    assert node.leftovers == (UNTOUCHED, [])


def test_everything_is_undone_when_the_time_is_over(node: Node) -> None:
    attempt, stubborn = waiting_with_two(node)
    eventually(lambda: len(stubborn.seen) > 1)
    node.waiter.stop()
    assert "the kubelet retries" in error_of(attempt.answer())
    assert node.leftovers == (UNTOUCHED, [])
    assert node.preparer._begun == {}
    stubborn.left = 0
    assert isinstance(node.requested(three(node)), Prepared)


def test_everything_is_undone_before_another_claim_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of another Prepare."""
    Stubborn(node, 9, 1)
    seen, wait = [], node.waiter.wait
    wanted = node.inventory.by_name[node.device("3g.40gb", 0)]
    assert isinstance(wanted, DynamicMigDevice)
    held = HeldDevice(wanted.name, "mig", "", node.gpu_uuid, placement=wanted.placement)

    def waited(place: Any, error: Any) -> None:
        seen.append((type(error).__name__, made(node), node.records.get("uid-1") is None))
        if isinstance(error, NvmlTransientError):
            other = claim(wanted.name, uid="uid-9")
            node.records.save(ClaimRecord(other, "prepared", "boot-1", (held,), ()))
        else:
            node.records.delete("uid-9")
        wait(place, error)

    monkeypatch.setattr(node.waiter, "wait", waited)
    assert isinstance(node.requested(three(node)), Prepared)
    assert seen == [("NvmlTransientError", [(14, 4), (19, 6)], False), ("DeviceHeldError", [], True)]


def test_instance_that_could_not_be_destroyed_is_destroyed_by_the_next_try(node: Node) -> None:
    node.machine.set_fault("nvmlGpuInstanceGetInfo", code="unknown", count=1)
    node.machine.set_fault("nvmlGpuInstanceDestroy", code="unknown", count=2)  # at once, and in the undo
    assert isinstance(node.requested(small(node)), Prepared)
    assert node.machine.current().faults == []
    assert node.on_gpu() == (True, [(10, 19, 3, 1)])
    assert [entry.phase for entry in node.ledger.details(OwnedInstance)] == ["created"]


# --- what does not pass, or not in time --------------------------------------------------------


@tabled("code", "text")
@pytest.mark.parametrize("function", CREATIONS)
def test_refusal_that_does_not_pass_fails_at_once(node: Node, function: str, code: str, text: str) -> None:
    node.machine.set_fault(function, code=code)
    reported = error_of(node.requested(small(node)))
    assert CREATIONS[function] in reported
    assert text in reported
    assert len([kind for kind, *_ in node.reported if kind == "create"]) == 1
    assert node.leftovers == (UNTOUCHED, [])


@pytest.mark.parametrize("function", CREATIONS)
def test_lost_gpu_is_searched_once_and_not_waited_for(node: Node, function: str) -> None:
    node.machine.set_fault(function, code="gpu-is-lost")
    assert "the GPU does not answer" in error_of(node.requested(small(node)))
    assert (node.node_devices.scans, node.outcomes.reported) == (1, [("prepare", "DeviceLostError")])
    assert len([kind for kind, *_ in node.reported if kind == "create"]) == 2
    assert node.leftovers == (UNTOUCHED, [])


@pytest.mark.parametrize("function", CREATIONS)
def test_refusal_that_lasts_is_reported_with_how_long_it_was_waited_for(node: Node, function: str) -> None:
    node.machine.set_fault(function, code="insufficient-resources")
    attempt = Attempt(node, small(node))
    eventually(lambda: len([kind for kind, *_ in node.reported if kind == "create"]) > 1)
    node.waiter.stop()
    reported = error_of(attempt.answer())
    assert CREATIONS[function] in reported
    assert re.search("; waited [0-9]+ s; the kubelet retries$", reported)
    assert node.outcomes.reported == [("prepare", NvmlTransientError.__name__)]
    assert node.leftovers == (UNTOUCHED, [])
    node.machine.clear_faults()
    assert isinstance(node.requested(small(node)), Prepared)


def test_silicon_that_someone_else_took_is_reported_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appeared after the check of the instances, so NVML only reports missing resources, but the error
    names it.
    """
    node.machine.set_mig_mode(0, True)
    create = node.hardware.create

    def late(*arguments: Any) -> int:
        node.machine.create_mig(0, "2g.20gb", 2)
        return create(*arguments)

    monkeypatch.setattr(node.hardware, "create", late)
    assert "in the way: GPU instance 4 (profile 14) at memory slices 2-3" in error_of(
        node.requested(small(node))
    )
    assert node.hardware.instances(*node.address)[0].slot == (14, 2)
    monkeypatch.undo()
    assert "which gpu-dra-driver did not create" in error_of(node.requested(small(node)))
    assert len(node.machine.gpu(0).instances) == 1


# --- beside others -----------------------------------------------------------------------------


def test_others_on_the_gpu_continue_and_no_lock_is_held_in_between(make: Callable[..., Node]) -> None:
    node = make(WaitTimeouts(retry_s=30, stop_s=0.01))
    first, second = small(node), small(node, 5, "uid-2")
    attempt = waiting(node, first)
    node.machine.clear_faults()
    assert node.on_gpu() == (True, [])
    with node.locks.hold({node.gpu_uuid}, 1), node.records.locks.hold("uid-1", 1):
        pass
    assert isinstance(node.requested(second), Prepared)
    assert node.no_more(second) is None
    node.work_off()
    assert node.on_gpu() == (True, []), "the mode stays on while a claim waits for a device"
    node.no_more(first)
    node.waiter.stop()
    attempt.answer()
    assert node.leftovers == (UNTOUCHED, [])


def test_unprepare_ends_the_waiting(node: Node) -> None:
    attempt, _ = waiting_with_two(node)
    assert node.no_more(three(node)) is None
    assert "the kubelet retries" in error_of(attempt.answer())
    assert node.leftovers == (UNTOUCHED, [])


def test_claim_that_comes_again_gets_no_device_on_which_a_process_computes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", 1.0)
    assert isinstance(node.requested(small(node)), Prepared)
    [before] = node.ledger.details(OwnedInstance)
    node.machine.hold_gpu(0, 4711, "python3", gpu_instance=before.gpu_instance_id, compute_instance=0)
    assert node.no_more(small(node)) is None
    for uid in ("uid-1", "uid-2"):
        assert "4711" in error_of(node.requested(small(node, uid=uid)))
    node.machine.release_gpu(0)
    assert isinstance(node.requested(small(node)), Prepared)
    [after] = node.ledger.details(OwnedInstance)
    assert after.uuid != before.uuid


def test_claim_that_wants_the_same_silicon_is_refused_until_the_one_before_gives_up(node: Node) -> None:
    attempt, _ = waiting_with_two(node)
    second = claim(node.device("1g.10gb", 5), uid="uid-2")
    assert "is held by claim default/claim-uid-1" in error_of(node.requested(second))
    node.no_more(three(node))
    attempt.answer()
    assert isinstance(node.requested(second), Prepared)
    assert made(node) == [(19, 5)]


def test_many_claims_of_one_gpu_are_all_made_though_half_of_all_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, turn = node.hardware.create, iter(range(10**6))

    def moody(*arguments: Any) -> int:
        if next(turn) % 2 == 0:
            raise NvmlTransientError("create a GPU instance: Insufficient Resources")
        return create(*arguments)

    monkeypatch.setattr(node.hardware, "create", moody)
    wanted = [small(node, start, f"uid-{start}") for start in range(7)]
    requested = [Attempt(node, one) for one in wanted]
    assert all(isinstance(one.answer(), Prepared) for one in requested)
    found = node.hardware.instances(*node.address)
    assert [one.placement.start for one in found] == list(range(7))
    assert all(isinstance(one, GpuInstance) for one in found)
    for one in wanted:
        assert node.no_more(one) is None
    assert node.leftovers == (UNTOUCHED, [])
