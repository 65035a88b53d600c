"""When the API server is asked what it can take of the slices, and what is said of the answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.model.mig import Partitioning, Placement
from dra_driver.slices.api_support import InformationalTaints, PartitionSupport
from tests.fakes.samples import ONE_G, h100, inventory

PLAIN = inventory(h100(0))
CUT = inventory(replace(h100(0), partitioning=Partitioning((), ((ONE_G, Placement(0, 1)),))))
HOUR = 3600.0


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.answers: list[str | Exception | None] = []
        self.concern: str | None = None
        self.told: list[str] = []
        self.warned: list[str] = []
        self.support = PartitionSupport(
            self._ask,
            self.told.append,
            caution=lambda found: self.concern,
            warn=self.warned.append,
            clock=lambda: self.now,
        )

    def _ask(self) -> str | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_server_that_counts_is_asked_once(bench: Bench) -> None:
    bench.answers = [None]
    for _ in range(2):
        assert bench.support.usable(CUT) is CUT
        bench.now += 2 * HOUR
    assert (bench.support.ask_at, bench.support.problem, bench.told) == (math.inf, None, [])


def test_server_that_cannot_count_is_asked_again_every_hour(bench: Bench) -> None:
    assert bench.support.ask_at == math.inf
    bench.answers = ["gate off"] * 2 + [None]
    for _ in range(2):
        assert bench.support.usable(CUT) == CUT.without_partitions()
        assert bench.support.ask_at == bench.now + HOUR
        bench.now += HOUR - 1
        bench.support.usable(CUT)
        bench.now += 1
    assert bench.support.usable(CUT) is CUT
    assert (bench.support.ask_at, bench.support.problem, bench.told) == (math.inf, None, ["gate off"])


def test_nobody_waits_for_an_answer_that_is_not_needed(bench: Bench) -> None:
    """A moment in the past would keep the publisher awake."""
    bench.answers = ["gate off"]
    bench.support.usable(CUT)
    assert bench.support.usable(PLAIN) is PLAIN
    assert (bench.support.ask_at, bench.support.problem) == (math.inf, None)
    bench.support.usable(CUT)
    assert (bench.support.ask_at, bench.support.problem) == (100.0 + HOUR, "gate off")


def test_server_that_drops_counters_or_is_away_is_asked_at_once(bench: Bench) -> None:
    bench.answers = [None, ApiUnavailableError("down"), "gate off"]
    bench.support.usable(CUT)
    bench.support.fields_dropped()
    with pytest.raises(ApiUnavailableError):
        bench.support.usable(CUT)
    assert bench.support.ask_at == math.inf
    assert bench.support.usable(CUT) == CUT.without_partitions()


def test_concern_is_told_once_where_counters_are_used(bench: Bench, logs: list) -> None:
    bench.concern = "an old scheduler"
    bench.answers = ["gate off", None]
    bench.support.usable(CUT)
    assert bench.warned == []
    bench.now += HOUR
    for _ in range(2):
        bench.support.usable(CUT)
    assert bench.warned == ["an old scheduler"]
    assert [line["reason"] for line in logs if line["event"] == "scheduler_outdated"] == bench.warned


def test_a_refused_slice_calls_for_a_new_answer_and_nothing_else_does() -> None:
    answers = [True, False]
    taints = InformationalTaints(lambda: answers.pop(0))
    assert taints.supported()
    for error in (
        ApiUnavailableError("away"),
        ApiRejectedError("forbidden", status=403),
        ValueError("surprise"),
    ):
        taints.publish_failed(error)
        assert taints.supported()
    taints.publish_failed(ApiRejectedError("unsupported effect", status=422))
    assert not taints.supported()
    assert not taints.supported()


def test_no_answer_is_no_answer() -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        if len(asked) == 1:
            raise ApiUnavailableError("away")
        return False

    taints = InformationalTaints(ask)
    with pytest.raises(ApiUnavailableError):
        taints.supported()
    assert not taints.supported()
