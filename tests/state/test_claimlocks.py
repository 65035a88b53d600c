from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.state.claimlocks import ClaimLocks


@pytest.fixture
def locks(tmp_path: Path) -> ClaimLocks:
    made = ClaimLocks(tmp_path / "locks")
    made.open()
    return made


def test_unprepare_is_remembered_for_its_claim_only(locks: ClaimLocks, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        assert not turn.was_unprepared_since(began)
        turn.note_unprepared()
        assert turn.was_unprepared_since(began)
        assert not turn.was_unprepared_since(time.monotonic_ns() + 1)
    other_process = ClaimLocks(tmp_path / "locks")
    with other_process.hold("uid-1", 1) as turn:
        assert turn.was_unprepared_since(began)
    with locks.hold("uid-2", 1) as turn:
        assert not turn.was_unprepared_since(began)


def test_prepare_and_unprepare_are_remembered_apart_and_by_both_instances(
    locks: ClaimLocks, tmp_path: Path
) -> None:
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        turn.note_prepared()
    with ClaimLocks(tmp_path / "locks").hold("uid-1", 1) as turn:
        assert (turn.was_prepared_since(began), turn.was_unprepared_since(began)) == (True, False)
        turn.note_unprepared()
    after = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        assert (turn.was_prepared_since(began), turn.was_unprepared_since(began)) == (True, True)
        assert (turn.was_prepared_since(after), turn.was_unprepared_since(after)) == (False, False)
        assert not turn.was_prepared_since(time.monotonic_ns())


def test_unprepare_before_a_reboot_refuses_no_claim_after_it(locks: ClaimLocks) -> None:
    """The clock starts anew then, so that the entry lies in the future."""
    with locks.hold("uid-1", 1) as turn:
        future = time.monotonic_ns() + 10**15
        turn.path.write_text(f'[["uid-1", {future}], ["prepared:uid-1", {future}]]')
        assert not turn.was_unprepared_since(time.monotonic_ns())
        assert not turn.was_prepared_since(time.monotonic_ns())
        turn.note_prepared()
        assert str(future) not in turn.path.read_text()


def test_claim_that_comes_and_goes_pushes_no_other_out(locks: ClaimLocks) -> None:
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        turn.note_unprepared()
        other = type(turn)("uid-2", turn.path, turn.descriptor)
        for _ in range(200):
            other.note_prepared()
            other.note_unprepared()
        assert turn.was_unprepared_since(began)


def test_memory_stays_small_whatever_comes(locks: ClaimLocks, tmp_path: Path) -> None:
    for number in range(3000):
        with locks.hold(f"uid-{number}", 1) as turn:
            turn.note_unprepared()
    files = list((tmp_path / "locks").iterdir())
    assert len(files) <= 64
    assert sum(file.stat().st_size for file in files) < 400_000


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[["uid-1", "x"]]', b"\0" * 100, b'{"a": 1}'])
def test_memory_that_cannot_be_read_is_none(locks: ClaimLocks, tmp_path: Path, content: bytes) -> None:
    with locks.hold("uid-1", 1) as turn:
        turn.path.write_bytes(content)
        assert not turn.was_unprepared_since(0)
        turn.note_unprepared()
        assert turn.was_unprepared_since(0)


def test_one_holder_at_a_time_in_and_across_instances(locks: ClaimLocks, tmp_path: Path) -> None:
    other = ClaimLocks(tmp_path / "locks")
    for rival in (locks, other):
        with locks.hold("uid-1", 1):
            started = time.monotonic()
            with pytest.raises(RetryableError, match="claim uid-1 is busy"), rival.hold("uid-1", 0.05):
                pass
            assert time.monotonic() - started < 20
    entered: list[int] = []

    def enter(number: int) -> None:
        with (locks if number % 2 else other).hold("uid-1", 10):
            entered.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(entered) == list(range(8))
