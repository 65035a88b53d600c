"""The problems of a node as events, notes, JSON and a file."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.atomic import remove_file, sync_removals, write_atomically
from dra_driver.base.file_lock import UseMark
from dra_driver.base.threads import BoundedCall
from dra_driver.errors import StateError
from dra_driver.journal.locks import GpuLocks
from dra_driver.model.claim import ClaimRef
from dra_driver.model.maintenance import Maintenance, overdue_problems
from dra_driver.model.problems import NodeProblem
from dra_driver.reporting import node_problems
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.node_problems import DiskWatch, NodeProblems, decode, read_problems
from tests.fakes.waiting import PATIENCE_S, eventually

FOREIGN = NodeProblem("foreign-driver", "another driver listens on /a.sock; remove it", "/a.sock")
UNKNOWN = [
    NodeProblem("health-unknown", f"GPU gpu-{number} is silent", f"gpu-{number}") for number in range(3)
]


class Bench:
    """A node whose only source returns `found`."""

    def __init__(self, directory: Path) -> None:
        self.found: Sequence[NodeProblem] = []
        self.error: Exception | None = None
        self.events: list[tuple[str, str, bool]] = []
        self.now, self.has_pool = 1000.0, True
        self.directory = directory
        self.failing = FailingClaims(
            ("", ""),
            lambda ref, timeout_s: None,
            lambda ref, seconds: None,
            lambda uid: None,
            clock=lambda: self.now,
        )
        self.made = NodeProblems(
            {"the node": self._source, "failing claims": self.failing.problems},
            self.failing,
            self,
            directory,
            lambda: self.has_pool,
            clock=lambda: self.now,
        )
        self.made.restore()

    def _source(self) -> Sequence[NodeProblem]:
        if self.error is not None:
            raise self.error
        return self.found

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((reason, message, warning))

    def claim_event(self, ref: ClaimRef, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((f"{reason} of {ref.name}", message, warning))

    def turn(self, *found: NodeProblem, after_s: float = 2.0) -> list[tuple[str, str, bool]]:
        """The events of one check, `after_s` seconds after the last."""
        self.found, self.events = found, []
        self.now += after_s
        self.made.turn()
        self.made._writing.result(PATIENCE_S)
        return self.events

    def file(self) -> list[NodeProblem]:
        return list(read_problems(self.directory)[1].problems)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_problem_that_lasts_has_one_event_and_one_at_its_end(bench: Bench) -> None:
    assert bench.turn(FOREIGN) == [("ForeignDriver", FOREIGN.text, True)]
    assert bench.turn(FOREIGN) == []
    assert bench.turn() == [("ForeignDriverGone", "No other driver uses this plugin's name", False)]
    assert bench.turn() == []


def test_problem_with_another_subject_has_an_event_that_names_all(bench: Bench) -> None:
    assert bench.turn(UNKNOWN[0]) == [("GPUHealthUnknown", "GPU gpu-0 is silent", True)]
    text = "GPU gpu-0 is silent; GPU gpu-1 is silent"
    assert bench.turn(*UNKNOWN[:2]) == [("GPUHealthUnknown", text, True)]
    assert bench.turn(UNKNOWN[1]) == []
    assert bench.turn() == [("GPUHealthKnown", "The health of all GPUs is known again", False)]


def test_problem_of_a_claim_has_an_event_on_the_claim_once(bench: Bench) -> None:
    found = [
        Maintenance(ClaimRef("ops", name, f"uid-{name}"), ("GPU-1", "GPU-2"), state, "20:05")
        for name, state in (("reset", "overdue"), ("flash", "active"))
    ]
    [problem] = overdue_problems(found)
    text = (
        "Maintenance claim ops/reset is overdue since 20:05: NVML is open again, but its GPUs "
        "(GPU-1, GPU-2) stay withdrawn until the claim ends; delete its pod"
    )
    assert bench.turn(problem) == [
        ("MaintenanceOverdue", text, True),
        ("MaintenanceOverdue of reset", text, True),
    ]
    assert bench.turn(problem) == []
    assert bench.turn() == [("MaintenanceEnded", "No GPU maintenance is overdue", False)]


def test_problem_of_claims_alone_has_an_event_on_each_claim_once(bench: Bench) -> None:
    def waiting(*names: str) -> NodeProblem:
        refs = tuple(ClaimRef("team", name, f"uid-{name}") for name in names)
        return NodeProblem("mps-users-wait", "users 0, 1 wait", "gpu-0", refs)

    assert bench.turn(waiting("a")) == [("MpsUsersWait of a", "users 0, 1 wait", True)]
    assert bench.turn(waiting("a", "b")) == [("MpsUsersWait of b", "users 0, 1 wait", True)]
    assert bench.turn(waiting("b")) == []
    assert bench.turn(waiting("a", "b")) == [("MpsUsersWait of a", "users 0, 1 wait", True)]
    assert bench.turn() == []


def test_gpus_that_go_and_come_back_have_events_and_a_first_driver_has_none(bench: Bench) -> None:
    absent = "the NVIDIA driver is not loaded"
    assert bench.turn(NodeProblem("waiting-for-driver", absent)) == []
    assert bench.made.notes() == [absent]
    assert bench.turn() == []
    assert bench.turn(NodeProblem("gpus-unavailable", absent)) == [("DriverUnavailable", absent, True)]
    assert [reason for reason, *_ in bench.turn()] == ["DriverAvailable"]


def test_long_list_of_problems_fits_into_an_event(bench: Bench) -> None:
    many = [NodeProblem("health-unknown", "x" * 300, str(number)) for number in range(8)]
    [(_, text, _)] = bench.turn(*many)
    assert (len(text), text[-3:]) == (1000, "...")


def test_problem_lasts_while_its_check_fails(bench: Bench) -> None:
    bench.turn(FOREIGN)
    bench.error = StateError("cannot read /x: Input/output error")
    assert bench.turn() == [], "nothing shows that the other driver is gone"
    assert bench.made.codes() == ["check-failed", "foreign-driver"]
    assert bench.made.notes()[0] == "The check of the node failed: cannot read /x: Input/output error"
    bench.error = None
    assert [reason for reason, *_ in bench.turn()] == ["ForeignDriverGone"]


def test_check_with_a_mistake_of_ours_does_not_hide_the_other_problems(bench: Bench) -> None:
    def broken() -> Sequence[NodeProblem]:
        raise KeyError("surprise")

    bench.made._checks.sources = {"it": broken, **bench.made.sources}
    bench.turn(FOREIGN)
    assert bench.made.codes() == ["check-failed", "foreign-driver"]


def test_check_that_hangs_is_its_own_problem_and_stops_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_problems, "_ANSWER_S", 0.05)
    gate, reached, calls = threading.Event(), threading.Event(), itertools.count()

    def hanging() -> Sequence[NodeProblem]:
        if next(calls):
            reached.set()
            gate.wait(PATIENCE_S)
        return UNKNOWN[:1]

    class Begun(BoundedCall[None]):
        """Its time begins when it hangs or has ended."""

        def start(self) -> None:
            super().start()
            eventually(lambda: reached.is_set() or not self.is_running)

    monkeypatch.setattr(node_problems, "BoundedCall", Begun)
    bench.made._checks.sources = {"it": hanging, **bench.made.sources}
    assert [reason for reason, *_ in bench.turn()] == ["GPUHealthUnknown"]
    assert bench.turn() == [], "nothing shows that its problem has ended"
    reached.clear()
    assert bench.turn(FOREIGN) == [("ForeignDriver", FOREIGN.text, True)]
    assert bench.made.notes() == [
        "The check of it failed: it has not returned for more than 0.05 s",
        UNKNOWN[0].text,
        FOREIGN.text,
    ]
    assert next(calls) == 2, "it is not called again while it hangs"
    gate.set()
    eventually(lambda: bench.turn() is not None and bench.made.codes() == ["health-unknown"])


def test_file_and_page_have_each_problem_with_its_beginning(bench: Bench) -> None:
    bench.turn(FOREIGN)
    bench.turn(FOREIGN, *UNKNOWN[:1])
    shown = [replace(FOREIGN, since=1002), replace(UNKNOWN[0], since=1004)]
    assert bench.file() == list(decode(bench.made.as_json()).problems) == shown


def test_file_follows_a_changed_sentence_once_a_minute(bench: Bench) -> None:
    def counted(seconds: int) -> NodeProblem:
        return NodeProblem("health-unknown", f"silent for {seconds} s", "gpu-0")

    bench.turn(counted(30))
    bench.turn(counted(32))
    assert [replace(one, since=0) for one in bench.file()] == [counted(30)]
    bench.turn(counted(92), after_s=60)
    assert [replace(one, since=0) for one in bench.file()] == [counted(92)]


def test_file_goes_when_nothing_is_wrong(bench: Bench) -> None:
    bench.turn()
    assert not list(bench.directory.glob("problems*"))
    bench.turn(FOREIGN)
    Bench(bench.directory).turn()
    assert not list(bench.directory.glob("problems*"))


def test_reader_knows_whether_a_process_runs(bench: Bench) -> None:
    assert not UseMark(bench.directory / "worker.lock").is_held()
    bench.made.start()
    assert read_problems(bench.directory)[0]
    bench.made.stop()
    assert not read_problems(bench.directory)[0]


def test_problems_are_reported_while_the_disk_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = node_problems.write_atomically

    def hanging(*given: Any, **named: Any) -> None:
        gate.wait(PATIENCE_S)
        write(*given, **named)

    monkeypatch.setattr(node_problems, "write_atomically", hanging)
    bench.found = [FOREIGN]
    bench.made.turn()
    bench.found = [FOREIGN, *UNKNOWN[:1]]
    bench.made.turn()
    assert [reason for reason, *_ in bench.events] == ["ForeignDriver", "GPUHealthUnknown"]
    gate.set()
    bench.made._writing.result(PATIENCE_S)
    bench.made.turn()
    eventually(lambda: len(bench.file()) == 2)


def test_full_disk_costs_the_file_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise StateError(f"cannot write {path}: {errno.ENOSPC}")

    with monkeypatch.context() as patched:
        patched.setattr(node_problems, "write_atomically", full)
        assert [reason for reason, *_ in bench.turn(FOREIGN)] == ["ForeignDriver"]
        assert bench.file() == []
    bench.turn(FOREIGN)
    assert bench.file() == [replace(FOREIGN, since=1002)]


def test_failing_claims_are_kept_over_a_restart(bench: Bench) -> None:
    ref, other = ClaimRef("team", "train", "uid-1"), ClaimRef("team", "serve", "uid-2")
    bench.failing.failed("prepare", ref, "no such device")
    bench.turn()
    assert bench.made.codes() == [], "one failure may be mended by the next try"
    [kept] = read_problems(bench.directory)[1].failing
    assert (kept.ref, kept.count, kept.error) == (ref, 1, "no such device")
    later = Bench(bench.directory)
    later.failing.failed("prepare", other, "busy")
    later.turn(after_s=20)
    assert [one.ref for one in later.failing.all()] == [ref, other]
    assert later.made.notes() == [
        "Claim team/train cannot be prepared (1 try failed): no such device",
        "Claim team/serve cannot be prepared (1 try failed): busy",
    ]
    later.failing.succeeded(ref)
    later.failing.succeeded(other)
    later.turn()
    assert not list(bench.directory.glob("problems*"))


def test_problem_of_the_pool_lasts_over_a_restart_until_the_next_pool(bench: Bench) -> None:
    outdated = NodeProblem("scheduler-outdated", "the scheduler is old; upgrade it")
    bench.turn(outdated, FOREIGN)
    for is_still_old in (True, False):
        later = Bench(bench.directory)
        later.now, later.has_pool = 2000.0, False
        assert later.turn() == []
        assert later.file() == list(later.made.current()) == [replace(outdated, since=1002)]
        later.has_pool = True
        if is_still_old:
            assert later.turn(outdated) == []
            assert later.file() == [replace(outdated, since=1002)]
    text = "No shared device of this node needs a newer scheduler"
    assert later.turn() == [("SchedulerFits", text, False)]
    assert later.turn(outdated, after_s=100) == [("SchedulerOutdated", outdated.text, True)]
    assert later.file() == [replace(outdated, since=2104)]


def test_file_that_cannot_be_read_is_an_error(bench: Bench) -> None:
    (bench.directory / "problems.json").write_text('{"version": 1, "problems": 7}')
    with pytest.raises(StateError, match="list of problems"):
        read_problems(bench.directory)


@pytest.fixture
def watch(tmp_path: Path) -> DiskWatch:
    (tmp_path / "claims").mkdir()
    return DiskWatch(tmp_path)


def looked(watch: DiskWatch) -> Sequence[NodeProblem]:
    watch.look()
    return watch.problems()


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


def test_disk_at_rest_is_not_a_problem_and_nothing_is_written(watch: DiskWatch, tmp_path: Path) -> None:
    assert looked(watch) == []
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
    assert str(probe) in looked(watch)[0].text
    assert [found.code for found in watch.problems()] == ["disk-not-writable"], "the probe failed too"
    disk.number = None
    assert looked(watch) == []
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
    assert looked(watch) == []


def test_lock_file_that_opens_does_not_end_the_problem_of_a_full_disk(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch)
    refused(tmp_path / "a")
    lock(tmp_path)
    assert [problem.code for problem in watch.problems()] == ["disk-not-writable"]


def test_write_of_the_plugin_ends_the_problem_without_a_probe(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
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


def test_directory_that_is_gone_is_not_a_problem(watch: DiskWatch, tmp_path: Path) -> None:
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
        assert looked(watch) == [NodeProblem("disk-not-writable", text, str(tmp_path))]
    monkeypatch.setattr(os, "statvfs", lambda _path: type(really)([0] * 10))
    assert looked(watch) == []  # a file system that reports no sizes


def test_file_system_that_became_read_only_is_a_problem_before_anything_is_written(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Prepare fails at its lock then, so that no write of the plugin fails."""
    text = f"The plugin cannot write in {tmp_path}: the file system is read-only; remount it writable"
    found = list(os.statvfs(tmp_path))
    flags = found[8]
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(found))
    found[8] = flags | os.ST_RDONLY
    assert looked(watch) == [NodeProblem("disk-not-writable", text, str(tmp_path))]
    found[8] = flags
    assert looked(watch) == []


def test_fault_of_one_file_is_not_a_problem_of_the_disk(watch: DiskWatch, tmp_path: Path) -> None:
    (tmp_path / "claims/uid-1.json/in-the-way").mkdir(parents=True)
    refused(tmp_path / "claims/uid-1.json")
    assert watch.problems() == []


def test_write_that_does_not_return_is_a_problem_and_holds_up_nothing(
    watch: DiskWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_problems, "_HANGS_AFTER_S", 0.0)
    gate, really = threading.Event(), os.write

    def hanging(descriptor: int, data: Any) -> int:
        gate.wait(PATIENCE_S)
        return really(descriptor, data)

    monkeypatch.setattr(os, "write", hanging)
    thread = threading.Thread(target=write_atomically, args=(tmp_path / "claims/a", b"x"))
    thread.start()
    eventually(lambda: any("has not returned" in problem.text for problem in watch.problems()))
    gate.set()
    thread.join(PATIENCE_S)
    assert watch.problems() == []
