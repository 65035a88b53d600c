"""What changes in a directory is seen by the next look, whoever changed it and however."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.errors import StateError
from dra_driver.files import directory_watch
from dra_driver.files.directory_watch import DirectoryWatch
from dra_driver.files.json_store import JsonStore


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    (tmp_path / "place/old.json").write_text("1")
    return tmp_path / "place"


CHANGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "nothing": (lambda place: None, set()),
    "written": (lambda place: (place / "new.json").write_text("2"), {"new.json"}),
    "written in place": (lambda place: (place / "old.json").write_text("2"), {"old.json"}),
    "removed": (lambda place: (place / "old.json").unlink(), {"old.json"}),
    "renamed": (lambda place: (place / "old.json").rename(place / "new.json"), {"old.json", "new.json"}),
    "moved in": (
        lambda place: (place.parent / "x").write_text("") or (place.parent / "x").rename(place / "x"),
        {"x"},
    ),
    "moved away": (lambda place: (place / "old.json").rename(place.parent / "x"), {"old.json"}),
    "linked": (lambda place: (place / "two").hardlink_to(place / "old.json"), {"two"}),
    "a directory": (lambda place: (place / "dir").mkdir(), {"dir"}),
    "by another process": (
        lambda place: subprocess.run(["touch", str(place / "theirs")], check=True),
        {"theirs"},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_look_names_what_has_changed_since_the_one_before(place: Path, name: str) -> None:
    change, names = CHANGES[name]
    watch = DirectoryWatch(place)
    assert watch.changed() is None, "the first look knows nothing"
    assert watch.changed() == set()
    change(place)
    # A hard link also changes the file that it is another name of.
    assert names <= (watch.changed() or set()) <= names | {"old.json"}
    assert watch.changed() == set()


def test_directory_that_was_replaced_is_looked_at_anew(place: Path) -> None:
    watch = DirectoryWatch(place)
    watch.changed()
    shutil.rmtree(place)
    with pytest.raises(FileNotFoundError):
        watch.changed()
    place.mkdir()
    assert watch.changed() is None
    (place / "a").touch()
    assert watch.changed() == {"a"}
    place.rename(place.with_name("elsewhere"))
    place.mkdir()
    assert watch.changed() is None


def test_so_many_changes_that_the_kernel_drops_some_are_no_secret(place: Path) -> None:
    watch = DirectoryWatch(place)
    watch.changed()
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(most // 2 + 2):  # each makes an event, and so does its removal
        (place / str(number)).mkdir()
        (place / str(number)).rmdir()
    assert watch.changed() is None
    assert watch.changed() == set()


def test_machine_without_watches_is_looked_at_each_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoWatches:
        def inotify_init1(self, _flags: int) -> int:
            return -1

    monkeypatch.setattr(directory_watch, "_libc", NoWatches())
    monkeypatch.setattr(directory_watch, "_events", directory_watch._Events())
    watch = DirectoryWatch(place)
    assert [watch.changed(), watch.changed()] == [None, None]
    store = JsonStore(place, "value", lambda _name, content: int(content), print, is_name=str.isalpha)
    assert store.all() == {"old": 1}
    (place / "new.json").write_text("2")
    assert store.all() == {"new": 2, "old": 1}


def test_all_watches_of_a_process_need_one_descriptor_and_go_with_their_owners(tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(50)]
    for place in places:
        place.mkdir()
    DirectoryWatch(tmp_path).changed()
    before = len(list(Path("/proc/self/fd").iterdir()))
    watches = [DirectoryWatch(place) for place in places for _ in range(2)]
    for watch in watches:
        assert watch.changed() is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (places[7] / "a").touch()
    assert [watch.changed() for watch in watches[12:18]] == [set(), set(), {"a"}, {"a"}, set(), set()]
    watched = len(directory_watch._events._watches)
    del watches, watch
    DirectoryWatch(tmp_path).changed()
    assert len(directory_watch._events._watches) <= watched - 49  # and one for the last look


def test_child_that_was_forked_takes_no_events_away(place: Path) -> None:
    watch = DirectoryWatch(place)
    watch.changed()
    (place / "a").touch()
    child = os.fork()
    if child == 0:
        os._exit(0 if watch.changed() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert watch.changed() == {"a"}


def test_store_reads_only_what_has_changed(place: Path) -> None:
    read: list[str] = []

    def decode(name: str, content: bytes) -> int:
        read.append(name)
        return int(content)

    store = JsonStore(place, "value", decode, print, is_name=str.isalpha)
    other = JsonStore(place, "value", lambda _name, content: int(content), print, is_name=str.isalpha)
    assert (store.all(), read) == ({"old": 1}, ["old"])
    other.save("new", b"2", durable=False, whole=False)
    assert (store.all(), read) == ({"new": 2, "old": 1}, ["old", "new"])
    other.delete("old", durable=False)
    assert (store.all(), read) == ({"new": 2}, ["old", "new"])
    assert store.get("new") == 2
    assert read == ["old", "new"]


def test_listing_that_failed_is_made_up_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every value would be gone for good: no event tells of files that were there before."""
    store = JsonStore(place, "value", lambda _name, content: int(content), print, is_name=str.isalpha)

    def too_many(_path: object) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", too_many)
        assert store.quarantined() == []
        with pytest.raises(StateError, match="cannot list the values"):
            store.all()
    assert store.all() == {"old": 1}


def test_answer_of_a_store_is_its_callers_own(place: Path) -> None:
    store = JsonStore(place, "value", lambda _name, content: int(content), print, is_name=str.isalpha)
    store.all().clear()
    assert store.all() == {"old": 1}


def test_libc_has_what_is_called() -> None:
    assert ctypes.CDLL(None).inotify_init1
