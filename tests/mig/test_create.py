"""MIG devices created and destroyed on a simulated GPU: what may be in the way, and what is never touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    NotSupportedError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.host.gpu_nodes import MigCaps
from dra_driver.model.mig import GpuInstance, OwnedInstance, OwnedMode, Placement
from dra_driver.model.plan import Plan
from dra_driver.model.steps import WriteCdiSpec
from tests.fakes.mignode import UNTOUCHED, MigNode, make_idle
from tests.fakes.preparing import in_threads
from tests.fakes.samples import claim, hold, record
from tests.fakes.tables import tabled

ONE_G_AT_3 = (10, 19, 3, 1)
HARDWARE = {"set_mode", "create", "create_compute", "destroy_compute", "destroy"}


def left_over(node: MigNode, small) -> None:
    """A device of a claim that has ended, before its first undo."""
    node.prepare(small)
    node.records.delete("uid-1")


def pending(node: MigNode) -> list[tuple[str, str | None]]:
    """Of each MIG device that is to be destroyed its name, and why that is not done yet."""
    return [(step.device, one.cause) for one in node.ledger.pending() for step in one.steps]  # type: ignore[union-attr]


def foreign(node: MigNode, seen: Any) -> Any:
    return node.ownership.foreign_instances(node.gpu_uuid, seen)


def hold_instance(node: MigNode, gpu_instance: int = 10) -> None:
    node.machine.hold_gpu(0, 4711, "python3", gpu_instance=gpu_instance, compute_instance=0)


# --- creation ----------------------------------------------------------------------------------


def test_created_device_is_known_with_everything_and_a_second_prepare_changes_nothing(
    node: MigNode, small
) -> None:
    node.prepare(small)
    made = node.made(small)
    (instance,) = node.machine.gpu(0).instances
    compute = instance.compute[0]
    assert (made.gpu_instance_id, made.compute_instance_id) == (instance.id, compute.id)
    assert (made.uuid, made.gpu_minor) == (compute.uuid, 0)
    assert node.ledger.created_instance("gpu-9") is None
    before = node.state()
    node.countdown.done.clear()
    node.prepare(small)
    assert (node.state(), node.countdown.done) == (before, [])
    assert node.reported == [("create", small.name, None)]


@tabled("function")
@pytest.mark.parametrize("code", ["insufficient-resources", "unknown", "in-use"])
def test_refusal_leaves_nothing_behind(node: MigNode, small, function: str, code: str) -> None:
    node.machine.set_fault(function, code=code, count=1)
    with pytest.raises((RetryableError, ClaimRefusedError)):
        node.prepare(small)
    may_appear = code == "unknown" and "GpuInstance" in function and "Compute" not in function
    assert len(pending(node)) == may_appear
    if may_appear:
        node.clock.now += 30
        node.work_off()
    assert node.state() == UNTOUCHED
    assert [(kind, error is None) for kind, _, error in node.reported if kind == "create"] == [
        ("create", False)
    ]
    node.prepare(small)
    assert node.on_gpu() == (True, [ONE_G_AT_3])


@pytest.mark.parametrize("code", ["unknown", "driver-not-loaded"])
def test_creation_that_cannot_be_undone_is_pending_cleanup(node: MigNode, small, code: str) -> None:
    node.machine.set_fault("nvmlGpuInstanceCreateComputeInstance", code=code, count=1)
    node.machine.set_fault("nvmlGpuInstanceDestroy", code=code)
    with pytest.raises(RetryableError, match=r"create a compute instance|not loaded"):
        node.prepare(small)
    assert node.records.all() == {}
    existing = node.hardware.instances(*node.address)
    assert foreign(node, existing) == (replace(existing[0], leaving=True),)
    [(device, cause)] = pending(node)
    assert (device, "destroy GPU instance 10" in str(cause)) == (small.name, True)
    node.machine.clear_faults()
    node.work_off()
    assert (node.state(), pending(node)) == (UNTOUCHED, [])


def test_step_is_done_within_one_operation_of_nvml(node: MigNode, small) -> None:
    depth: list[str] = []

    @contextmanager
    def operation() -> Iterator[None]:
        depth.append("begin")
        before = list(node.countdown.done)
        yield
        depth.append(f"end after {[name for name in node.countdown.done[len(before) :] if name in HARDWARE]}")

    node.reconnect(operation=operation)
    node.prepare(small)
    node.unprepare()
    assert depth == [
        "begin", "end after ['set_mode', 'create', 'create_compute']",
        "begin", "end after ['destroy_compute', 'destroy']",
        "begin", "end after ['set_mode']",
    ]  # fmt: skip


def test_busy_gpu_keeps_its_mode_and_the_mode_stays_unowned(node: MigNode, small) -> None:
    node.machine.hold_gpu(0, 4711, "python3")
    with pytest.raises(DeviceBusyError, match="4711"):
        node.prepare(small)
    assert node.state() == UNTOUCHED


def test_ampere_gpu_does_not_change_its_mode_with_the_next_reset(machine: Any, tmp_path: Path) -> None:
    a100 = machine("dgx-a100-40gb")
    make_idle(a100, mig_mode=False)
    node = MigNode(a100, tmp_path)
    node.machine.hold_gpu(0, 4711, "python3")
    with pytest.raises(DeviceBusyError):
        node.prepare(node.wanted("1g.5gb", 3))
    assert (node.state(), node.machine.gpu(0).mig_pending) == (UNTOUCHED, 0)


def test_gpu_without_mig_is_refused(machine: Any, tmp_path: Path) -> None:
    t4 = machine("t4-4")
    t4.session.reopen()
    node = MigNode(t4, tmp_path)
    with pytest.raises(ClaimRefusedError, match="does not support MIG"):
        node.mode.enter(node.address)
    assert node.ledger.details(OwnedMode) == []


# --- somebody else's ---------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "start"), [("1g.10gb", 3), ("2g.20gb", 2), ("7g.80gb", 0)])
def test_foreign_instance_is_named_and_left_alone(node: MigNode, small, profile: str, start: int) -> None:
    node.machine.set_mig_mode(0, True)
    number, *_ = node.machine.create_mig(0, profile, start)
    before = node.on_gpu()
    with pytest.raises(
        ClaimRefusedError,
        match=rf"overlaps with GPU instance {number} .* which gpu-dra-driver did not create",
    ):
        node.prepare(small)
    node.work_off()
    assert node.on_gpu() == before
    assert node.state()[1:] == UNTOUCHED[1:]


def test_mode_stays_on_while_foreign_instance_is_there(node: MigNode, small) -> None:
    node.prepare(small)
    number, *_ = node.machine.create_mig(0, "1g.10gb", 0)
    node.unprepare()
    assert node.on_gpu() == (True, [(number, 19, 0, 1)])
    node.work_off()
    assert len(node.ledger.details(OwnedMode)) == 1
    node.machine.destroy_mig(0, number)
    node.work_off()
    assert node.state() == UNTOUCHED


@pytest.mark.parametrize("has_compute", [True, False])
def test_hand_remade_instance_is_neither_used_nor_destroyed(
    node: MigNode, small, *, has_compute: bool, logs: list
) -> None:
    node.prepare(small)
    node.machine.destroy_mig(0, 10)
    if has_compute:
        node.machine.create_mig(0, "1g.10gb", 3)
    else:
        entry = node.entry_of(small)
        node.hardware.create(*node.address, 19, Placement(3, 1))
        node.ledger.save(replace(entry, gpu_instance_id=11))
    before = node.on_gpu()
    with pytest.raises(ClaimRefusedError, match="but gpu-dra-driver did not create it"):
        node.prepare(small)
    assert node.records.get("uid-1") is not None, "a claim that was prepared keeps what it has"
    node.unprepare()
    assert node.on_gpu() == before
    assert node.ledger.details(OwnedInstance) == []
    assert "mig_device_replaced" in [line["event"] for line in logs]


def test_instance_destroyed_by_hand_is_made_again(node: MigNode, small) -> None:
    node.prepare(small)
    before = node.made(small)
    node.machine.destroy_mig(0, 10)
    node.prepare(small)
    assert node.made(small).uuid != before.uuid
    assert node.on_gpu() == (True, [ONE_G_AT_3])
    node.machine.destroy_mig(0, 10)
    node.unprepare()
    assert node.state() == UNTOUCHED


def test_compute_instance_destroyed_by_hand_is_made_again(node: MigNode, small) -> None:
    node.prepare(small)
    node.hardware.destroy_compute(*node.address, 10, 0)
    node.prepare(small)
    assert node.on_gpu() == (True, [ONE_G_AT_3])
    assert [row[-1] for row in node.state()[1]] == [True], "the ledger has the new UUID"


def test_own_instances_are_sorted_from_others(node: MigNode, small) -> None:
    node.prepare(small)
    node.machine.create_mig(0, "2g.20gb", 0)
    seen = node.hardware.instances(*node.address)
    others = tuple(item for item in seen if item.profile_id == 14)
    assert len(seen) == 2
    assert foreign(node, seen) == others
    assert foreign(node.restarted(), seen) == others
    assert foreign(node.restarted(boot_id="boot-2"), seen) == seen
    node.unprepare()
    assert foreign(node, seen) == others, "the look began before the removal"
    node.clock.now += 31
    assert foreign(node, seen) == seen
    assert node.ownership.foreign_instances("GPU-other", [GpuInstance(10, 19, Placement(3, 1))]) != ()


# --- other claims ------------------------------------------------------------------------------


def test_shared_device_goes_with_the_last_claim(node: MigNode, small) -> None:
    node.prepare(small)
    uuid = node.ledger.created_instance(small.name)
    node.prepare(small, uid="uid-2")
    assert node.ledger.created_instance(small.name) == uuid
    node.unprepare()
    assert node.ledger.created_instance(small.name) == uuid
    node.unprepare("uid-2")
    assert node.state() == UNTOUCHED


def test_device_of_a_claim_whose_record_was_lost_is_kept(node: MigNode, small) -> None:
    left_over(node, small)
    node.lost = {"uid-1": (small.name,)}
    node.work_off()
    with pytest.raises(RetryableError, match="of a claim whose record was lost"):
        node.prepare(node.wanted("3g.40gb", 0), uid="uid-2")
    assert node.on_gpu() == (True, [ONE_G_AT_3])
    node.lost = {}
    node.work_off()
    assert node.state() == UNTOUCHED


def test_overlapping_device_of_another_claim_is_waited_for(node: MigNode, small) -> None:
    node.prepare(small)
    with pytest.raises(
        RetryableError, match=r"of claim default/claim-uid-1 \(UID uid-1\); the kubelet retries"
    ):
        node.prepare(node.wanted("3g.40gb", 0), uid="uid-2")
    assert node.on_gpu() == (True, [ONE_G_AT_3])


def test_overlapping_device_of_an_ended_claim_makes_room(node: MigNode, small) -> None:
    left_over(node, small)
    node.prepare(node.wanted("3g.40gb", 0), uid="uid-2")
    assert [row[1:] for row in node.on_gpu()[1]] == [(9, 0, 1)]
    assert "set_mode" not in node.countdown.done[10:], "the mode stays on in between"


# --- destruction -------------------------------------------------------------------------------


def test_device_in_use_is_waited_for_and_its_holder_named(node: MigNode, small) -> None:
    node.prepare(small)
    hold_instance(node)
    node.unprepare()
    assert 0.3 < node.clock.now <= 0.5, "the RPC waits a little, in pauses"
    assert node.records.get("uid-1") is None, "the claim ends all the same"
    assert node.on_gpu() == (True, [ONE_G_AT_3])
    [(device, cause)] = pending(node)
    assert (device, "4711" in str(cause)) == (small.name, True)
    seen = node.hardware.instances(*node.address)
    assert foreign(node, seen) == (replace(seen[0], leaving=True),), "nothing that overlaps it is offered"
    node.machine.release_gpu(0)
    node.work_off()
    assert node.state() == UNTOUCHED
    assert node.reported[0] == ("create", small.name, None)
    assert ("destroy", small.name, "DeviceBusyError") in node.reported
    assert node.reported[-1] == ("destroy", small.name, None)


def test_device_freed_in_time_needs_no_second_call(node: MigNode, small) -> None:
    node.prepare(small)
    hold_instance(node)
    pause = node.clock.pause

    def freed(seconds: float) -> None:
        pause(seconds)
        node.machine.release_gpu(0)

    node.reconnect(pause=freed)
    node.unprepare()
    assert node.state() == UNTOUCHED


@pytest.mark.parametrize("function", ["destroy", "nvmlDeviceSetMigMode"])
def test_undo_that_reports_success_without_effect_is_retried(
    node: MigNode, small, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare(small)
    with monkeypatch.context() as broken:
        broken.setattr(node.hardware if function == "destroy" else pynvml, function, lambda *_given: 0)
        node.unprepare()
        left = [f"{cause}" for _, cause in pending(node)] if function == "destroy" else ["is still there"]
        assert ["is still there" in cause for cause in left] == [True]
        assert (node.on_gpu()[0], len(node.ledger.details(OwnedMode))) == (True, 1)
    node.work_off()
    assert node.state() == UNTOUCHED


def test_mode_that_cannot_be_left_withholds_nothing(node: MigNode, small, logs: list) -> None:
    node.prepare(small)
    node.machine.hold_gpu(0, 4711, "dcgm", gpu_instance=5)
    node.unprepare()
    assert node.on_gpu() == (True, [])
    assert (len(node.ledger.details(OwnedMode)), pending(node)) == (1, [])
    node.work_off()
    assert [line["event"] for line in logs].count("mig_mode_disable_failed") == 1, (
        "logged once while the reason stays"
    )
    node.machine.release_gpu(0)
    node.work_off()
    assert node.state() == UNTOUCHED


def fault(node: MigNode, function: str, **how: Any) -> Callable[[], None]:
    node.machine.set_fault(function, **how)
    return node.machine.clear_faults


def nvml_closed(node: MigNode) -> Callable[[], None]:
    node.simulated.session.close()
    return node.simulated.session.reopen


@pytest.mark.parametrize(
    "broken",
    [
        nvml_closed,
        lambda node: fault(node, "nvmlDeviceGetMigMode", code="gpu-is-lost"),
        lambda node: fault(node, "nvmlDeviceGetMigMode", code="driver-not-loaded"),
        lambda node: fault(node, "nvmlGpuInstanceDestroy", code="unknown", count=2),
    ],
    ids=["NVML closed", "GPU lost", "no driver", "destruction refused"],
)
def test_claim_ends_whatever_is_broken_and_the_device_goes_later(
    node: MigNode, small, broken: Callable[[MigNode], Callable[[], None]]
) -> None:
    node.prepare(small)
    healed = broken(node)
    node.unprepare()
    assert node.records.all() == {}
    assert [device for device, _ in pending(node)] == [small.name]
    healed()
    node.unprepare()
    node.work_off()
    assert (node.state(), pending(node)) == (UNTOUCHED, [])


# --- whole GPUs --------------------------------------------------------------------------------


def test_whole_gpu_leaves_the_mode_that_was_ours(node: MigNode, small) -> None:
    left_over(node, small)
    node.prepare_whole("uid-2")
    assert node.state()[:3] == UNTOUCHED[:3]
    node.prepare_whole("uid-2")
    node.unprepare("uid-2")
    assert node.state() == UNTOUCHED


def test_whole_gpu_waits_for_the_claim_that_has_a_part(node: MigNode, small) -> None:
    node.prepare(small)
    with pytest.raises(
        RetryableError,
        match=r"as a whole overlaps with MIG device .*GPU instance 10 .* of claim default/claim-uid-1",
    ):
        node.prepare_whole("uid-2")
    assert node.on_gpu() == (True, [ONE_G_AT_3])


def test_whole_gpu_is_refused_while_foreign_instance_is_on_it(node: MigNode) -> None:
    node.ledger.save(OwnedMode(*node.address, "boot-1"))
    node.machine.set_mig_mode(0, True)
    number, *_ = node.machine.create_mig(0, "2g.20gb", 0)
    with pytest.raises(ClaimRefusedError, match=rf"GPU instance {number} .* gpu-dra-driver did not create"):
        node.prepare_whole()
    assert node.on_gpu() == (True, [(number, 14, 0, 1)])


def test_whole_gpu_is_refused_in_a_mode_that_is_not_ours(node: MigNode) -> None:
    node.machine.set_mig_mode(0, True)
    with pytest.raises(
        ClaimRefusedError, match=r"by another program .*`nvidia-smi -i GPU-[0-9a-f-]+ -mig 0`"
    ):
        node.prepare_whole()
    assert node.on_gpu() == (True, [])


# --- boots, files, steps -----------------------------------------------------------------------


@pytest.mark.parametrize("was_cut_off", [True, False])
def test_after_a_reboot_nothing_of_the_old_boot_is_taken_for_ours(
    node: MigNode, small, *, was_cut_off: bool
) -> None:
    prepared = node.prepare(small)
    entry = node.entry_of(small)
    if was_cut_off:
        bare = replace(entry, phase="creating", gpu_instance_id=None, compute_instance_id=None, uuid=None)
        node.ledger.save(bare)
    make_idle(node.simulated, mig_mode=True)
    number, *_ = node.machine.create_mig(0, "1g.10gb", 3)
    after = node.restarted(boot_id="boot-2")
    assert after.ledger.created_instance(small.name) is None
    with pytest.raises(ClaimRefusedError, match="which gpu-dra-driver did not create"):
        after.prepare(small)
    after.ledger.save(entry)
    after.work_off()
    assert (after.ledger.details(OwnedInstance), after.ledger.details(OwnedMode)) == ([], [])
    assert after.records.all() == {}, (
        "in this boot nothing was prepared, so the failed Prepare takes its record back"
    )
    after.ledger.save(entry)
    after.records.save(replace(prepared, phase="preparing", boot_id="boot-2"))
    after.unprepare()
    after.work_off()
    assert after.ledger.details(OwnedInstance) == []
    assert after.on_gpu() == (True, [(number, 19, 3, 1)])


def test_unreadable_ledger_makes_its_instance_foreign(node: MigNode, small, tmp_path: Path) -> None:
    node.prepare(small)
    (tmp_path / "ledger" / f"{node.gpu_uuid}.json").write_text("{")
    node.ledger.open()
    node.unprepare()
    node.work_off()
    assert node.on_gpu() == (True, [ONE_G_AT_3])


def test_device_is_in_place_while_its_capabilities_are_there(
    node: MigNode, small, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[int, ...]] = []

    def there(_caps: MigCaps, *ids: int) -> bool:
        requested.append(ids)
        return len(requested) == 1

    steps = node.devices
    step, kept = node.step(small), record(hold("gpu-00000000"))
    assert not steps.in_place(step, kept)
    node.prepare(small)
    monkeypatch.setattr(MigCaps, "exist", there)
    assert [steps.in_place(step, kept) for _ in range(2)] == [True, False]
    assert requested == [(0, 10, 0)] * 2
    assert steps.in_place(WriteCdiSpec(), kept)
    node.ledger.save(replace(node.made(small), phase="creating"))
    assert not steps.in_place(step, kept)


def test_unsupported_profile_is_reported_as_the_claims_fault(
    node: MigNode, small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_arguments: Any) -> int:
        raise NotSupportedError("create a GPU instance: Not Supported")

    monkeypatch.setattr(node.hardware, "create", cannot)
    with pytest.raises(ClaimRefusedError, match="Not Supported; delete the pod and its claim"):
        node.devices.do(node.step(small), Plan(claim("x"), (), ()))


def test_every_switch_of_the_mode_is_reported(node: MigNode, small) -> None:
    gpu = node.gpu_uuid
    node.prepare(small)
    node.unprepare()
    assert node.reported_modes == [("mode-on", gpu, None), ("mode-off", gpu, None)]
    node.reported_modes.clear()
    node.machine.set_fault("nvmlDeviceSetMigMode", code="in-use", count=1)
    with pytest.raises(DeviceBusyError):
        node.prepare(small)
    assert node.reported_modes == [("mode-on", gpu, "DeviceBusyError")]
    node.reported_modes.clear()
    node.prepare(small)
    node.machine.set_fault("nvmlDeviceSetMigMode", code="in-use", count=1)
    node.unprepare()
    node.work_off()
    assert node.reported_modes == [
        ("mode-on", gpu, None), ("mode-off", gpu, "DeviceBusyError"), ("mode-off", gpu, None),
    ]  # fmt: skip
    node.reported_modes.clear()
    left_over(node, small)
    node.prepare_whole()
    assert node.reported_modes == [("mode-on", gpu, None), ("mode-off", gpu, None)]


def test_mode_that_no_one_can_report_is_reported(
    node: MigNode, small, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, calls = node.hardware.mode, iter(range(9))

    def vanishing(*where: Any) -> Any:
        if next(calls):
            raise NvmlUnavailableError("the driver went away")
        return mode(*where)

    monkeypatch.setattr(node.hardware, "mode", vanishing)
    node.machine.set_fault("nvmlDeviceSetMigMode", code="unknown", count=1)
    with pytest.raises(RetryableError):
        node.prepare(small)
    assert [(kind, error is None) for kind, _, error in node.reported_modes] == [
        ("mode-on", False), ("mode-off", False),
    ]  # fmt: skip
    monkeypatch.undo()
    assert len(node.ledger.details(OwnedMode)) == 1
    node.work_off()
    assert node.state() == UNTOUCHED


# --- several claims, start --------------------------------------------------------------------


def test_devices_of_one_gpu_come_and_go_in_parallel(node: MigNode) -> None:
    wanted = [node.wanted("1g.10gb", start) for start in range(4)]

    def churn(item: Any) -> None:
        for _ in range(3):
            node.prepare(item, uid=f"uid-{item.name}")
            node.work_off()
            node.unprepare(f"uid-{item.name}")

    assert in_threads(*(lambda item=item: churn(item) for item in wanted)) == [None] * 4
    assert node.state() == UNTOUCHED
