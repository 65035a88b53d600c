"""Closes NVML for a while, so that an administrator can reset GPUs, switch MIG modes or unload the NVIDIA driver.

The NVIDIA driver counts every process with an open NVML session as a client of every GPU. `gpu-dra-driver detach`
writes a file with an end time, so every process of the plugin closes NVML, even on standby or after a restart. Each
process, and the MPS host for nvidia-smi, holds a lock while it has NVML open, so `detach` can see when all have closed
it.

    attached ──file──▶ closing ──no change of a GPU in progress──▶ detached ──its end, or `--end`──▶ attached
                        └── a change is in progress: retried a second later

After a crash of the command or of the plugin, NVML stays closed until the end time, or until a reboot.

A pause is shorter: NVML is closed while a GPU moves to another kernel driver, or, in the other processes, while the MIG
mode changes. The process that needs the pause holds a lock. No device is withdrawn, and calls wait where they can, for
a few seconds at most.

    wanted ──no nvidia-smi, no operation──▶ own NVML closed ──lock──▶ others closing ──▶ paused ──released──▶ over
     └── too long, or a GPU hangs: refused         └────── too long: refused, the lock is released ─────▲

A killed process whose thread hangs in the kernel keeps its lock. Only the worker pauses others, so the worker ignores
such a lock.

| Byte of the lock file | is locked by |
|---|---|
| 0 | each process that has NVML open |
| 1 | each nvidia-smi that the plugin runs, also after the plugin was killed |
| 2 | each pause |
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from dra_driver.base.atomic import read_plain, state_error, write_atomically
from dra_driver.base.bounded_program import inherited
from dra_driver.base.fields import Codec, FileFormat, NewerFormatError
from dra_driver.base.file_lock import UseMark, hold_file
from dra_driver.errors import (
    ClaimsInTheWayError,
    DeviceBusyError,
    NvmlDetachedError,
    NvmlInUseError,
    NvmlPausedError,
    RetryableError,
    StateError,
)
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import replace
from dra_driver.model.maintenance import MAX_S, Detachment, Maintenance, maintenances
from dra_driver.model.record import ClaimRecord
from dra_driver.model.units import named

if TYPE_CHECKING:
    from dra_driver.nvml.session import NvmlSession

_log = structlog.get_logger(__name__)

LOCK_FILE = "nvml.lock"
_OPEN, _SMI, _PAUSED = 0, 1, 2  # bytes of the lock file
_FILE = "detach.json"
_TIMEOUT_S = 60.0
_POLL_S = 0.1
_PAUSE_S = 10.0
_CLOSING_S = 5.0
"""How long other processes may take to close NVML."""
_MAX_NAMED = 8


def _seconds_of_boot() -> float:
    """Unlike the wall clock, this clock is never adjusted; it includes suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_SHAPE = Codec(Detachment)
_DETACH_FILE = FileFormat("detach file", _SHAPE.decode, _SHAPE.encode)


class Detachments:
    """The detach file and the lock of NVML in the plugin directory. Thread-safe. Methods raise StateError.

    If `boot_id` is unknown, a file of any boot counts. The node's worker ignores pauses of other processes.
    """

    def __init__(
        self,
        plugin_directory: Path,
        boot_id: str | None,
        clock: Callable[[], float] = _seconds_of_boot,
        is_worker: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = plugin_directory / _FILE
        self._lock = plugin_directory / LOCK_FILE
        self._boot_id = boot_id
        self._clock = clock
        self._is_worker = is_worker
        self._own_pauses: list[UseMark] = []
        self._read: Detachment | None = None

    def now(self) -> Detachment | None:
        return self._if_it_lasts(self.written())

    def last_known(self) -> Detachment | None:
        return self._if_it_lasts(self._last_written())

    def written(self) -> Detachment | None:
        """Return the detachment in the detach file, even if its time is over.

        A damaged file counts as None, because it must not leave the node without GPUs forever. A file of a newer
        release closes NVML for at most a day.
        """
        content = _content(self._path)
        try:
            found = None if content is None else _DETACH_FILE.read(content)
        except NewerFormatError:
            found = self._of_newer_release()
        except StateError:
            found = None
        self._read = found
        return found

    def _last_written(self) -> Detachment | None:
        with suppress(StateError):
            return self.written()
        return self._read

    def _if_it_lasts(self, found: Detachment | None) -> Detachment | None:
        return found if found is not None and found.lasts(self._boot_id, self._clock()) else None

    def _of_newer_release(self) -> Detachment:
        written = 0.0
        with suppress(OSError):
            written = self._path.stat().st_mtime
        until = datetime.fromtimestamp(written + MAX_S).astimezone().isoformat(sep=" ", timespec="seconds")
        text = f"{until} at the latest (a newer release of gpu-dra-driver wrote the detach file)"
        since_boot = self._clock() - (time.time() - written)
        return Detachment(self._boot_id or "", since_boot + MAX_S if since_boot >= 0 else 0.0, text)

    def maintenances(self, records: Iterable[ClaimRecord]) -> list[Maintenance]:
        return maintenances(records, self._last_written(), self._boot_id, self._clock())

    def problem(self) -> str | None:
        """Return why this process must keep NVML closed now."""
        error = self._refusal()
        return None if error is None else str(error)

    def detached(self) -> str | None:
        """Return the problem, without pauses."""
        try:
            found = self.now()
        except StateError as error:
            is_directory = getattr(error.__cause__, "errno", None) == errno.EISDIR
            remedy = "" if is_directory else "; `gpu-dra-driver detach --end` removes the file"
            return f"whether NVML must stay closed is unknown: {error}{remedy}"
        return None if found is None else found.problem

    def _refusal(self) -> NvmlDetachedError | None:
        reason = self.detached()
        if reason is not None:
            return NvmlDetachedError(reason)
        try:
            return NvmlPausedError() if self._is_paused_by_others() else None
        except StateError as error:
            return NvmlDetachedError(
                f"whether NVML must stay closed is unknown: {error}; gpu-dra-driver tries again"
            )

    def guarded(self, load: Callable[[], object]) -> Callable[[], object]:
        def unless_detached() -> object:
            error = self._refusal()
            if error is not None:
                raise error
            return load()

        return unless_detached

    @contextmanager
    def using_nvml(self, wait_s: float = _PAUSE_S) -> Iterator[None]:
        """Hold the lock of NVML while the block runs a program that opens NVML.

        The program holds the lock too, also if this process is killed. Waits for a pause to end. Raises:
        NvmlDetachedError.
        """
        mark, until = UseMark(self._lock, _SMI), time.monotonic() + wait_s
        try:
            while True:
                # A disk that refuses the lock must not keep a process from using NVML.
                with suppress(StateError):
                    mark.hold()
                error = self._refusal() or (NvmlPausedError() if self._own_pauses else None)
                if error is None:
                    break
                mark.release()
                if not isinstance(error, NvmlPausedError) or time.monotonic() >= until:
                    raise error
                time.sleep(_POLL_S)
            with inherited([] if mark.descriptor is None else [mark.descriptor]):
                yield
        finally:
            mark.release()

    def paused(self) -> bool:
        """Whether another process requires that this one keeps NVML closed. If unknown, an open NVML stays open."""
        with suppress(StateError):
            return self._is_paused_by_others()
        return False

    def _is_paused_by_others(self) -> bool:
        return not self._is_worker() and UseMark(self._lock, _PAUSED).is_held()

    def wait_for_smi(self, wait_s: float) -> None:
        """Wait until no nvidia-smi of the plugin runs. New ones may still start. Raises: NvmlInUseError."""
        until, mark = time.monotonic() + wait_s, UseMark(self._lock, _SMI)
        while mark.is_held():
            if time.monotonic() >= until:
                raise NvmlInUseError(
                    "close NVML for a moment: gpu-dra-driver is running nvidia-smi, and retries soon"
                )
            time.sleep(_POLL_S)

    @contextmanager
    def pause(self, what: str, wait_s: float = _CLOSING_S, own: UseMark | None = None) -> Iterator[None]:
        """Keep NVML closed in all of the plugin's processes on this node. Pauses of one process may overlap.

        This process is included, unless `own` is the mark of its open session.

        Raises: NvmlDetachedError; NvmlInUseError if another process has not closed NVML after `wait_s` seconds.
        """
        mark, began = UseMark(self._lock, _PAUSED), time.monotonic()
        mark.hold()
        self._own_pauses.append(mark)
        _log.info("nvml_paused", what=what)
        try:
            detached = self.detached()
            if detached is not None:
                raise NvmlDetachedError(detached)
            while self.is_nvml_open(own):
                if time.monotonic() - began >= wait_s:
                    raise NvmlInUseError(
                        "close NVML for a moment: another process of gpu-dra-driver on this node has not closed it, "
                        "such as a command or the MPS host; gpu-dra-driver retries soon"
                    )
                time.sleep(_POLL_S)
            yield
        finally:
            self._own_pauses.remove(mark)
            mark.release()
            _log.info("nvml_pause_ended", seconds=round(time.monotonic() - began, 1))

    def begin(
        self, seconds: float, claim: ClaimRef | None = None, gpu_uuids: tuple[str, ...] = ()
    ) -> Detachment:
        """Keep NVML closed for `seconds` from now on.

        Without a `claim`, this replaces an earlier detachment without a claim. A claim that already has a detachment
        keeps it.

        Raises: DeviceBusyError while another claim keeps NVML closed; NvmlDetachedError for a claim while `detach`
        does.
        """
        if self._boot_id is None:
            raise StateError("the ID of this boot cannot be read, so a detachment would outlive a reboot")
        until = datetime.now().astimezone() + timedelta(seconds=seconds)
        shown = until.isoformat(sep=" ", timespec="seconds")
        made = Detachment(self._boot_id, self._clock() + seconds, shown, claim, gpu_uuids)
        with self._changing():
            found = self.now()
            if found is not None and found.claim is not None:
                if found.claim != claim:
                    raise DeviceBusyError(found.problem)
                return found
            if found is not None and claim is not None:
                raise NvmlDetachedError(found.problem)
            self._write(made)
        return made

    def _changing(self) -> AbstractContextManager[int]:
        lock, busy = self._path.with_suffix(".lock"), "another process is writing the detach file; try again"
        return hold_file(lock, time.monotonic() + _CLOSING_S, busy)

    def _write(self, made: Detachment) -> None:
        try:
            _DETACH_FILE.read(_content(self._path) or b"")
        except NewerFormatError as error:
            if self.now() is not None:
                raise StateError(
                    f"cannot write {self._path}: {error}, or run `gpu-dra-driver detach --end`"
                ) from error
        except StateError:
            pass  # no file, or a damaged one
        write_atomically(self._path, _DETACH_FILE.write(made), durable=False)

    def wait_closed(self, made: Detachment, timeout_s: float) -> None:
        """Raise NvmlInUseError if a process of the plugin still has NVML open after `timeout_s`, or RetryableError if
        the detachment was ended.
        """
        end = time.monotonic() + timeout_s
        while self.is_nvml_open() and self.now() == made:
            if time.monotonic() >= end:
                raise NvmlInUseError(
                    f"the plugin has not closed NVML within {timeout_s:.0f} s; a change to a GPU or an nvidia-smi that "
                    "the plugin started may be running, or NVML hangs: see the plugin's log, and try again"
                )
            time.sleep(_POLL_S)
        if self.now() != made:
            raise RetryableError(
                "close NVML: another process ended the detachment, or its time is over; try again"
            )

    def is_nvml_open(self, excluded: UseMark | None = None) -> bool:
        opened = excluded or UseMark(self._lock, _OPEN)
        return opened.is_held() or UseMark(self._lock, _SMI).is_held()

    def restore(self, made: Detachment, before: Detachment | None) -> None:
        """Restore what `made` replaced, except a maintenance claim's detachment, because the claim may have ended."""
        with self._changing():
            if self.now() != made:
                return
            if before is None or before.claim is not None:
                self._remove()
            else:
                self._write(before)

    def remove_damaged(self) -> None:
        if _content(self._path) is None:
            return
        with self._changing():
            if self.written() is None:
                self._remove()

    def end(self) -> None:
        """Let the plugin open NVML again. The file of a maintenance claim stays, with its end time set to now."""
        found = None
        with suppress(StateError):
            found = self.written()
        if found is None or found.claim is None:
            self._remove()
        elif self._if_it_lasts(found) is not None:
            until = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            self._write(replace(found, until_s=self._clock(), until=until))

    def end_of(self, claim: ClaimRef) -> bool:
        """Remove the detach file if it belongs to this maintenance claim, whose lock the caller holds; return whether
        it did.

        A newer release's file belongs to the claim whose UID it contains.
        """
        content, found = _content(self._path), self.written()
        is_its = found is not None and (
            claim.uid.encode() in (content or b"") if found.claim is None else found.claim.uid == claim.uid
        )
        if is_its:
            self._remove()
        return is_its

    def _remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise state_error("remove", self._path, error) from error


def _content(path: Path) -> bytes | None:
    """Return None only if the file does not exist: a file that cannot be read may keep NVML closed."""
    try:
        return read_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise state_error("read", path, error) from error


@contextmanager
def nvml_paused(
    session: NvmlSession, detachments: Detachments, what: str, patience: Callable[[], float]
) -> Iterator[None]:
    """Keep NVML closed in all of the plugin's processes on the node.

    `what` is a text for the log. `patience` returns how many seconds to wait for calls in progress. Raises:
    NvmlDetachedError, NvmlInUseError, StateError.
    """
    until = time.monotonic() + patience()
    detachments.wait_for_smi(until - time.monotonic())
    with session.closed(lambda: until - time.monotonic()), detachments.pause(what):
        yield


@contextmanager
def closed_elsewhere(
    session: NvmlSession,
    detachments: Detachments,
    refuse_hanging: Callable[[str], None],
    gpu_uuid: str,
    what: str,
) -> Iterator[None]:
    """Close NVML in the plugin's other processes on the node, to change this GPU.

    `what` is a text for the log. `refuse_hanging` raises an error if an operation on another GPU hangs, because closing
    NVML might hang too.
    """
    own = session.mark
    if own is None or not detachments.is_nvml_open(own):
        yield
        return
    refuse_hanging(gpu_uuid)
    with detachments.pause(what, own=own):
        yield


def detach(
    detachments: Detachments,
    seconds: float,
    claims: Callable[[], Sequence[str]] | None,
    timeout_s: float = _TIMEOUT_S,
) -> Detachment:
    """Close NVML for `seconds` in all processes of the plugin, unless `claims` returns claims that use the GPUs.

    On an error, the previous detachment is restored. Raises: ClaimsInTheWayError; the errors of `begin` and
    `wait_closed`.
    """
    _refuse(claims)
    before = detachments.now()
    made = detachments.begin(seconds)
    try:
        detachments.wait_closed(made, timeout_s)
        _refuse(claims)  # for claims prepared during the wait
    except BaseException:
        detachments.restore(made, before)
        raise
    return made


def _refuse(claims: Callable[[], Sequence[str]] | None) -> None:
    found = [] if claims is None else sorted(claims())
    if not found:
        return
    raise ClaimsInTheWayError(
        f"claims use the GPUs: {named(found, _MAX_NAMED)}; delete their pods first (kubectl drain), name only "
        "the GPUs that will be changed, or use --force"
    )
