import errno
import os
from pathlib import Path

import pytest

from dra_driver.base.atomic import clear_abandoned, make_directory, write_atomically
from dra_driver.errors import StateError
from tests.fakes.directories import names
from tests.fakes.tables import tabled


class Crash(BaseException):
    """The process dies here."""


def fail(code: int):
    def call(*_args: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def die(*_args: object, **_options: object) -> None:
    raise Crash


def test_content_and_mode_are_those_requested(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomically(file, b"old", mode=0o644)
    write_atomically(file, b"new")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o600)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_always_synced_and_the_directory_when_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").is_dir())
    )
    write_atomically(tmp_path / "a", b"x", durable=durable)
    assert synced == ([False, True] if durable else [False])


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EDQUOT, "the disk quota is used up; raise it or free some space"),
        (errno.EROFS, "the file system is read-only; remount it writable"),
        (errno.EACCES, "permission was denied; run as root and check the directory's mode"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("place", ["os.open", "os.fsync", "os.fchmod", "pathlib.Path.replace"])
def test_error_names_file_and_remedy_and_old_content_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, remedy: str
) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")
    monkeypatch.setattr(place, fail(code))
    with pytest.raises(StateError) as caught:
        write_atomically(file, b"new")
    monkeypatch.undo()
    assert str(caught.value) == f"cannot write {file}: {remedy}"
    assert (names(tmp_path), file.read_bytes()) == (["a"], b"old")


def test_error_is_ours_when_even_the_clean_up_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(errno.EROFS))
    monkeypatch.setattr(Path, "unlink", fail(errno.EROFS))
    with pytest.raises(StateError, match="the file system is read-only; remount it writable"):
        write_atomically(tmp_path / "a", b"new")


@pytest.mark.parametrize("place", ["os.fsync", "os.fchmod", "pathlib.Path.replace"])
def test_old_content_stays_when_the_process_dies_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"old")
    monkeypatch.setattr(place, die)
    with pytest.raises(Crash):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"


def test_directory_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "gone" / "a"
    with pytest.raises(StateError) as caught:
        write_atomically(file, b"x")
    assert (
        str(caught.value)
        == f"cannot write {file}: the directory does not exist; create it or check the mount"
    )


def test_file_of_a_killed_writer_is_cleared_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".other").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(Crash):
            write_atomically(tmp_path / "a", b"x")
    assert len(names(tmp_path)) == 2
    clear_abandoned(tmp_path)
    assert names(tmp_path) == [".other"]
    clear_abandoned(tmp_path / "none")


@pytest.mark.parametrize("place", ["os.write", "os.fsync", "pathlib.Path.replace"])
def test_file_that_is_being_written_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name = (os, place[3:]) if place.startswith("os.") else (Path, "replace")
    real = getattr(owner, name)

    def meanwhile(*args: object) -> object:
        clear_abandoned(tmp_path)
        return real(*args)

    monkeypatch.setattr(owner, name, meanwhile)
    write_atomically(tmp_path / "a", b"x")
    assert names(tmp_path) == ["a"]


def test_file_that_is_cleared_before_its_lock_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.open, []

    def meanwhile(path: Path, flags: int, *rest: int) -> int:
        descriptor = real(path, flags, *rest)
        if flags & os.O_CREAT:
            opened.append(path)
            if len(opened) == 1:
                clear_abandoned(tmp_path)
        return descriptor

    monkeypatch.setattr(os, "open", meanwhile)
    write_atomically(tmp_path / "a", b"x")
    assert (names(tmp_path), len(opened)) == (["a"], 2)


def test_directory_is_created_with_its_parents_and_once_more(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    make_directory(path, 0o700)
    make_directory(path, 0o700)
    assert path.stat().st_mode & 0o777 == 0o700


@tabled("below", "remedy")
def test_directory_cannot_be_created_when_a_file_is_in_the_way(
    tmp_path: Path, below: str, remedy: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError) as caught:
        make_directory(tmp_path / below, 0o700)
    assert str(caught.value) == f"cannot create the directory {tmp_path / below}: {remedy}"
