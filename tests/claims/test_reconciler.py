"""Claims that the kubelet will never unprepare are unprepared, and no others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from dra_driver.claims.gpu_processes import InUse
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.errors import (
    ApiRejectedError,
    ApiUnavailableError,
    DraDriverError,
    RetryableError,
    StateError,
)
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef, PodRef, Prepared
from dra_driver.model.record import ClaimRecord
from tests.fakes.preparing import Node, in_threads, reconciler_of
from tests.fakes.samples import GPU_0, GPU_1, MIG_1G, MIG_3G, claim
from tests.fakes.waiting import PATIENCE_S

GRACE_S = 60.0
ONE, TWO = claim(GPU_0), claim(GPU_1, uid="uid-2")


@dataclass
class RecordedReports:
    """What users get to hear."""

    recovered_claims: list[tuple[str, str]] = field(default_factory=list)
    kept_claims: list[tuple[str, str]] = field(default_factory=list)
    has_recovered: threading.Event = field(default_factory=threading.Event)

    def recovered(self, ref: ClaimRef, why: str) -> None:
        self.recovered_claims.append((ref.uid, why))
        self.has_recovered.set()

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        self.kept_claims.append((ref.uid, text))


class Bench:
    """A reconciler over a node, with a clock that tests turn."""

    def __init__(self, node: Node, **parts: object) -> None:
        self.node = node
        self.now = 1000.0
        self.reported = RecordedReports()
        self.reconciler = reconciler_of(node, self.reported, clock=lambda: self.now, **parts)  # type: ignore[arg-type]

    def look(self, only: list[str] | None = None) -> float | None:
        return self.reconciler.check(only)

    def later(self, seconds: float = GRACE_S) -> float | None:
        self.now += seconds
        return self.look()

    def found_stale(self, *claims: AllocatedClaim) -> None:
        """Claims that were prepared, deleted since, and seen to be."""
        for one in claims:
            self.node.prepare(one)
            del self.node.claims.allocated[one.ref.uid]
        self.look()

    @property
    def held(self) -> list[str]:
        return sorted(self.node.records.all())

    def during_the_look(self, happens: Callable[[], object]) -> None:
        """Once, right after the API server answered."""
        look = self.node.claims.current

        def then(ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
            self.node.claims.current = look  # type: ignore[method-assign]
            seen = look(ref, timeout_s)
            happens()
            return seen

        self.node.claims.current = then  # type: ignore[method-assign]

    @contextmanager
    def waiting(self, wanted: AllocatedClaim) -> Iterator[Future[object]]:
        """The answer of a Prepare that waits for its device."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.node.prepare, wanted)
            while wanted.ref.uid not in self.node.waiting:
                assert not answer.done()
                time.sleep(0.002)
            yield answer


@pytest.fixture
def bench(node: Node) -> Bench:
    return Bench(node)


def forget(bench: Bench, *uids: str) -> None:
    for uid in uids:
        del bench.node.claims.allocated[uid]


def deallocate(bench: Bench) -> None:
    bench.node.claims.deallocated.add("uid-1")


def remake(bench: Bench) -> None:
    forget(bench, "uid-1")
    bench.node.claims.allocated["new"] = AllocatedClaim(ClaimRef("default", ONE.ref.name, "new"), ONE.results)


def move(bench: Bench) -> None:
    bench.node.claims.add(claim(GPU_1))


@pytest.mark.parametrize(
    ("departs", "why"),
    [
        (lambda bench: forget(bench, "uid-1"), "was deleted"),
        (remake, "was deleted and created again"),
        (deallocate, "is no longer allocated"),
        (move, "now has other devices"),
    ],
)
def test_stale_claim_is_undone_after_the_grace_time(
    bench: Bench, departs: Callable[[Bench], None], why: str
) -> None:
    bench.node.prepare(ONE)
    departs(bench)
    assert bench.look() is None
    assert bench.later(GRACE_S - 1) is None
    assert bench.held == ["uid-1"]
    assert bench.later(1) is None
    assert (bench.node.files(), bench.reported.recovered_claims) == ({}, [("uid-1", why)])
    assert bench.node.outcomes.reported[-1] == ("unprepare", None)
    bench.later()
    assert len(bench.reported.recovered_claims) == 1


def test_claims_in_use_and_those_the_kubelet_will_unprepare_are_kept(bench: Bench) -> None:
    bench.node.prepare(ONE)
    bench.node.prepare(TWO)
    bench.node.claims.unused.add("uid-1")
    bench.look()  # which writes down for which pods claims are reserved
    before = bench.node.files()
    for _ in range(5):
        assert bench.later() is None
    assert (bench.node.files(), bench.reported.recovered_claims) == (before, [])


def test_claim_that_is_allocated_again_starts_over(bench: Bench) -> None:
    bench.node.prepare(ONE)
    deallocate(bench)
    bench.look()
    bench.node.claims.deallocated.clear()
    bench.later()
    deallocate(bench)
    bench.later()
    assert bench.held == ["uid-1"], "it was found stale just now"
    bench.later()
    assert bench.held == []


def test_record_that_is_another_one_by_now_starts_over(bench: Bench) -> None:
    bench.node.prepare(ONE)
    deallocate(bench)
    bench.look()
    bench.node.unprepare(ONE)
    bench.node.prepare(claim(MIG_1G))
    bench.later()
    assert bench.held == ["uid-1"]


UNSURE = pytest.mark.parametrize(
    "error",
    [
        ApiUnavailableError("starting"),
        ApiRejectedError("forbidden", status=403),
        ApiRejectedError("internal error", status=500),
        ApiRejectedError("404 page not found", status=404),
    ],
)


def unsure_of(bench: Bench, patch: pytest.MonkeyPatch, error: DraDriverError, *uids: str) -> None:
    """From now on the API server does not say what became of these claims."""
    look = bench.node.claims.current

    def unsure(ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        if ref.uid in uids:
            raise error
        return look(ref, timeout_s)

    patch.setattr(bench.node.claims, "current", unsure)


@UNSURE
def test_no_sure_answer_keeps_everything(
    bench: Bench, error: DraDriverError, monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, str]]
) -> None:
    bench.found_stale(ONE, TWO)
    with monkeypatch.context() as patch:
        unsure_of(bench, patch, error, "uid-1", "uid-2")
        pauses = [bench.later() for _ in range(7)]
        assert bench.held == ["uid-1", "uid-2"]
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert [line["event"] for line in logs].count("reconcile_delayed") == 1
    assert bench.later() is None
    assert bench.held == [], "how long it was stale is known from before"


@UNSURE
def test_claim_without_a_sure_answer_is_skipped_and_requested_again(
    bench: Bench, error: DraDriverError, monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, str]]
) -> None:
    """One object that the API server cannot read must not keep the devices of all others."""
    bench.found_stale(ONE, TWO)
    with monkeypatch.context() as patch:
        unsure_of(bench, patch, error, "uid-2")
        assert bench.later() == 30
        assert bench.held == ["uid-2"]
        pauses = [bench.later() for _ in range(3)]
        assert pauses == [30, 60, 120], "nobody else is left"
    reported = [line for line in logs if line["event"] == "claim_not_reconciled"]
    assert [line["claim_uid"] for line in reported] == ["uid-2"], "it is logged once"
    assert str(error) in reported[0]["reason"]
    assert bench.later() is None
    assert bench.held == []


DEVICES = (GPU_0, GPU_1, MIG_1G, MIG_3G)


@pytest.fixture
def four_stale(node: Node) -> Bench:
    """Four claims that were deleted before the last check, one grace period ago."""
    bench = Bench(node)
    for number, device in enumerate(DEVICES):
        bench.node.prepare(claim(device, uid=f"uid-{number}"))
    bench.node.claims.allocated.clear()
    bench.look()
    bench.now += GRACE_S
    return bench


def test_look_ends_after_several_claims_in_a_row_without_an_answer_and_keeps_what_it_knows(
    four_stale: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that fails like that knows nothing of the next claim either."""
    requested: list[str] = []

    def unsure(ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        requested.append(ref.uid)
        if ref.uid == requested[0]:
            return None
        raise ApiUnavailableError("starting")

    with monkeypatch.context() as patch:
        patch.setattr(four_stale.node.claims, "current", unsure)
        assert four_stale.look() == 30
    assert (len(requested), four_stale.held) == (
        5,
        sorted({f"uid-{number}" for number in range(4)} - {requested[0]}),
    )
    assert four_stale.look() is None
    assert four_stale.held == []


def test_claims_that_cannot_be_read_keep_no_other_from_being_undone(
    four_stale: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsure_of(four_stale, monkeypatch, ApiUnavailableError("timed out"), "uid-0", "uid-1", "uid-2")
    looks = 0
    while four_stale.held != ["uid-0", "uid-1", "uid-2"]:
        four_stale.look()
        looks += 1
        assert looks < 200, "each look asks in another order"


def test_refusals_never_end_a_look(four_stale: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ApiRejectedError("forbidden", status=403)
    unsure_of(four_stale, monkeypatch, refused, "uid-0", "uid-1", "uid-2")
    assert four_stale.look() == 30
    assert four_stale.held == ["uid-0", "uid-1", "uid-2"]


def test_api_server_is_queried_no_sooner_than_it_says(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.node.prepare(ONE)

    def busy(ref: ClaimRef, timeout_s: float) -> None:
        raise ApiUnavailableError("too many requests", retry_after_s=900)

    monkeypatch.setattr(bench.node.claims, "current", busy)
    assert bench.look() == 900


def test_nothing_is_undone_while_the_api_server_does_not_know_the_node(node: Node) -> None:
    problems: list[DraDriverError] = [ApiRejectedError("nodes node-a not found", status=404)]

    def check_node() -> None:
        if problems:
            raise problems[0]

    bench = Bench(node, check_node=check_node)
    bench.node.prepare(ONE)
    forget(bench, "uid-1")
    assert bench.look() is None
    assert bench.later() == 30
    assert bench.held == ["uid-1"]
    problems.clear()
    bench.later()
    assert bench.held == []


def in_use(*pids: int) -> InUse | None:
    return InUse(frozenset(pids), f"{list(pids)} still use {GPU_0}") if pids else None


def test_device_that_something_computes_on_is_not_given_away(node: Node, logs: list[dict[str, str]]) -> None:
    uses = [in_use(4711), in_use(4711), in_use(4711, 4712), in_use(4712), None]
    bench = Bench(node, in_use=lambda record: uses.pop(0))
    bench.found_stale(ONE)
    assert len(uses) == 5, "nobody is asked before the grace time is over"
    assert [bench.later(), *(bench.later(30) for _ in range(3))] == [30] * 4
    assert (bench.held, bench.reported.recovered_claims) == (["uid-1"], [])
    [problem] = bench.reconciler.problems()
    assert (problem.code, problem.text.partition(", but ")[0]) == (
        "claim-in-use",
        f"Claim {problem.subject} was deleted",
    )
    reported = [line["reason"] for line in logs if line["event"] == "claim_still_in_use"]
    assert [f"the claim {text}" for _, text in bench.reported.kept_claims] == reported
    assert reported == [
        f"the claim was deleted, but {pids} still use {GPU_0}; run `kill -9 {killed}` on the node, or if that does "
        "not help, drain and reboot the node"
        for pids, killed in (("[4711]", "4711"), ("[4711, 4712]", "4711 4712"))
    ], "each process is told once"
    assert (bench.later(30), bench.held, bench.reconciler.problems()) == (None, [], [])
    assert bench.reported.recovered_claims == [("uid-1", "was deleted")]


def test_other_claims_do_not_wait_for_a_process(node: Node) -> None:
    bench = Bench(node, in_use=lambda record: in_use(4711) if record.ref.uid == "uid-1" else None)
    bench.found_stale(ONE, TWO)
    assert (bench.later(), bench.held, bench.reported.recovered_claims) == (
        30,
        ["uid-1"],
        [("uid-2", "was deleted")],
    )


def test_nothing_is_undone_while_it_is_not_sure_what_computes(node: Node, logs: list[dict[str, str]]) -> None:
    hangs = [True]

    def ask(record: ClaimRecord) -> None:
        if hangs[-1]:
            raise RetryableError("NVML does not answer")

    bench = Bench(node, in_use=ask)
    bench.found_stale(ONE)
    assert (bench.later(), bench.later(30), bench.held) == (30, 30, ["uid-1"])
    reported = [line["reason"] for line in logs if line["event"] == "claim_not_reconciled"]
    assert reported == [
        "the claim was deleted; gpu-dra-driver cannot find out whether its devices are still in use: "
        "NVML does not answer"
    ]
    hangs.append(False)
    assert (bench.later(30), bench.held, bench.reported.kept_claims) == (None, [], [])


@pytest.mark.parametrize("end", ["process", "claim"])
def test_problem_of_a_claim_in_use_ends_with_the_process_or_the_claim(node: Node, end: str) -> None:
    def refuse(record: ClaimRecord) -> None:
        raise StateError("cannot remove the spec")

    uses = [in_use(4711)]
    bench = Bench(node, in_use=lambda record: uses[-1])
    bench.found_stale(ONE)
    bench.later()
    assert len(bench.reconciler.problems()) == 1
    if end == "process":
        node.steps.on_undo = refuse
        uses.append(None)
        bench.later(30)
        assert bench.held == ["uid-1"]
    else:
        node.unprepare(ONE)
        bench.later(30)
        node.prepare(ONE)
        forget(bench, "uid-1")
        bench.look()
    assert bench.reconciler.problems() == []


def test_failure_of_one_claim_keeps_no_other_and_is_retried(bench: Bench) -> None:
    def refuse_one(ref: ClaimRef) -> None:
        if ref.uid == "uid-1":
            raise StateError("cannot remove the spec")

    bench.node.steps.on_undo = refuse_one
    bench.found_stale(ONE, TWO)
    assert (bench.later(), bench.held) == (30, ["uid-1"])
    bench.node.steps.on_undo = lambda ref: None
    assert (bench.later(30), bench.held) == (None, [])


# --- against the kubelet -------------------------------------------------------------------------


def test_unprepare_of_the_kubelet_in_between_and_after_it_is_fine(bench: Bench) -> None:
    bench.found_stale(ONE)
    undoing, unpreparing = threading.Event(), threading.Event()

    def slowly(_record: object) -> None:
        undoing.set()
        assert unpreparing.wait(PATIENCE_S)

    def unprepare() -> object:
        assert undoing.wait(PATIENCE_S)
        unpreparing.set()
        return bench.node.unprepare(ONE)

    bench.node.steps.on_undo = slowly
    assert in_threads(bench.later, unprepare) == [None, None]
    assert (bench.node.files(), bench.node.unprepare(ONE)) == ({}, None)


def test_unprepare_of_the_kubelet_right_after_the_check_is_not_reported_as_ours(bench: Bench) -> None:
    bench.found_stale(ONE)
    bench.during_the_look(lambda: bench.node.unprepare(ONE))
    assert bench.later() is None
    assert (bench.node.files(), bench.reported.recovered_claims) == ({}, [])


def test_claim_that_is_prepared_after_the_check_is_kept(bench: Bench) -> None:
    """It was allocated again, to the same device: its record is the same, and its pod starts."""
    bench.node.prepare(ONE)
    deallocate(bench)
    bench.look()

    def prepared() -> None:
        bench.node.claims.deallocated.clear()
        assert isinstance(bench.node.prepare(ONE), Prepared)

    bench.during_the_look(prepared)
    bench.later()
    assert (bench.held, sorted(bench.node.specs.list()), bench.reported.recovered_claims) == (
        ["uid-1"],
        ["uid-1"],
        [],
    )


def test_claim_whose_prepare_is_running_is_kept(bench: Bench) -> None:
    """It was allocated again and waits for its new device; its record may still have the old one."""
    bench.node.prepare(ONE)
    bench.node.prepare(TWO)
    bench.node.claims.deallocated.add("uid-2")
    bench.look(["uid-1"])
    with bench.waiting(claim(GPU_1)) as answer:
        bench.now += GRACE_S
        bench.look(["uid-1"])
        assert bench.reported.recovered_claims == []
        bench.node.unprepare(TWO)
        assert isinstance(answer.result(PATIENCE_S), Prepared)
    assert bench.held == ["uid-1"]


def test_waiting_call_gets_the_released_device(bench: Bench) -> None:
    bench.found_stale(ONE)
    with bench.waiting(claim(GPU_0, uid="uid-9")) as answer:
        bench.later()
        assert isinstance(answer.result(PATIENCE_S), Prepared)
    assert (bench.held, bench.node.waited_for) == (["uid-9"], ["uid-1"])


# --- specs without a record ------------------------------------------------------------------------


def test_spec_of_a_claim_that_no_one_can_name_is_reported_and_kept(
    node: Node, logs: list[dict[str, str]]
) -> None:
    node.prepare(ONE)
    node.records.delete("uid-1")
    bench = Bench(node.restarted())
    forget(bench, "uid-1")
    for _ in range(3):
        bench.later()
    assert (sorted(bench.node.specs.list()), bench.node.claims.looks) == (["uid-1"], [])
    reported = [line["reason"] for line in logs if line["event"] == "claim_not_reconciled"]
    assert reported == [
        "the claim has a CDI spec but no record, so its name is unknown; remove the CDI spec if no pod uses it"
    ]


def test_claim_whose_record_a_newer_release_wrote_is_reported_with_that_release(
    node: Node, logs: list[dict[str, str]]
) -> None:
    """Removing its CDI spec would free nothing."""
    node.prepare(ONE)
    file = node.records.directory / "uid-1.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99, "release": "9.0.0"}))
    bench = Bench(node.restarted())
    for _ in range(3):
        bench.later()
    [reason] = [line["reason"] for line in logs if line["event"] == "claim_not_reconciled"]
    assert reason.startswith(
        "the claim's devices stay reserved until the kubelet unprepares the claim: gpu-dra-"
    )
    assert ("install gpu-dra-driver 9.0.0 or newer" in reason, "CDI spec" in reason) == (True, False)


def test_claim_whose_record_cannot_be_read_is_reported_once_and_kept(
    node: Node, logs: list[dict[str, str]]
) -> None:
    node.prepare(ONE)
    (node.records.directory / "uid-1.json").write_text("{")
    bench = Bench(node.restarted())
    for _ in range(3):
        bench.later()
    reported = [line for line in logs if line["event"] == "claim_not_reconciled"]
    assert [(line["claim_uid"], line["reason"].partition(",")[0]) for line in reported] == [
        ("uid-1", "the claim's record cannot be read")
    ]
    assert list(bench.node.specs.list()) == ["uid-1"]


# --- the thread ------------------------------------------------------------------------------------


def test_thread_looks_by_itself_and_when_someone_waits(node: Node) -> None:
    rhythm = Rhythm(first_s=3600, grace_s=0.01, between_requests_s=0)
    reported = RecordedReports()
    reconciler = reconciler_of(node, reported, rhythm=rhythm)
    node.prepare(ONE)
    node.prepare(TWO)
    node.claims.allocated.clear()
    reconciler.start()
    reconciler.check_soon(ONE.ref)
    assert reported.has_recovered.wait(PATIENCE_S)
    reconciler.stop()
    assert (reported.recovered_claims, sorted(node.records.all())) == ([("uid-1", "was deleted")], ["uid-2"])


def test_first_check_comes_by_itself_and_a_surprise_ends_nothing(node: Node) -> None:
    surprises = [ValueError("a bug")]

    look = node.claims.current

    def surprising(ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        if surprises:
            raise surprises.pop()
        return look(ref, timeout_s)

    node.claims.current = surprising  # type: ignore[method-assign]
    rhythm = Rhythm(first_s=0, every_s=0.01, grace_s=0.01, retry_s=0.01, between_requests_s=0)
    reported = RecordedReports()
    reconciler = reconciler_of(node, reported, rhythm=rhythm)
    node.prepare(ONE)
    node.claims.allocated.clear()
    reconciler.start()
    assert reported.has_recovered.wait(PATIENCE_S)
    reconciler.stop()
    assert (reported.recovered_claims, node.files()) == ([("uid-1", "was deleted")], {})


def test_only_what_is_kept_is_checked_again_and_at_once_when_someone_waits(node: Node) -> None:
    uses: list[InUse | None] = [in_use(4711)]
    seen = threading.Semaphore(0)

    def ask(record: ClaimRecord) -> InUse | None:
        seen.release()
        return uses[-1]

    def start(retry_s: float) -> Reconciler:
        rhythm = Rhythm(first_s=0, every_s=3600, grace_s=0.01, retry_s=retry_s, between_requests_s=0)
        made = reconciler_of(node, reported, in_use=ask, rhythm=rhythm)
        made.start()
        return made

    reported = RecordedReports()
    node.prepare(ONE)
    node.prepare(TWO)
    forget_one = node.claims.allocated.pop("uid-1")
    reconciler = start(retry_s=0.01)
    for _ in range(4):
        assert seen.acquire(timeout=PATIENCE_S)
    reconciler.stop()
    assert node.claims.looks.count("uid-2") == 1, "the others are left in peace"
    seen = threading.Semaphore(0)
    reconciler = start(retry_s=3600)
    assert seen.acquire(timeout=PATIENCE_S)
    uses.append(None)
    while not reported.has_recovered.is_set():
        reconciler.check_soon(forget_one.ref)  # again, because the first call may come during a check
        reported.has_recovered.wait(0.01)
    reconciler.stop()
    assert (reported.recovered_claims, sorted(node.records.all())) == ([("uid-1", "was deleted")], ["uid-2"])


# --- somebody waits ------------------------------------------------------------------------------

POD = PodRef("train-0", "11111111-06c0-4d70-8a51-e59b25b2c16c")


def waited_for(node: Node, pods_run: bool | None, looks: int = 0, **parts: object) -> Bench:
    """A claim that ended while no driver ran, or was found stale, and an attempt that waits for its device."""
    bench = Bench(node, pods_run=lambda record: pods_run if record.ref == ONE.ref else True, **parts)
    node.prepare(replace(ONE, pods=(POD,)))
    forget(bench, "uid-1")
    for _ in range(looks):
        bench.look()
        assert bench.held == ["uid-1"]
    bench.reconciler.check_soon(ONE.ref)
    bench.reconciler._turn()
    return bench


@pytest.mark.parametrize("looks", [0, 1])
def test_claim_that_is_waited_for_goes_at_once_when_no_process_of_its_pods_runs(
    node: Node, looks: int
) -> None:
    bench = waited_for(node, pods_run=False, looks=looks)
    assert bench.held == []
    assert bench.reported.recovered_claims == [("uid-1", "was deleted")]


@pytest.mark.parametrize("pods_run", [True, None], ids=["a process runs", "not known"])
def test_claim_that_is_waited_for_has_the_grace_time_otherwise(node: Node, pods_run: bool | None) -> None:
    bench = waited_for(node, pods_run)
    assert bench.held == ["uid-1"]
    bench.later()
    assert bench.held == []


@pytest.mark.parametrize("unanswered", [("uid-1",), ("uid-1", "uid-2")])
def test_claim_that_is_waited_for_is_checked_again_after_a_check_without_an_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch, unanswered: tuple[str, ...]
) -> None:
    bench = Bench(node, pods_run=lambda record: False)
    bench.node.prepare(replace(ONE, pods=(POD,)))
    bench.node.prepare(TWO)
    forget(bench, "uid-1")
    for awaited in (ONE, TWO):
        bench.reconciler.check_soon(awaited.ref)
    with monkeypatch.context() as patch:
        unsure_of(bench, patch, ApiUnavailableError("starting"), *unanswered)
        bench.reconciler._turn()
    bench.reconciler._turn()
    assert bench.held == ["uid-2"]
