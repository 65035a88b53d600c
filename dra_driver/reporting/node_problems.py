"""Collects the problems of this node every two seconds, and shows them to users.

The file `problems.json`, which `top` reads, exists only while there are problems or failing claims.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from dra_driver.base.atomic import (
    WRITES,
    read_or_none,
    remove_file,
    state_error,
    write_atomically,
)
from dra_driver.base.fields import NUMBER, TEXT, Codec, FileFormat, list_of, required
from dra_driver.base.file_lock import UseMark
from dra_driver.base.threads import BackgroundWorker, BoundedCall
from dra_driver.errors import DraDriverError, StateError
from dra_driver.model.dataclass import KW_ONLY, dataclass, replace
from dra_driver.model.problems import (
    FOUND_WITH_POOL,
    EventReason,
    FailingClaim,
    NodeProblem,
    ProblemCode,
)
from dra_driver.reporting.event_recorder import EventRecorder
from dra_driver.reporting.failing_claims import FailingClaims

_log = structlog.get_logger(__name__)

_HANGS_AFTER_S = 30.0
_PROBE = bytes(4096)
"""A full disk may still accept an empty file."""


class DiskWatch:
    """Detects that files in `directory` cannot be written, before a claim needs it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._refusal: str | None = None

    def problems(self) -> Sequence[NodeProblem]:
        """Does not block on the disk."""
        text = self._fault()
        return [] if text is None else [NodeProblem("disk-not-writable", text, str(self.directory))]

    def look(self) -> None:
        """Read the state of the disk. Hangs if the disk does.

        After a failed write, write a small file: the problem ends as soon as a write succeeds.
        """
        self._refusal = _refusal(self.directory)
        failed = WRITES.failed_in(self.directory)
        if failed is None:
            return
        where, _ = failed
        if not where.is_dir() and where != self.directory:
            WRITES.forget(where)
            return
        file = where / ".write-probe"
        with suppress(StateError, OSError):  # the outcome is recorded like that of any other write
            write_atomically(file, _PROBE)
            file.unlink()

    def _fault(self) -> str | None:
        hangs_s = WRITES.hanging_in(self.directory)
        if hangs_s is not None and hangs_s > _HANGS_AFTER_S:
            return (
                f"A write in {self.directory} has not returned for {hangs_s:.0f} s, so no claim can be prepared; check "
                "the disk of this directory (`dmesg`), then drain and reboot the node"
            )
        failed = WRITES.failed_in(self.directory)
        refusal = self._refusal if failed is None else failed[1]
        return None if refusal is None else f"The plugin {refusal}"


def _refusal(directory: Path) -> str | None:
    """Return the error that a write would certainly have."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return None
    if disk.f_flag & os.ST_RDONLY:
        return str(state_error("write in", directory, OSError(errno.EROFS, "")))
    if (disk.f_blocks > 0 and disk.f_bfree == 0) or (disk.f_files > 0 and disk.f_ffree == 0):
        return str(state_error("write in", directory, OSError(errno.ENOSPC, "")))
    return None


PROBLEMS_FILE: Final = "problems.json"
WORKER_LOCK: Final = "worker.lock"
"""Each process of the plugin locks byte 0 while it lives: readers then know whether `problems.json` is kept up to date.
`app/handover.py` uses the bytes from 4 on."""


class Reported(NamedTuple):
    problems: tuple[NodeProblem, ...] = ()
    failing: tuple[FailingClaim, ...] = ()


def encode(reported: Reported, at: int) -> bytes:
    """Encode the report as of `at`, in seconds since 1970."""
    return _FILE.write((reported, at))


def decode(content: bytes) -> Reported:
    """Raises: StateError."""
    return _FILE.read(content)[0]


def read_problems(directory: Path) -> tuple[bool, Reported]:
    """Return whether a process of the plugin is running, and the last report. Raises: StateError."""
    runs = UseMark(directory / WORKER_LOCK).is_held()
    content = read_or_none(directory / PROBLEMS_FILE)
    return runs, Reported() if content is None else decode(content)


_PROBLEM = Codec(
    NodeProblem,
    code=required(TEXT, "problem"),
    subject=required(TEXT),
    claims=None,
    since=required(NUMBER),
)
_REPORTED = Codec(
    Reported,
    problems=required(list_of(_PROBLEM.kind)),
    failing=required(list_of(Codec(FailingClaim).kind), "failingClaims"),
)
_FILE: FileFormat[tuple[Reported, int]] = FileFormat(
    "list of problems",
    lambda document: (_REPORTED.decode(document), int(document["at"])),
    lambda report: {"at": report[1], **_REPORTED.encode(report[0])},
)


ProblemSource = Callable[[], Iterable[NodeProblem] | None]
"""Return the current problems. A source that only does something regularly returns None."""

_ANSWER_S = 5.0


class Checks:
    """Calls the sources in turn, in a thread that is left behind if one hangs.

    That source is not called again until it returns.
    """

    def __init__(self, sources: Mapping[str, ProblemSource]) -> None:
        self.sources = sources
        self._found: dict[str, Sequence[NodeProblem]] = {}
        self._faults: dict[str, str] = {}
        self._hanging: dict[str, BoundedCall[None]] = {}
        self._round, self._at = 0, ""

    def problems(self) -> Iterator[NodeProblem]:
        """The earlier problems of a source that fails or hangs remain, because nothing shows that they ended."""
        self._hanging = {name: call for name, call in self._hanging.items() if call.is_running}
        self._round += 1
        call = BoundedCall("the checks", partial(self._call_sources, self._round))
        call.start()
        _, fault = call.result(_ANSWER_S)
        if call.is_running:
            self._hanging[self._at] = call
        elif fault is not None:
            yield NodeProblem("check-failed", f"The checks of this node did not run: {fault}")
        for name in self.sources:
            hangs = f"it has not returned for more than {_ANSWER_S:g} s" if name in self._hanging else None
            problem = hangs or self._faults.get(name)
            if problem is not None:
                yield NodeProblem("check-failed", f"The check of {name} failed: {problem}", name)
            yield from self._found.get(name, ())

    def _call_sources(self, number: int) -> None:
        for name, source in self.sources.items():
            if number != self._round:
                return  # this thread was left behind, and the source has returned now
            if name in self._hanging:
                continue
            self._at = name
            try:
                self._found[name] = tuple(source() or ())
            except DraDriverError as error:
                self._faults[name] = str(error)
            except Exception as error:  # noqa: BLE001  our own bug must not hide the other problems
                text = f"a bug in gpu-dra-driver: {error!r}"
                if self._faults.get(name) != text:
                    _log.exception("check_crashed", check=name)
                self._faults[name] = text
            else:
                self._faults.pop(name, None)


_TURN_S = 2.0
_LAST_WRITE_S = 1.0
_WRITE_AGAIN_S = 60.0
"""Some texts count seconds; such changes are written once a minute."""
_LONGEST_EVENT = 1000
"""The API server accepts messages of up to 1,024 bytes."""

_EVENTS: Mapping[ProblemCode, tuple[EventReason, EventReason, str]] = {
    "cleanup-pending": ("CleanupPending", "CleanupDone", "No cleanup of an ended claim is pending"),
    "device-not-published": ("DeviceNotPublished", "DevicesPublished", "No device exceeds a limit of the API"),
    "disk-not-writable": ("DiskNotWritable", "DiskWritable", "The plugin can write its files again"),
    "driver-files-missing": ("DriverFilesMissing", "DriverFilesFound",
                             "The files of the NVIDIA driver are complete again"),
    "foreign-driver": ("ForeignDriver", "ForeignDriverGone", "No other driver uses this plugin's name"),
    "gpus-unavailable": ("DriverUnavailable", "DriverAvailable", "The node's GPUs can be used again"),
    "health-unknown": ("GPUHealthUnknown", "GPUHealthKnown", "The health of all GPUs is known again"),
    "maintenance-overdue": ("MaintenanceOverdue", "MaintenanceEnded", "No GPU maintenance is overdue"),
    "mps-daemon-failed": ("MpsDaemonFailed", "MpsDaemonsWork", "The MPS daemons of this node work again"),
    "memory-unclaimed": ("MemoryUnclaimed", "MemoryReleased",
                         "No process without a claim uses memory of a GPU"),
    "mps-host-missing": ("MpsHostMissing", "MpsHostRuns", "The MPS host is running again"),
    "newer-files": ("FilesOfNewerRelease", "FilesReadable", "The plugin can read all of its files again"),
    "not-registered": ("PluginNotRegistered", "PluginRegistered", "The kubelet has registered the plugin"),
    "partitions-not-supported": ("PartitionsNotSupported", "PartitionsSupported",
                                 "The API server can count all devices of this node"),
    "passthrough-unavailable": ("PassthroughUnavailable", "PassthroughAvailable",
                                "Virtual machines can use GPUs again"),
    "scheduler-outdated": ("SchedulerOutdated", "SchedulerFits",
                           "No shared device of this node needs a newer scheduler"),
    "setting-changed": ("SettingChanged", "SettingRight", "No program has changed a setting that the plugin set"),
    "setting-lost": ("SettingLost", "SettingRestored", "Every setting of a GPU is restored"),
    "slice-fields-dropped": ("SliceFieldsDropped", "SliceFieldsKept",
                             "The API server stores all fields of the node's slices"),
    "slices-contested": ("SlicesContested", "SlicesUncontested", "No other program changes the node's slices"),
    "slices-not-published": ("SlicesNotPublished", "SlicesPublished", "The node's slices are published again"),
}  # fmt: skip
"""The event when a problem starts, the event when it ends, and its text. Claims and GPUs have events of their own."""
_CLAIM_EVENTS: Mapping[ProblemCode, EventReason] = {
    "maintenance-overdue": "MaintenanceOverdue",
    "mps-not-exclusive": "MpsNotExclusive",
    "mps-users-wait": "MpsUsersWait",
}


@dataclass(eq=False)
class NodeProblems(BackgroundWorker):
    """Until `has_pool` returns True, the problems of `FOUND_WITH_POOL` of the previous process remain."""

    sources: Mapping[str, ProblemSource]
    failing: FailingClaims
    recorder: EventRecorder
    directory: Path
    has_pool: Callable[[], bool]
    _: KW_ONLY
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._checks = Checks(self.sources)
        self._shown: tuple[NodeProblem, ...] = ()
        self._reported: dict[ProblemCode, frozenset[str]] = {}
        self._reported_on_claims: Collection[tuple[ProblemCode, str, str]] = ()  # with the claim's UID
        self._written: tuple[Reported, float] | None = None
        self._inherited: tuple[NodeProblem, ...] = ()  # problems of the previous process
        self._path = self.directory / PROBLEMS_FILE
        self._mark = UseMark(self.directory / WORKER_LOCK)
        self._to_write = Reported()
        self._writing = BoundedCall("the file of problems", self._write)
        super().__init__("node-problems", self.turn)

    def start(self) -> None:
        try:
            self._mark.hold()
        except StateError as error:
            _log.warning("running_lock_failed", reason=str(error))
        self.restore()
        super().start()

    def stop(self) -> bool:
        has_ended = super().stop()
        self._writing.result(_LAST_WRITE_S)  # a later write would replace the file of the next process
        self._mark.release()
        return has_ended

    def current(self) -> tuple[NodeProblem, ...]:
        return self._shown

    def notes(self) -> list[str]:
        return [problem.text for problem in self.current()]

    def as_json(self) -> bytes:
        return encode(Reported(self.current(), self.failing.all()), int(self.clock()))

    def codes(self) -> list[ProblemCode]:
        return [problem.code for problem in self.current()]

    def turn(self) -> float:
        """Return the seconds until the next check."""
        found, before = self._found_now(), self._shown
        self._shown = found
        self._log_changes(before, found)
        self._report(found)
        self._report_on_claims(found)
        self._keep(Reported(found, self.failing.all()))
        return _TURN_S

    def _found_now(self) -> tuple[NodeProblem, ...]:
        found = {_key(problem): problem for problem in self._checks.problems()}
        since = {_key(problem): problem.since for problem in self._shown}
        if not self.has_pool():
            found |= {_key(problem): problem for problem in self._inherited}
        now = int(self.clock())
        return tuple(
            replace(problem, since=problem.since or since.get(key, now)) for key, problem in found.items()
        )

    def _log_changes(self, before: Sequence[NodeProblem], now: Sequence[NodeProblem]) -> None:
        known, current = set(map(_key, before)), set(map(_key, now))
        for one in now:
            if _key(one) not in known:
                _log.warning("node_problem", problem=one.code, subject=one.subject, reason=one.text)
        for one in before:
            if _key(one) not in current:
                _log.info("node_problem_ended", problem=one.code, subject=one.subject, since=one.since)

    def _report(self, problems: Sequence[NodeProblem]) -> None:
        by_code: dict[ProblemCode, list[NodeProblem]] = {}
        for problem in problems:
            by_code.setdefault(problem.code, []).append(problem)
        for code, (began, ended, end_text) in _EVENTS.items():
            found, reported = by_code.get(code, []), self._reported.get(code, frozenset())
            subjects = frozenset(problem.subject for problem in found)
            if subjects - reported:
                text = "; ".join(problem.text for problem in found)
                self.recorder.node_event(began, _shortened(text), warning=True)
            elif reported and not subjects:
                self.recorder.node_event(ended, end_text, warning=False)
            self._reported[code] = subjects

    def _report_on_claims(self, problems: Sequence[NodeProblem]) -> None:
        found = {(*_key(one), ref.uid): (one, ref) for one in problems for ref in one.claims}
        for key, (problem, ref) in found.items():
            if key not in self._reported_on_claims:
                self.recorder.claim_event(ref, _CLAIM_EVENTS[problem.code], problem.text, warning=True)
        self._reported_on_claims = found.keys()

    def restore(self) -> None:
        """Restore failing claims, and problems that this process cannot know yet."""
        try:
            before = read_problems(self.directory)[1]
        except StateError as error:
            _log.debug("problems_not_read", reason=str(error))
            return
        self.failing.restore(before.failing)
        self._shown = self._inherited = tuple(one for one in before.problems if one.code in FOUND_WITH_POOL)
        for code, subject in map(_key, self._inherited):
            self._reported[code] = self._reported.get(code, frozenset()) | {subject}

    def _keep(self, reported: Reported) -> None:
        """Update the file in another thread: a hanging disk must not block the reports."""
        if self._writing.is_running or not self._is_due(reported):
            return
        self._to_write = reported
        self._writing.start()

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


def _key(problem: NodeProblem) -> tuple[ProblemCode, str]:
    return problem.code, problem.subject


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_EVENT else f"{text[: _LONGEST_EVENT - 3]}..."
