"""Whether the disk takes files, by what was written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.atomic import remove_file, sync_removals, write_atomically
from dra_driver.errors import StateError
from dra_driver.journal.locks import GpuLocks
from dra_driver.model.problems import NodeProblem
from dra_driver.reporting import node_problems
from dra_driver.reporting.node_problems import DiskWatch
from tests.fakes.waiting import eventually


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskWatch:
    monkeypatch.setattr(node_problems, "_PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(node_problems, "_SIZES_EVERY_S", 0.0)
    (tmp_path / "claims").mkdir()
    return DiskWatch([tmp_path], write_atomically)


class FullDisk:
    """Writes fail while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
        self.number: int | None = number
        really = os.write

        def write(descriptor: int, data: Any) -> int:
            if self.number is not None:
                raise OSError(self.number, os.strerror(self.number))
            return really(descriptor, data)

        monkeypatch.setattr(os, "write", write)


def refused(path: Path) -> str:
    with pytest.raises(StateError) as caught:
        write_atomically(path, b"x")
    return str(caught.value)


def test_disk_at_rest_is_no_problem_and_nothing_is_written(watch: DiskWatch, tmp_path: Path) -> None:
    assert watch.problems() == []
    assert [path.name for path in tmp_path.rglob("*")] == ["claims"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "the disk is full; free some space"),
        (errno.EROFS, "the file system is read-only; remount it writable"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_failed_write_is_a_problem_until_a_write_succeeds(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    disk, file = FullDisk(monkeypatch, number), tmp_path / "claims/uid-1.json"
    assert refused(file) == f"cannot write {file}: {remedy}"
    [problem] = watch.problems()
    assert problem.subject == str(tmp_path)
    assert problem.code == "disk-not-writable"
    assert problem.text.startswith("The plugin cannot write ")
    assert problem.text.endswith(remedy)
    probe = tmp_path / "claims/.write-probe"
    eventually(lambda: str(probe) in watch.problems()[0].text)
    assert [found.code for found in watch.problems()] == ["disk-not-writable"], "the probe failed too"
    disk.number = None
    eventually(lambda: watch.problems() == [])
    assert not list((tmp_path / "claims").iterdir())


def lock(directory: Path) -> None:
    """As each Prepare and Unprepare does."""
    with GpuLocks(directory).hold(["GPU-1"], 1.0):
        pass


@pytest.mark.parametrize(
    ("function", "action", "what"),
    [
        ("open", lock, "open the lock file"),
        ("unlink", lambda directory: remove_file(directory / "uid-1.json"), "remove"),
        ("fsync", sync_removals, "sync"),
    ],
)
def test_disk_on_which_an_operation_before_or_after_a_write_fails_is_a_problem(
    watch: DiskWatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    action: Callable[[Path], object],
    what: str,
) -> None:
    def fails(*_arguments: Any, **_named: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, function, fails)
        with pytest.raises(StateError, match=what) as caught:
            action(tmp_path)
        assert [problem.text for problem in watch.problems()] == [f"The plugin {caught.value}"]
    eventually(lambda: watch.problems() == [])


def test_lock_file_that_opens_does_not_end_the_problem_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = DiskWatch([tmp_path], write_atomically)
    FullDisk(monkeypatch)
    refused(tmp_path / "a")
    lock(tmp_path)
    assert [problem.code for problem in watch.problems()] == ["disk-not-writable"]


def test_write_of_the_plugin_ends_the_problem_without_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, disk = DiskWatch([tmp_path], write_atomically), FullDisk(monkeypatch)
    refused(tmp_path / "a")
    disk.number = None
    write_atomically(tmp_path / "a", b"x")
    assert watch.problems() == []


def test_failure_elsewhere_is_not_a_problem_of_this_directory(
    watch: DiskWatch, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    FullDisk(monkeypatch)
    refused(other / "a")
    assert watch.problems() == []


def test_directory_that_is_gone_is_no_problem(watch: DiskWatch, tmp_path: Path) -> None:
    assert "the directory does not exist" in refused(tmp_path / "gone/a")
    assert watch.problems() == []


def test_disk_without_free_blocks_or_inodes_is_a_problem_before_anything_is_written(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"The plugin cannot write in {tmp_path}: the disk is full; free some space"
    really = os.statvfs(tmp_path)
    for field in (3, 6):  # free blocks, free inodes
        found = [100] * 10
        found[field] = 0
        monkeypatch.setattr(os, "statvfs", lambda _path, found=found: type(really)(found))
        eventually(lambda: watch.problems() == [NodeProblem("disk-not-writable", text, str(tmp_path))])
    monkeypatch.setattr(os, "statvfs", lambda _path: type(really)([0] * 10))
    eventually(lambda: watch.problems() == [])  # a file system that tells no sizes


def test_file_system_that_became_read_only_is_a_problem_before_anything_is_written(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Prepare fails at its lock then, so that no write of the plugin fails."""
    text = f"The plugin cannot write in {tmp_path}: the file system is read-only; remount it writable"
    found = list(os.statvfs(tmp_path))
    flags = found[8]
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(found))
    found[8] = flags | os.ST_RDONLY
    eventually(lambda: watch.problems() == [NodeProblem("disk-not-writable", text, str(tmp_path))])
    found[8] = flags
    eventually(lambda: watch.problems() == [])


def test_disk_whose_size_cannot_be_had_holds_up_nothing(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = threading.Event(), []
    monkeypatch.setattr(os, "statvfs", lambda path: (asked.append(path), gate.wait(60)))
    for _ in range(3):
        assert watch.problems() == []
    eventually(lambda: asked == [tmp_path])
    gate.set()


def test_fault_of_one_file_is_no_problem_of_the_disk(watch: DiskWatch, tmp_path: Path) -> None:
    (tmp_path / "claims/uid-1.json/in-the-way").mkdir(parents=True)
    refused(tmp_path / "claims/uid-1.json")
    assert watch.problems() == []


def test_write_that_does_not_return_is_a_problem_and_holds_up_nothing(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_problems, "_HANGS_AFTER_S", 0.0)
    gate, really = threading.Event(), os.write

    def hanging(descriptor: int, data: Any) -> int:
        gate.wait(60)
        return really(descriptor, data)

    monkeypatch.setattr(os, "write", hanging)
    thread = threading.Thread(target=write_atomically, args=(tmp_path / "claims/a", b"x"))
    thread.start()
    eventually(lambda: any("has not returned" in problem.text for problem in watch.problems()))
    gate.set()
    thread.join(20)
    assert watch.problems() == []
