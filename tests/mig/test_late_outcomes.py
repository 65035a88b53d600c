"""GPU instances whose creation had an unknown outcome, and that appear later or never."""

from __future__ import annotations

from typing import Any

import pytest

from dra_driver.errors import NvmlTransientError, NvmlUnknownOutcomeError, RetryableError
from dra_driver.model.mig import OwnedInstance
from tests.fakes.mignode import UNTOUCHED, MigNode

MADE = (10, 19, 3, 1)


def appear(node: MigNode) -> None:
    node.machine.create_mig(0, "1g.10gb", 3)


def comes_within_the_try(node: MigNode, monkeypatch: pytest.MonkeyPatch, start: int = 3) -> None:
    """An instance appears after the check of the next attempt, and before that creates its own."""
    create = node.hardware.create

    def late(*arguments: Any) -> int:
        monkeypatch.setattr(node.hardware, "create", create)
        node.machine.create_mig(0, "1g.10gb", start)
        return create(*arguments)

    monkeypatch.setattr(node.hardware, "create", late)


def left_open(node: MigNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next creation times out."""
    create = node.hardware.create

    def timing_out(*_arguments: Any) -> int:
        monkeypatch.setattr(node.hardware, "create", create)
        raise NvmlUnknownOutcomeError("create a GPU instance: Timeout")

    monkeypatch.setattr(node.hardware, "create", timing_out)


def tried(node: MigNode, small: Any) -> None:
    """An attempt that continues later."""
    with pytest.raises(NvmlUnknownOutcomeError):
        node.prepare(small, tries_again=True)


def given_up(node: MigNode, small: Any) -> None:
    with pytest.raises(NvmlUnknownOutcomeError):
        node.prepare(small)
    assert node.records.get("uid-1") is None


@pytest.fixture
def unsure(node: MigNode, monkeypatch: pytest.MonkeyPatch) -> MigNode:
    left_open(node, monkeypatch)
    return node


def phases(node: MigNode) -> list[str]:
    return [instance.phase for instance in node.ledger.details(OwnedInstance)]


def pending(node: MigNode) -> int:
    return len(node.ledger.pending())


def foreign(node: MigNode) -> list[bool]:
    """Return, for the GPU's instances that must not be used for claims, whether they are leaving."""
    seen = node.hardware.instances(*node.address)
    return [one.leaving for one in node.ownership.foreign_instances(node.gpu_uuid, seen)]


@pytest.mark.parametrize("comes", [True, False])
def test_next_try_makes_the_device_whether_the_late_one_came_or_not(
    unsure: MigNode, small: Any, comes: bool
) -> None:
    tried(unsure, small)
    assert (phases(unsure), unsure.on_gpu(), pending(unsure)) == (["unknown"], (True, []), 0)
    if comes:
        appear(unsure)
    assert foreign(unsure) == []
    unsure.prepare(small)
    assert (unsure.on_gpu(), phases(unsure), foreign(unsure)) == ((True, [MADE]), ["created"], [])
    assert [kind for kind, *_ in unsure.reported] == ["create", "create"]
    unsure.unprepare()
    assert unsure.state() == UNTOUCHED


def test_cleanup_destroys_what_comes_after_the_call_gave_up(unsure: MigNode, small: Any) -> None:
    given_up(unsure, small)
    assert (phases(unsure), pending(unsure)) == (["unknown"], 1)
    [cleanup] = unsure.ledger.pending()
    assert "may still appear" in str(cleanup.cause)
    unsure.clock.now += 29
    appear(unsure)
    assert foreign(unsure) == [True]
    unsure.work_off()
    assert (unsure.state(), pending(unsure)) == (UNTOUCHED, 0)


def test_cleanup_leaves_alone_what_comes_while_the_claim_waits(unsure: MigNode, small: Any) -> None:
    tried(unsure, small)
    appear(unsure)
    unsure.work_off()
    assert unsure.on_gpu() == (True, [(10, 19, 3, 1)])
    unsure.prepare(small)
    assert unsure.on_gpu() == (True, [MADE])


def test_instance_that_never_appears_is_forgotten(unsure: MigNode, small: Any) -> None:
    given_up(unsure, small)
    unsure.clock.now += 29.9
    unsure.work_off()
    assert phases(unsure) == ["unknown"]
    unsure.clock.now += 0.1
    unsure.work_off()
    assert (unsure.state(), pending(unsure)) == (UNTOUCHED, 0)
    unsure.clock.now += 60
    unsure.machine.set_mig_mode(0, True)
    unsure.simulated.session.reopen()
    appear(unsure)
    assert foreign(unsure) == [False]
    unsure.work_off()
    assert unsure.on_gpu() == (True, [MADE])


def test_next_instance_of_the_plugin_waits_again(unsure: MigNode, small: Any) -> None:
    given_up(unsure, small)
    following = unsure.restarted()
    following.clock.now = 1000.0
    following.work_off()
    assert phases(following) == ["unknown"]
    following.clock.now += 30
    following.work_off()
    assert following.state() == UNTOUCHED


def test_second_open_answer_is_expected_as_long_as_the_first(
    unsure: MigNode, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried(unsure, small)
    unsure.clock.now += 20
    left_open(unsure, monkeypatch)
    given_up(unsure, small)
    unsure.clock.now += 29
    unsure.work_off()
    assert phases(unsure) == ["unknown"]


@pytest.mark.parametrize("other", [("1g.10gb", 3), ("3g.40gb", 0), ("1g.20gb", 2)])
def test_instance_that_appears_within_an_attempt_is_a_transient_refusal(
    unsure: MigNode, small: Any, other: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(unsure, small)
    comes_within_the_try(unsure, monkeypatch)
    wanted = unsure.wanted(*other)
    with pytest.raises(NvmlTransientError, match="in the way"):
        unsure.prepare(wanted, "uid-2", tries_again=True)
    unsure.prepare(wanted, "uid-2")
    assert [row[2] for row in unsure.on_gpu()[1]] == [other[1]]
    assert phases(unsure) == ["created"]
    unsure.unprepare("uid-2")
    assert unsure.state() == UNTOUCHED


@pytest.mark.parametrize("left_after_s", [None, 30])
def test_unexpected_instance_in_the_way_is_not_a_transient_refusal(
    node: MigNode, small: Any, left_after_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person created it after the check."""
    if left_after_s is not None:
        left_open(node, monkeypatch)
        tried(node, small)
        node.clock.now += left_after_s
    comes_within_the_try(node, monkeypatch)
    with pytest.raises(RetryableError, match="in the way") as caught:
        node.prepare(small, tries_again=True)
    assert not isinstance(caught.value, NvmlTransientError)
    assert (node.on_gpu(), phases(node)) == ((True, [MADE]), [])


def test_neighbour_is_refused_for_good_though_one_is_expected_elsewhere(
    unsure: MigNode, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(unsure, small)
    comes_within_the_try(unsure, monkeypatch, start=6)
    with pytest.raises(RetryableError, match="in the way") as caught:
        unsure.prepare(unsure.wanted("1g.10gb", 6), "uid-2")
    assert not isinstance(caught.value, NvmlTransientError)


@pytest.mark.parametrize("code", ["insufficient-resources", "not-ready"])
def test_instance_is_still_expected_when_the_next_attempt_is_refused(
    unsure: MigNode, small: Any, code: str
) -> None:
    tried(unsure, small)
    unsure.machine.set_fault("nvmlDeviceCreateGpuInstanceWithPlacement", code=code, count=1)
    with pytest.raises(NvmlTransientError):
        unsure.prepare(small, tries_again=True)
    assert phases(unsure) == ["unknown"]
    unsure.clock.now += 29
    appear(unsure)
    unsure.prepare(small)
    assert (unsure.on_gpu(), phases(unsure)) == ((True, [MADE]), ["created"])


@pytest.mark.parametrize("comes", [True, False])
def test_unprepare_leaves_to_the_cleanup_what_has_not_come(unsure: MigNode, small: Any, comes: bool) -> None:
    tried(unsure, small)
    if comes:
        appear(unsure)
    unsure.unprepare()
    assert unsure.on_gpu() == ((False, []) if comes else (True, []))
    assert phases(unsure) == ([] if comes else ["unknown"])
    assert unsure.records.get("uid-1") is None
