"""When the API server is asked what it can take of the slices, and what is said of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.versions import ResourceApi
from dra_driver.model.mig import Partitioning, Placement
from dra_driver.slices.api_support import PartitionSupport, TaintSupport, keeps_taints
from dra_driver.slices.rules.diff import Owner
from dra_driver.slices.rules.kubernetes_releases import NEWEST_TAINTS, OLDEST_TAINTS, TaintLimits
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
    answers = [NEWEST_TAINTS, OLDEST_TAINTS]
    taints = TaintSupport(lambda: answers.pop(0), lambda: True)
    assert taints.limits() == NEWEST_TAINTS
    for error in (
        ApiUnavailableError("away"),
        ApiRejectedError("forbidden", status=403),
        ValueError("surprise"),
    ):
        taints.publish_failed(error)
        assert taints.limits() == NEWEST_TAINTS
    taints.publish_failed(ApiRejectedError("unsupported effect", status=422))
    assert taints.limits() == OLDEST_TAINTS
    assert taints.limits() == OLDEST_TAINTS


def test_no_answer_is_no_answer() -> None:
    asked: list[bool] = []

    def ask() -> TaintLimits:
        asked.append(True)
        if len(asked) == 1:
            raise ApiUnavailableError("away")
        return OLDEST_TAINTS

    taints = TaintSupport(ask, lambda: True)
    with pytest.raises(ApiUnavailableError):
        taints.limits()
    assert taints.limits() == OLDEST_TAINTS


def test_a_server_that_does_not_tell_its_release_is_taken_for_new_until_it_refuses() -> None:
    taints = TaintSupport(lambda: None, lambda: True)
    assert taints.limits() == NEWEST_TAINTS
    taints.publish_failed(ApiRejectedError("too many taints", status=422))
    assert taints.limits() == OLDEST_TAINTS


def test_whether_taints_are_kept_is_asked_when_it_matters_and_hourly_while_they_are_not() -> None:
    now = [0.0]
    answers = [False, False, True]
    asked: list[float] = []

    def keeps() -> bool:
        asked.append(now[0])
        return answers.pop(0)

    taints = TaintSupport(lambda: None, keeps, clock=lambda: now[0])
    assert not taints.drops(matters=False)
    assert (asked, taints.ask_at) == ([], math.inf)
    assert taints.drops(matters=True)
    assert taints.drops(matters=True)
    assert (asked, taints.ask_at) == ([0.0], HOUR)
    assert taints.drops(matters=False), "it is known, and needs no asking"
    assert taints.ask_at == math.inf
    for now[0] in (HOUR, HOUR + 1):
        assert taints.drops(matters=True)
    now[0] = 2 * HOUR
    assert not taints.drops(matters=True)
    assert asked == [0.0, HOUR, 2 * HOUR]
    now[0] = 9 * HOUR
    assert not taints.drops(matters=True)
    assert len(asked) == 3, "a server that keeps them shows in its answers if it stops"
    taints.fields_dropped()
    assert taints.drops(matters=True)


@pytest.mark.parametrize(("minor", "gate", "kept"), [(34, {}, False), (35, {}, False), (36, {}, True),
                                                     (34, {"DRADeviceTaints": True}, True)])  # fmt: skip
def test_servers_are_asked_without_a_write(
    connect: Callable[..., ApiClient], minor: int, gate: dict[str, bool], kept: bool
) -> None:
    with PlaygroundApiServer(minor=minor, gates=gate) as server:
        assert keeps_taints(ResourceApi(connect(server)), Owner("gpu.nvidia.com", "n1", "u" * 36)) is kept
        assert server.objects("resourceslices") == []


def test_a_server_that_does_not_tell_is_believed_until_it_drops_taints() -> None:
    """As where a webhook refuses dry runs."""
    now = [0.0]
    taints = TaintSupport(lambda: None, lambda: None, clock=lambda: now[0])
    assert not taints.drops(matters=True)
    taints.fields_dropped()
    for now[0] in (0.0, HOUR + 1, 3 * HOUR):
        assert taints.drops(matters=True), "it is not offered again to see what happens"


def test_a_server_that_refuses_to_be_asked_does_not_tell(
    connect: Callable[..., ApiClient],
) -> None:
    with PlaygroundApiServer(minor=34) as server:
        server.faults.fail(1, 403, reason="Forbidden", method="POST")
        assert keeps_taints(ResourceApi(connect(server)), Owner("gpu.nvidia.com", "n1", "u" * 36)) is None
