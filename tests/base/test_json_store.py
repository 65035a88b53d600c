"""A store always shows the content of the disk, even if another process has just changed it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dra_driver.base import atomic, json_store
from dra_driver.base.atomic import Stamp
from dra_driver.base.json_store import JsonStore
from dra_driver.errors import StateError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    (tmp_path / "place/old.json").write_text("1")
    return tmp_path / "place"


def store_at(
    place: Path, decode: Callable[[str, bytes], int] = lambda _name, content: int(content)
) -> JsonStore[int]:
    return JsonStore(place, "value", decode, print, is_name=str.isalpha)


def wait_for_a_tick(place: Path) -> None:
    """Until a change gives another time than any before."""
    while not all(atomic.is_settled(path.stat().st_ctime_ns) for path in (place, *place.iterdir())):
        time.sleep(0.001)


def replaced(place: Path) -> None:
    (place / "new").write_text("7")
    (place / "new").replace(place / "old.json")


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "written": (lambda place: (place / "new.json").write_text("2"), {"new": 2, "old": 1}),
    "replaced under its name": (replaced, {"old": 7}),
    "removed": (lambda place: (place / "old.json").unlink(), {}),
    "renamed": (lambda place: (place / "old.json").rename(place / "new.json"), {"new": 1}),
    "moved away": (lambda place: (place / "old.json").rename(place.parent / "x"), {}),
    "linked": (lambda place: (place / "two.json").hardlink_to(place / "old.json"), {"old": 1, "two": 1}),
}


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a tick"])
@pytest.mark.parametrize("name", CHANGES)
def test_change_is_seen_by_the_next_look(place: Path, name: str, waits: bool) -> None:
    change, values = CHANGES[name]
    store = store_at(place)
    if waits:
        wait_for_a_tick(place)
    assert store.all() == {"old": 1}
    change(place)
    assert store.all() == values
    assert store.get("old") == values.get("old")


TICK_NS = 10_000_000


@pytest.fixture
def coarse_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose file times move by ticks, and a disk that gives the next file the inode of the one before."""
    now = time.clock_gettime_ns

    def stamp_of(status: os.stat_result) -> Stamp:
        return (7, status.st_size, status.st_ctime_ns // TICK_NS * TICK_NS)

    def stat(path: Path) -> SimpleNamespace:
        return SimpleNamespace(st_ino=7, st_mtime_ns=path.stat().st_mtime_ns // TICK_NS * TICK_NS)

    monkeypatch.setattr(json_store, "stamp_of", stamp_of)
    monkeypatch.setattr(json_store, "stamp_at", lambda path: stamp_of(path.lstat()))
    monkeypatch.setattr(json_store, "os", SimpleNamespace(**vars(os) | {"stat": stat}))
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: now(clock) // TICK_NS * TICK_NS)


@pytest.mark.usefixtures("coarse_clock")
def test_no_change_is_missed_within_a_tick_of_the_clock(place: Path) -> None:
    store, other = store_at(place), store_at(place)
    for number in range(500):
        other.write("old", str(number % 10).encode(), durable=False, whole=False)
        expected = {"old": number % 10}
        assert store.all() == expected
        assert store.get("old") == expected["old"]


def test_nothing_is_read_again_while_nothing_changes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    store = store_at(place, lambda name, content: read.append(name) or int(content))
    wait_for_a_tick(place)
    assert store.all() == {"old": 1}
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", pytest.fail)
        assert (store.all(), store.quarantined(), store.get("old")) == ({"old": 1}, [], 1)
    assert read == ["old"]
    store_at(place).write("new", b"2", durable=False, whole=False)
    assert (store.all(), read) == ({"new": 2, "old": 1}, ["old", "new"])


def test_times_of_whole_seconds_count_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    second = 10**9
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _clock: 7 * second + 5)
    assert [atomic.is_settled(at) for at in (7 * second + 4, 7 * second + 5, 7 * second + 6)] == [
        True,
        False,
        False,
    ]
    assert [atomic.is_settled(at) for at in (7 * second, 6 * second)] == [False, True]


def test_file_from_before_the_clock_was_set_back_is_parsed_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def decode(name: str, content: bytes) -> int:
        read.append(name)
        return int(content)

    store, now = store_at(place, decode), time.clock_gettime_ns
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: now(clock) - 3600 * 10**9)
    assert [store.get("old"), store.get("old")] == [1, 1]
    assert read == ["old"]


def test_directory_that_was_replaced_is_checked_again(place: Path) -> None:
    store = store_at(place)
    wait_for_a_tick(place)
    assert store.all() == {"old": 1}
    shutil.rmtree(place)
    with pytest.raises(StateError, match="cannot list the values"):
        store.all()
    place.mkdir()
    assert store.all() == {}


def test_listing_that_failed_is_made_up_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(place)
    wait_for_a_tick(place)

    def too_many(_path: object) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", too_many)
        with pytest.raises(StateError, match="cannot list the values"):
            store.all()
    assert store.all() == {"old": 1}


def test_value_whose_reading_failed_for_now_is_read_by_the_next_look(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(place)
    wait_for_a_tick(place)

    def too_many(_path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("dra_driver.base.json_store.read_plain", too_many)
        with pytest.raises(StateError, match="cannot read the value"):
            store.all()
    assert store.all() == {"old": 1}


def test_unreadable_file_is_read_when_the_disk_works_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at(place)
    wait_for_a_tick(place)
    lstat = os.lstat

    def broken(path: str) -> os.stat_result:
        if str(path).endswith("old.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return lstat(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", broken)
        assert (store.all(), store.quarantined()) == ({}, [place / "old.json"])
    assert (store.all(), store.quarantined()) == ({"old": 1}, [])


def test_answer_of_a_store_is_its_callers_own(place: Path) -> None:
    store = store_at(place)
    wait_for_a_tick(place)
    store.all().clear()
    assert store.all() == {"old": 1}
