"""An operation on a GPU never ends: its claim ends all the same, other GPUs feel nothing, and when it ends at last,
nothing is left of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.errors import RetryableError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, Failed, Prepared
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import BindVfio, CreateMig, LeaveMigMode, RunMps, SetTimeSlice, Step
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.kindnode import KINDS, KindNode, Site
from tests.fakes.samples import claim
from tests.fakes.waiting import eventually

HURRY_S = 3.0
"""A deadline of the kubelet that leaves a second to the driver."""
QUICK_S = 2.0
STEPS: dict[str, type] = {
    "time-slicing": SetTimeSlice,
    "MPS settings": RunMps,
    "MPS over several GPUs": RunMps,
    "share": RunMps,
    "MIG on demand": CreateMig,
    "whole GPU that may be cut": LeaveMigMode,
    "virtual machine": BindVfio,
}


class Hang:
    """Until its `end`, the steps of one type do not return."""

    def __init__(self, node: KindNode, step: type, method: str) -> None:
        self.reached = threading.Event()
        self._let = threading.Event()
        runner = node.runner.runners[step]
        real: Callable[..., Any] = getattr(runner, method)

        def call(step: Step, about: Any) -> Any:
            self.reached.set()
            self._let.wait(60)
            return real(step, about)

        setattr(runner, method, call)

    def end(self) -> None:
        self._let.set()


@pytest.fixture(scope="module")
def site(make_memory_path: Callable[[], Path]) -> Iterator[Site]:
    one = Site(make_memory_path() / "machine")
    yield one
    one.close()


@pytest.fixture(params=STEPS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.journal.cleaner.UNDO_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.cleaner._ALL_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.executor._TAKE_BACK_S", 0.5)
    monkeypatch.setattr("dra_driver.claims.prepare._PREPARED_WAIT_S", 0.7)


@pytest.fixture
def node(site: Site, memory_path: Path, kind: str, short_limits: None) -> KindNode:
    site.reset()
    return KindNode(site, memory_path / "node", metadata=KINDS[kind].metadata)


def prepared_in_a_hurry(node: KindNode, wanted: AllocatedClaim) -> Any:
    node.claims.add(wanted)
    return node.service.prepare([wanted.ref], HURRY_S)[wanted.ref.uid]


def a_neighbour_feels_nothing(node: KindNode) -> None:
    other = claim(node.site.whole(4), uid="neighbour")
    began = time.monotonic()
    assert isinstance(node.prepare(other), Prepared)
    assert node.unprepare(other) is None
    assert time.monotonic() - began < QUICK_S


def in_the_end_nothing_is_left(node: KindNode, untouched: object) -> None:
    eventually(lambda: not node.cleaner.clean_all() and not node.lanes.under_way())

    def ended_clean() -> bool:
        node.work_off()
        return node.state() == untouched

    eventually(ended_clean)


def test_prepare_that_hangs(node: KindNode, kind: str) -> None:
    untouched, wanted = node.state(), KINDS[kind].wanted(node.site)
    hang = Hang(node, STEPS[kind], "do")
    answer = prepared_in_a_hurry(node, wanted)
    assert isinstance(answer, Failed)
    assert "has not ended in the time of this call" in answer.error
    assert wanted.ref.uid not in node.specs.list()
    assert wanted.ref.uid not in node.records.all()
    a_neighbour_feels_nothing(node)
    again = prepared_in_a_hurry(node, wanted)
    assert isinstance(again, Failed)
    assert re.search("has not ended in the time of this call|Cleanup pending", again.error)
    began = time.monotonic()
    assert node.unprepare(wanted) is None
    assert time.monotonic() - began < QUICK_S
    assert wanted.ref.uid not in node.records.all()
    hang.end()
    in_the_end_nothing_is_left(node, untouched)
    assert isinstance(node.prepare(wanted), Prepared)


def test_prepared_claim_in_place_is_answered_when_its_tool_fails_at_once(
    node: KindNode, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is answered when the tool hangs: its pod may run."""
    wanted = KINDS[kind].wanted(node.site)
    answer = node.prepare(wanted)
    assert isinstance(answer, Prepared)

    def fails(_step: Step, _plan: object) -> None:
        raise RetryableError("the tool is broken")

    monkeypatch.setattr(node.runner.runners[STEPS[kind]], "do", fails)
    assert node.prepare(wanted) == answer
    (node.specs.file(wanted.ref.uid)).unlink()
    assert isinstance(node.prepare(wanted), Failed), "what is not in place is not answered"


def test_prepared_claim_of_an_older_boot_is_not_answered_when_its_tool_fails(
    node: KindNode, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = KINDS[kind].wanted(node.site)
    assert isinstance(node.prepare(wanted), Prepared)
    following = node.restarted(boot_id="boot-2")

    def fails(_step: Step, _plan: object) -> None:
        raise RetryableError("the tool is broken")

    monkeypatch.setattr(following.runner.runners[STEPS[kind]], "do", fails)
    following.claims.add(wanted)
    assert isinstance(following.prepare(wanted), Failed)


def test_prepare_goes_on_once_the_operation_has_ended(node: KindNode, kind: str) -> None:
    wanted = KINDS[kind].wanted(node.site)
    hang = Hang(node, STEPS[kind], "do")
    assert isinstance(prepared_in_a_hurry(node, wanted), Failed)
    hang.end()
    assert isinstance(node.prepare(wanted), Prepared)
    assert node.cleaner.outstanding() == []


def test_gpu_that_has_hung_for_a_minute_is_refused_at_once(
    node: KindNode, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.journal.lanes.UNRESPONSIVE_AFTER_S", 0.0)
    wanted = KINDS[kind].wanted(node.site)
    hang = Hang(node, STEPS[kind], "do")
    assert isinstance(prepared_in_a_hurry(node, wanted), Failed)
    began = time.monotonic()
    refused = node.prepare(wanted)
    assert time.monotonic() - began < QUICK_S
    assert isinstance(refused, Failed)
    assert "does not react" in refused.error
    hang.end()


def test_prepared_claim_is_answered_from_its_record(node: KindNode, kind: str) -> None:
    wanted = KINDS[kind].wanted(node.site)
    first = node.prepare(wanted)
    assert isinstance(first, Prepared)
    hang = Hang(node, STEPS[kind], "do")
    prepared_in_a_hurry(node, wanted)  # whoever comes first may wait for it
    assert node.service.prepare([wanted.ref], HURRY_S)[wanted.ref.uid] == first
    hang.end()


@pytest.mark.parametrize("restarts", [False, True], ids=["the same instance", "a restart"])
def test_unprepare_that_hangs(node: KindNode, kind: str, restarts: bool) -> None:
    untouched, wanted = node.state(), KINDS[kind].wanted(node.site)
    assert isinstance(node.prepare(wanted), Prepared)
    hang = Hang(node, STEPS[kind], "undo")
    began = time.monotonic()
    assert node.unprepare(wanted) is None
    assert time.monotonic() - began < QUICK_S
    assert wanted.ref.uid not in node.records.all()
    a_neighbour_feels_nothing(node)
    began = time.monotonic()
    node.cleaner.clean_all()
    assert time.monotonic() - began < QUICK_S
    hang.end()
    in_the_end_nothing_is_left(node.again() if restarts else node, untouched)


def test_claims_that_hang_hold_up_no_claim_behind_them_in_the_same_call(
    site: Site, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.reset()
    node = KindNode(site, memory_path / "node")
    hanging = [claim(site.whole(2), uid=f"hanging-{number}") for number in range(40)]
    last = claim(site.whole(4), uid="last")
    let, fetch, prepared = threading.Event(), node.service.fetch.allocated, threading.Event()

    def allocated(ref: ClaimRef, call: KubeletCall) -> AllocatedClaim:
        if ref != last.ref:
            assert let.wait(30)
            raise RetryableError("the API server does not answer")
        return fetch(ref, call)

    monkeypatch.setattr(node.service.fetch, "allocated", allocated)
    monkeypatch.setattr(node.service.observer, "prepared", lambda *_: prepared.set())
    node.claims.add(last)
    answers: dict[str, object] = {}
    refs = [one.ref for one in (*hanging, last)]
    call = threading.Thread(target=lambda: answers.update(node.service.prepare(refs, None)))
    call.start()
    assert prepared.wait(20)
    let.set()
    call.join(30)
    assert [uid for uid, answer in answers.items() if isinstance(answer, Prepared)] == ["last"]


class Cells:
    """For every kind of claim, a node of its own for each function of NVML that some work for the claim calls."""

    def __init__(self, site: Site, directory: Path) -> None:
        self.site = site
        self._directory = directory
        self._number = 0

    def each(
        self,
        before: Callable[[KindNode, AllocatedClaim], object],
        work: Callable[[KindNode, AllocatedClaim], object],
    ) -> Iterator[tuple[KindNode, AllocatedClaim, object]]:
        """A node on which `before` was done, its claim, and its state before, while a function hangs that `work`
        calls there; then it has ended, and nothing may be left."""
        seen: set[str] = set()
        for name in KINDS:
            node, wanted, _ = self._node(name, before)
            nvml = HangingNvml(self.site.simulated.session)
            try:
                calls = nvml.calls_of(lambda node=node, wanted=wanted: work(node, wanted))  # type: ignore[misc]
                for function in calls:
                    if function in seen:
                        continue
                    seen.add(function)
                    node, wanted, untouched = self._node(name, before)
                    with nvml.hanging(function):
                        yield node, wanted, untouched
                        assert nvml.reached.is_set(), function
                        a_neighbour_feels_nothing(node)
                        node.claims.add(wanted)
                        began = time.monotonic()
                        assert node.unprepare(wanted) is None, function
                        assert time.monotonic() - began < QUICK_S, function
                    in_the_end_nothing_is_left(node, untouched)
            finally:
                nvml.leave()
        assert {"nvmlDeviceGetMigMode", "nvmlDeviceGetHandleByPciBusId_v2"} <= seen

    def _node(
        self, kind: str, before: Callable[[KindNode, AllocatedClaim], object]
    ) -> tuple[KindNode, AllocatedClaim, object]:
        self.site.reset()
        self._number += 1
        node = KindNode(self.site, self._directory / str(self._number), metadata=KINDS[kind].metadata)
        for other in KINDS[kind].beside(self.site):
            assert isinstance(node.prepare(other), Prepared)
        untouched, wanted = node.state(), KINDS[kind].wanted(self.site)
        before(node, wanted)
        return node, wanted, untouched


@pytest.fixture
def cells(site: Site, memory_path: Path, short_limits: None) -> Cells:
    return Cells(site, memory_path)


def nothing(_node: KindNode, _wanted: AllocatedClaim) -> None:
    """Nothing is done."""


def test_every_nvml_call_of_a_prepare_may_hang(cells: Cells) -> None:
    for node, wanted, _ in cells.each(nothing, KindNode.prepare):
        began = time.monotonic()
        prepared_in_a_hurry(node, wanted)
        assert time.monotonic() - began < HURRY_S


def test_every_nvml_call_of_an_unprepare_may_hang(cells: Cells) -> None:
    for node, wanted, _ in cells.each(KindNode.prepare, KindNode.unprepare):
        began = time.monotonic()
        assert node.unprepare(wanted) is None
        assert time.monotonic() - began < QUICK_S


def test_every_nvml_call_of_a_collection_may_hang(cells: Cells) -> None:
    def left_over(node: KindNode, wanted: AllocatedClaim) -> None:
        node.prepare(wanted)
        if isinstance(node.records.get(wanted.ref.uid), ClaimRecord):
            node.records.delete(wanted.ref.uid)

    for node, _, _ in cells.each(left_over, lambda node, _wanted: node.work_off()):
        began = time.monotonic()
        node.work_off(0.5)
        assert time.monotonic() - began < QUICK_S
