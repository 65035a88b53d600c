"""The files in which the plugin requests MPS daemons, and the MPS host reports their state.

| File below `mps/` | Written by | Content |
|---|---|---|
| `host.wanted/<device>.json` | the plugin, in the lane of the device's GPU | this daemon should run, with this spec |
| `host.status/<device>.json` | the host | the state of the daemon |
| `<device>.json`, a directory | the host | the daemon's record and files (`daemon`) |
| `host.lock` | the host, which locks it while it runs | the format version of these files |
| `host.modes` | no one | each nvidia-smi process of the host locks one byte for its GPU |
| `host.alive` | the host, every ten seconds | nothing; its time shows that all status files are current |

For a start, the plugin waits until the status is `ready` or shows a problem; for a stop, until both the status and the
host's record are gone.

    not wanted ──file written──▶ starting ──▶ ready ──file removed──▶ stopped ──▶ no record, no status

If the host cannot read or list the `host.wanted` files, it keeps running daemons and starts none. An empty directory
would stop all daemons, so the host creates the directory only if no daemon exists.

A file may change while the host is checking, so each side writes first and checks afterwards. To stop a daemon, the
host withdraws `ready`, checks that the daemon is still unwanted, then stops it; the plugin writes the wanted file, and
only then relies on `ready`. To start a daemon, the host writes its record, then cancels the start if the daemon is no
longer wanted; the plugin removes the wanted file, then checks for the record.

| Event | Result |
|---|---|
| the host dies | daemons keep running; the next host adopts them, and applies the wanted files |
| a stop while no host runs | the next host stops the daemon; the GPU is withheld until then |
| wanted again, or with a different spec | the host completes the stop, then starts the daemon |
| a start fails | the host undoes it, reports the problem, and retries while the file exists |
| the host's record is lost | the host stops the daemon and restores the GPU, by the spec in the status |
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from base64 import b32encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import structlog

from dra_driver.base.atomic import (
    Stamp,
    read_or_none,
    remove_file,
    stamp_or_none,
    sync_removals,
)
from dra_driver.base.fields import (
    NUMBER,
    Codec,
    FileFormat,
    Kind,
    required,
)
from dra_driver.base.file_lock import is_locked
from dra_driver.base.installation import helm_set
from dra_driver.base.json_store import JsonStore, UnreadableFile, log_unreadable
from dra_driver.errors import PermanentError, RetryableError, StateError
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.ids import is_dns_label
from dra_driver.model.mps import (
    MpsDaemonSpec,
    MpsDaemonStatus,
    MpsDirectories,
)
from dra_driver.model.problems import NodeProblem
from dra_driver.model.units import counted
from dra_driver.mps_host.daemon_control import check_spec
from dra_driver.mps_host.daemon_processes import identify, is_control_daemon, users_of

_log = structlog.get_logger(__name__)

T = TypeVar("T")
SUFFIX = ".json"
LONGEST_SOCKET = 106
"""In bytes; NVIDIA's control daemons need one less than the kernel's limit."""
LONGEST_SOCKET_NAME = "control_privileged"
_PLAIN_CHARACTERS = 12
"""The longest device name used as a directory name: the longest known kubelet root (MicroK8s) leaves room for 13."""
_POLL_S = 0.015
_SILENT_S = 30.0
"""Three times the interval at which the host touches `host.alive`."""
_ASKED_AGAIN_S = 600.0
_SEE_PODS = "see its pod: `kubectl get pods -A -o wide -l app.kubernetes.io/component=mps`"
_REPLACE = (
    "delete the pod of the DaemonSet gpu-dra-driver-mps on this node when no MPS claim runs there (its MPS daemons "
    "stop with the pod)"
)

SPEC = Codec(MpsDaemonSpec)
_STATUS = Codec(MpsDaemonStatus, since=required(Kind(NUMBER.read, int)))
FORMAT = 1
"""Plugin and host write to each other, so each reads only this number."""
LOCK_FILE: FileFormat[None] = FileFormat(
    "lock file", lambda _document: None, lambda _nothing: {}, FORMAT, FORMAT
)
WANTED_FILE = FileFormat(
    "MPS daemon request",
    lambda document: SPEC.decode(document["spec"]),
    lambda spec: {"spec": SPEC.encode(spec)},
    FORMAT,
    FORMAT,
)
STATUS_FILE = FileFormat("MPS status file", _STATUS.decode, _STATUS.encode, FORMAT, FORMAT)


class NoMpsHostError(RetryableError):
    """No compatible MPS host is running."""

    has_no_effect = True


class MpsHostFiles:
    """The plugin's access to the files, for many threads and processes. Raises: StateError.

    `wait_s` is for a host that is restarting. `is_expected`: the configuration requires a host. `sees_daemons` returns
    False in another PID namespace, where only the status files show the daemons.
    """

    def __init__(
        self,
        layout: MpsLayout,
        *,
        wait_s: float = 1.0,
        is_expected: bool = False,
        sees_daemons: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._wait_s = wait_s
        self._is_expected = is_expected
        self._sees_daemons = sees_daemons
        self._clock = clock
        self._alive: tuple[Stamp | None, float] = (None, clock())
        self._missed_at = -math.inf
        self._wanted, self._statuses = wanted_files(layout), status_files(layout)

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float = 20.0) -> MpsDaemonStatus:
        """Start the daemon if necessary, wait until it is ready or in FAULT, and return its status.

        Raises: PermanentError if the request cannot be satisfied, NoMpsHostError, RetryableError.
        """
        check_spec(spec)
        self._layout.refuse_long_path(spec.device)
        deadline = time.monotonic() + timeout_s
        self._await_host(deadline)
        if self._refusal(spec.device) is not None:
            self.stop(spec.device, timeout_s)  # so that the host retries at once
        self._want(spec)
        while True:
            status = self._statuses.get(spec.device)
            if status is not None and status.spec == spec and self._serves(status):
                return status
            if (refusal := self._refusal(spec.device)) is not None:
                raise RetryableError(refusal)
            self._pause(deadline, "start", spec.device, timeout_s, status)

    def stop(self, device: str, timeout_s: float = 20.0) -> None:
        """Stop the device's daemon, if any, and wait until its processes have exited and its GPUs have their earlier
        modes.

        Raises: NoMpsHostError if no host runs (the next host then stops the daemon); RetryableError.
        """
        layout, deadline = self._layout, time.monotonic() + timeout_s
        before = self._statuses.get(device)
        remove_file(layout.wanted(device))
        # If the file came back after a power failure, it would start a daemon that no claim needs.
        sync_removals(layout.wanted_directory)
        if not layout.has_traces(device):
            return
        try:
            self._await_host(deadline)
        except NoMpsHostError as error:
            _log.warning("mps_stop_deferred", device=device, reason=str(error))
            raise
        while layout.has_traces(device):
            status = self._statuses.get(device)
            if (
                status is not None
                and status.state == "failed"
                and status != before
                and layout.record(device).exists()  # otherwise a failed start is being undone
            ):
                raise RetryableError(status.problem or "")
            self._pause(deadline, "stop", device, timeout_s, status)

    def statuses(self) -> tuple[MpsDaemonStatus, ...]:
        """Return the status of each daemon, sorted by name; none if no host runs."""
        if not is_locked(self._layout.lock) or not self._layout.statuses.is_dir():
            return ()
        return tuple(self._statuses.all().values())

    def runs(self, spec: MpsDaemonSpec) -> bool:
        status = self._statuses.get(spec.device)
        is_ready = (
            status is not None and (status.spec, status.state) == (spec, "ready") and self._serves(status)
        )
        return is_ready and self._wanted.get(spec.device) == spec

    def unseen(self) -> list[str]:
        """Return the devices whose daemon differs from the wanted one."""
        wanted, found = self._wanted.all(), self._statuses.all()
        return sorted(
            device
            for device in wanted.keys() | found.keys()
            if device not in wanted or device not in found or found[device].spec != wanted[device]
        )

    def problems(self) -> Sequence[NodeProblem]:
        """Return problems of daemons, and of a needed host that has been missing, silent or incompatible for 30 s.

        Must be called every few seconds.
        """
        found = []
        reason = self._host_trouble()
        if reason is not None and self._is_needed():
            found.append(NodeProblem("mps-host-missing", reason))
        for status in self.statuses():
            if status.problem is not None:
                device, where = status.device, f"its output is in {status.directory}/log on the node"
                text = _of_daemon(device, status.problem)
                found.append(
                    NodeProblem("mps-daemon-failed", f"{text}; {where}" if status.directory else text, device)
                )
        return found

    def _host_trouble(self) -> str | None:
        """Return a problem that has lasted for 30 s. It ends only when the host touches `host.alive` again."""
        reason, sign = self.host_problem(), stamp_or_none(self._layout.alive)
        last, at = self._alive
        if reason is None and sign not in (None, last):
            self._alive = sign, self._clock()
            return None
        if self._clock() - at < _SILENT_S:
            return None
        if reason is not None:
            return f"{reason[0].upper()}{reason[1:]}"
        return (
            f"The MPS host on this node has not reported for more than {_SILENT_S:.0f} s: it hangs, or it cannot write "
            f"its files below {self._layout.root}; {_SEE_PODS}, and its log"
        )

    def _is_needed(self) -> bool:
        return self._is_expected or self._clock() - self._missed_at < _ASKED_AGAIN_S or self.is_in_use()

    def is_in_use(self) -> bool:
        return any(
            is_dns_label(path.name.removesuffix(SUFFIX))
            for directory in (self._layout.wanted_directory, self._layout.statuses)
            for path in directory.glob(f"*{SUFFIX}")
        )

    def host_problem(self) -> str | None:
        """Return why no daemon can be requested."""
        if not is_locked(self._layout.lock):
            enable = f"enable it: {helm_set('mps.enabled=true')}"
            return f"the MPS host is not running on this node; if MPS is enabled, {_SEE_PODS}, otherwise {enable}"
        if self.is_starting():
            return f"the MPS host on this node is starting; {_SEE_PODS}, and its log"
        content = read_or_none(self._layout.lock) or b""
        with suppress(StateError):
            LOCK_FILE.read(content)
            return None
        return f"the MPS host on this node is from a different release than gpu-dra-driver; {_REPLACE}"

    def is_starting(self) -> bool:
        """Whether a host is running that has not yet adopted all daemons."""
        return is_locked(self._layout.lock) and not read_or_none(self._layout.lock)

    def _want(self, spec: MpsDaemonSpec) -> None:
        """Raise PermanentError if other claims use this daemon with different settings, or the device that had this
        name before.
        """
        device = spec.device
        found, status = self._wanted.get(device), self._statuses.get(device)
        is_in_use = status is not None and status.state in ("ready", "fault") and status.clients != 0
        if found is not None and found != spec and (found.uuid == spec.uuid or is_in_use):
            raise PermanentError(
                f"the MPS daemon of {device} runs with different settings ({'; '.join(found.differences(spec))}); "
                "the daemon stops when the claims that use it are gone"
            )
        if found != spec:
            # If a power failure damages the file, the next Prepare finds no daemon and writes the file again.
            self._wanted.write(device, spec, durable=False, whole=True)

    def _refusal(self, device: str) -> str | None:
        """Return why a start failed; None while the host may still start the daemon."""
        status = self._statuses.get(device)
        if status is None or status.state != "failed" or self._layout.record(device).exists():
            return None
        return status.problem

    def _serves(self, status: MpsDaemonStatus) -> bool:
        """Whether the process in the status still runs, as far as this process can see."""
        if status.pid is not None and not self._sees_daemons():
            return True
        process = identify(status.pid) if status.pid is not None else None
        return process is not None and is_control_daemon(
            process, self._layout.directories(status.device).pipe
        )

    def _await_host(self, deadline: float) -> None:
        deadline = min(deadline, time.monotonic() + self._wait_s)
        while (problem := self.host_problem()) is not None:
            if time.monotonic() >= deadline:
                self._missed_at = self._clock()
                raise NoMpsHostError(problem)
            time.sleep(_POLL_S)

    def _pause(
        self, deadline: float, action: str, device: str, timeout_s: float, status: MpsDaemonStatus | None
    ) -> None:
        if time.monotonic() < deadline:
            time.sleep(_POLL_S)
            return
        unread = self._statuses.newer().get(device)
        problem = status.problem if status is not None else unread and str(unread.newer)
        reason = self.host_problem() or problem or "see `kubectl logs` of its pod"
        raise RetryableError(
            f"the MPS host did not {action} the MPS daemon of {device} within {timeout_s:.3g} s; {reason}"
        )


def _of_daemon(device: str, problem: str) -> str:
    if problem.startswith(f"the MPS daemon of {device} "):
        return f"T{problem[1:]}"
    return f"The MPS daemon of {device} does not work: {problem}"


def wanted_files(
    layout: MpsLayout, tell: Callable[[UnreadableFile], None] = lambda _file: None
) -> JsonStore[MpsDaemonSpec]:
    return _files(layout.wanted_directory, WANTED_FILE, tell)


def status_files(layout: MpsLayout) -> JsonStore[MpsDaemonStatus]:
    return _files(layout.statuses, STATUS_FILE, lambda _file: None)


def _files(directory: Path, kind: FileFormat[T], tell: Callable[[UnreadableFile], None]) -> JsonStore[T]:
    def read(_device: str, content: bytes) -> T:
        return kind.read(content)

    return JsonStore(directory, kind.what, read, kind.write, tell, is_name=is_dns_label)


@dataclass(frozen=True, slots=True)
class MpsLayout:
    """Device names contain no dot, so a device's directory never has the name of a host file."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "host.lock"

    @property
    def modes(self) -> Path:
        return self.root / "host.modes"

    @property
    def alive(self) -> Path:
        return self.root / "host.alive"

    @property
    def libraries(self) -> Path:
        return self.root / "host.lib"

    @property
    def wanted_directory(self) -> Path:
        return self.root / "host.wanted"

    @property
    def statuses(self) -> Path:
        return self.root / "host.status"

    def wanted(self, device: str) -> Path:
        return self.wanted_directory / f"{_checked(device)}{SUFFIX}"

    def is_unwanted(self, device: str) -> bool:
        """Whether the daemon should not run; False if unknown."""
        try:
            self.wanted(device).lstat()
        except FileNotFoundError:
            return self.wanted_directory.is_dir()
        except OSError:
            pass
        return False

    def status(self, device: str) -> Path:
        return self.statuses / f"{_checked(device)}{SUFFIX}"

    def record(self, device: str) -> Path:
        return self.root / f"{_checked(device)}{SUFFIX}"

    def directory(self, device: str) -> Path:
        """Return the directory with the daemon's files, which exists as long as the daemon.

        A long device name becomes `gpu_` and a hash, because socket paths are limited; no device name has a `_`.
        """
        name = _checked(device)
        if len(name) > _PLAIN_CHARACTERS:
            digest = b32encode(hashlib.sha256(name.encode()).digest())
            name = f"gpu_{digest[: _PLAIN_CHARACTERS - 4].decode().lower()}"
        return self.root / name

    def refuse_long_path(self, device: str) -> None:
        """Raise PermanentError if a socket's path is too long for NVIDIA's control daemon."""
        path = f"{self.directories(device).pipe}/{LONGEST_SOCKET_NAME}"
        excess = len(os.fsencode(path)) - LONGEST_SOCKET
        if excess > 0:
            raise PermanentError(
                f"no MPS daemon can run for {device}: the path of its socket {path} has {LONGEST_SOCKET + excess} "
                f"bytes, but NVIDIA's program accepts at most {LONGEST_SOCKET}; use a kubelet plugins directory "
                f"whose path is {counted(excess, 'byte')} shorter"
            )

    def directories(self, device: str) -> MpsDirectories:
        top = self.directory(device)
        return MpsDirectories(pipe=str(top / "pipe"), log=str(top / "log"), shm=str(top / "shm"))

    def has_traces(self, device: str) -> bool:
        return (
            self.record(device).exists()
            or self.status(device).exists()
            or bool(users_of(self.directories(device).pipe))
        )


def mps_layout(plugin_directory: Path) -> MpsLayout:
    return MpsLayout(plugin_directory / "mps")


def _checked(device: str) -> str:
    if not is_dns_label(device):
        raise PermanentError(f"{device!r} is not a device name: it must be a DNS label")
    return device


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """`modes_before` has the compute modes to restore, by GPU UUID."""

    spec: MpsDaemonSpec
    modes_before: Mapping[str, int] = field(default_factory=dict)


_RECORD = Codec(DaemonRecord)
RECORD_FILE = FileFormat("MPS record", _RECORD.decode, _RECORD.encode)


class DaemonRecords(JsonStore[DaemonRecord]):
    """The record files by device; only the host writes them. Raises: StateError."""

    def __init__(self, layout: MpsLayout) -> None:
        tell = log_unreadable(
            unreadable_event="mps_record_unreadable",
            name="device",
            remedy="the MPS host finds the daemon again without its record; inspect the file, then remove it",
            newer="the MPS host neither starts nor stops the daemon; install the newer release of the MPS host again",
        )
        super().__init__(
            layout.root, RECORD_FILE.what, _decode_record, RECORD_FILE.write, tell, is_name=is_dns_label
        )
        self._layout = layout

    def refuse_newer(self, device: str) -> None:
        """Raise StateError if a newer release wrote the record: it may have settings to restore that this one does not
        know.
        """
        self.get(device)
        found = self.newer().get(device)
        if found is not None:
            raise StateError(f"{found.newer}, or remove {self.path(device)}")

    def save(self, record: DaemonRecord) -> None:
        self.write(record.spec.device, record, durable=True, whole=True)

    def forget(self, device: str) -> None:
        """Remove the record, but keep unreadable records that were set aside."""
        self.remove(device, durable=False)
        # After a power failure, the removed directories must not come back without the record.
        sync_removals(self.directory)


def _decode_record(device: str, content: bytes) -> DaemonRecord:
    record = RECORD_FILE.read(content)
    if record.spec.device != device:
        raise StateError(f"it is the record of {record.spec.device}")
    return record
