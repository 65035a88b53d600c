"""Only the newest living registered instance publishes, however the others ended."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import StateError
from dra_driver.slices import leadership
from dra_driver.slices.leadership import InstanceLeadership, live_instances
from tests.fakes.directories import names

INSTANCE = """
import sys
from pathlib import Path
from dra_driver.slices.leadership import InstanceLeadership
turn = InstanceLeadership(Path(sys.argv[1]), sys.argv[2])
turn.announce()
print("announced", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "publishers"


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., InstanceLeadership]]:
    made: list[InstanceLeadership] = []

    def instance(name: str, *, announced: bool = True) -> InstanceLeadership:
        made.append(InstanceLeadership(directory, name))
        if announced:
            made[-1].announce()
        return made[-1]

    yield instance
    for turn in made:
        turn.withdraw()


Start = Callable[..., InstanceLeadership]


def test_living_instances_are_those_that_hold_a_file(start: Start, directory: Path) -> None:
    assert live_instances(directory) == frozenset()
    start("uid-1")
    ended = start("uid-2")
    start("uid-3", announced=False)
    (directory / f"{7:020d}-uid-4.lock").touch()
    assert live_instances(directory) == {"uid-1", "uid-2"}
    ended.withdraw()
    assert live_instances(directory) == {"uid-1"}
    assert f"{7:020d}-uid-4.lock" in names(directory), "a reader removes nothing"


def test_single_instance_publishes_registered_or_not(start: Start, directory: Path) -> None:
    turn = start("a", announced=False)
    assert turn.is_ours()
    assert not directory.exists(), "asking leaves nothing behind"
    turn.announce()
    turn.announce()
    assert turn.is_ours()
    assert len(names(directory)) == 1


def test_newest_registered_instance_publishes(start: Start) -> None:
    first, second, third = start("c"), start("b"), start("a")
    assert [turn.is_ours() for turn in (first, second, third)] == [False, False, True]
    third.withdraw()
    assert [turn.is_ours() for turn in (first, second)] == [False, True]
    second.withdraw()
    assert first.is_ours()


def test_instance_waits_for_its_registration_while_another_publishes(start: Start) -> None:
    old, new = start("old"), start("new", announced=False)
    assert (old.is_ours(), new.is_ours()) == (True, False)
    new.announce()
    assert (old.is_ours(), new.is_ours()) == (False, True)


def test_start_decides_and_not_the_moment_of_registration(start: Start) -> None:
    """A restarted kubelet registers the sockets in the order of the directory."""
    old, new = start("old", announced=False), start("new")
    old.announce()
    assert (old.is_ours(), new.is_ours()) == (False, True)


def test_name_decides_between_equal_starts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.clock_gettime_ns", lambda _clock: 7)
    one, other = start("a"), start("b")
    assert (one.is_ours(), other.is_ours()) == (False, True)


def test_killed_instance_gives_its_turn_back(start: Start, directory: Path) -> None:
    old = start("old")
    command = [sys.executable, "-c", INSTANCE, str(directory), "new"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"announced\n"
        assert not old.is_ours()
        process.kill()
        process.wait()
    assert old.is_ours()
    assert len(names(directory)) == 1, "the dead instance's file is gone"


def test_files_from_before_a_reboot_do_not_count(start: Start, directory: Path) -> None:
    """The clock starts again at a boot, so they look newer than any living instance."""
    directory.mkdir()
    (directory / f"{'9' * 20}-before.lock").touch()
    (directory / ".x.lock.1.tmp").touch()
    (directory / "README").touch()
    os.mkfifo(directory / f"{'8' * 20}-pipe.lock")
    (directory / f"{'7' * 20}-directory.lock").mkdir()
    turn = start("a", announced=False)
    assert turn.is_ours()
    turn.announce()
    assert turn.is_ours()
    left = [f"{'7' * 20}-directory.lock", "README"]
    assert [name for name in names(directory) if not name.endswith("-a.lock")] == left


def test_file_that_someone_removed_is_made_again(start: Start, directory: Path) -> None:
    old, new = start("old"), start("new")
    for name in names(directory):
        (directory / name).unlink()
    directory.rmdir()
    assert new.is_ours()
    assert not old.is_ours()
    assert len(names(directory)) == 2


def test_name_cannot_leave_the_directory(start: Start, directory: Path) -> None:
    start("../../etc/x")
    [name] = names(directory)
    assert name.endswith("-------etc-x.lock")


def test_withdrawal_is_final_and_leaves_nothing(start: Start, directory: Path) -> None:
    descriptors = len(names(Path("/proc/self/fd")))
    turn = start("a")
    for _ in range(2):
        turn.withdraw()
    turn.announce()
    assert names(directory) == []
    assert len(names(Path("/proc/self/fd"))) == descriptors


def test_asking_keeps_no_descriptor(start: Start) -> None:
    old, new = start("old"), start("new")
    descriptors = len(names(Path("/proc/self/fd")))
    for _ in range(200):
        assert (old.is_ours(), new.is_ours()) == (False, True)
    assert len(names(Path("/proc/self/fd"))) == descriptors


def test_instance_that_cannot_announce_leaves_the_other_alone(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = start("old"), start("new", announced=False)

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = os.link
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StateError, match="the disk is full"):
        new.announce()
    assert (old.is_ours(), new.is_ours()) == (True, False)
    assert len(names(directory)) == 1
    monkeypatch.setattr(os, "link", real)
    assert (new.is_ours(), old.is_ours()) == (True, False)


def test_other_files_are_not_in_the_way(directory: Path) -> None:
    """In the place of one that would come before ours, or of a temporary file."""
    old = InstanceLeadership(directory, "old")
    old.announce()
    later = f"{2**62:020d}"
    (directory / f"{later}-link.lock").symlink_to(f"{later}-link.lock")
    (directory / f"{later}-none.lock").symlink_to("nowhere/at/all")
    (directory / f".{later}-x.lock.1.tmp").symlink_to(".")
    (directory / f"{later}-dir.lock").mkdir()
    os.mkfifo(directory / f"{later}-pipe.lock")
    assert old.is_ours()
    assert [name for name in names(directory) if "dir" not in name and "old" not in name] == []


@pytest.mark.parametrize("is_removable", [True, False])
def test_file_of_a_dead_instance_on_a_bad_block_does_not_stop_the_living(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch, logs: list, is_removable: bool
) -> None:
    turn = start("a")
    dead = directory / f"{'9' * 20}-dead.lock"
    dead.touch()
    opened, unlink = os.open, Path.unlink

    def bad(path: Path, *given: Any) -> int:
        if path == dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *given)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == dead and not is_removable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", bad)
        patch.setattr(Path, "unlink", refuse)
        assert [turn.is_ours() for _ in range(3)] == [True] * 3
        assert dead.exists() != is_removable
    assert [line["event"] for line in logs] == ["instance_file_unreadable"]


def test_file_of_a_living_instance_counts_while_this_process_has_too_many_files_open(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _new = start("old"), start("new")
    with monkeypatch.context() as patch:
        patch.setattr(leadership, "is_locked", full)
        with pytest.raises(StateError):
            old.is_ours()
    assert len(names(directory)) == 2


def full(*_given: object) -> bool:
    error = StateError("too many open files")
    error.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    raise error


def test_unreadable_directory_is_one_sentence(directory: Path) -> None:
    directory.touch()
    with pytest.raises(StateError) as caught:
        InstanceLeadership(directory, "a").is_ours()
    assert str(caught.value).startswith(f"cannot read {directory}: ")


def test_exactly_one_of_many_that_start_and_end_at_once_publishes(directory: Path) -> None:
    """While all instances check and clean up, no living instance is mistaken for dead."""
    turns = [InstanceLeadership(directory, f"i{number}") for number in range(12)]
    stop = threading.Event()

    def watch(turn: InstanceLeadership) -> None:
        while not stop.is_set():
            turn.is_ours()

    with ThreadPoolExecutor(12) as pool:
        watchers = [pool.submit(watch, InstanceLeadership(directory, "watcher")) for _ in range(4)]
        list(pool.map(InstanceLeadership.announce, turns))
        stop.set()
        for watcher in watchers:
            watcher.result()
    assert len(names(directory)) == 12
    assert [turn.is_ours() for turn in turns] == [False] * 11 + [True]
    for turn in turns:
        turn.withdraw()
    assert names(directory) == []
