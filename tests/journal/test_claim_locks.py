from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from functools import partial
from pathlib import Path

import pytest

from dra_driver.errors import RetryableError
from dra_driver.files.file_lock import hold_file
from dra_driver.journal import locks as claimlocks
from dra_driver.journal.locks import ClaimLocks
from tests.fakes.directories import names
from tests.fakes.preparing import in_threads


@pytest.fixture
def locks(tmp_path: Path) -> ClaimLocks:
    made = ClaimLocks(tmp_path / "locks")
    made.open()
    return made


def test_prepare_and_unprepare_are_remembered_apart_and_by_both_instances(
    locks: ClaimLocks, tmp_path: Path
) -> None:
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        assert not turn.was_prepared_since(began)
        turn.note_prepared()
    with locks.hold("uid-2", 1) as turn:
        assert not turn.was_prepared_since(began)
    with ClaimLocks(tmp_path / "locks").hold("uid-1", 1) as turn:
        assert (turn.was_prepared_since(began), turn.was_unprepared_since(began)) == (True, False)
        turn.note_unprepared()
    after = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        assert (turn.was_prepared_since(began), turn.was_unprepared_since(began)) == (True, True)
        assert (turn.was_prepared_since(after), turn.was_unprepared_since(after)) == (False, False)
        assert not turn.was_prepared_since(time.monotonic_ns())


def test_calls_are_told_apart_by_their_beginning_in_both_instances(locks: ClaimLocks, tmp_path: Path) -> None:
    first, second, third = (time.monotonic_ns() for _ in range(3))
    with locks.hold("uid-1", 1) as turn:
        turn.note_prepared(second)
        turn.note_unprepared(second)
    with ClaimLocks(tmp_path / "locks").hold("uid-1", 1) as turn:
        later = [turn.was_prepared_by_call_after(moment) for moment in (first, second, third)]
        assert later == [True, False, False]
        assert [turn.was_unprepared_since(moment) for moment in (first, third)] == [True, False]
        assert turn.was_prepared_since(third), "it ended after all three"
    with locks.hold("uid-2", 1) as turn:
        assert not turn.was_prepared_by_call_after(first)


def test_lock_is_not_waited_for_on_behalf_of_who_has_left(locks: ClaimLocks, tmp_path: Path) -> None:
    for other in (locks, ClaimLocks(tmp_path / "locks")):
        with other.hold("uid-1", 1):
            asked = iter([False, False, True]).__next__
            with pytest.raises(RetryableError, match="busy"), locks.hold("uid-1", 60, asked):
                pass
    with locks.hold("uid-1", 1, lambda: True):
        pass


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


def test_prepare_longer_ago_than_is_remembered_may_have_been(
    locks: ClaimLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        assert not turn.was_prepared_since(began)
        for number in range(127):
            type(turn)(f"uid-of-another-{number}", turn.path, turn.descriptor).note_unprepared()
        assert not turn.was_prepared_since(began)
        type(turn)("uid-2", turn.path, turn.descriptor).note_unprepared()
        assert turn.was_prepared_since(began), "it may have been pushed out"
        assert not turn.was_unprepared_since(began)
        assert not turn.was_prepared_since(time.monotonic_ns())
    now_ns = time.monotonic_ns
    monkeypatch.setattr(claimlocks.time, "monotonic_ns", lambda: now_ns() + 601 * 10**9)
    with locks.hold("uid-of-another-file", 1) as turn:
        assert turn.was_prepared_since(began)
        assert not turn.was_prepared_since(began + 2 * 10**9)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fstat"])
def test_full_disk_keeps_no_claim_from_going(
    locks: ClaimLocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, str]], call: str
) -> None:
    """What it does not take is remembered by this process, and written with the next that it takes."""
    began = time.monotonic_ns()
    with locks.hold("uid-1", 1) as turn:
        type(turn)("uid-2", turn.path, turn.descriptor).note_unprepared()

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, locks.hold("uid-1", 1) as turn:
        patched.setattr(claimlocks.os, call, full)
        turn.note_prepared()
        turn.note_unprepared()
    with locks.hold("uid-1", 1) as turn:
        assert (turn.was_prepared_since(began), turn.was_unprepared_since(began)) == (True, True)
        assert not turn.was_unprepared_since(time.monotonic_ns())
    assert [entry["event"] for entry in logs] == ["memory_kept_in_process"]
    assert "the disk is full; free some space" in logs[0]["reason"]
    other = ClaimLocks(tmp_path / "locks")
    between = time.monotonic_ns()
    with other.hold("uid-1", 1) as turn:
        assert not turn.was_unprepared_since(began)
        two = type(turn)("uid-2", turn.path, turn.descriptor)
        assert two.was_unprepared_since(began), "nothing is lost"
        two.note_unprepared()
    with locks.hold("uid-1", 1) as turn:
        unwritten = {uid: claimlocks._Entry(uid, began, began) for uid in ("uid-2", "uid-1")}
        two = type(turn)("uid-2", turn.path, turn.descriptor, unwritten)
        assert two.was_unprepared_since(between), "what the other instance wrote since counts"
        assert len(two._remembered()) == 2
    with locks.hold("uid-1", 1) as turn:
        turn.note_prepared()
        assert turn.unwritten == {}
    with other.hold("uid-1", 1) as turn:
        assert (turn.was_prepared_since(began), turn.was_unprepared_since(began)) == (True, True)


def test_lock_files_are_there_before_the_disk_is_full(
    locks: ClaimLocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first claim of a node must end as well when no file can be created any more."""
    create = os.open

    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not Path(path).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    for number in range(500):
        with locks.hold(f"uid-{number}", 1):
            pass
    assert len(names(tmp_path / "locks")) == 64


def test_what_is_written_fits_in_what_was_there(locks: ClaimLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is given back, which somebody else would take on a full disk."""
    with locks.hold("uid-1", 1) as turn:
        turn.note_unprepared()
        size = turn.path.stat().st_size
        turn.path.write_bytes(turn.path.read_bytes() + b"\0" * 9)  # what a cut growth leaves
        assert turn.was_unprepared_since(0)
        monkeypatch.setattr(claimlocks.os, "ftruncate", None)
        monkeypatch.setattr(claimlocks, "_REMEMBERED_NS", 0)
        type(turn)("u", turn.path, turn.descriptor).note_unprepared()
        assert turn.path.stat().st_size == size + 9
        assert type(turn)("u", turn.path, turn.descriptor).was_unprepared_since(0)
        assert not turn.was_unprepared_since(0)


def of_one_file(locks: ClaimLocks) -> tuple[str, str]:
    """UIDs of two claims whose locks are in the same file."""
    first: dict[Path, str] = {}
    for number in range(65):
        uid = f"uid-{number}"
        with locks.hold(uid, 1) as turn:
            other = first.setdefault(turn.path, uid)
        if other != uid:
            return other, uid
    raise AssertionError


@pytest.mark.parametrize("same_instance", [True, False])
def test_call_that_hangs_holds_up_no_other_claim(
    locks: ClaimLocks, tmp_path: Path, same_instance: bool
) -> None:
    hanging, free = of_one_file(locks)
    began = time.monotonic_ns()
    other = locks if same_instance else ClaimLocks(tmp_path / "locks")
    with locks.hold(hanging, 1) as one:
        one.note_prepared()
        with other.hold(free, 0) as two:
            assert one.path == two.path
            two.note_unprepared()
            one.note_unprepared()
            assert two.was_unprepared_since(began)
            assert not two.was_prepared_since(began)
        with pytest.raises(RetryableError, match=f"claim {hanging} is busy"), other.hold(hanging, 0):
            pass
    with other.hold(hanging, 0) as again:
        assert (again.was_prepared_since(began), again.was_unprepared_since(began)) == (True, True)
    assert locks._locks == other._locks == {}


def test_release_before_locks_all_claims_of_a_file(locks: ClaimLocks) -> None:
    """As during a rolling update from it."""
    one, two = of_one_file(locks)
    with locks.hold(one, 1) as turn:
        path = turn.path
        with pytest.raises(RetryableError), hold_file(path, threading.Lock(), 0, "the file"):
            pass
    with hold_file(path, threading.Lock(), 0, "the file"):
        for uid in (one, two):
            with pytest.raises(RetryableError, match=f"claim {uid} is busy"), locks.hold(uid, 0):
                pass


def test_notes_of_many_claims_at_once_are_all_kept(locks: ClaimLocks, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    instances = [locks, ClaimLocks(tmp_path / "locks")]
    with locks.hold(of_one_file(locks)[0], 1) as turn:
        path = turn.path
    uids = [uid for uid in map(str, range(2000)) if f"-{zlib.crc32(uid.encode()) % 64:02}." in path.name][:24]
    both = threading.Barrier(len(uids))

    def note(number: int) -> None:
        with instances[number % 2].hold(uids[number], 10) as turn:
            both.wait(10)
            for _ in range(5):
                turn.note_unprepared()

    assert in_threads(*(partial(note, number) for number in range(len(uids)))) == [None] * len(uids)
    for uid in uids:
        with locks.hold(uid, 1) as turn:
            assert turn.was_unprepared_since(began)


def test_one_holder_at_a_time_in_and_across_instances(locks: ClaimLocks, tmp_path: Path) -> None:
    other = ClaimLocks(tmp_path / "locks")
    entered: list[int] = []

    def enter(number: int) -> None:
        with (locks if number % 2 else other).hold("uid-1", 10):
            entered.append(number)

    assert in_threads(*(partial(enter, number) for number in range(8))) == [None] * 8
    assert sorted(entered) == list(range(8))
