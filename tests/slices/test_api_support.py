"""When the API server is tested for what it accepts and stores of the slices, and how the result is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never

import pytest
from playground.apiserver import PlaygroundApiServer

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.model.gpu import Card
from dra_driver.model.mig import Partitioning, Placement
from dra_driver.model.sharing import SharingRule, share_all
from dra_driver.slices.api_support import Support, ask_support, shares_counters, sharing_caution
from dra_driver.slices.rules.build import NEWEST_TAINTS, OLDEST_TAINTS, TaintLimits
from dra_driver.slices.rules.diff import GROUPS_GATE, SHARES_GATE, TAINTS_GATE, Owner
from tests.fakes.samples import ONE_G, bound, card, h100, inventory
from tests.fakes.slices import QueriedSupport

PLAIN = inventory(h100(0))
CUT = inventory(replace(h100(0), partitioning=Partitioning((), ((ONE_G, Placement(0, 1)),))))
HOUR = 3600.0
OWNER = Owner("gpu.nvidia.com", "n1", "u" * 36)
ALL, UNCOUNTED, UNTAINTED = Support(), Support(no_partitions="gate off"), Support(frozenset({TAINTS_GATE}))
INVALID = ApiRejectedError("unsupported effect", status=422)


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.answers: list[Support | Exception] = []
        self.requested: list[tuple[Support, bool]] = []
        sharing = share_all(SharingRule("shares", 4))
        self.support = QueriedSupport(self._ask, sharing=sharing, clock=lambda: self.now)

    def _ask(self, known: Support, partitions: bool) -> Support:
        self.requested.append((known, partitions))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("found", [PLAIN, CUT], ids=["plain", "cut"])
def test_a_server_that_keeps_everything_is_queried_once(bench: Bench, found: object) -> None:
    bench.answers = [ALL]
    for _ in range(2):
        assert bench.support.of(found, OWNER) == ALL
        bench.now += 2 * HOUR
    assert bench.requested == [(ALL, found is CUT)]
    assert (bench.support.ask_at, bench.support.problem) == (math.inf, None)


@pytest.mark.parametrize("lacks", [UNCOUNTED, UNTAINTED], ids=["partitions", "taints"])
def test_a_server_that_lacks_something_is_queried_again_every_hour(bench: Bench, lacks: Support) -> None:
    assert bench.support.ask_at == math.inf
    bench.answers = [lacks, lacks, ALL]
    for _ in range(2):
        assert bench.support.of(CUT, OWNER) == lacks
        assert bench.support.ask_at == bench.now + HOUR
        bench.now += HOUR - 1
        bench.support.of(CUT, OWNER)
        bench.now += 1
    assert bench.support.drops_taints is (lacks is UNTAINTED)
    assert bench.support.of(CUT, OWNER) == ALL
    assert (bench.support.ask_at, bench.support.problem, bench.support.drops_taints) == (
        math.inf,
        None,
        False,
    )


def test_partitions_are_requested_when_there_could_be_some(bench: Bench) -> None:
    bench.answers = [ALL, UNCOUNTED]
    assert bench.support.of(PLAIN, OWNER) == ALL
    assert bench.support.of(CUT, OWNER) == UNCOUNTED
    assert [partitions for _, partitions in bench.requested] == [False, True]


@pytest.mark.parametrize("one", [card(0), bound(0)], ids=["free", "under vfio"])
def test_cards_need_counters(bench: Bench, one: Card) -> None:
    bench.answers = [UNCOUNTED]
    found = inventory(cards=(one,)) if one.is_bound else inventory(h100(0), cards=(one,))
    assert bench.support.of(found, OWNER) == UNCOUNTED
    assert (bench.requested, bench.support.problem) == ([(ALL, True)], "gate off")


def test_shares_next_to_a_virtual_machine_are_counted() -> None:
    rule = share_all(SharingRule("shares", 4))
    assert shares_counters(inventory(h100(0), cards=(card(0),)), rule)
    assert not shares_counters(inventory(h100(0)), rule)
    assert not shares_counters(inventory(cards=(bound(0),)), rule)


def test_nothing_waits_for_an_answer_that_is_not_needed(bench: Bench) -> None:
    """A moment in the past would keep the publisher awake."""
    bench.answers = [UNCOUNTED]
    bench.support.of(CUT, OWNER)
    bench.support.of(PLAIN, OWNER)
    assert (bench.support.ask_at, bench.support.problem) == (math.inf, None)
    bench.support.of(CUT, OWNER)
    assert (bench.support.ask_at, bench.support.problem) == (100.0 + HOUR, "gate off")


def test_support_that_was_not_needed_in_between_is_tested_again(bench: Bench) -> None:
    bench.answers = [UNCOUNTED, UNTAINTED, UNCOUNTED]
    bench.support.of(CUT, OWNER)
    bench.support.refused(INVALID)
    bench.support.of(PLAIN, OWNER)
    assert bench.support.of(CUT, OWNER) == UNCOUNTED


def test_a_server_that_is_away_is_queried_at_once(bench: Bench) -> None:
    bench.answers = [ApiUnavailableError("down"), UNCOUNTED]
    with pytest.raises(ApiUnavailableError):
        bench.support.of(CUT, OWNER)
    assert bench.support.ask_at == math.inf
    assert bench.support.of(CUT, OWNER) == UNCOUNTED


def test_scheduler_is_a_concern_while_it_is_old_and_counters_are_shared(bench: Bench) -> None:
    support = bench.support
    support.concern = "an old scheduler"
    bench.answers = [UNCOUNTED, ALL, ALL, ALL]
    support.of(CUT, OWNER)
    assert support.caution is None, "there are no counters"
    bench.now += HOUR
    for found, expected in ((CUT, "an old scheduler"), (PLAIN, None), (CUT, "an old scheduler")):
        support.of(found, OWNER)
        assert support.caution == expected
    assert support.ask_at == bench.now + HOUR
    bench.now += HOUR
    support.concern = ApiUnavailableError("down")
    assert support.of(CUT, OWNER) == ALL
    assert support.caution == "an old scheduler", "nothing shows that it was upgraded"
    assert support.ask_at == bench.now + 60
    bench.now += 60
    support.concern = None
    support.of(CUT, OWNER)
    assert (support.caution, support.ask_at, len(bench.requested)) == (None, math.inf, 4)


def test_scheduler_whose_release_is_unknown_is_asked_again_soon_and_publishing_goes_on(
    bench: Bench, logs: list[Any]
) -> None:
    support = bench.support
    support.concern = ApiUnavailableError("down")
    bench.answers = [ALL, ALL, ALL, ALL]
    for _ in range(2):
        assert support.of(CUT, OWNER) == ALL
        assert (support.caution, support.ask_at) == (None, bench.now + 60)
        bench.now += 60
    assert [(line["event"], line["reason"]) for line in logs] == [("scheduler_release_unknown", "down")]
    support.concern = "an old scheduler"
    support.of(CUT, OWNER)
    assert (support.caution, support.ask_at) == ("an old scheduler", bench.now + HOUR)


def test_a_refused_slice_calls_for_a_new_answer_and_nothing_else_does(bench: Bench) -> None:
    older = Support(taints=OLDEST_TAINTS)
    bench.answers = [ALL, older]
    bench.support.of(PLAIN, OWNER)
    for error in (
        ApiUnavailableError("away"),
        ApiRejectedError("forbidden", status=403),
        ValueError("surprise"),
    ):
        bench.support.refused(error)
        assert bench.support.of(PLAIN, OWNER) == ALL
    bench.support.refused(INVALID)
    for _ in range(2):
        assert bench.support.of(PLAIN, OWNER) == older
    assert bench.requested[1:] == [(older, False)], (
        "if the server says nothing, it gets what every server takes"
    )


def slice_of(name: str = "s", **device: object) -> dict:
    return {"metadata": {"name": name}, "spec": {"devices": [{"name": "gpu-0", **device}]}}


TAINTED = slice_of(taints=[{"key": "x", "effect": "NoSchedule"}])
COUNTED = slice_of(consumesCounters=[{"counterSet": "gpu-0", "counters": {}}])


def test_dropped_field_with_a_known_gate_is_believed_for_an_hour(bench: Bench) -> None:
    """The response came from another server than the test."""
    bench.answers = [ALL, ALL]
    bench.support.of(CUT, OWNER)
    bench.now += 50.0
    assert bench.support.stored(TAINTED, slice_of()) == (("spec.devices[0].taints", TAINTS_GATE),)
    assert bench.support.as_sent([slice_of()]) == [slice_of()], "it is built without taints from now on"
    assert (bench.support.of(CUT, OWNER), bench.support.ask_at) == (UNTAINTED, bench.now + HOUR)
    bench.support.stored(COUNTED, slice_of())
    problem = bench.support.of(CUT, OWNER).no_partitions or ""
    assert problem.startswith(
        "the API server drops spec.devices[0].consumesCounters of a slice: its feature gate"
    )
    assert bench.support.problem == problem
    bench.now += HOUR
    assert bench.support.of(CUT, OWNER) == ALL


def test_other_changes_of_the_server_are_taken_for_what_was_sent_while_they_are_there(bench: Bench) -> None:
    bench.answers = [ALL]
    bench.support.of(PLAIN, OWNER)
    sent, stored = (
        slice_of(capacity={"memory": {"value": "1Gi"}}),
        slice_of(attributes={"by": {"string": "a webhook"}}),
    )
    other = slice_of("other")
    assert [gate for _, gate in bench.support.stored(sent, stored)] == ["unknown", "unknown"]
    assert bench.support.as_sent([stored, other]) == [sent, other]
    assert bench.support.of(PLAIN, OWNER) == ALL
    changed = slice_of(attributes={})
    assert bench.support.as_sent([changed]) == [changed]
    assert bench.support.as_sent([stored]) == [stored], "it is forgotten"
    bench.support.stored(sent, stored)
    bench.support.stored(sent, sent)
    assert bench.support.as_sent([stored]) == [stored], "the last answer counts"


def test_devices_are_what_the_server_says_only_if_it_can_be_queried(
    connect: Callable[..., ApiClient],
) -> None:
    known = Support(frozenset({TAINTS_GATE}), OLDEST_TAINTS)
    with PlaygroundApiServer() as server:
        api = connect(server)
        server.faults.fail(1, 400, reason="BadRequest", method="POST")
        assert ask_support(api, OWNER, known, partitions=False) == known
        assert ask_support(api, OWNER, known, partitions=False) == ALL


NONE = frozenset({TAINTS_GATE, SHARES_GATE})


@pytest.mark.parametrize(
    ("minor", "gates", "missing", "limits"),
    [
        (34, {}, NONE, NEWEST_TAINTS),
        (35, {}, NONE, NEWEST_TAINTS),
        (36, {}, frozenset(), NEWEST_TAINTS),
        (36, {SHARES_GATE: False}, {SHARES_GATE}, NEWEST_TAINTS),
        (34, {TAINTS_GATE: True}, {SHARES_GATE}, OLDEST_TAINTS),
        (34, {TAINTS_GATE: True, SHARES_GATE: True}, frozenset(), OLDEST_TAINTS),
    ],
)
def test_servers_are_queried_without_a_write(
    connect: Callable[..., ApiClient],
    minor: int,
    gates: dict[str, bool],
    missing: frozenset[str],
    limits: TaintLimits,
) -> None:
    """The limits of taints that are dropped do not matter."""
    with PlaygroundApiServer(minor=minor, gates=gates) as server:
        api = connect(server)
        assert ask_support(api, OWNER, ALL, partitions=False) == Support(frozenset(missing), limits)
        assert server.objects("resourceslices") == []


@pytest.mark.parametrize("gate", [True, False], ids=["on", "off"])
def test_groups_are_published_only_where_a_new_slice_keeps_them(
    connect: Callable[..., ApiClient], gate: bool
) -> None:
    """A scheduler without the gate would pass over the devices."""
    with PlaygroundApiServer(minor=37, gates={GROUPS_GATE: gate}) as server:
        api = connect(server)
        assert ask_support(api, OWNER, ALL, partitions=True) == Support(keeps_groups=gate)
        assert server.objects("resourceslices") == []


def test_a_server_that_refuses_groups_counts_partitions_all_the_same(
    connect: Callable[..., ApiClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    with PlaygroundApiServer() as server:
        api = connect(server)

        def refuse(*_: object, **__: object) -> Never:
            raise INVALID

        monkeypatch.setattr("dra_driver.slices.api_support.partitions_problem", lambda *_: None)
        monkeypatch.setattr(api, "call", refuse)
        assert ask_support(api, OWNER, ALL, partitions=True) == ALL


def test_groups_that_a_server_does_not_keep_any_more_are_left_out(bench: Bench) -> None:
    """An update of a slice with groups keeps them even if the gate is off, so only a test of a new slice
    shows it.
    """
    grouped = Support(keeps_groups=True)
    bench.answers = [grouped, grouped, ALL]
    for _ in range(2):
        assert bench.support.of(CUT, OWNER) == grouped
        assert bench.support.ask_at == bench.now + HOUR
        bench.now += HOUR
    assert bench.support.of(CUT, OWNER) == ALL
    assert bench.support.ask_at == math.inf


def test_groups_that_an_answer_lacks_are_left_out(bench: Bench) -> None:
    bench.answers = [Support(keeps_groups=True)]
    bench.support.of(CUT, OWNER)
    use = {"counterSet": "gpu-0", "counters": {}}
    sent = slice_of(consumesCounters=[use | {"compatibilityGroups": ["mig"]}])
    assert bench.support.stored(sent, slice_of(consumesCounters=[use])) == (
        ("spec.devices[0].consumesCounters[0].compatibilityGroups", GROUPS_GATE),
    )
    assert bench.support.of(CUT, OWNER) == ALL
    assert bench.support.as_sent([COUNTED]) == [COUNTED]


class Server:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def request(self, method: str, path: str, *, action: str) -> dict:
        assert (method, path) == ("GET", "/version")
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"major": "1", "gitVersion": self.answer}


@pytest.mark.parametrize(
    "version", ["v1.35.0", "v1.35.99", "v1.36.0", "v1.36.1-gke.100", "v1.36.1+k3s1", "1.36.1"]
)
def test_older_releases_are_warned_of(version: str) -> None:
    caution = sharing_caution(Server(version))
    assert caution is not None
    assert f"Kubernetes {version} " in caution
    assert "upgrade to 1.36.2 or newer" in caution


@pytest.mark.parametrize(
    "answer",
    ["v1.36.2", "v1.36.2-eks-1", "v1.37.0", "v1.100.0", "v2.0.0", "", "custom", None,
     ApiRejectedError("forbidden", status=403)],
)  # fmt: skip
def test_nothing_is_said_of_newer_and_unknown_ones(answer: object) -> None:
    assert sharing_caution(Server(answer)) is None
