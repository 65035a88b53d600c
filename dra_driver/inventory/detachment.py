"""Closing NVML for a while, so that others can reset GPUs, switch MIG modes or unload the NVIDIA driver.

The NVIDIA driver counts every process with an open NVML session as a client of every GPU. `gpu-dra-driver detach`
writes a file that names an end. Every instance of this plugin on the node closes NVML when it sees the file, and opens
NVML again when the end has come or the file is gone. A lock that each instance holds while it has NVML open shows when
all have closed NVML. The MPS host reads the same file, and holds the lock while it runs nvidia-smi.

    attached ──file──▶ letting go ──no change of a GPU under way──▶ detached ──its end, or `--end`──▶ attached
                          └── a change is under way: a second later again

| A crash … | leaves | and then |
|---|---|---|
| of the command, before the file | nothing | |
| of the command, after it | the file | the plugin opens NVML by itself when the time is over |
| of the plugin | the file, no lock | the next instance opens NVML only when the time is over |
| of the node | the file of an older boot | it counts no more |

A file and not a socket of one daemon: both instances of a rolling update close NVML, and a restart changes nothing.

A pause is shorter: NVML is closed for the moment in which a GPU goes to another kernel driver. Whoever needs it holds a
second lock, which ends with its process, and waits until all others have closed NVML. No device is withdrawn, and calls
wait where they can.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dra_driver.errors import (
    ClaimsInTheWayError,
    NvmlDetachedError,
    NvmlInUseError,
    NvmlPausedError,
    StateError,
)
from dra_driver.files.atomic import state_error, write_atomically
from dra_driver.files.fields import TEXT, Kind, Shape, needed
from dra_driver.files.file_lock import UseMark
from dra_driver.files.formats import parse
from dra_driver.model.units import named

if TYPE_CHECKING:
    from dra_driver.nvml.session import NvmlSession

FORMAT_VERSION = 1
LOCK_FILE = "nvml.lock"
PAUSE_FILE = "nvml-pause.lock"
_FILE = "detach.json"
_TIMEOUT_S = 60.0
_POLL_S = 0.1
_PAUSE_S = 10.0
_MOST_NAMED = 8


def _seconds_of_boot() -> float:
    """Unlike the time of day, nobody sets this clock; it goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Detachment:
    """NVML is to stay closed until `until_s` of the boot clock. `until` is the same for people, with the time zone."""

    boot_id: str
    until_s: float
    until: str

    @property
    def problem(self) -> str:
        """Why GPUs cannot be used now."""
        return (
            f"NVML is closed until {self.until}, so that others can reset GPUs or change the NVIDIA driver; "
            "`gpu-dra-driver detach --end` ends that"
        )


_SHAPE = Shape(
    Detachment,
    boot_id=needed(TEXT, "bootID"),
    until_s=needed(Kind(lambda _name, value: float(value)), "untilBootSeconds"),
    until=needed(TEXT),
)


class Detachments:
    """The file in the plugin directory. `boot_id` is that of this boot; while it is not known, a file of any boot
    counts, and none can be written."""

    def __init__(
        self, plugin_directory: Path, boot_id: str | None, clock: Callable[[], float] = _seconds_of_boot
    ) -> None:
        self._path = plugin_directory / _FILE
        self._boot_id = boot_id
        self._clock = clock

    def now(self) -> Detachment | None:
        """The detachment that lasts; None if there is none. A file that cannot be read counts as none: a node without
        GPUs for ever would be worse."""
        content = self.content()
        if content is None:
            return None
        try:
            found = parse(content, "detach file", _SHAPE.decode, known=FORMAT_VERSION)
        except StateError:
            return None
        is_of_this_boot = self._boot_id in (None, found.boot_id)
        return found if is_of_this_boot and self._clock() < found.until_s else None

    def problem(self) -> str | None:
        """Why NVML is to stay closed now; None if it may be opened."""
        error = self._refusal()
        return None if error is None else str(error)

    def detached(self) -> str | None:
        """As `problem`, but a pause does not count."""
        found = self.now()
        return None if found is None else found.problem

    def _refusal(self) -> NvmlDetachedError | None:
        reason = self.detached()
        if reason is not None:
            return NvmlDetachedError(reason)
        return NvmlPausedError() if self.is_paused() else None

    def guarded(self, load: Callable[[], object]) -> Callable[[], object]:
        """`load`, which raises NvmlDetachedError instead while NVML is to stay closed, NvmlPausedError if that is only
        for a moment."""

        def unless_detached() -> object:
            error = self._refusal()
            if error is not None:
                raise error
            return load()

        return unless_detached

    @contextmanager
    def using_nvml(self, wait_s: float = _PAUSE_S) -> Iterator[None]:
        """For whoever runs a program that opens NVML: `detach` and `pause` wait for the end of it. A pause is waited
        for, `wait_s` seconds at most. Raises: NvmlDetachedError."""
        mark, until = UseMark(self._path.with_name(LOCK_FILE)), time.monotonic() + wait_s
        try:
            while True:
                with suppress(StateError):  # a disk that does not take the lock keeps nobody from NVML
                    mark.hold()
                error = self._refusal()
                if error is None:
                    break
                mark.let_go()
                if not isinstance(error, NvmlPausedError) or time.monotonic() >= until:
                    raise error
                time.sleep(_POLL_S)
            yield
        finally:
            mark.let_go()

    def is_paused(self) -> bool:
        """Whether a process of ours on this node, this one or another, keeps NVML closed for a moment."""
        try:
            return UseMark(self._path.with_name(PAUSE_FILE)).is_held()
        except StateError:
            return False

    @contextmanager
    def pause(self, wait_s: float) -> Iterator[None]:
        """No process of ours on this node has NVML open inside; the session of this one is closed before.

        Raises: NvmlDetachedError; NvmlInUseError if another one has not closed it after so long; StateError.
        """
        mark, until = UseMark(self._path.with_name(PAUSE_FILE)), time.monotonic() + wait_s
        mark.hold()
        try:
            detached = self.now()
            if detached is not None:
                raise NvmlDetachedError(detached.problem)
            while self.is_nvml_open():
                if time.monotonic() >= until:
                    raise NvmlInUseError(
                        "close NVML for a moment: another process of gpu-dra-driver on this node has not closed it; a "
                        "change of a GPU or nvidia-smi may be under way; it is tried again soon"
                    )
                time.sleep(_POLL_S)
            yield
        finally:
            mark.let_go()

    def begin(self, seconds: float) -> Detachment:
        """Have NVML closed for so long from now on, whatever was asked before. Raises: StateError."""
        if self._boot_id is None:
            raise StateError("the ID of this boot cannot be read, so a detachment would outlive a reboot")
        until = datetime.now().astimezone() + timedelta(seconds=seconds)
        made = Detachment(
            self._boot_id, self._clock() + seconds, until.isoformat(sep=" ", timespec="seconds")
        )
        document = {"version": FORMAT_VERSION, **_SHAPE.encode(made)}
        write_atomically(self._path, json.dumps(document).encode(), durable=False)
        return made

    def is_nvml_open(self) -> bool:
        """Whether an instance of the plugin has NVML open. Raises: StateError."""
        return UseMark(self._path.with_name(LOCK_FILE)).is_held()

    def content(self) -> bytes | None:
        """What is in the file, None if there is none."""
        try:
            return self._path.read_bytes()
        except OSError:
            return None

    def put_back(self, made: Detachment, before: bytes | None) -> None:
        """Have the file as it was before `made`, unless somebody has asked anew since. Raises: StateError."""
        if self.now() != made:
            return
        if before is None:
            self.end()
        else:
            write_atomically(self._path, before, durable=False)

    def end(self) -> None:
        """Have NVML opened again. Raises: StateError."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise state_error("remove", self._path, error) from error


def nvml_pause(
    session: NvmlSession, detachments: Detachments
) -> Callable[[Callable[[], float]], AbstractContextManager[None]]:
    """What keeps NVML closed within, in this process and in all others of ours on the node. It is asked with a function
    that returns how many seconds are left for closing.

    The context raises: NvmlDetachedError, NvmlInUseError, StateError; what that function raises.
    """

    @contextmanager
    def paused(patience: Callable[[], float]) -> Iterator[None]:
        with session.closed(patience), detachments.pause(patience()):
            yield

    return paused


def detach(
    detachments: Detachments,
    seconds: float,
    claims: Callable[[], Sequence[str]] | None,
    timeout_s: float = _TIMEOUT_S,
) -> Detachment:
    """Have NVML closed for `seconds`, and wait until every instance has closed it. `claims` returns the claims that use
    the GPUs; None if they do not matter.

    If it fails, everything is as it was before. Raises: ClaimsInTheWayError; NvmlInUseError if an instance
    does not close it in time; StateError.
    """
    _refuse(claims)
    before = detachments.content()
    made = detachments.begin(seconds)
    try:
        deadline = time.monotonic() + timeout_s
        while detachments.is_nvml_open():
            if time.monotonic() >= deadline:
                raise NvmlInUseError(
                    f"the plugin has not closed NVML within {timeout_s:.0f} s; a change of a GPU may be under way, or "
                    "NVML hangs: see the plugin's log, and try again"
                )
            time.sleep(_POLL_S)
        _refuse(claims)  # of what was prepared meanwhile
    except BaseException:
        detachments.put_back(made, before)
        raise
    return made


def _refuse(claims: Callable[[], Sequence[str]] | None) -> None:
    found = [] if claims is None else sorted(claims())
    if not found:
        return
    raise ClaimsInTheWayError(
        f"claims use the GPUs: {named(found, _MOST_NAMED)}; end their pods first (kubectl drain), name only "
        "the GPUs that will be changed, or use --force"
    )
