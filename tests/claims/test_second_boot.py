"""The first Prepare after a reboot: the record says what the claim gets, and nothing of it is done yet.

The CDI root outlives the boot here, so that the CDI spec of the boot before is still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dra_driver.claims import prepare
from dra_driver.errors import RetryableError
from dra_driver.model.claim import AllocatedClaim, Failed, Prepared
from dra_driver.model.steps import Step, WriteCdiSpec
from tests.claims.test_hangs import HURRY_S, STEPS, Hang
from tests.fakes.kindnode import KINDS, KindNode, Site
from tests.fakes.waiting import eventually

PREPARED_WAIT_S = 0.2
SLOW_S = 4 * PREPARED_WAIT_S


@pytest.fixture(scope="module")
def site(make_memory_path: Callable[[], Path]) -> Iterator[Site]:
    one = Site(make_memory_path() / "machine")
    yield one
    one.close()


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_PREPARED_WAIT_S", PREPARED_WAIT_S)
    monkeypatch.setattr("dra_driver.journal.cleaner.UNDO_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.cleaner.CLEAN_BEFORE_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.executor._TAKE_BACK_S", 0.5)


class Rebooted:
    """A claim that was prepared, then the node was rebooted."""

    def __init__(self, site: Site, directory: Path, kind: str) -> None:
        site.reset()
        first = KindNode(site, directory, metadata=KINDS[kind].metadata)
        self.wanted: AllocatedClaim = KINDS[kind].wanted(site)
        assert isinstance(first.prepare(self.wanted), Prepared)
        assert self.wanted.ref.uid in first.specs.list()
        site.reset()
        self.node = first.restarted(boot_id="boot-2")
        assert self.node.record_of(self.wanted.ref.uid).phase == "preparing"

    def in_a_hurry(self) -> Any:
        return self.node.service.prepare([self.wanted.ref], HURRY_S)[self.wanted.ref.uid]


@pytest.fixture
def rebooted(site: Site, memory_path: Path) -> Callable[[str], Rebooted]:
    return lambda kind: Rebooted(site, memory_path / "node", kind)


def replaced(node: KindNode, step: type, do: Callable[[Callable[..., Any], Step, Any], Any]) -> None:
    """Have steps of this type done by `do`, which gets what does them really."""
    runner = node.runner.runners[step]
    real = runner.do
    runner.do = lambda step, plan: do(real, step, plan)


@pytest.mark.parametrize("kind", STEPS)
def test_slow_step_after_a_reboot_has_the_time_of_a_first_prepare(
    kind: str, rebooted: Callable[[str], Rebooted]
) -> None:
    after, done = rebooted(kind), []

    def slowly(real: Callable[..., Any], step: Step, plan: Any) -> None:
        time.sleep(SLOW_S)
        real(step, plan)
        done.append(step)

    replaced(after.node, STEPS[kind], slowly)
    assert isinstance(after.node.prepare(after.wanted), Prepared)
    assert len(done) >= 1
    assert after.node.record_of(after.wanted.ref.uid).phase == "prepared"


@pytest.mark.parametrize("kind", STEPS)
def test_hanging_step_after_a_reboot_is_never_answered_prepared(
    kind: str, rebooted: Callable[[str], Rebooted]
) -> None:
    after = rebooted(kind)
    hang = Hang(after.node, STEPS[kind], "do")
    for _ in range(2):
        assert isinstance(after.in_a_hurry(), Failed)
    began = time.monotonic()
    assert after.node.unprepare(after.wanted) is None
    assert time.monotonic() - began < HURRY_S
    hang.end()
    eventually(lambda: not after.node.cleaner.clean_all() and not after.node.lanes.under_way())
    assert isinstance(after.node.prepare(after.wanted), Prepared)


@pytest.mark.parametrize("kind", KINDS)
def test_failing_step_after_a_reboot_is_never_answered_prepared(
    kind: str, rebooted: Callable[[str], Rebooted]
) -> None:
    """Every kind has a step: the CDI spec at least."""
    after, fails = rebooted(kind), [True]

    def failing(real: Callable[..., Any], step: Step, plan: Any) -> None:
        if fails:
            raise RetryableError("not today")
        real(step, plan)

    replaced(after.node, STEPS.get(kind, WriteCdiSpec), failing)
    for _ in range(2):
        answer = after.node.prepare(after.wanted)
        assert isinstance(answer, Failed)
        assert "not today" in answer.error
    fails.clear()
    assert isinstance(after.node.prepare(after.wanted), Prepared)


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_after_a_reboot_needs_the_api_server(kind: str, rebooted: Callable[[str], Rebooted]) -> None:
    """No pod runs, so that the claim may have another allocation by now."""
    after = rebooted(kind)
    after.node.claims.down = True
    assert isinstance(after.in_a_hurry(), Failed)
    after.node.claims.down = False
    assert isinstance(after.node.prepare(after.wanted), Prepared)
    after.node.claims.down = True
    assert isinstance(after.in_a_hurry(), Prepared)
