"""An operation on a GPU hangs: its claim can still be unprepared, other GPUs are not affected, and when it
returns, nothing remains. Every change of a GPU, a daemon or a driver hangs in turn, and every function of
NVML.

A hang lasts until the test ends it, so whatever returns before that has not waited for it.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dra_driver.claims.calls import KubeletCall
from dra_driver.errors import RetryableError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, Failed, Prepared
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import (
    STEPS,
    BindVfio,
    CreateMig,
    FileStep,
    LeaveMigMode,
    LockClocks,
    RunMps,
    SetPowerLimit,
    SetTimeSlice,
    StartMaintenance,
    Step,
    WriteCdiSpec,
)
from tests.claims.test_matrix_kill import EXPECTED
from tests.fakes.hanging_nvml import HangingNvml
from tests.fakes.kindnode import KINDS, ON_DEMAND, TIME_SLICING, KindNode, Site, parameters
from tests.fakes.matrix import BOOTS, Case
from tests.fakes.samples import claim
from tests.fakes.waiting import PATIENCE_S, eventually

HURRY_S = 2.3
"""A kubelet deadline that leaves 0.3 s to the plugin."""
_HANGS = re.compile("has not finished; the kubelet's deadline has passed|Cleanup pending")
BY_KIND: dict[str, type[Step]] = {
    "time-slicing": SetTimeSlice,
    "eight GPUs with an interval": SetTimeSlice,
    "power limit": SetPowerLimit,
    "locked clocks": LockClocks,
    "MPS settings": RunMps,
    "share": RunMps,
    "MIG on demand": CreateMig,
    "whole GPU with MIG on demand": LeaveMigMode,
    "virtual machine": BindVfio,
}


def test_every_kind_of_step_on_a_gpu_has_a_kind_of_claim() -> None:
    """A maintenance claim closes NVML instead, which tests/claims/test_maintenance.py covers."""
    assert {step for step in STEPS if not issubclass(step, FileStep)} == {*BY_KIND.values(), StartMaintenance}


def cells(action: str) -> list[tuple[str, str, int]]:
    """Boots and kinds of claims, each with the number of a change that hangs: in the second boot the first change."""
    return [
        (boot, name, number)
        for boot in BOOTS
        for name in KINDS
        for number in range(1, len(EXPECTED[name][action]) + 1)
        if number == 1 or boot == BOOTS[0]
    ]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("cleaner.UNDO_S", "cleaner.CLEAN_BEFORE_S", "cleaner._ALL_S", "executor._UNDO_WAIT_S"):
        monkeypatch.setattr(f"dra_driver.journal.{limit}", 0.3)
    monkeypatch.setattr("dra_driver.claims.prepare._PREPARED_WAIT_S", 0.1)
    # Otherwise no time is left to a step, and only one call of hundreds begins it.
    monkeypatch.setattr("dra_driver.journal.executor._FINISH_S", 0.0)


@pytest.fixture(params=BOOTS)
def boot(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(site: Site, memory_path: Path, kind: str, boot: str) -> Case:
    return Case(site, memory_path / "node", kind, boot)


@contextmanager
def hanging(node: KindNode, number: int) -> Iterator[threading.Event]:
    """Within it the change of this number does not return; the event says that it was reached."""
    reached, let, count = threading.Event(), threading.Event(), iter(range(1, 1000))

    def hang() -> None:
        if next(count) == number:
            reached.set()
            let.wait()

    node.deaths.before = hang
    try:
        yield reached
    finally:
        node.deaths.before = lambda: None
        let.set()


@contextmanager
def replaced(
    node: KindNode, step: type, do: Callable[[Callable[..., Any], Step, Any], Any]
) -> Iterator[None]:
    """Within it steps of this type are done by `do`, which gets what does them really."""
    runner = node.runner.runners[step]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "do", lambda step, plan, real=runner.do: do(real, step, plan))
        yield


def failing(_real: object, _step: Step, _plan: object) -> None:
    raise RetryableError("not today")


def prepare_until(node: KindNode, wanted: AllocatedClaim, reached: threading.Event) -> None:
    """A kubelet in a hurry calls again and again, until the answer says that something hangs."""
    while True:
        answer = node.prepare(wanted, HURRY_S)
        assert isinstance(answer, Failed)
        if reached.is_set() and _HANGS.search(answer.error):
            return


def others_feel_nothing(node: KindNode, *others: AllocatedClaim) -> None:
    """A claim that changes the setting of a GPU, the others, and background cleanup."""
    sliced = claim(node.site.whole(4), uid="sliced", configs=(parameters(**TIME_SLICING),))
    for other in (*others, sliced):
        assert isinstance(node.prepare(other), Prepared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.runner.runners[SetTimeSlice], "undo", failing_undo)
        for other in (*others, sliced):
            assert node.unprepare(other) is None
    assert "sliced" in [one.record.ref.uid for one in node.cleaner.outstanding()]

    def is_cleaned() -> bool:
        node.cleaner.retry_now()
        node.cleaner._turn()
        return all(one.record.ref.uid != "sliced" for one in node.cleaner.outstanding())

    eventually(is_cleaned)


def a_mig_device(case: Case) -> AllocatedClaim:
    """Another claim, for a device on demand on a GPU that the claim of the case does not use."""
    inventory = case.site.inventory
    used = {inventory.by_name[result.device].gpu.index for result in case.wanted.results}
    free = next(index for index in ON_DEMAND if index not in used)
    return claim(case.site.possible(free, "1g.10gb", 0), uid="cut")


def failing_undo(_step: Step, _record: object) -> None:
    raise RetryableError("not today")


def in_the_end_nothing_is_left(node: KindNode, untouched: object) -> None:
    eventually(lambda: not node.cleaner.clean_all() and not node.lanes.under_way())
    eventually(lambda: not node.cleaner.clean_all() and node.state() == untouched)


@pytest.mark.parametrize(("boot", "kind", "number"), cells("prepare"))
def test_prepare_whose_change_hangs_fails_in_time_and_holds_nothing_up(
    case: Case, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = case.untouched()
    node, wanted = case.fresh(), case.wanted
    with hanging(node, number) as reached:
        prepare_until(node, wanted, reached)
        with monkeypatch.context() as patch:
            patch.setattr("dra_driver.journal.lanes.UNRESPONSIVE_AFTER_S", 0.0)
            assert "does not respond" in node.prepare(wanted).error
        others_feel_nothing(node, a_mig_device(case))
        assert node.unprepare(wanted) is None
        assert wanted.ref.uid not in {**node.records.all(), **node.specs.list()}
    in_the_end_nothing_is_left(node, untouched)
    assert isinstance(node.prepare(wanted), Prepared)


@pytest.mark.parametrize(("boot", "kind", "number"), cells("unprepare"))
def test_unprepare_whose_change_hangs_succeeds_and_holds_nothing_up(
    case: Case, number: int, boot: str
) -> None:
    """In the second boot the plugin is restarted after the change has ended."""
    untouched = case.untouched()
    node, wanted = case.prepared(), case.wanted
    with hanging(node, number) as reached:
        assert node.unprepare(wanted) is None
        assert reached.wait(PATIENCE_S)
        assert wanted.ref.uid not in {**node.records.all(), **node.specs.list()}
        others_feel_nothing(node, a_mig_device(case))
        node.cleaner.clean_all()
    in_the_end_nothing_is_left(node if boot == BOOTS[0] else node.again(), untouched)


@pytest.mark.parametrize("kind", BY_KIND)
def test_prepare_continues_once_the_step_has_ended(case: Case, kind: str) -> None:
    node, reached, let = case.fresh(), threading.Event(), threading.Event()

    def hang(real: Callable[..., Any], step: Step, plan: Any) -> Any:
        reached.set()
        let.wait()
        return real(step, plan)

    with replaced(node, BY_KIND[kind], hang):
        try:
            prepare_until(node, case.wanted, reached)
        finally:
            let.set()
    eventually(lambda: isinstance(node.prepare(case.wanted), Prepared))
    assert node.cleaner.outstanding() == []


@pytest.mark.parametrize("how", ["hangs", "fails"])
@pytest.mark.parametrize("kind", BY_KIND)
def test_prepared_claim_in_place_is_answered_whatever_its_tool_does(case: Case, kind: str, how: str) -> None:
    """Its pod may run."""
    node, wanted, let = case.prepared(), case.wanted, threading.Event()
    expected = node.prepare(wanted)
    assert isinstance(expected, Prepared)

    def broken(real: Callable[..., Any], step: Step, plan: Any) -> Any:
        if how == "fails":
            raise RetryableError("not today")
        let.wait()
        return real(step, plan)

    with replaced(node, BY_KIND[kind], broken):
        try:
            assert node.prepare(wanted) == expected
            node.specs.file(wanted.ref.uid).unlink()
            assert isinstance(node.prepare(wanted), Failed), "what is not in place is not answered"
        finally:
            let.set()
            eventually(lambda: not node.lanes.under_way())  # the next test has the same machine


# --- the second boot: the record says what the claim gets, and nothing of it is done yet -----------

in_the_second_boot = pytest.mark.parametrize("boot", BOOTS[1:], indirect=True)


@in_the_second_boot
@pytest.mark.parametrize("kind", BY_KIND)
def test_slow_step_after_a_reboot_has_the_time_of_a_first_prepare(
    case: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.claims.prepare._PREPARED_WAIT_S", 0.0)
    node = case.fresh()

    def slowly(real: Callable[..., Any], step: Step, plan: Any) -> None:
        time.sleep(0.2)
        real(step, plan)

    with replaced(node, BY_KIND[kind], slowly):
        assert isinstance(node.prepare(case.wanted), Prepared)
    assert node.record_of(case.wanted.ref.uid).phase == "prepared"


@in_the_second_boot
@pytest.mark.parametrize("kind", KINDS)
def test_failing_step_after_a_reboot_is_never_answered_prepared(case: Case, kind: str) -> None:
    """Every kind has a step: the CDI spec at least. The CDI root outlives the boot here."""
    node, wanted = case.fresh(), case.wanted
    assert wanted.ref.uid in node.specs.list()
    with replaced(node, BY_KIND.get(kind, WriteCdiSpec), failing):
        for _ in range(2):
            answer = node.prepare(wanted)
            assert isinstance(answer, Failed)
            assert "not today" in answer.error
    assert isinstance(node.prepare(wanted), Prepared)


@in_the_second_boot
@pytest.mark.parametrize("kind", KINDS)
def test_prepare_after_a_reboot_needs_the_api_server(case: Case) -> None:
    """No pod runs, so the claim may have another allocation by now."""
    node, wanted = case.fresh(), case.wanted
    for is_prepared in (False, True):
        node.claims.down = True
        assert isinstance(node.prepare(wanted, HURRY_S), Prepared if is_prepared else Failed)
        node.claims.down = False
        assert isinstance(node.prepare(wanted), Prepared)


# --- NVML, and other claims of the call ------------------------------------------------------------


class Cells:
    """For every kind of claim, a node of its own for each function of NVML that some work for the claim calls."""

    def __init__(self, site: Site, directory: Path) -> None:
        self.site, self._directory = site, directory

    def each(
        self,
        begin: Callable[[Case], KindNode],
        work: Callable[[KindNode, AllocatedClaim], object],
        hurried: Callable[[KindNode, AllocatedClaim, float], object] | None = None,
    ) -> None:
        """Do `work` while a function that it calls hangs, until that is reached. The claim's Unprepare
        succeeds during the hang, others are not affected, and afterwards nothing remains.

        `hurried` does the work with a deadline in seconds; each retry has a second more, since a busy machine
        may not reach the call.
        """
        seen: set[str] = set()
        for name in KINDS:
            case = Case(self.site, self._directory / name.replace(" ", "-") / "node", name)
            case.directory.parent.mkdir()
            wanted, untouched = case.wanted, case.untouched()
            node = begin(case)
            nvml = HangingNvml(self.site.simulated.session)
            try:
                calls = nvml.calls_of(lambda node=node, wanted=wanted: work(node, wanted))  # type: ignore[misc]
                for function in calls.keys() - seen:
                    seen.add(function)
                    node = begin(case)
                    with nvml.hanging(function):
                        for seconds in itertools.count(HURRY_S):
                            hurried(node, wanted, seconds) if hurried else work(node, wanted)
                            if nvml.reached.is_set():
                                break
                        others_feel_nothing(node)
                        assert node.unprepare(wanted) is None, function
                    in_the_end_nothing_is_left(node, untouched)
            finally:
                nvml.leave()
        assert {"nvmlDeviceGetMigMode", "nvmlDeviceGetHandleByPciBusId_v2"} <= seen


@pytest.fixture
def nvml_cells(site: Site, memory_path: Path) -> Cells:
    return Cells(site, memory_path)


def test_every_nvml_call_of_a_prepare_may_hang(nvml_cells: Cells) -> None:
    nvml_cells.each(Case.fresh, KindNode.prepare, KindNode.prepare)


def test_every_nvml_call_of_an_unprepare_may_hang(nvml_cells: Cells) -> None:
    nvml_cells.each(Case.prepared, KindNode.unprepare)


def test_every_nvml_call_of_a_cleanup_may_hang(nvml_cells: Cells) -> None:
    def left_over(case: Case) -> KindNode:
        node = case.prepared()
        if isinstance(node.records.get(case.wanted.ref.uid), ClaimRecord):
            node.records.delete(case.wanted.ref.uid)
            node.specs.remove(case.wanted.ref.uid)
        return node

    nvml_cells.each(left_over, lambda node, _wanted: node.work_off(0.5))


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
            assert let.wait(PATIENCE_S)
            raise RetryableError("the API server does not answer")
        return fetch(ref, call)

    monkeypatch.setattr(node.service.fetch, "allocated", allocated)
    monkeypatch.setattr(node.service.observer, "prepared", lambda *_: prepared.set())
    node.claims.add(last)
    answers: dict[str, object] = {}
    refs = [one.ref for one in (*hanging, last)]
    call = threading.Thread(target=lambda: answers.update(node.service.prepare(refs, None)))
    call.start()
    assert prepared.wait(PATIENCE_S)
    let.set()
    call.join(PATIENCE_S)
    assert [uid for uid, answer in answers.items() if isinstance(answer, Prepared)] == ["last"]
