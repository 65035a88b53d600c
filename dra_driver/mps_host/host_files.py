"""The files by which the plugin has the MPS host run daemons, and the host says what runs.

| File below `mps/` | Written by | Says |
|---|---|---|
| `host.wanted/<device>.json` | the plugin, in the lane of the device's GPU | this daemon shall run, with this spec |
| `host.status/<device>.json` | the host | how the daemon is |
| `<device>.json`, a directory | the host | what it made, and the compute modes from before (`daemon`) |
| `host.lock` | the host, which holds its lock | a host runs, and the number of the format of these files |
| `host.modes` | no one: it is empty | each nvidia-smi that the host started locks one byte of it, that of its GPU |
| `host.alive` | the host, every ten seconds | it watches, and all status files say what it knows |

A daemon shall run as long as its file is in `host.wanted`. The host makes that so, and tries again after pauses. The
plugin waits: for a start until the status says `ready` or why not, for a stop until the host's record is gone too.

    not wanted ──the file is written──▶ starting ──▶ ready ──the file is removed──▶ stopped ──▶ no record, no status

The host changes none of these files. What it cannot read or list there, as that of another release, says nothing: a
daemon runs on, and none is started. So it makes the directory only where it has no daemon.

A file may come or go while the host looks, so each side writes first and looks then. The host takes `ready` back,
looks whether the daemon is still unwanted, then stops it; the plugin writes what is wanted, then goes by `ready`. The
host writes its record, and breaks the start off if the daemon is not wanted any more; the plugin removes what was
wanted, then looks for the record.

| What happens | What follows |
|---|---|
| the host dies | daemons run on; the next host takes them over, and makes true what is wanted then |
| the plugin dies before it wrote or removed a file | nothing has changed; its ledger has the step or its undo |
| the plugin dies after that | the host goes on; the next call of the plugin finds it done, or waits |
| a stop while no host runs | the next host finds the file gone; the GPU is withheld until then |
| a stop while the daemon starts | the start is broken off, and taken back |
| wanted again while it stops | the host ends the stop, then starts the daemon |
| wanted with another spec | the host stops it first; the plugin refuses that while a claim needs the daemon |
| a start fails | the host takes it back, says why, and tries again as long as the file is there |
| full disk | no new daemon; a stop works |
| reboot | the host starts again what is wanted |
| host of another format | it keeps its daemons; the plugin asks for none, and refuses |
| the host's record is lost | its status has the spec: with that the daemon is stopped, and the GPU put back |
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from base64 import b32encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from dra_driver.base.atomic import (
    Stamp,
    read_or_none,
    remove_file,
    stamp_or_none,
    sync_removals,
    write_atomically,
)
from dra_driver.base.fields import (
    NUMBER,
    Codec,
    Kind,
    NewerFormatError,
    parse_file,
    required,
)
from dra_driver.base.file_lock import is_locked
from dra_driver.base.installation import helm_set
from dra_driver.base.json_store import JsonStore, UnreadableFile, log_unreadable
from dra_driver.errors import PermanentError, RetryableError, StateError
from dra_driver.model.ids import is_dns_label
from dra_driver.model.mps import (
    MpsDaemonSpec,
    MpsDaemonStatus,
    MpsDirectories,
)
from dra_driver.model.problems import NodeProblem
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import counted
from dra_driver.mps_host.daemon_control import check_spec
from dra_driver.mps_host.daemon_processes import ProcessId, identify, is_control_daemon, users_of

_log = structlog.get_logger(__name__)

T = TypeVar("T")
FORMAT = 3
SUFFIX = ".json"
LONGEST_SOCKET = 106
"""Bytes of the longest socket path with which NVIDIA's control daemons start: one less than the kernel takes."""
LONGEST_SOCKET_NAME = "control_privileged"
"""Of the sockets that a control daemon makes in its pipe directory."""
_PLAIN_CHARACTERS = 12
"""Below MicroK8s' kubelet root, the longest that is known, a directory has room for 13."""
_POLL_S = 0.015
_SILENT_S = 30.0
"""Three times the period of the host's sign of life."""
_ASKED_AGAIN_S = 600.0
_SEE_PODS = "see its pod: `kubectl get pods -A -o wide -l app.kubernetes.io/component=mps`"
_REPLACE = (
    "delete the pod of the DaemonSet gpu-dra-driver-mps on this node once no MPS claims run there (its daemons end "
    "with it)"
)

SPEC = Codec(MpsDaemonSpec)
_STATUS = Codec(MpsDaemonStatus, since=required(Kind(NUMBER.read, int)))


class NoMpsHostError(RetryableError):
    """No MPS host runs that reads what this release writes."""

    has_no_effect = True


class MpsHostFiles:
    """The plugin's side: for many threads and processes. `wait_s` is how long a host that restarts is waited for,
    `is_expected` whether the node's configuration wants a host. `sees_daemons` says whether this process sees those of
    the host; one in a PID namespace of its own has only the status that the MPS host writes."""

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
        """The daemon's status once it is ready, or found in FAULT. Nobody waits for one that runs.

        Raises: PermanentError if it cannot be as asked, RetryableError if it failed or was not ready in time,
        NoMpsHostError, StateError.
        """
        check_spec(spec)
        self._layout.refuse_long_path(spec.device)
        deadline = time.monotonic() + timeout_s
        try:
            self._await_host(deadline)
        except NoMpsHostError:
            self._missed_at = self._clock()
            raise
        if self._refusal(spec.device) is not None:
            self.stop(spec.device, timeout_s)  # so that it is tried again at once
        self._want(spec)
        while True:
            status = self._statuses.get(spec.device)
            if status is not None and status.spec == spec and self._serves(status):
                return status
            if (refusal := self._refusal(spec.device)) is not None:
                raise RetryableError(refusal)
            self._pause(deadline, f"made the MPS daemon of {spec.device} ready", timeout_s, status)

    def stop(self, device: str, timeout_s: float = 20.0) -> None:
        """No process of the device's daemon runs, and its GPUs have their former compute modes; also if there was none.

        Raises: NoMpsHostError if no host runs and a daemon was there, which the next host then stops; RetryableError,
        StateError.
        """
        layout, deadline = self._layout, time.monotonic() + timeout_s
        before = self._statuses.get(device)
        remove_file(layout.wanted(device))
        # A file that came back after a power cut would start a daemon that no claim asked for.
        sync_removals(layout.wishes)
        if not layout.has_traces(device):
            return
        try:
            self._await_host(deadline)
        except NoMpsHostError as error:
            _log.warning("mps_stop_left_to_next_host", device=device, reason=str(error))
            raise
        while layout.has_traces(device):
            status = self._statuses.get(device)
            if status is not None and status.state == "failed" and status != before:
                raise RetryableError(status.problem or "")
            self._pause(deadline, f"stopped the MPS daemon of {device}", timeout_s, status)

    def statuses(self) -> tuple[MpsDaemonStatus, ...]:
        """All daemons of the node, by name; none where no host runs. Raises: StateError."""
        if not is_locked(self._layout.lock) or not self._layout.statuses.is_dir():
            return ()
        return tuple(self._statuses.all().values())

    def runs(self, spec: MpsDaemonSpec) -> bool:
        """Whether a daemon that is ready with this spec runs, and shall. Raises: StateError."""
        status = self._statuses.get(spec.device)
        is_ready = (
            status is not None and (status.spec, status.state) == (spec, "ready") and self._serves(status)
        )
        return is_ready and self._wanted.get(spec.device) == spec

    def unseen(self) -> list[str]:
        """Devices whose daemon is not, or not yet, as wanted. Raises: StateError."""
        wanted, found = self._wanted.all(), self._statuses.all()
        return sorted(
            device
            for device in wanted.keys() | found.keys()
            if device not in wanted or device not in found or found[device].spec != wanted[device]
        )

    def problems(self) -> Sequence[NodeProblem]:
        """A host that has been missing, silent or of another release for 30 s, if anyone needs one, and each daemon
        that has failed. It compares with the calls before, so it is called every few seconds. Raises: StateError."""
        found = []
        reason = self._host_trouble()
        if reason is not None and self._is_needed():
            found.append(NodeProblem("mps-host-missing", reason))
        for status in self.statuses():
            if status.problem is not None:
                device, where = status.device, f"its output is in {status.directory}/log on the node"
                text = f"The MPS daemon of {device} does not work: {status.problem}"
                found.append(
                    NodeProblem("mps-daemon-failed", f"{text}; {where}" if status.directory else text, device)
                )
        return found

    def _host_trouble(self) -> str | None:
        """What has been wrong with the host for 30 s. Only a sign of life since the last look ends that."""
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
            f"The MPS host of this node has not reported for more than {_SILENT_S:.0f} s: it hangs, or it cannot write "
            f"its files below {self._layout.root}; {_SEE_PODS}, and its log"
        )

    def _is_needed(self) -> bool:
        """Whether the configuration wants a host, a claim has or had a daemon, or asked for one a short time ago: the
        kubelet asks again every two minutes as long as the pod exists."""
        return self._is_expected or self._clock() - self._missed_at < _ASKED_AGAIN_S or self.is_in_use()

    def is_in_use(self) -> bool:
        """Whether a claim has or had a daemon of which anything is left."""
        return any(
            is_device_name(path.name.removesuffix(SUFFIX))
            for directory in (self._layout.wishes, self._layout.statuses)
            for path in directory.glob(f"*{SUFFIX}")
        )

    def host_problem(self) -> str | None:
        """Why no daemon can be asked for. Raises: StateError."""
        if not is_locked(self._layout.lock):
            enable = f"enable it: {helm_set('mps.enabled=true')}"
            return f"the MPS host is not running on this node; {_SEE_PODS}, or {enable} if there are none"
        content = read_or_none(self._layout.lock)
        if not content:
            return f"the MPS host of this node is starting; {_SEE_PODS}, and its log"
        with suppress(StateError):
            parse_file(content, "lock file", dict, known=FORMAT, field="format")
            return None
        return f"the MPS host on this node is of another release than gpu-dra-driver; {_REPLACE}"

    def _want(self, spec: MpsDaemonSpec) -> None:
        """Have the host run it. Raises: PermanentError if other claims have it with other settings, or use the device
        that had the name before; StateError."""
        device = spec.device
        found, status = self._wanted.get(device), self._statuses.get(device)
        is_in_use = status is not None and status.state in ("ready", "fault") and status.clients != 0
        if found is not None and found != spec and (found.uuid == spec.uuid or is_in_use):
            raise PermanentError(
                f"the MPS daemon of {device} runs with other settings ({'; '.join(found.differences(spec))}); "
                "it is stopped when the claims that use it are gone"
            )
        if found != spec:
            # What a power cut tears is written again by the Prepare after it, which finds no daemon.
            write_atomically(self._layout.wanted(device), encode_wanted(spec), durable=False)

    def _refusal(self, device: str) -> str | None:
        """Why the device has no daemon though it shall; None while one is there that the host may still start."""
        status = self._statuses.get(device)
        has_none = (
            status is not None and status.state == "failed" and not self._layout.record(device).exists()
        )
        return status.problem if status is not None and has_none else None

    def _serves(self, status: MpsDaemonStatus) -> bool:
        """Whether the process that is said to serve still runs, as far as this process can see."""
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
                raise NoMpsHostError(problem)
            time.sleep(_POLL_S)

    def _pause(self, deadline: float, what: str, timeout_s: float, status: MpsDaemonStatus | None) -> None:
        if time.monotonic() < deadline:
            time.sleep(_POLL_S)
            return
        problem = status.problem if status is not None else None
        reason = self.host_problem() or problem or "see `kubectl logs` of its pod"
        raise RetryableError(f"the MPS host has not {what} within {timeout_s:.3g} s; {reason}")


def wanted_files(
    layout: MpsLayout, tell: Callable[[UnreadableFile], None] = lambda _file: None
) -> JsonStore[MpsDaemonSpec]:
    """Which daemons shall run, by device, for a process that only reads."""
    return _files(layout.wishes, "wish for an MPS daemon", lambda body: SPEC.decode(body["spec"]), tell)


def status_files(layout: MpsLayout) -> JsonStore[MpsDaemonStatus]:
    """What the host reports of the daemons, by device, for a process that only reads."""
    return _files(layout.statuses, "status", _STATUS.decode, lambda _file: None)


def _files(
    directory: Path, what: str, decode: Callable[[JsonObject], T], tell: Callable[[UnreadableFile], None]
) -> JsonStore[T]:
    def read(_device: str, content: bytes) -> T:
        return parse_file(content, what, decode, known=FORMAT, field="format")

    return JsonStore(directory, what, read, tell, is_name=is_device_name, only_reads=True)


def encode_wanted(spec: MpsDaemonSpec) -> bytes:
    """The content of the file that has a daemon run."""
    return json.dumps({"format": FORMAT, "spec": SPEC.encode(spec)}).encode()


def encode_status(status: MpsDaemonStatus) -> bytes:
    """The content of a status file."""
    return json.dumps({"format": FORMAT, **_STATUS.encode(status)}, indent=1).encode()


@dataclass(frozen=True, slots=True)
class MpsLayout:
    """`<root>/<device>.json` is a daemon's record; its directories are `pipe`, `log` and `shm` in `directory(device)`.

    A device name has no dot, so nothing of the host can collide with a device's directory.
    """

    root: Path

    @property
    def lock(self) -> Path:
        """Held by the one host process of this directory; says the format of its files."""
        return self.root / "host.lock"

    @property
    def modes(self) -> Path:
        """Empty; the locks of GPUs whose compute mode is read or set."""
        return self.root / "host.modes"

    @property
    def alive(self) -> Path:
        """Empty; the host sets its time while it watches and can write its status files."""
        return self.root / "host.alive"

    @property
    def libraries(self) -> Path:
        """Links to the NVIDIA driver's libraries, where they are not where the loader looks."""
        return self.root / "host.lib"

    @property
    def wishes(self) -> Path:
        """What shall run."""
        return self.root / "host.wanted"

    @property
    def statuses(self) -> Path:
        """What runs."""
        return self.root / "host.status"

    def wanted(self, device: str) -> Path:
        """Says that the daemon shall run."""
        return self.wishes / f"{_checked(device)}{SUFFIX}"

    def is_unwanted(self, device: str) -> bool:
        """Whether the daemon shall not run; where that cannot be looked up, it may."""
        try:
            self.wanted(device).lstat()
        except FileNotFoundError:
            return self.wishes.is_dir()
        except OSError:
            pass
        return False

    def status(self, device: str) -> Path:
        """What the host says of the daemon."""
        return self.statuses / f"{_checked(device)}{SUFFIX}"

    def record(self, device: str) -> Path:
        """The record of one daemon."""
        return self.root / f"{_checked(device)}{SUFFIX}"

    def directory(self, device: str) -> Path:
        """Everything that exists as long as the daemon does.

        It has the device's name if that is as short as that of a GPU; otherwise `gpu_` and a hash of the name. So its
        length is bounded, it follows from the name alone, and it never meets another name: device names have no `_`.
        """
        name = _checked(device)
        if len(name) > _PLAIN_CHARACTERS:
            digest = b32encode(hashlib.sha256(name.encode()).digest())
            name = f"gpu_{digest[: _PLAIN_CHARACTERS - 4].decode().lower()}"
        return self.root / name

    def refuse_long_path(self, device: str) -> None:
        """Raises: PermanentError if the path of a socket would be too long for NVIDIA's control daemon."""
        path = f"{self.directories(device).pipe}/{LONGEST_SOCKET_NAME}"
        excess = len(os.fsencode(path)) - LONGEST_SOCKET
        if excess > 0:
            raise PermanentError(
                f"no MPS daemon can run for {device}: the path of its socket {path} has {LONGEST_SOCKET + excess} "
                f"bytes, and NVIDIA's program takes at most {LONGEST_SOCKET}; use a plugins directory of the kubelet "
                f"whose path is {counted(excess, 'byte')} shorter"
            )

    def directories(self, device: str) -> MpsDirectories:
        """The parts that clients need."""
        top = self.directory(device)
        return MpsDirectories(pipe=str(top / "pipe"), log=str(top / "log"), shm=str(top / "shm"))

    def has_traces(self, device: str) -> bool:
        """Whether a daemon is there that is not stopped yet, or the host has something to say of one."""
        return (
            self.record(device).exists()
            or self.status(device).exists()
            or bool(users_of(self.directories(device).pipe))
        )


def mps_layout(plugin_directory: Path) -> MpsLayout:
    """The layout below the plugin's own directory."""
    return MpsLayout(plugin_directory / "mps")


def is_device_name(name: str) -> bool:
    """Whether a device can have this name."""
    return is_dns_label(name)


def _checked(device: str) -> str:
    if not is_device_name(device):
        raise PermanentError(f"{device!r} is not a device name: it must be a DNS label")
    return device


RECORD_FORMAT = 2
"""Of `<device>.json`, which only the host reads."""


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """`process` is the last one that was started, in boot `boot_id`. `modes_before` has the compute modes that this
    daemon's start changes, by the UUID of the GPU: what to put back."""

    spec: MpsDaemonSpec
    boot_id: str
    process: ProcessId | None = None
    modes_before: Mapping[str, int] = field(default_factory=dict)


_RECORD = Codec(DaemonRecord)


class DaemonRecords(JsonStore[DaemonRecord]):
    """The record files of one layout, by device; only the host of the layout writes. A record of a newer release is set
    aside too: the daemon is found again by its claims."""

    def __init__(self, layout: MpsLayout) -> None:
        tell = log_unreadable(
            unreadable_event="mps_record_unreadable",
            name="device",
            remedy="the daemon is found again by its claims; look at the file, then remove it",
        )
        super().__init__(layout.root, "MPS record", _decode_record, tell, is_name=is_device_name)
        self._layout = layout

    def save(self, record: DaemonRecord) -> None:
        """Replace the record, synced to disk. Raises: StateError."""
        content = json.dumps({"format": RECORD_FORMAT, **_RECORD.encode(record)}, indent=1).encode()
        self.write(record.spec.device, content, durable=True, whole=True)

    def forget(self, device: str) -> None:
        """Forget the daemon for good; nothing happens where nothing is. A record that could not be read stays aside.
        Raises: StateError."""
        self.remove(device, durable=False)
        # The directories that were removed before it must not come back without it.
        sync_removals(self.directory)


def _decode_record(device: str, content: bytes) -> DaemonRecord:
    try:
        record = parse_file(content, "MPS record", _RECORD.decode, known=RECORD_FORMAT, field="format")
    except NewerFormatError as error:
        raise StateError(str(error)) from error  # so that the file is set aside
    if record.spec.device != device:
        raise StateError(f"it is the record of {record.spec.device}")
    return record
