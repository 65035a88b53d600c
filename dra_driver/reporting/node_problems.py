"""The problems of this node: collected from the parts that have them, and shown wherever people look.

Every two seconds a thread calls the sources. What they return is the state: a problem begins when a source returns it
and ends when no source does. Each change is logged and becomes an event on the node. The readiness notes, the metric
`nvidia_dra_problems`, the page `/problems` and the file `problems.json`, which `top` reads, show the state itself.

`running.lock` is held as long as this process lives, so that a reader knows whether anyone keeps the file up to date.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import structlog

from dra_driver.base.atomic import remove_file, write_atomically
from dra_driver.base.file_lock import UseMark
from dra_driver.base.threads import BackgroundWorker, BoundedCall
from dra_driver.errors import DraDriverError, StateError
from dra_driver.model.problems import (
    DISK_NOT_WRITABLE,
    DISK_WRITABLE,
    DRIVER_AVAILABLE,
    DRIVER_FILES_FOUND,
    DRIVER_FILES_MISSING,
    DRIVER_UNAVAILABLE,
    FOREIGN_DRIVER,
    FOREIGN_DRIVER_GONE,
    GPU_HEALTH_KNOWN,
    GPU_HEALTH_UNKNOWN,
    MPS_DAEMON_FAILED,
    MPS_DAEMONS_WORK,
    MPS_HOST_MISSING,
    MPS_HOST_RUNS,
    PASSTHROUGH_AVAILABLE,
    PASSTHROUGH_UNAVAILABLE,
    PLUGIN_NOT_REGISTERED,
    PLUGIN_REGISTERED,
    SLICES_NOT_PUBLISHED,
    SLICES_PUBLISHED,
    NodeProblem,
    ProblemCode,
    ShownProblem,
)
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.failing_claims import FailingClaims
from dra_driver.reporting.problems_file import (
    PROBLEMS_FILE,
    RUNNING_LOCK,
    Reported,
    encode,
    read_problems,
)

_log = structlog.get_logger(__name__)

ProblemSource = Callable[[], Sequence[NodeProblem]]

_TURN_S = 2.0
_WRITE_AGAIN_S = 60.0
"""A sentence that counts seconds changes with every look; the file follows once a minute."""
_LONGEST_EVENT = 1000
"""The API server takes messages of 1,024 bytes."""

_EVENTS: Mapping[ProblemCode, tuple[str, str, str]] = {
    "disk-not-writable": (DISK_NOT_WRITABLE, DISK_WRITABLE, "The plugin can write its files again"),
    "driver-files-missing": (
        DRIVER_FILES_MISSING,
        DRIVER_FILES_FOUND,
        "The files of the NVIDIA driver are complete again",
    ),
    "foreign-driver": (
        FOREIGN_DRIVER,
        FOREIGN_DRIVER_GONE,
        "No other driver uses this plugin's name any more",
    ),
    "gpus-unavailable": (DRIVER_UNAVAILABLE, DRIVER_AVAILABLE, "The node's GPUs can be used again"),
    "health-unknown": (GPU_HEALTH_UNKNOWN, GPU_HEALTH_KNOWN, "The health of all GPUs is known again"),
    "mps-daemon-failed": (MPS_DAEMON_FAILED, MPS_DAEMONS_WORK, "The MPS daemons of this node work again"),
    "mps-host-missing": (MPS_HOST_MISSING, MPS_HOST_RUNS, "The MPS host is running again"),
    "not-registered": (PLUGIN_NOT_REGISTERED, PLUGIN_REGISTERED, "The kubelet has registered the plugin"),
    "passthrough-unavailable": (
        PASSTHROUGH_UNAVAILABLE,
        PASSTHROUGH_AVAILABLE,
        "GPUs can be given to virtual machines again",
    ),
    "slices-not-published": (SLICES_NOT_PUBLISHED, SLICES_PUBLISHED, "The node's slices are published again"),
}
"""The events at the beginning and at the end of a problem, and the text at the end. Other problems have no event here:
claims and GPUs have their own (`PrepareFailed`, `GPUUnhealthy`), a node that waits for its first NVIDIA driver is in no
trouble, and a check that fails is seen in the notes."""


@dataclass(eq=False)
class NodeProblems(BackgroundWorker):
    """Collects the problems of the node.

    The claims that are `failing` are one of the sources, and are kept in the file over a restart. A source returns what
    is wrong now. It must not block, and may be called from any thread. While `speaks_for_node`
    returns False, another instance of the plugin writes events and file.
    """

    sources: Sequence[ProblemSource]
    failing: FailingClaims
    recorder: EventRecorder
    speaks_for_node: Callable[[], bool]
    directory: Path
    _: KW_ONLY
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[tuple[ProblemCode, str], int] = {}
        self._returned: dict[
            int, Sequence[NodeProblem]
        ] = {}  # by each source at the last time, by its number
        self._shown: tuple[ShownProblem, ...] = ()
        self._reported: dict[ProblemCode, frozenset[str]] = {}
        self._written: tuple[Reported, float] | None = None
        self._speaks = False
        self._path = self.directory / PROBLEMS_FILE
        self._mark = UseMark(self.directory / RUNNING_LOCK)
        self._to_write = Reported()
        self._writing = BoundedCall("the file of problems", self._write)
        super().__init__(
            "node-problems", self.turn, crash_event="node_problems_failed", on_crash=lambda _: _TURN_S
        )

    def start(self) -> None:
        """Begin, and show that this process runs."""
        try:
            self._mark.hold()
        except StateError as error:
            _log.warning("running_not_shown", reason=str(error))
        super().start()

    def stop(self) -> bool:
        """End, and stop to show that this process runs."""
        has_ended = super().stop()
        self._mark.let_go()
        return has_ended

    def current(self) -> tuple[ShownProblem, ...]:
        """All problems as of now, in the order of their sources."""
        found = {(problem.code, problem.subject): problem for problem in self._collected()}
        now = int(self.clock())
        with self._lock:
            self._since = {key: self._since.get(key, now) for key in found}
            return tuple(ShownProblem(problem, self._since[key]) for key, problem in found.items())

    def notes(self) -> list[str]:
        """A sentence for each problem."""
        return [shown.problem.text for shown in self.current()]

    def as_json(self) -> bytes:
        """The problems as a JSON document."""
        return encode(Reported(self.current(), self.failing.all()), int(self.clock()))

    def codes(self) -> list[ProblemCode]:
        """The code of each problem; one that several subjects have comes several times."""
        return [shown.problem.code for shown in self.current()]

    def turn(self) -> float:
        """Look once: log and report what has changed. Returns the pause until the next look, in seconds."""
        shown, before = self.current(), self._shown
        self._shown = shown
        self._log_changes(before, shown)
        if self.speaks_for_node():
            self._take_over()
            self._report(shown)
            self._keep(Reported(shown, self.failing.all()))
        else:
            self._speaks = False
            self._reported, self._written = {}, None
        return _TURN_S

    def _collected(self) -> Iterable[NodeProblem]:
        """What the sources return. A source that fails has the problems that it returned before, since they end only on
        evidence, and the failure is another one."""
        for number, source in enumerate((*self.sources, self.failing.problems)):
            try:
                self._returned[number] = source()
            except DraDriverError as error:
                yield NodeProblem("check-failed", f"A check of this node failed: {error}", str(error))
            except Exception as error:  # noqa: BLE001  a mistake of ours must not hide the other problems
                text = "A check of this node failed because of a fault in gpu-dra-driver; see its log"
                yield NodeProblem("check-failed", f"{text}: {error!r}", repr(error))
            yield from self._returned.get(number, ())

    def _log_changes(self, before: Sequence[ShownProblem], now: Sequence[ShownProblem]) -> None:
        known = {_key(shown): shown for shown in before}
        current = {_key(shown) for shown in now}
        for shown in now:
            if _key(shown) not in known:
                problem = shown.problem
                _log.warning(
                    "node_problem", problem=problem.code, subject=problem.subject, reason=problem.text
                )
        for key, shown in known.items():
            if key not in current:
                code, subject = key
                _log.info("node_problem_ended", problem=code, subject=subject, since=shown.since)

    def _report(self, shown: Sequence[ShownProblem]) -> None:
        """Write an event for each code that began, that got another subject, or that ended."""
        by_code: dict[ProblemCode, list[NodeProblem]] = {}
        for entry in shown:
            by_code.setdefault(entry.problem.code, []).append(entry.problem)
        for code, (began, ended, end_text) in _EVENTS.items():
            found, reported = by_code.get(code, []), self._reported.get(code, frozenset())
            subjects = frozenset(problem.subject for problem in found)
            if subjects - reported:
                text = "; ".join(problem.text for problem in found)
                self.recorder.node_event(began, _shortened(text), warning=True)
            elif reported and not subjects:
                self.recorder.node_event(ended, end_text, warning=False)
            self._reported[code] = subjects

    def _take_over(self) -> None:
        """Learn from the file which claims failed with the instance that spoke for the node before."""
        if self._speaks:
            return
        self._speaks = True
        try:
            self.failing.restore(read_problems(self.directory)[1].failing)
        except StateError as error:
            _log.debug("problems_not_read", reason=str(error))

    def _keep(self, reported: Reported) -> None:
        """Bring the file up to date, in another thread: a disk that hangs must not keep problems from being reported.
        That a disk takes no file is a problem of its own source."""
        if self._writing.is_asking or not self._is_due(reported):
            return
        self._to_write = reported
        self._writing.ask()

    def _is_due(self, now: Reported) -> bool:
        if self._written is None:
            return now != Reported() or self._path.exists()
        before, at = self._written
        if before.failing != now.failing or list(map(_key, before.problems)) != list(map(_key, now.problems)):
            return True
        return before != now and self.clock() - at >= _WRITE_AGAIN_S

    def _write(self) -> None:
        reported, now = self._to_write, self.clock()
        self._mark.hold()
        if reported != Reported():
            write_atomically(self._path, encode(reported, int(now)), durable=False, whole=False)
        else:
            remove_file(self._path)
        self._written = (reported, now)


def _key(shown: ShownProblem) -> tuple[ProblemCode, str]:
    return shown.problem.code, shown.problem.subject


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_EVENT else f"{text[: _LONGEST_EVENT - 3]}..."
