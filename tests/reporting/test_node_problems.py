"""The problems of a node as events, notes, JSON and a file."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.file_lock import UseMark
from dra_driver.errors import StateError
from dra_driver.model.claim import ClaimRef
from dra_driver.model.problems import NodeProblem, ShownProblem
from dra_driver.reporting import node_problems
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.node_problems import NodeProblems, decode, read_problems
from tests.fakes.waiting import eventually

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
        self.now, self.is_ours = 1000.0, True
        self.directory = directory
        self.failing = FailingClaims(
            ("", ""),
            lambda ref, timeout_s: None,
            lambda ref, seconds: None,
            lambda uid: None,
            clock=lambda: self.now,
        )
        self.made = NodeProblems(
            (self._source,), self.failing, self, lambda: self.is_ours, directory, clock=lambda: self.now
        )

    def _source(self) -> Sequence[NodeProblem]:
        if self.error is not None:
            raise self.error
        return self.found

    def node_event(self, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((reason, message, warning))

    def turn(self, *found: NodeProblem, after_s: float = 2.0) -> list[tuple[str, str, bool]]:
        """The events of one look, `after_s` seconds after the last."""
        self.found, self.events = found, []
        self.now += after_s
        self.made.turn()
        self.made._writing.answer(20)
        return self.events

    def file(self) -> list[ShownProblem]:
        return list(read_problems(self.directory)[1].problems)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_problem_that_lasts_has_one_event_and_one_at_its_end(bench: Bench) -> None:
    assert bench.turn(FOREIGN) == [("ForeignDriver", FOREIGN.text, True)]
    assert bench.turn(FOREIGN) == []
    assert bench.turn() == [("ForeignDriverGone", "No other driver uses this plugin's name any more", False)]
    assert bench.turn() == []


def test_problem_with_another_subject_has_an_event_that_names_all(bench: Bench) -> None:
    assert bench.turn(UNKNOWN[0]) == [("GPUHealthUnknown", "GPU gpu-0 is silent", True)]
    text = "GPU gpu-0 is silent; GPU gpu-1 is silent"
    assert bench.turn(*UNKNOWN[:2]) == [("GPUHealthUnknown", text, True)]
    assert bench.turn(UNKNOWN[1]) == []
    assert bench.turn() == [("GPUHealthKnown", "The health of all GPUs is known again", False)]


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


def test_problem_is_reported_when_this_instance_begins_to_speak_for_the_node(bench: Bench) -> None:
    bench.is_ours = False
    assert bench.turn(FOREIGN) == []
    assert bench.file() == []
    assert bench.made.notes() == [FOREIGN.text]
    bench.is_ours = True
    assert [reason for reason, *_ in bench.turn(FOREIGN)] == ["ForeignDriver"]
    assert bench.file() == [ShownProblem(FOREIGN, 1002)]


def test_check_that_fails_is_a_problem_of_its_own(bench: Bench) -> None:
    bench.error = StateError("cannot read /x: Input/output error")
    bench.turn()
    assert bench.made.codes() == ["check-failed"]
    assert bench.made.notes() == ["A check of this node failed: cannot read /x: Input/output error"]


def test_problem_lasts_while_its_check_fails(bench: Bench) -> None:
    bench.turn(FOREIGN)
    bench.error = StateError("cannot read /x: Input/output error")
    assert bench.turn() == [], "nothing shows that the other driver is gone"
    assert bench.made.codes() == ["check-failed", "foreign-driver"]
    bench.error = None
    assert [reason for reason, *_ in bench.turn()] == ["ForeignDriverGone"]


def test_check_with_a_mistake_of_ours_does_not_hide_the_other_problems(bench: Bench) -> None:
    def broken() -> Sequence[NodeProblem]:
        raise KeyError("surprise")

    bench.made.sources = (broken, *bench.made.sources)
    bench.found = [FOREIGN]
    assert bench.made.codes() == ["check-failed", "foreign-driver"]


def test_file_and_page_have_each_problem_with_its_beginning(bench: Bench) -> None:
    bench.turn(FOREIGN)
    bench.turn(FOREIGN, *UNKNOWN[:1])
    shown = [ShownProblem(FOREIGN, 1002), ShownProblem(UNKNOWN[0], 1004)]
    assert bench.file() == list(decode(bench.made.as_json()).problems) == shown


def test_file_follows_a_changed_sentence_once_a_minute(bench: Bench) -> None:
    def counted(seconds: int) -> NodeProblem:
        return NodeProblem("health-unknown", f"silent for {seconds} s", "gpu-0")

    bench.turn(counted(30))
    bench.turn(counted(32))
    assert [one.problem for one in bench.file()] == [counted(30)]
    bench.turn(counted(92), after_s=60)
    assert [one.problem for one in bench.file()] == [counted(92)]


def test_file_goes_when_nothing_is_wrong(bench: Bench) -> None:
    bench.turn()
    assert not list(bench.directory.glob("problems*"))
    bench.turn(FOREIGN)
    bench.turn()
    assert not list(bench.directory.glob("problems*"))


def test_file_of_an_earlier_process_goes_when_nothing_is_wrong(bench: Bench) -> None:
    bench.turn(FOREIGN)
    later = Bench(bench.directory)
    later.turn()
    assert later.file() == []


def test_reader_knows_whether_a_process_runs(bench: Bench) -> None:
    assert not UseMark(bench.directory / "running.lock").is_held()
    bench.made.start()
    assert read_problems(bench.directory)[0]
    bench.made.stop()
    assert not read_problems(bench.directory)[0]


def test_problems_are_reported_while_the_disk_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = node_problems.write_atomically

    def hanging(*given: Any, **named: Any) -> None:
        gate.wait(60)
        write(*given, **named)

    monkeypatch.setattr(node_problems, "write_atomically", hanging)
    bench.found = [FOREIGN]
    bench.made.turn()
    bench.found = [FOREIGN, *UNKNOWN[:1]]
    bench.made.turn()
    assert [reason for reason, *_ in bench.events] == ["ForeignDriver", "GPUHealthUnknown"]
    gate.set()
    bench.made._writing.answer(20)
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
    assert bench.file() == [ShownProblem(FOREIGN, 1002)]


def test_failing_claims_are_kept_over_a_restart_and_while_another_instance_speaks(bench: Bench) -> None:
    ref, other = ClaimRef("team", "train", "uid-1"), ClaimRef("team", "serve", "uid-2")
    bench.failing.failed("prepare", ref, "no such device")
    bench.turn()
    assert bench.made.codes() == [], "one failure may be mended by the next try"
    [kept] = read_problems(bench.directory)[1].failing
    assert (kept.ref, kept.count, kept.error) == (ref, 1, "no such device")
    later = Bench(bench.directory)
    later.is_ours = False
    later.failing.failed("prepare", other, "busy")
    later.turn()
    assert [one.ref for one in later.failing.all()] == [other]
    later.is_ours = True
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


def test_file_that_cannot_be_read_is_an_error(bench: Bench) -> None:
    (bench.directory / "problems.json").write_text('{"version": 1, "problems": 7}')
    with pytest.raises(StateError, match="list of problems"):
        read_problems(bench.directory)
