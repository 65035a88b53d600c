from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.contextvars import bound_contextvars, get_contextvars

from dra_driver.base import atomic
from dra_driver.errors import RetryableError, StateError
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimRef,
    DeviceConfig,
    DeviceResult,
    Failed,
    PodRef,
    Pods,
    Prepared,
    PreparedDevice,
)
from dra_driver.model.inventory import Inventory
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteCdiSpec
from tests.fakes.preparing import Node, error_of, in_threads
from tests.fakes.samples import (
    GPU_0,
    GPU_1,
    MIG_1G,
    MIG_3G,
    MIXED,
    NODE,
    claim,
    h100,
    hold,
    inventory,
    result,
)
from tests.fakes.waiting import PATIENCE_S

AT = "2026-08-07T12:00:00.000+00:00"


def prepared(wanted: AllocatedClaim) -> Prepared:
    return Prepared(
        tuple(
            PreparedDevice(
                (item.base_request,),
                NODE,
                item.device,
                (f"k8s.gpu.nvidia.com/claim={wanted.ref.uid}-{item.device}",),
            )
            for item in wanted.results
        )
    )


def failing(error: Exception):
    def fail(_subject: object) -> None:
        raise error

    return fail


# --- the plain way -------------------------------------------------------------------------------


def test_prepare_answers_every_device_and_records_it(node: Node) -> None:
    wanted = claim(GPU_0, result(MIG_1G, "part/small"))
    assert node.prepare(wanted) == prepared(wanted)
    assert node.records.all() == {
        "uid-1": ClaimRecord(wanted, "prepared", "boot-1", (hold(GPU_0), hold(MIG_1G)), (WriteCdiSpec(),), AT)
    }
    assert node.specs.list() == {"uid-1": (GPU_0, MIG_1G)}
    assert node.outcomes.reported == [("prepare", None)]


def test_prepare_twice_is_as_once_and_writes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = claim(GPU_0)
    first, files = node.prepare(wanted), node.files()
    monkeypatch.setattr(Path, "replace", failing(AssertionError("written")))
    assert (node.prepare(wanted), node.files()) == (first, files)
    assert (node.restarted().prepare(wanted), node.files()) == (first, files)


def test_pods_that_the_claim_is_reserved_for_are_recorded(node: Node) -> None:
    wanted = replace(claim(GPU_0), pods=(PodRef("trainer-0", "pod-uid-0"),))
    node.prepare(wanted)
    assert recorded_pods(node) == wanted.pods
    node.claims.down = True
    node.specs.remove("uid-1")
    assert isinstance(node.restarted().prepare(claim(GPU_0)), Prepared)
    assert recorded_pods(node) == wanted.pods, "the API server said nothing of them"


def test_prepare_for_another_pod_writes_nothing_for_that_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PodRef("trainer-0", "pod-uid-0"), PodRef("trainer-1", "pod-uid-1")
    node.prepare(replace(claim(GPU_0), pods=(first,)))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing(AssertionError("written")))
        assert isinstance(node.prepare(replace(claim(GPU_0), pods=(first, second))), Prepared)
    assert recorded_pods(node) == (first,)
    node.prepare(replace(claim(GPU_1), pods=(second,)))
    assert recorded_pods(node) == (second,)


def recorded_pods(node: Node) -> Pods:
    record = node.record_of()
    return record.claim.pods


def test_unprepare_of_an_unknown_claim_succeeds_without_api_server_and_devices(tmp_path: Path) -> None:
    node = Node(tmp_path, Inventory())
    node.claims.down = True
    node.devices.inventory, node.devices.problem = None, "the driver is not loaded"
    assert node.unprepare(claim(GPU_0)) is None
    assert (node.claims.reads, node.devices.scans) == ([], 0)


def test_unprepare_works_from_the_record_alone(node: Node) -> None:
    node.prepare(claim(GPU_0))
    node.claims.allocated.clear()
    node.claims.down = True
    node.devices.inventory, node.devices.problem = None, "the driver is not loaded"
    reads = len(node.claims.reads)
    assert (node.unprepare(claim(GPU_0)), node.files()) == (None, {})
    assert len(node.claims.reads) == reads


def test_claim_without_a_device_of_ours_is_ready_and_leaves_nothing(node: Node) -> None:
    nic = DeviceResult("nic", "dra.net", "pool-x", "eth0")
    assert node.prepare(claim(nic)) == Prepared(())
    assert node.files() == {}


def test_only_our_part_of_a_claim_is_prepared_and_recorded(node: Node) -> None:
    nic = DeviceResult("nic", "dra.net", "pool-x", "eth0")
    assert node.prepare(claim(nic, GPU_0)) == prepared(claim(GPU_0))
    record = node.record_of()
    assert record.claim == claim(GPU_0)


def test_device_that_came_since_the_last_check_is_found(node: Node) -> None:
    node.devices.inventory, node.devices.hidden = inventory(h100(1)), MIXED
    assert node.prepare(claim(MIG_1G)) == prepared(claim(MIG_1G))
    assert node.devices.scans == 1


def test_devices_are_read_again_when_they_were_unavailable(node: Node) -> None:
    node.devices.inventory, node.devices.hidden, node.devices.problem = None, MIXED, "not loaded"
    assert node.prepare(claim(GPU_0)) == prepared(claim(GPU_0))


# --- one claim's failure is its own --------------------------------------------------------------


def test_failure_of_one_claim_does_not_touch_the_others(node: Node) -> None:
    refs = [
        node.claims.add(item)
        for item in (claim(GPU_0), claim("gpu-9", uid="uid-2"), claim(GPU_1, uid="uid-3"))
    ]
    answers = node.service.prepare([*refs, ClaimRef("default", "gone", "uid-4")], None)
    assert {uid: type(answer) for uid, answer in answers.items()} == {
        "uid-1": Prepared, "uid-2": Failed, "uid-3": Prepared, "uid-4": Failed,
    }  # fmt: skip
    assert error_of(answers["uid-2"]) == (
        "cannot prepare claim default/claim-uid-2 (UID uid-2): request gpu: device gpu-9 of pool node-a does not "
        "exist on this node; delete the pod and its claim so that the scheduler allocates another device"
    )
    assert error_of(answers["uid-4"]) == (
        "cannot prepare claim default/gone (UID uid-4): claim default/gone does not exist in the API "
        "server; it was deleted"
    )
    assert sorted(node.records.all()) == ["uid-1", "uid-3"]
    assert sorted(node.outcomes.reported, key=str) == [
        ("prepare", "ClaimRefusedError"), ("prepare", "ClaimRefusedError"), ("prepare", None), ("prepare", None),
    ]  # fmt: skip


def test_bug_in_a_step_is_the_claims_error_and_nothing_is_left(node: Node, logs: list) -> None:
    node.steps.on_do = failing(ValueError("first\nsecond"))
    text = error_of(node.prepare(claim(GPU_0)))
    assert text == (
        "cannot prepare claim default/claim-uid-1 (UID uid-1): internal error (ValueError: first second); "
        "see the log of gpu-dra-driver"
    )
    assert node.files() == {}
    assert [line["event"] for line in logs] == ["claim_crashed"]


def test_record_is_kept_when_the_rollback_fails_and_the_next_call_continues_with_it(
    node: Node, logs: list
) -> None:
    node.steps.after_do = failing(RetryableError("no node"))
    node.steps.on_undo = failing(StateError("cannot remove the spec"))
    assert error_of(node.prepare(claim(GPU_0))).endswith("no node")
    record = node.record_of()
    assert (record.phase, record.devices) == ("preparing", (hold(GPU_0),))
    assert ("rollback_incomplete", "cannot remove the spec") in [
        (line["event"], line.get("reason")) for line in logs
    ]
    following = node.restarted()
    assert "is held by" in error_of(following.prepare(claim(GPU_0, uid="uid-2")))
    assert (following.unprepare(claim(GPU_0)), following.files()) == (None, {})


def test_failed_unprepare_keeps_the_record_and_is_retried(node: Node) -> None:
    node.prepare(claim(GPU_0))
    node.steps.on_undo = failing(StateError("cannot remove the spec"))
    assert error_of(node.unprepare(claim(GPU_0))) == (
        "cannot unprepare claim default/claim-uid-1 (UID uid-1): cannot remove the spec"
    )
    assert list(node.records.all()) == ["uid-1"]
    node.steps.on_undo = lambda ref: None
    assert (node.unprepare(claim(GPU_0)), node.files()) == (None, {})


# --- a claim that was prepared before ------------------------------------------------------------


def test_lost_spec_is_written_again(node: Node) -> None:
    answer, files = node.prepare(claim(GPU_0)), node.files()
    node.specs.remove("uid-1")
    assert (node.prepare(claim(GPU_0)), node.files()) == (answer, files)


def test_known_claim_is_answered_from_its_record_when_the_api_server_is_down(node: Node, logs: list) -> None:
    answer, files = node.prepare(claim(GPU_0)), node.files()
    node.claims.down = True
    node.specs.remove("uid-1")
    following = node.restarted()
    assert (following.prepare(claim(GPU_0)), following.files()) == (answer, files)
    assert "claim_read_from_record" in [line["event"] for line in logs]
    assert node.claims.reads[-1][1] <= 3


def test_half_prepared_claim_is_not_answered_from_its_record(node: Node) -> None:
    node.prepare(claim(GPU_0))
    record = node.record_of()
    node.records.save(replace(record, phase="preparing"))
    node.claims.down = True
    assert "does not answer" in error_of(node.prepare(claim(GPU_0)))


def test_running_pod_keeps_what_it_has_while_the_driver_is_replaced(node: Node) -> None:
    answer = node.prepare(claim(GPU_0))
    node.devices.problem = "the NVIDIA kernel driver is not loaded; load it (modprobe nvidia)"
    assert node.prepare(claim(GPU_0)) == answer


@pytest.mark.parametrize("spoil", ["spec", "boot", "claim"])
def test_known_claim_waits_for_the_driver_when_it_is_not_in_place(node: Node, spoil: str) -> None:
    node.prepare(claim(GPU_0))
    following = node.restarted(boot_id="boot-2" if spoil == "boot" else "boot-1")
    if spoil == "spec":
        following.specs.remove("uid-1")
    following.devices.problem = "the driver is not loaded"
    wanted = claim(GPU_1) if spoil == "claim" else claim(GPU_0)
    assert error_of(following.prepare(wanted)).endswith(
        "devices of this node are not usable now: the driver is not loaded"
    )
    assert list(following.records.all()) == ["uid-1"]


def test_claim_that_was_allocated_again_releases_its_old_devices(node: Node) -> None:
    node.prepare(claim(GPU_0))
    moved = claim(GPU_1)
    assert node.prepare(moved) == prepared(moved)
    record = node.record_of()
    assert (record.claim, record.devices) == (moved, (hold(GPU_1),))
    assert node.specs.list() == {"uid-1": (GPU_1,)}
    assert isinstance(node.prepare(claim(GPU_0, uid="uid-2")), Prepared)


def test_claim_whose_allocation_went_to_others_leaves_nothing(node: Node) -> None:
    node.prepare(claim(GPU_0))
    assert node.prepare(claim()) == Prepared(())
    assert node.files() == {}


def test_old_devices_are_kept_when_the_new_allocation_is_refused(node: Node) -> None:
    node.prepare(claim(GPU_0))
    node.prepare(claim(GPU_1, uid="uid-2"))
    files = node.files()
    assert "is held by claim default/claim-uid-2" in error_of(node.prepare(claim(GPU_1)))
    assert node.files() == files


def test_new_config_of_a_prepared_claim_is_recorded(node: Node) -> None:
    node.prepare(claim(GPU_0))
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
    wanted = claim(GPU_0, configs=(DeviceConfig("FromClaim", (), "gpu.nvidia.com", parameters),))
    assert node.prepare(wanted) == prepared(wanted)
    record = node.record_of()
    assert (record.claim, record.phase, record.prepared_at) == (wanted, "prepared", AT)


# --- records that cannot be read ------------------------------------------------------------------


def spoil(node: Node, uid: str) -> None:
    (node.records.directory / f"{uid}.json").write_text("{")
    node.records.load()


@pytest.mark.parametrize(("held", "free"), [(GPU_0, GPU_1), (MIG_1G, MIG_3G)])
def test_unreadable_record_protects_its_device_alone_until_its_claim_ends(
    node: Node, held: str, free: str
) -> None:
    node.prepare(claim(held))
    spoil(node, "uid-1")
    assert "is held by claim ?/? (UID uid-1)" in error_of(node.prepare(claim(held, uid="uid-2")))
    assert isinstance(node.prepare(claim(free, uid="uid-3")), Prepared)
    assert node.unprepare(claim(held)) is None
    assert isinstance(node.prepare(claim(held, uid="uid-2")), Prepared)


def test_claim_with_an_unreadable_record_is_prepared_again_and_unprepared(node: Node) -> None:
    answer = node.prepare(claim(GPU_0))
    spoil(node, "uid-1")
    assert node.prepare(claim(GPU_0)) == answer
    assert node.unprepare(claim(GPU_0)) is None
    assert (node.records.all(), node.specs.list()) == ({}, {})


def test_claim_whose_record_was_removed_by_hand_is_unprepared(node: Node) -> None:
    node.prepare(claim(GPU_0))
    node.records.path("uid-1").unlink()
    assert node.unprepare(claim(GPU_0)) is None
    assert (node.records.all(), node.files()) == ({}, {})
    assert isinstance(node.prepare(claim(GPU_0, uid="uid-2")), Prepared)


# --- what comes over the wire --------------------------------------------------------------------


@pytest.mark.parametrize("uid", ["../../etc/cron.d/x", "a/b", "", ".."])
def test_uid_with_path_characters_is_refused_and_touches_nothing(node: Node, uid: str) -> None:
    outside = sorted(node.directory.parent.iterdir())
    wanted = claim(GPU_0, uid=uid)
    assert "is not a valid file name" in error_of(node.prepare(wanted))
    assert "is not a valid file name" in error_of(node.unprepare(wanted))
    assert (node.files(), sorted(node.directory.parent.iterdir())) == ({}, outside)


def test_call_fails_for_now_when_its_deadline_is_over(node: Node) -> None:
    node.prepare(claim(GPU_0))
    files = node.files()
    over = "the kubelet's deadline has passed; the kubelet retries"
    ref = node.claims.add(claim(GPU_1, uid="uid-2"))
    assert error_of(node.service.prepare([ref], 0.5)["uid-2"]).endswith(over)
    assert error_of(node.service.unprepare([claim(GPU_0).ref], 0.0)["uid-1"]).endswith(over)
    assert node.files() == files


def test_no_record_appears_when_the_deadline_passes_while_it_is_planned(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dra_driver.claims import calls

    now = [1000.0]
    monkeypatch.setattr(calls.time, "monotonic", lambda: now[0])
    node.devices.inventory, node.devices.hidden = inventory(h100(1)), MIXED
    scan = node.devices.scan_now

    def slow(timeout_s: float) -> None:
        now[0] += 60
        scan(timeout_s)

    monkeypatch.setattr(node.devices, "scan_now", slow)
    assert "deadline has passed" in error_of(node.prepare(claim(GPU_0)))
    assert node.files() == {}


def test_calls_are_counted_from_their_arrival_to_their_answer(node: Node) -> None:
    node.prepare(claim(GPU_0))
    node.unprepare(claim(GPU_0))
    assert node.outcomes.calls == ["prepare begins", "prepare ends", "unprepare begins", "unprepare ends"]


def test_thousand_claims_are_answered_in_one_call(node: Node) -> None:
    wanted = [claim(uid=f"uid-{number}") for number in range(1000)]
    refs = [node.claims.add(item) for item in wanted]
    answers = node.service.prepare(refs, None)
    assert list(answers) == [ref.uid for ref in refs]
    assert set(answers.values()) == {Prepared(())}
    assert set(node.service.unprepare(refs, None).values()) == {None}
    assert node.files() == {}


def test_prepared_claim_on_a_lost_gpu_keeps_what_it_has(node: Node) -> None:
    """One GPU of two is lost: the kubelet's next call is answered as without NVML, so the pod keeps the other one."""
    both = claim(GPU_0, GPU_1)
    first = node.prepare(both)
    gpus = tuple(gpu for gpu in MIXED.gpus if gpu.uuid != h100(0).uuid)
    node.devices.inventory = replace(MIXED, gpus=gpus, lost=(h100(0),))
    files = node.files()
    assert node.prepare(both) == first == prepared(both)
    assert node.files() == files
    assert "which no longer answers" in error_of(node.restarted(boot_id="boot-2").prepare(both)), (
        "it was rebooted"
    )
    assert node.unprepare(both) is None
    assert "which no longer answers" in error_of(node.prepare(claim(GPU_0, uid="uid-2")))


def test_monitor_of_all_gpus_goes_without_a_lost_one(node: Node) -> None:
    """It is wanted most on a node with a bad GPU. When the GPU is back, its next Prepare has it."""
    looks = claim(*(result(name, admin_access=True) for name in (GPU_0, GPU_1)))
    gpus = tuple(gpu for gpu in MIXED.gpus if gpu.uuid != h100(0).uuid)
    node.devices.inventory = replace(MIXED, gpus=gpus, lost=(h100(0),))
    answer = node.prepare(looks)
    assert isinstance(answer, Prepared)
    assert [device.device for device in answer.devices] == [GPU_1]
    assert node.specs.list() == {"uid-1": (GPU_1,)}, "every name in the answer is in the spec"
    only_lost = claim(result(GPU_0, admin_access=True), uid="uid-2")
    assert "which no longer answers" in error_of(node.prepare(only_lost))
    mixed = claim(result(GPU_0), result(GPU_1, admin_access=True), uid="uid-3")
    assert "which no longer answers" in error_of(node.prepare(mixed)), "what uses a lost GPU cannot run"
    node.devices.inventory = MIXED
    answer = node.prepare(looks)
    assert isinstance(answer, Prepared)
    assert [device.device for device in answer.devices] == [GPU_0, GPU_1]
    node.devices.inventory = replace(MIXED, gpus=gpus, lost=(h100(0),))
    assert node.prepare(looks) == answer, "what it has it keeps"
    assert node.unprepare(looks) is None
    assert node.files() == {}


def test_claim_with_admin_access_does_not_wait_for_the_owner_of_its_gpu(node: Node) -> None:
    """A Prepare that hangs on a GPU holds its lock; a claim with adminAccess can start and end during that."""
    looks, hung, ended = (
        claim(result(GPU_0, admin_access=True), uid="looks"),
        threading.Event(),
        threading.Event(),
    )

    def hang(plan: Plan) -> None:
        if plan.claim.ref.uid == "owner":
            hung.set()
            assert ended.wait(PATIENCE_S)

    node.steps.on_do = hang
    owner = threading.Thread(target=lambda: node.prepare(claim(GPU_0, uid="owner")))
    owner.start()
    assert hung.wait(PATIENCE_S)
    try:
        node.claims.add(looks)
        answers = node.service.prepare([looks.ref], time.monotonic() + 5)
        assert isinstance(answers["looks"], Prepared)
        assert node.service.unprepare([looks.ref], time.monotonic() + 5) == {"looks": None}
    finally:
        ended.set()
        owner.join(PATIENCE_S)
    assert list(node.records.all()) == ["owner"]


# --- many at once --------------------------------------------------------------------------------


def test_claim_prepared_by_eight_threads_is_prepared_once(node: Node) -> None:
    wanted = claim(GPU_0, MIG_1G)
    node.claims.add(wanted)
    inside: list[int] = []

    def alone(_plan: object) -> None:
        inside.append(1)
        assert len(inside) == 1
        inside.pop()

    node.steps.on_do = alone
    assert in_threads(*[lambda: node.prepare(wanted)] * 8) == [prepared(wanted)] * 8
    assert list(node.files()) == ["cdi/k8s.gpu.nvidia.com-claim_uid-1.yaml", "claims/uid-1.json"]


def test_eight_claims_on_eight_gpus_are_prepared_at_the_same_time(tmp_path: Path) -> None:
    node = Node(tmp_path, inventory(*map(h100, range(8))))
    barrier = threading.Barrier(8, timeout=PATIENCE_S)
    node.steps.on_do = lambda plan: barrier.wait() and None
    wanted = [claim(f"gpu-{number:08x}", uid=f"uid-{number}") for number in range(8)]
    answers = in_threads(*(lambda item=item: node.prepare(item) for item in wanted))
    assert answers == [prepared(item) for item in wanted]


def test_unprepare_during_prepare_waits_for_it_and_leaves_nothing(node: Node) -> None:
    wanted = claim(GPU_0)
    begun, go_on = threading.Event(), threading.Event()

    def wait(_plan: object) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    def unprepare() -> object:
        assert begun.wait(PATIENCE_S)
        threading.Timer(0.05, go_on.set).start()
        return node.unprepare(wanted)

    node.steps.on_do = wait
    assert in_threads(lambda: node.prepare(wanted), unprepare) == [prepared(wanted), None]
    assert node.files() == {}


def test_answer_of_the_record_names_the_metadata_while_nvml_is_away(tmp_path: Path) -> None:
    node = Node(tmp_path, MIXED, metadata=("v1beta1",))
    first = node.prepare(claim(GPU_0))
    node.devices.problem = "no driver"
    assert node.prepare(claim(GPU_0)) == first
    for path in (tmp_path / "plugin").rglob("metadata.json"):
        path.unlink()
    assert "no driver" in error_of(node.prepare(claim(GPU_0)))


def test_metadata_that_cannot_be_written_or_removed_is_that_claims_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, MIXED, metadata=("v1beta1",))
    wanted = claim(GPU_0)
    plugin = tmp_path / "plugin"
    plugin.write_text("in the way")
    assert "cannot create the directory" in error_of(node.prepare(wanted))
    plugin.unlink()
    assert isinstance(node.prepare(wanted), Prepared)

    def refuse(_path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as refusing:
        refusing.setattr(atomic, "read_plain", refuse)
        assert "cannot read" in error_of(node.unprepare(wanted))
    assert node.records.get("uid-1") is not None
    assert node.unprepare(wanted) is None
    assert node.files() == {}


def test_spec_and_metadata_that_no_record_speaks_of_go_with_the_unprepare(tmp_path: Path) -> None:
    node = Node(tmp_path, MIXED, metadata=("v1beta1",))
    wanted = claim(GPU_0)
    node.prepare(wanted)
    node.records.delete("uid-1")
    assert node.unprepare(wanted) is None
    assert node.files() == {}


def test_log_events_bear_the_request_and_the_claim_they_belong_to(node: Node) -> None:
    """Code that logs needs no claim argument, not even in threads that work on several claims."""
    seen: list[tuple[str, object]] = []

    def note(what: str) -> None:
        assert get_contextvars()["request_id"] == 7
        seen.append((what, get_contextvars()["claim_uid"]))

    claims = [claim(GPU_0), claim(GPU_1, uid="uid-2")]
    refs = [node.claims.add(wanted) for wanted in claims]
    read = node.claims.read
    node.claims.read = lambda ref, timeout_s: (note(f"read {ref.uid}"), read(ref, timeout_s))[1]
    node.steps.on_do = lambda plan: note(f"do {plan.claim.ref.uid}")
    node.steps.on_undo = lambda ref: note(f"undo {ref.uid}")
    with bound_contextvars(request_id=7):
        node.service.prepare(refs, None)
        node.service.unprepare(refs, None)
        assert "claim_uid" not in get_contextvars()
    assert sorted(seen) == [
        (f"{what} {uid}", uid) for what in ("do", "read", "undo") for uid in ("uid-1", "uid-2")
    ]
