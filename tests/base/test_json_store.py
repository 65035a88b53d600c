"""A loaded store keeps its values in memory; a store that is not loaded reads the disk at each call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dra_driver.base import atomic, json_store
from dra_driver.base.fields import NewerFormatError
from dra_driver.base.json_store import JsonStore, UnreadableFile
from dra_driver.errors import StateError
from tests.fakes.directories import names


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    (tmp_path / "place/old.json").write_text("1")
    return tmp_path / "place"


def decode(_name: str, content: bytes) -> int:
    if content == b"newer":
        raise NewerFormatError("a newer release wrote it", {})
    if not content.isdigit():
        raise StateError("it is not a number")
    return int(content)


def encode(value: int) -> bytes:
    return str(value).encode()


def store_at(place: Path, report: Callable[[UnreadableFile], None] = print) -> JsonStore[int]:
    return JsonStore(place, "value", decode, encode, report, is_name=str.isalpha)


@pytest.fixture
def store(place: Path) -> JsonStore[int]:
    made = store_at(place)
    made.load()
    return made


def fails(code: int) -> Callable[..., None]:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def write(store: JsonStore[int], name: str, value: int, *, durable: bool = False) -> None:
    store.write(name, value, durable=durable, whole=False)


def test_loaded_store_reads_no_disk(store: JsonStore[int], monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, "new", 2)
    for where, name in ((json_store, "read_plain"), (os, "listdir"), (os, "stat"), (os, "lstat")):
        monkeypatch.setattr(where, name, pytest.fail)
    assert (store.get("old"), store.get("other"), store.all()) == (1, None, {"old": 1, "new": 2})
    assert (store.quarantined(), store.newer(), store.problems()) == ([], {}, [])


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "written": (lambda place: (place / "new.json").write_text("2"), {"new": 2, "old": 1}),
    "replaced under its name": (lambda place: (place / "old.json").write_text("7"), {"old": 7}),
    "removed": (lambda place: (place / "old.json").unlink(), {}),
    "damaged": (lambda place: (place / "old.json").write_text("x"), {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_by_hand_is_noticed_by_the_next_load_and_at_once_without_load(
    store: JsonStore[int], place: Path, name: str
) -> None:
    change, values = CHANGES[name]
    reader = store_at(place)
    assert reader.all() == {"old": 1}
    change(place)
    assert (store.all(), store.get("old")) == ({"old": 1}, 1)
    assert (reader.all(), reader.get("old")) == (values, values.get("old"))
    store.load()
    assert (store.all(), store.get("old")) == (values, values.get("old"))


def test_value_whose_file_was_removed_by_hand_can_be_removed(store: JsonStore[int], place: Path) -> None:
    (place / "old.json").unlink()
    assert store.remove("old", durable=True) is False
    assert store.all() == {}


@pytest.mark.parametrize("durable", [False, True])
def test_failed_write_leaves_the_value_of_the_file(
    store: JsonStore[int], place: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    for name in ("old", "new"):
        with monkeypatch.context() as disk:
            disk.setattr(os, "write", fails(errno.ENOSPC))
            with pytest.raises(StateError, match="the disk is full"):
                write(store, name, 2, durable=durable)
    assert store.all() == store_at(place).all() == {"old": 1}
    with monkeypatch.context() as disk:
        disk.setattr(atomic, "sync_directory", fails(errno.EIO))
        with pytest.raises(StateError):
            write(store, "old", 2, durable=True)
    assert store.all() == store_at(place).all() == {"old": 2}, "the file was replaced, but not synced"


def test_failed_removal_keeps_the_value(store: JsonStore[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(Path, "unlink", fails(errno.EROFS))
        with pytest.raises(StateError, match="read-only"):
            store.remove("old", durable=False)
    assert store.all() == {"old": 1}


@pytest.mark.parametrize(("where", "name"), [(os, "listdir"), (json_store, "read_plain")])
def test_load_that_fails_for_now_renames_nothing_and_can_be_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    store = store_at(place)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fails(errno.EMFILE))
        for read in (store.load, store.all):
            with pytest.raises(StateError, match=r"cannot (list|read) the value"):
                read()
    store.load()
    assert (store.all(), names(place)) == ({"old": 1}, ["old.json"])


def test_unreadable_file_is_renamed_and_reported_by_load_only(place: Path) -> None:
    reported: list[UnreadableFile] = []
    file = place / "old.json"
    file.write_text("x")
    reader = store_at(place, reported.append)
    for _ in range(2):
        assert (reader.all(), reader.get("old"), reader.quarantined()) == ({}, None, [file])
    assert [(found.name, found.kept_as) for found in reported] == [("old", file)]
    store = store_at(place, reported.append)
    for _ in range(2):
        store.load()
    [aside] = store.quarantined()
    assert (reported[1:], names(place)) == (
        [UnreadableFile("old", aside, "it is not a number", is_newer=False)],
        [aside.name],
    )
    write(store, "old", 2)
    assert (store.all(), store.quarantined()) == ({"old": 2}, [aside])


def test_file_of_a_newer_release_is_kept_until_an_administrator_removes_it(
    store: JsonStore[int], place: Path
) -> None:
    (place / "old.json").write_text("newer")
    store.load()
    for _ in range(2):
        with pytest.raises(StateError, match=r"cannot write .*: a newer release wrote it"):
            write(store, "old", 2)
    assert (store.all(), list(store.newer()), len(store.problems())) == ({}, ["old"], 1)
    assert (place / "old.json").read_text() == "newer"
    (place / "old.json").unlink()
    write(store, "old", 2)
    assert (store.all(), store.newer(), store.problems()) == ({"old": 2}, {}, [])


def test_values_are_found_by_their_keys(place: Path) -> None:
    store = JsonStore(
        place, "value", decode, encode, print, is_name=str.isalpha, keys=lambda value: set(str(value))
    )
    for _ in range(2):
        write(store, "a", 12)
        write(store, "b", 23)
        assert store.having("1") == {"old": 1, "a": 12}
        assert store.having("321") == {"old": 1, "a": 12, "b": 23}
        write(store, "a", 3)
        assert (store.having("1"), store.having("3")) == ({"old": 1}, {"a": 3, "b": 23})
        store.remove("a", durable=False)
        assert (store.having("3"), store.having("9")) == ({"b": 23}, {})
        store.load()


def test_caller_may_change_what_the_store_returned(store: JsonStore[int]) -> None:
    store.all().clear()
    assert store.all() == {"old": 1}


def test_write_that_hangs_until_another_process_has_the_files_changes_none(
    store: JsonStore[int], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: store.close())
    with pytest.raises(StateError, match="handed the values over"):
        write(store, "old", 2, durable=True)
    assert (names(place), store_at(place).all()) == (["old.json"], {"old": 1})
