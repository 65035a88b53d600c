from __future__ import annotations

import errno
import os
import time
from functools import partial
from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.journal import locks as claimlocks
from dra_driver.journal.locks import ClaimLocks
from tests.fakes.directories import names
from tests.fakes.preparing import in_threads


@pytest.fixture
def locks(tmp_path: Path) -> ClaimLocks:
    made = ClaimLocks(tmp_path / "locks")
    made.open()
    return made


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


def test_lock_is_not_waited_for_when_the_kubelet_has_cancelled_the_call(
    locks: ClaimLocks, tmp_path: Path
) -> None:
    for other in (locks, ClaimLocks(tmp_path / "locks")):
        with other.hold("uid-1", 1):
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
    monkeypatch.setattr(claimlocks, "_REMEMBERED", 2)
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


def test_lock_file_is_there_before_the_disk_is_full(
    locks: ClaimLocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first claim of a node can be unprepared even if no file can be created any more."""
    create = os.open

    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    for number in range(500):
        with locks.hold(f"uid-{number}", 1):
            pass
    assert names(tmp_path / "locks") == ["claims.lock"]


@pytest.mark.parametrize("same_instance", [True, False])
def test_call_that_hangs_holds_up_no_other_claim(
    locks: ClaimLocks, tmp_path: Path, same_instance: bool
) -> None:
    hanging, free = "uid-1", "uid-2"
    other = locks if same_instance else ClaimLocks(tmp_path / "locks")
    with locks.hold(hanging, 1):
        with other.hold(free, 0):
            pass
        with (
            pytest.raises(RetryableError, match=f"prepares or unprepares claim {hanging}"),
            other.hold(hanging, 0),
        ):
            pass
    with other.hold(hanging, 0):
        pass
    assert {one.wanted for one in (*locks._guards.values(), *other._guards.values())} == {0}


def test_lock_has_one_holder_at_a_time_in_and_across_instances(locks: ClaimLocks, tmp_path: Path) -> None:
    other = ClaimLocks(tmp_path / "locks")
    entered: list[int] = []

    def enter(number: int) -> None:
        with (locks if number % 2 else other).hold("uid-1", 10):
            entered.append(number)

    assert in_threads(*(partial(enter, number) for number in range(8))) == [None] * 8
    assert sorted(entered) == list(range(8))
