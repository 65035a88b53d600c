from __future__ import annotations

import time

import pytest

from dra_driver.errors import RetryableError
from dra_driver.journal import records
from dra_driver.journal.records import ClaimLocks, PlanningLock
from tests.fakes.preparing import in_threads


@pytest.fixture
def locks() -> ClaimLocks:
    return ClaimLocks()


def test_last_prepare_and_unprepare_of_each_claim_are_remembered(locks: ClaimLocks) -> None:
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as guard:
        assert not guard.was_prepared_since(began)
        guard.note_prepared(began)
    with locks.hold("uid-2", 1) as guard:
        assert not guard.was_prepared_since(began)
    with locks.hold("uid-1", 1) as guard:
        assert (guard.was_prepared_since(began), guard.was_unprepared_since(began)) == (True, False)
        guard.note_unprepared(began)
    after = time.monotonic_ns()
    with locks.hold("uid-1", 1) as guard:
        assert (guard.was_prepared_since(began), guard.was_unprepared_since(began)) == (True, True)
        assert (guard.was_prepared_since(after), guard.was_unprepared_since(after)) == (False, False)


def test_calls_are_ordered_by_when_they_began(locks: ClaimLocks) -> None:
    first, second, third = (time.monotonic_ns() for _ in range(3))
    with locks.hold("uid-1", 1) as guard:
        for began in (second, first):  # the older call ends last
            guard.note_prepared(began)
            guard.note_unprepared(began)
        assert [guard.was_prepared_by_call_after(moment) for moment in (first, second)] == [True, False]
        assert [guard.was_unprepared_since(moment) for moment in (second, third)] == [True, False]
        assert guard.was_prepared_since(third), "it ended after all three"


def test_lock_is_not_waited_for_when_the_kubelet_has_cancelled_the_call(locks: ClaimLocks) -> None:
    with locks.hold("uid-1", 1):
        is_cancelled = iter([False, False, True]).__next__
        with (
            pytest.raises(RetryableError, match="still prepares or unprepares"),
            locks.hold("uid-1", 60, is_cancelled),
        ):
            pass
    with locks.hold("uid-1", 1, lambda: True):
        pass


def test_claims_that_were_wanted_longest_ago_are_forgotten(
    locks: ClaimLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_REMEMBERED", 2)
    began = time.monotonic_ns()
    with locks.hold("uid-0", 1) as held:
        for uid in ("uid-1", "uid-2", "uid-3"):
            with locks.hold(uid, 1) as guard:
                guard.note_prepared(began)
        held.note_prepared(began)
    with locks.hold("uid-0", 1) as guard:
        assert guard.was_prepared_since(began)
    with locks.hold("hung", 1):
        for number in range(10):
            with locks.hold(f"other-{number}", 1):
                pass
    assert [*locks._guards] == ["hung", "other-9"]


def test_call_that_hangs_holds_up_no_other_claim(locks: ClaimLocks) -> None:
    hanging, free = "uid-1", "uid-2"
    with locks.hold(hanging, 1):
        with locks.hold(free, 0):
            pass
        with (
            pytest.raises(RetryableError, match=f"prepares or unprepares claim {hanging}"),
            locks.hold(hanging, 0),
        ):
            pass
    with locks.hold(hanging, 0):
        pass
    assert {one.wanted for one in locks._guards.values()} == {0}


def test_claim_lock_has_one_holder_at_a_time(locks: ClaimLocks) -> None:
    inside, most = [0], [0]

    def enter() -> None:
        with locks.hold("uid-1", 10):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1

    assert in_threads(*[enter] * 8) == [None] * 8
    assert most == [1]


def test_planning_lock_is_not_waited_for_after_the_time_limit_or_a_cancellation() -> None:
    planning = PlanningLock()
    with planning.hold(1):
        for timeout_s, is_cancelled in ((0.0, None), (60.0, iter([False, True]).__next__)):
            with (
                pytest.raises(RetryableError, match="the planning of another claim has not finished"),
                planning.hold(timeout_s, is_cancelled),
            ):
                pass
    with planning.hold(0.0):
        pass
