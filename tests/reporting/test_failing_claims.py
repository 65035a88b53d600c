"""Claims that fail, until there is evidence that they do not."""

from __future__ import annotations

import threading

import pytest

from dra_driver.errors import ApiUnavailableError
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef
from dra_driver.model.problems import FailingClaim, NodeProblem
from dra_driver.model.record import ClaimRecord, Phase
from dra_driver.reporting import failing_claims
from dra_driver.reporting.failing_claims import FailingClaims
from tests.fakes.waiting import PATIENCE_S, eventually

REF = ClaimRef("team", "train", "uid-1")
NODE = ("gpu.nvidia.com", "node-a")


def now(
    uid: str = "uid-1", *, pool: tuple[str, str] = NODE, is_allocated: bool = True, is_reserved: bool = True
) -> ClaimNow:
    held = frozenset({(*pool, "gpu-1")}) if is_allocated else None
    return ClaimNow(uid, is_deleting=False, is_reserved=is_reserved, allocated=held)


class Bench:
    """An API server that answers `answer`, and a clock."""

    def __init__(self) -> None:
        self.answer: ClaimNow | Exception | None = now()
        self.looks: list[ClaimRef] = []
        self.slow: list[ClaimRef] = []
        self.now = 1000.0
        self.record: ClaimRecord | None = None
        self.claims = FailingClaims(
            NODE,
            self._look,
            lambda ref, seconds: self.slow.append(ref),
            lambda uid: self.record,
            clock=lambda: self.now,
        )

    def _look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        self.looks.append(ref)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def turn(self) -> None:
        self.claims.problems()
        self.claims._looking.result(PATIENCE_S)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(failing_claims, "_CHECK_EVERY_S", 0.0)
    return Bench()


def test_failures_of_a_claim_are_counted_from_the_first_on(bench: Bench) -> None:
    for text in ("busy", "busy", "still busy"):
        bench.claims.failed("prepare", REF, text)
        bench.now += 60
    assert bench.claims.all() == (FailingClaim(REF, "prepare", 1000, 1120, 3, "still busy"),)
    bench.claims.failed("unprepare", REF, "the disk is full")
    assert bench.claims.all() == (FailingClaim(REF, "unprepare", 1180, 1180, 1, "the disk is full"),)
    bench.claims.succeeded(REF)
    assert bench.claims.all() == ()


def test_claim_is_a_problem_from_its_second_failure_on_or_after_ten_seconds(bench: Bench) -> None:
    bench.claims.failed("prepare", REF, "busy")
    assert bench.claims.problems() == []
    bench.now += 10
    text = "Claim team/train cannot be prepared (1 try failed): busy"
    assert bench.claims.problems() == [NodeProblem("claims-failing", text, "team/train", since=1000)]
    bench.claims.failed("prepare", REF, "busy")
    text = "Claim team/train cannot be prepared (2 tries failed): busy"
    assert bench.claims.problems() == [NodeProblem("claims-failing", text, "team/train", since=1000)]


def test_memory_of_failing_claims_is_bounded(bench: Bench) -> None:
    for number in range(300):
        bench.claims.failed("prepare", ClaimRef("team", f"c{number}", f"uid-{number}"), "x" * 5000)
    kept = bench.claims.all()
    assert [kept[0].ref.name, kept[-1].ref.name, len(kept)] == ["c44", "c299", 256]
    assert {len(one.error) for one in kept} == {1000}


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        (now(), True),
        (ApiUnavailableError("no answer"), True),
        (None, False),
        (now("uid-2"), False),
        (now(is_allocated=False), False),
        (now(is_reserved=False), False),
        (now(pool=("gpu.nvidia.com", "node-b")), False),
        (now(pool=("other.example", "node-a")), False),
    ],
    ids=[
        "wanted",
        "unknown",
        "deleted",
        "made again",
        "not allocated",
        "not reserved",
        "on another node",
        "of another driver",
    ],
)
def test_claim_that_the_kubelet_no_longer_retries_ends_by_what_the_api_server_says(
    bench: Bench, answer: ClaimNow | Exception | None, *, is_kept: bool
) -> None:
    bench.claims.failed("prepare", REF, "busy")
    bench.answer = answer
    bench.now += 100
    bench.turn()
    assert bench.looks == [], "the kubelet may ask again"
    bench.now += 100
    bench.turn()
    assert bench.looks == [REF]
    assert bool(bench.claims.all()) == is_kept


def test_claim_that_the_process_before_has_prepared_since_is_not_failing(bench: Bench) -> None:
    def record(phase: Phase) -> ClaimRecord:
        return ClaimRecord(AllocatedClaim(REF, ()), phase, "boot-1", (), ())

    kept = FailingClaim(REF, "prepare", 900, 1000, 2, "busy")
    bench.record = record("prepared")
    bench.claims.restore([kept])
    assert bench.claims.all() == ()
    for bench.record in (None, record("preparing")):
        bench.claims.restore([kept])
        assert bench.claims.all() == (kept,)
    bench.record = record("prepared")
    unprepared = FailingClaim(REF, "unprepare", 900, 1000, 2, "busy")
    bench.claims.succeeded(REF)
    bench.claims.restore([unprepared])
    assert bench.claims.all() == (unprepared,)


def test_node_without_failing_claims_asks_nothing(bench: Bench) -> None:
    bench.turn()
    assert bench.looks == []


def test_api_server_that_hangs_delays_no_problem(bench: Bench) -> None:
    gate = threading.Event()
    bench.claims.look = lambda ref, timeout_s: gate.wait(PATIENCE_S) and None
    bench.claims.failed("prepare", REF, "busy")
    bench.now += 200
    for _ in range(2):
        assert [problem.subject for problem in bench.claims.problems()] == ["team/train"]
    gate.set()
    eventually(lambda: bench.claims.all() == ())


def test_prepare_that_takes_long_is_reported_once_while_it_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ClaimRef("team", "other", "uid-2")
    with bench.claims.preparing([REF]):
        bench.turn()
        assert bench.slow == []
        monkeypatch.setattr(failing_claims, "_SLOW_S", 0.0)
        for _ in range(2):
            bench.turn()
            assert bench.slow == [REF]
        with bench.claims.preparing([other]):
            bench.turn()
            with bench.claims.preparing([other]):  # the kubelet calls again before the first call has ended
                bench.turn()
    bench.turn()
    assert bench.slow == [REF, other, other]
