"""The files by which the plugin tells the MPS host what shall run, and the host tells what runs.

| File below `mps/` | Written by | Says |
|---|---|---|
| `host.wanted/<device>.json` | the plugin | this daemon shall run, with this spec |
| `host.wanted/<device>.stop` | the plugin, by a rename of the former; removed by the host | it shall stop |
| `host.status/<device>.json` | the host | how the daemon is, which wish the host has seen, why it refuses that |
| `<device>.json`, a directory | the host | what it made, and the compute modes from before (`daemon`) |
| `host.lock` | the host, which holds its lock | a host runs, and the number of the format of these files |
| `host.modes` | nobody; empty | an nvidia-smi that the host started holds a lock on a byte for each GPU |
| `host.alive` | the host, every ten seconds | it watches, and all status files say what it knows |

A wish is known by its generation: the inode and time of its file. So each call of the plugin is one that the host has
not seen yet, and a stop needs no space on the disk. Nobody acts on what he cannot read, nor on what is not there: a
daemon runs on until its device has a `.stop`, and the host starts nothing while there is one.

| What happens | What follows |
|---|---|
| the host dies | daemons run on; the next host takes them over, and does what it has not seen done |
| the plugin dies before or after it wrote | the wish stands; its successor writes it again, or withdraws it |
| a stop while no host runs | the `.stop` waits for the next host, and the GPU is withheld meanwhile |
| a stop while the daemon starts | the start is broken off, and taken back |
| wanted again while it stops | both files are there: the host ends the stop first |
| wanted again while it runs | the plugin goes on; the host looks at the daemon after that |
| two instances of the plugin write | the last file counts; the other call waits for it, or fails if its spec differs |
| a first start fails | the host takes it back and says why; it tries again at the next generation |
| full disk | no new daemon; a stop works |
| reboot | the host starts again what is wanted |
| host of another format | it keeps its daemons; the plugin writes nothing, and refuses |
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from base64 import b32encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from dra_driver.errors import PermanentError, RetryableError, StateError
from dra_driver.files.atomic import (
    QUARANTINE,
    make_directory,
    read_or_none,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.files.fields import (
    FLAG,
    NUMBER,
    TEXT,
    TEXTS,
    Kind,
    Shape,
    left_out,
    list_of,
    needed,
    nullable,
    one_of,
    or_null,
)
from dra_driver.files.file_lock import is_locked
from dra_driver.files.formats import parse
from dra_driver.model.mps import (
    MPS_STATES,
    MpsDaemonSpec,
    MpsDaemonStatus,
    MpsDirectories,
    MpsMember,
)
from dra_driver.model.problems import NodeProblem
from dra_driver.model.units import counted
from dra_driver.mps.daemon_limits import check_spec
from dra_driver.mps.daemon_processes import identify, is_control_daemon, users_of

_log = structlog.get_logger(__name__)

FORMAT = 2
SUFFIX = ".json"
LONGEST_SOCKET = 106
"""Bytes of the longest socket path with which NVIDIA's control daemons start: one less than the kernel takes."""
LONGEST_SOCKET_NAME = "control_privileged"
"""Of the sockets that a control daemon makes in its pipe directory."""
_PLAIN_CHARACTERS = 12
"""Below MicroK8s' kubelet root, the longest that is known, a directory has room for 13."""
_DEVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_POLL_S = 0.015
_SILENT_S = 30.0
"""Three times the period of the host's sign of life."""
_ASKED_AGAIN_S = 600.0
_SEE_PODS = "see its pod: `kubectl get pods -A -o wide -l app.kubernetes.io/component=mps`"
_ENABLE = "enable it: `helm upgrade RELEASE CHART -n NAMESPACE --reuse-values --set mps.enabled=true`"
_REPLACE = (
    "delete the pod of the DaemonSet gpu-dra-driver-mps on this node once no MPS claims run there (its daemons end "
    "with it)"
)

_LIMIT = left_out(or_null(NUMBER))
_MEMBER = Shape(MpsMember, device=needed(TEXT), gpu_uuid=needed(TEXT), default_memory_limit_mib=_LIMIT)
SPEC = Shape(
    MpsDaemonSpec,
    device=needed(TEXT),
    uuid=needed(TEXT),
    kind=needed(one_of("the kind", "gpu", "mig")),
    gpu_uuid=needed(TEXT),
    multi_user=needed(FLAG),
    default_active_thread_percentage=_LIMIT,
    default_memory_limit_mib=_LIMIT,
    others=left_out(list_of(_MEMBER.kind), ()),
)
"""Also in the records of claims."""
_STATUS = Shape(
    MpsDaemonStatus,
    device=needed(TEXT),
    state=needed(one_of("the state", *MPS_STATES)),
    spec=needed(SPEC.kind),
    pid=nullable(NUMBER),
    since=needed(Kind(NUMBER.read, int)),
    clients=nullable(NUMBER),
    problem=nullable(TEXT),
    users=needed(list_of(NUMBER)),
    not_exclusive=needed(TEXTS),
    directory=needed(TEXT),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What the host says of one daemon. `seen` is the generation of the last wish that it has dealt with, `refusal` why
    it could not do that; with `is_final` a person has to change something first."""

    status: MpsDaemonStatus
    seen: str | None = None
    refusal: str | None = None
    is_final: bool = False


_REPORT = Shape(
    Report,
    status=needed(_STATUS.kind),
    seen=nullable(TEXT),
    refusal=nullable(TEXT),
    is_final=needed(FLAG),
)


class NoMpsHostError(RetryableError):
    """No MPS host runs that reads what this release writes."""

    has_no_effect = True


class MpsHostFiles:
    """The plugin's side: for many threads and processes. `wait_s` is how long a host that restarts is waited for,
    `is_expected` whether the node's configuration wants a host."""

    def __init__(
        self,
        layout: MpsLayout,
        *,
        wait_s: float = 1.0,
        is_expected: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._wait_s = wait_s
        self._is_expected = is_expected
        self._clock = clock
        self._alive: tuple[str | None, float] = (None, clock())
        self._missed_at = -math.inf
        self._known: dict[str, tuple[str, MpsDaemonStatus]] = {}

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float = 20.0) -> MpsDaemonStatus:
        """The daemon's status once it is ready, or found in FAULT. Nobody waits for one that runs: the host only looks
        at it once more.

        Raises: PermanentError if it cannot be as asked, RetryableError if it was not ready in time, NoMpsHostError,
        StateError.
        """
        check_spec(spec)
        self._layout.refuse_long_path(spec.device)
        deadline = time.monotonic() + timeout_s
        try:
            self._await_host(deadline)
        except NoMpsHostError:
            self._missed_at = self._clock()
            raise
        running = self._running(spec)
        wish = self._layout.wanted(spec.device)
        # What a power cut tears is written anew by the Prepare after it, which finds no daemon.
        write_atomically(wish, encode_wish(spec), durable=False, whole=running is None)
        if running is not None:
            return running
        while (found := generation_of(wish)) is not None:
            report = self._report(spec.device)
            if report is not None and report.seen == found:
                if report.refusal is not None:
                    raise (PermanentError if report.is_final else RetryableError)(report.refusal)
                if report.status.spec != spec:
                    raise RetryableError(f"another call wants another MPS daemon of {spec.device}")
                return report.status
            self._pause(deadline, f"made the MPS daemon of {spec.device} ready", timeout_s)
        raise RetryableError(f"the MPS daemon of {spec.device} was to be stopped while it started")

    def stop(self, device: str, timeout_s: float = 20.0, *, gpu_uuid: str | None = None) -> None:
        """No process of the device's daemon runs, and the GPU has its former compute mode; also if there was none.

        With the `gpu_uuid` of a whole GPU the host puts the compute mode back even if its record is lost. Raises:
        NoMpsHostError if no host runs and a daemon was there, which the next host then stops; RetryableError,
        StateError.
        """
        deadline = time.monotonic() + timeout_s
        if not withdraw(self._layout, device, gpu_uuid):
            return
        stop = self._layout.unwanted(device)
        try:
            self._await_host(deadline)
        except NoMpsHostError as error:
            if not self._layout.has_traces(device):
                remove_file(stop)
                return
            _log.warning("mps_stop_left_to_next_host", device=device, reason=str(error))
            raise
        while (found := generation_of(stop)) is not None:
            report = self._report(device)
            if report is not None and report.seen == found and report.refusal is not None:
                raise RetryableError(report.refusal)
            self._pause(deadline, f"stopped the MPS daemon of {device}", timeout_s)

    def statuses(self) -> tuple[MpsDaemonStatus, ...]:
        """All daemons of the node, by name; none where no host runs. A file that is the same as at the last look is not
        read again. Raises: StateError."""
        if not is_locked(self._layout.lock):
            return ()
        known, found = self._known, {}
        for path in sorted(self._layout.statuses.glob(f"*{SUFFIX}")):
            device, seen = path.name.removesuffix(SUFFIX), generation_of(path)
            if seen is not None and device in known and known[device][0] == seen:
                found[device] = known[device]
            elif seen is not None and (report := self._report(device)) is not None:
                found[device] = seen, report.status
        self._known = found
        return tuple(status for _, status in found.values())

    def spec_of(self, device: str) -> MpsDaemonSpec | None:
        """With which settings the device's daemon runs, or shall run; None if no file tells of one."""
        report = self._report(device)
        if report is not None:
            return report.status.spec
        with suppress(StateError):
            return read_wish(self._layout.wanted(device))
        return None

    def runs(self, spec: MpsDaemonSpec) -> bool:
        """Whether a daemon that is ready with this spec runs, and is not to stop. Raises: StateError."""
        return self._running(spec) is not None

    def unseen(self) -> list[str]:
        """Devices of which the host has not yet done, or refused, what is wanted."""
        found = []
        for path in sorted(self._layout.wishes.glob("*.*")):
            device = path.name.partition(".")[0]
            if is_device_name(device):
                report = self._report(device)
                if report is None or report.seen != generation_of(path):
                    found.append(device)
        return found

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
        reason, sign = self.host_problem(), generation_of(self._layout.alive)
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
        if self._is_expected or self._clock() - self._missed_at < _ASKED_AGAIN_S:
            return True
        return any(is_device_name(path.name.partition(".")[0]) for path in self._layout.wishes.glob("*.*"))

    def host_problem(self) -> str | None:
        """Why no daemon can be asked for. Raises: StateError."""
        if not is_locked(self._layout.lock):
            return f"the MPS host is not running on this node; {_SEE_PODS}, or {_ENABLE} if there are none"
        content = read_or_none(self._layout.lock)
        if not content:
            return f"the MPS host of this node is starting; {_SEE_PODS}, and its log"
        with suppress(StateError):
            parse(content, "lock file", dict, known=FORMAT, field="format")
            return None
        return f"the MPS host on this node is of another release than gpu-dra-driver: {_REPLACE}"

    def _report(self, device: str) -> Report | None:
        """What the host says; None where there is nothing that can be read."""
        content = read_or_none(self._layout.status(device))
        with suppress(StateError):
            return parse(content or b"", "status", _REPORT.decode, known=FORMAT, field="format")
        return None

    def _running(self, spec: MpsDaemonSpec) -> MpsDaemonStatus | None:
        """What the host said of a daemon that is ready with this spec, still runs and is not to stop; None otherwise.
        Raises: StateError."""
        report, pipe = self._report(spec.device), self._layout.directories(spec.device).pipe
        if report is None or report.refusal is not None or self._layout.unwanted(spec.device).exists():
            return None
        status = report.status
        if status.state != "ready" or status.spec != spec or status.pid is None:
            return None
        process = identify(status.pid)
        return status if process is not None and is_control_daemon(process, pipe) else None

    def _await_host(self, deadline: float) -> None:
        deadline = min(deadline, time.monotonic() + self._wait_s)
        while (problem := self.host_problem()) is not None:
            if time.monotonic() >= deadline:
                raise NoMpsHostError(problem)
            time.sleep(_POLL_S)

    def _pause(self, deadline: float, what: str, timeout_s: float) -> None:
        if time.monotonic() < deadline:
            time.sleep(_POLL_S)
            return
        reason = self.host_problem() or "see `kubectl logs` of its pod"
        raise RetryableError(f"the MPS host has not {what} within {timeout_s:.3g} s; {reason}")


def withdraw(layout: MpsLayout, device: str, gpu_uuid: str | None) -> bool:
    """Have the device's daemon stopped, also if that failed before; whether there is anything to stop. Raises:
    StateError, PermanentError."""
    wish, stop = layout.wanted(device), layout.unwanted(device)
    try:
        wish.replace(stop)
    except FileNotFoundError:
        if not stop.exists():
            if not layout.has_traces(device):
                return False
            spec = None
            if gpu_uuid is not None:
                spec = MpsDaemonSpec(device, gpu_uuid, "gpu", gpu_uuid)
                check_spec(spec)
            make_directory(stop.parent, 0o700)
            write_atomically(stop, encode_wish(spec), durable=False)
    except OSError as error:
        raise state_error("rename", wish, error) from error
    with suppress(FileNotFoundError):  # the host has stopped it meanwhile
        now = time.time_ns()
        os.utime(stop, ns=(now, now))
    # A wish that came back after a power cut would start a daemon that no claim asked for.
    sync_removals(stop.parent)
    return True


def encode_wish(spec: MpsDaemonSpec | None) -> bytes:
    """The content of a wish; only of a stop the spec may be unknown."""
    return json.dumps({"format": FORMAT, "spec": spec and SPEC.encode(spec)}).encode()


def read_wish(path: Path) -> MpsDaemonSpec | None:
    """The spec in a wish. Raises: StateError; also if there is none any more."""
    return parse(
        read_or_none(path) or b"",
        "wish for an MPS daemon",
        lambda body: body["spec"] and SPEC.decode(body["spec"]),
        known=FORMAT,
        field="format",
    )


def generation(status: os.stat_result) -> str:
    """What differs when a wish was written anew."""
    return f"{status.st_ino}-{status.st_mtime_ns}"


def generation_of(path: Path) -> str | None:
    """That of the wish at this path; None if there is none."""
    try:
        return generation(path.lstat())
    except OSError:
        return None


def encode_report(report: Report) -> bytes:
    """The content of a status file."""
    return json.dumps({"format": FORMAT, **_REPORT.encode(report)}, indent=1).encode()


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
        """What shall run and what shall stop."""
        return self.root / "host.wanted"

    @property
    def statuses(self) -> Path:
        """What runs."""
        return self.root / "host.status"

    def wanted(self, device: str) -> Path:
        """The wish that the daemon runs."""
        return self.wishes / f"{_checked(device)}{SUFFIX}"

    def unwanted(self, device: str) -> Path:
        """The wish that the daemon stops."""
        return self.wishes / f"{_checked(device)}.stop"

    def status(self, device: str) -> Path:
        """What the host says of the daemon."""
        return self.statuses / f"{_checked(device)}{SUFFIX}"

    def record(self, device: str) -> Path:
        """The record of one daemon."""
        return self.root / f"{_checked(device)}{SUFFIX}"

    def records_aside(self, device: str) -> list[Path]:
        """Where records are that could not be read. A directory never was one."""
        return [
            path for path in self.root.glob(f"{_checked(device)}{SUFFIX}{QUARANTINE}*") if not path.is_dir()
        ]

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
        """Whether anything of a daemon is left. A compute mode alone does not count: an administrator may have set
        it."""
        return (
            self.directory(device).exists()
            or self.record(device).exists()
            or bool(self.records_aside(device))
            or bool(users_of(self.directories(device).pipe))
        )


def mps_layout(plugin_directory: Path) -> MpsLayout:
    """The layout below the plugin's own directory."""
    return MpsLayout(plugin_directory / "mps")


def is_device_name(name: str) -> bool:
    """Whether a device can have this name."""
    return _DEVICE_NAME.fullmatch(name) is not None


def _checked(device: str) -> str:
    if not is_device_name(device):
        raise PermanentError(f"{device!r} is not a device name: it must be a DNS label")
    return device
