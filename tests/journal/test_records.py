import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base import json_store
from dra_driver.base.atomic import read_plain
from dra_driver.errors import StateError
from dra_driver.journal.records import RECORD_FILE, RecordStore
from tests.fakes import directories
from tests.fakes.samples import GPU_0, GPU_1, hold, record

ONE, TWO = record(hold(GPU_0), uid="uid-1"), record(hold(GPU_1), uid="uid-2")
CORRUPT = {"empty": b"", "zeros": b"\0" * 300, "half": RECORD_FILE.write(ONE)[:100]}


def names(directory: Path) -> list[str]:
    """What is in the directory of records but the name of the boot."""
    return [name for name in directories.names(directory) if name != ".boot"]


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    made = RecordStore(tmp_path / "claims")
    made.open("boot-1")
    return made


def other(store: RecordStore) -> RecordStore:
    """The same directory in another process, which has not opened it."""
    return RecordStore(store.directory)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EPERM, errno.EIO])
def test_record_that_cannot_be_set_aside_is_reported_once_and_protects_what_it_held(
    store: RecordStore, logs: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.save(TWO)
    file = store.directory / "uid-1.json"
    file.write_bytes(b"{")

    def refuse(*_paths: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", refuse)
        for _ in range(2):
            store.load()
            assert (store.all(), store.quarantined()) == ({"uid-2": TWO}, [file])
    (line,) = logs
    assert (line["event"], line["kept_as"]) == ("record_unreadable", str(file))
    assert "cannot set aside the unreadable claim record" in str(line["reason"])
    store.load()
    assert store.all() == {"uid-2": TWO}
    (aside,) = store.quarantined()
    assert (aside.read_bytes(), len(logs)) == (b"{", 2)


def test_record_on_a_bad_sector_is_set_aside(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(ONE)
    store.save(TWO)

    def broken(path: Path) -> bytes:
        if path.name == "uid-1.json":
            raise OSError(errno.EIO, "Input/output error")
        return read_plain(path)

    monkeypatch.setattr(json_store, "read_plain", broken)
    store.load()
    assert store.all() == {"uid-2": TWO}
    assert len(store.quarantined()) == 1


def test_other_files_are_not_records(store: RecordStore) -> None:
    for name in ("README", ".hidden.json", "a b.json", "..json", "uid-1.json.tmp", "x.yaml"):
        (store.directory / name).write_text("{}")
    store.load()
    assert (store.all(), store.quarantined()) == ({}, [])


@pytest.mark.parametrize("uid", ["", "..", "../x", "/etc/passwd", "-a", "a\n", "a\0b", "ä", "x" * 300])
def test_uid_is_refused_when_it_could_lead_elsewhere(store: RecordStore, uid: str) -> None:
    for call in (store.get, store.delete):
        with pytest.raises(StateError, match="is not a valid file name, so the claim record is rejected"):
            call(uid)
    with pytest.raises(StateError, match="is not a valid file name"):
        store.save(record(hold(GPU_0), uid=uid))
    assert names(store.directory) == []


def test_missing_directory_is_one_sentence(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "gone")
    with pytest.raises(StateError) as caught:
        store.all()
    assert str(caught.value) == (
        f"cannot list the claim records in {tmp_path / 'gone'}: the directory does not exist; "
        "create it or check the mount"
    )
    assert (store.get("uid-1"), store.quarantined()) == (None, [])
    store.delete("uid-1")
    with pytest.raises(StateError, match=r"cannot write .*: the directory does not exist"):
        store.save(ONE)


def test_torn_record_is_removed_only_at_the_next_boot(
    store: RecordStore, logs: list[dict[str, object]]
) -> None:
    store.save(ONE)
    for name, content in CORRUPT.items():
        (store.directory / f"{name}.json").write_bytes(content)
    (store.directory / "other.json").write_bytes(RECORD_FILE.write(TWO))
    again = other(store)
    again.open("boot-2")
    assert [(line["event"], line["log_level"]) for line in logs] == [
        *[("record_torn", "info")] * 3,
        ("record_unreadable", "error"),
    ]
    assert len(names(store.directory)) == 2, "what can be parsed stays, right or wrong"
    (store.directory / "uid-9.json").write_bytes(CORRUPT["half"])
    again.open("boot-2")
    assert again.all() == {"uid-1": ONE.as_of("boot-2")}
    assert len(again.quarantined()) == 2, "in the same boot nobody knows what it protects"


def test_record_of_an_earlier_boot_is_not_prepared(store: RecordStore) -> None:
    """The effects of its steps did not survive the reboot, whatever the file says."""
    store.save(ONE)
    assert (ONE.phase, ONE.boot_id) == ("prepared", "boot-1")
    again = other(store)
    again.open("boot-2")
    assert again.get("uid-1") == replace(ONE, phase="preparing")
    assert store.get("uid-1") == ONE
    store.save(replace(ONE, prepared_at="2026-01-01T00:00:00+00:00"))
    again.load()
    assert again.get("uid-1") == replace(ONE, phase="preparing"), "the time is that of a Prepare that is void"
    unfinished = replace(TWO, phase="preparing")
    again.save(unfinished)
    assert (other(store).get("uid-2"), again.get("uid-2")) == (unfinished, unfinished)


def test_first_start_of_all_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "uid-1.json").touch()
    RecordStore(tmp_path).open("boot-1")
    [name] = names(tmp_path)
    assert name.startswith("uid-1.json.unreadable-")


def test_disk_that_takes_nothing_keeps_no_driver_from_starting(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(ONE)
    really = os.open

    def read_only(path: str, flags: int, *more: int, **options: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return really(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    again = other(store)
    again.open("boot-2")
    monkeypatch.undo()
    assert again.all() == {"uid-1": ONE.as_of("boot-2")}


def test_torn_record_on_a_read_only_disk_does_not_stop_the_driver(
    store: RecordStore, logs: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(ONE)
    (store.directory / "torn.json").touch()
    old = store.directory / ".x.json.1-1.tmp"
    old.touch()
    os.utime(old, (1, 1))

    def read_only(*_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    again = other(store)
    for name in ("unlink", "rename", "replace"):
        monkeypatch.setattr(Path, name, read_only)
    again.open("boot-2")
    assert [line["event"] for line in logs] == ["record_unreadable"], "what was not removed is not told to be"
    assert again.all() == {"uid-1": ONE.as_of("boot-2")}


def test_delete_is_durable(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(ONE)
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    store.delete("uid-1")
    assert synced == [str(store.directory)]
