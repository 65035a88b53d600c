"""NVIDIA's `nvidia-cuda-mps-control`, as the daemon of a device, and as a client that queries the daemon."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import structlog

from dra_driver.base.bounded_program import run_driver_program
from dra_driver.errors import PermanentError, RetryableError
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.driver_files import CONTROL_PROGRAM, FindPrograms, exit_text, not_run
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories
from dra_driver.model.remedies import RESET_OR_REBOOT
from dra_driver.mps_host import daemon_processes as processes
from dra_driver.mps_host.daemon_processes import PIPE_VARIABLE, ProcessId, spawn

_log = structlog.get_logger(__name__)

_UUIDS = {"gpu": re.compile(r"GPU-[0-9A-Fa-f-]{1,64}"), "mig": re.compile(r"MIG-[0-9A-Za-z/-]{1,96}")}
_SIZE = re.compile(r"(?<!\d)(\d{1,18})(?!\d)\s*([KMGT]?)(?:i?B)?")
_MIB = {"": 1 / 1048576, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1048576}
CONTROL_SOCKET = "control"
"""A daemon creates this socket just before it can respond. R470 and R535 create no pid file."""
OUTPUT = "host.out"
LOGS = ("control.log", OUTPUT)
MULTI_USER = "-multiuser-server"
"""From R555 on."""

ALWAYS_ANSWERED = "get_default_active_thread_percentage"

_CUDA_ENDS: Mapping[int, str] = {
    34: "CUDA error 802, system not ready: the NVLink fabric is not set up; `systemctl restart nvidia-fabricmanager` "
    "on the node, and see `journalctl -u nvidia-fabricmanager`",
    35: "CUDA error 803 or 35, driver mismatch: the libraries of the NVIDIA driver do not match its kernel module; "
    "complete the update of the NVIDIA driver, or reboot the node",
    46: "CUDA error 46, device unavailable: another process uses the GPU exclusively; stop the process "
    "that `nvidia-smi -q -d COMPUTE,PIDS` on the node shows",
    100: "CUDA error 100, no device: CUDA finds no GPU; check that `nvidia-smi -L` on the node lists the device, and "
    "that its device nodes are in /dev",
    231: "CUDA error 999, unknown: `dmesg | grep -iE 'nvrm|xid'` on the node shows the cause; "
    + RESET_OR_REBOOT,
    244: "CUDA error 500, not found: CUDA's library libcuda.so.1 is missing; install the NVIDIA driver package "
    "that contains it, or set the driver root to where the NVIDIA driver is installed",
}
"""Exit codes of control daemons from R580 on: if CUDA fails, they print nothing and exit with its error modulo 256."""

_NO_SOCKET = (
    "it has not created its socket; from R580 on it initialises CUDA first, which takes seconds for each "
    "GPU unless persistence mode is on (nvidia-persistenced, or `nvidia-smi -pm 1` on the node)"
)
_NO_DAEMON = "Cannot find MPS control daemon"
_BUSY = "cannot send command"
_LARGEST_LOG, _KEPT_OF_LOG = 4 << 20, 1 << 20
"""In bytes. The probes alone add 3 MB a day to a log."""
_BLOCK = 512
_OF_QUESTIONS = ("Accepting connection", "NEW UI", "Cmd:", "UI closed")
_TAIL_BYTES = 16384
_TAIL_LINES = 4
_POLL_S = 0.01
_FIRST_ASK_S, _ASK_EVERY_S = 0.05, 0.5
_BUSY_S = 0.05


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds. `patience` is how long a process may take to exit after `quit`, and again after SIGTERM.
    `start` includes CUDA's initialisation.

    Intervals: `look` for reading the wanted daemons, `idle` for the same while no daemon exists, `tick` for checking
    processes, `probe` for queries, `sign` for touching `host.alive`, `exclusive` for checking compute modes.
    """

    start: float = 20.0
    answer: float = 5.0
    patience: float = 3.0
    first_backoff: float = 0.2
    longest_backoff: float = 30.0
    calm: float = 60.0
    look: float = 0.04
    idle: float = 0.25
    tick: float = 0.5
    sign: float = 10.0
    probe: float = 10.0
    exclusive: float = 30.0


class BusyError(RetryableError):
    """The daemon was serving another program."""


class StartCancelledError(Exception):
    """Not a failure: the daemon is no longer wanted, or the next process continues the start."""


@dataclass(eq=False)
class DaemonControl:
    """`closing` is set when this process exits."""

    find: FindPrograms
    spec: MpsDaemonSpec
    directories: MpsDirectories
    timings: Timings = Timings()
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._turn = threading.Lock()

    def start(self) -> ProcessId:
        """Start the daemon as a foreground process. Raises: RetryableError; StateError like `spawn`."""
        programs = self.find()
        arguments = [programs.path(CONTROL_PROGRAM), "-f"]
        if self.spec.multi_user and os.geteuid() == 0:
            arguments.append(MULTI_USER)
        elif self.spec.multi_user:  # the program accepts the option only from root
            _log_one_user(os.geteuid())
        environment = {
            **programs.environment(),
            **self._variables,
            "CUDA_VISIBLE_DEVICES": self.spec.visible,
        }
        try:
            return spawn(arguments, environment, Path(self.directories.log, OUTPUT))
        except OSError as error:
            raise not_run(f"start the MPS daemon of {self.spec.device}", arguments[0], error) from error

    def wait_ready(self, process: ProcessId, is_unwanted: Callable[[], bool]) -> None:
        """Return when the daemon responds. Waits for its socket first, because each query starts a process.

        Raises: RetryableError with the end of the daemon's log, StartCancelledError.
        """
        control = Path(self.directories.pipe, CONTROL_SOCKET)
        began = time.monotonic()
        deadline = began + self.timings.start
        ask_at, pause, reason = 0.0, _FIRST_ASK_S, _NO_SOCKET
        ask_anyway_at = began + 2 * _ASK_EVERY_S
        while not self.closing.is_set():
            now = time.monotonic()
            if not processes.is_alive(process):
                raise self._not_ready(
                    f"stopped during its start with {status_text(processes.reap(process.pid))}"
                )
            if is_unwanted():
                raise StartCancelledError("a stop of the daemon was requested")
            if now >= deadline:
                raise self._not_ready(f"was not ready after {now - began:.1f} s ({reason})")
            if now >= ask_at and (now >= ask_anyway_at or control.exists()):
                try:
                    self.query(timeout_s=max(0.1, min(deadline - now, self.timings.answer)))
                    return
                except RetryableError as error:
                    reason = str(error) if control.exists() else _NO_SOCKET
                ask_at = time.monotonic() + pause
                pause = min(2 * pause, _ASK_EVERY_S)
            time.sleep(_POLL_S)
        raise StartCancelledError("the MPS host is being stopped")

    def apply_limits(self) -> None:
        """Set and verify the default limits. Raises: PermanentError."""
        for setter, getter, wanted in limit_commands(self.spec):
            lines = self.query(setter, getter)
            if not lines or not is_answer(wanted, lines[-1]):
                raise PermanentError(
                    f"the MPS daemon of {self.spec.device} did not apply {setter!r}: "
                    f"{getter!r} returns {' | '.join(lines) or 'nothing'}"
                )

    def query_servers(self) -> tuple[str | None, int]:
        """Return (the servers' fault or None, the number of clients). Raises: RetryableError."""
        faulty, clients = [], 0
        for server in filter(str.isdigit, self.query("get_server_list")):
            if "FAULT" in " ".join(self.query(f"get_server_status {server}")).upper():
                faulty.append(server)
            clients += sum(map(str.isdigit, self.query(f"get_client_list {server}")))
        if not faulty:
            return None, clients
        return (
            f"MPS server {', '.join(faulty)} is in state FAULT: one client failed, which stopped all other clients",
            clients,
        )

    def query(self, *commands: str, timeout_s: float | None = None) -> list[str]:
        """Like `query_once`, but retry while the daemon serves another program."""
        deadline = time.monotonic() + (self.timings.answer if timeout_s is None else timeout_s)
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BusyError(f"the MPS daemon of {self.spec.device} is still answering another query")
        try:
            while True:
                left = max(0.1, deadline - time.monotonic())
                try:
                    return self.query_once(*commands, timeout_s=left)
                except BusyError:
                    if time.monotonic() + _BUSY_S >= deadline or self.closing.wait(_BUSY_S):
                        raise
        finally:
            self._turn.release()

    def query_once(self, *questions: str, timeout_s: float) -> list[str]:
        """Return the daemon's answer, as lines.

        A daemon serves one program at a time; others get no answer, often with exit code 0. So the last query is one
        that always gets an answer. Raises: BusyError if it is missing, RetryableError if no daemon responds.
        """
        asked = (*questions, ALWAYS_ANSWERED)
        lines = self._pass(asked, timeout_s)
        if not lines or not is_number(lines[-1]):
            raise BusyError(f"the MPS daemon did not answer {asked[0]!r}: it was busy with another program")
        return lines[:-1]

    def stop_processes(self, started: ProcessId | None) -> None:
        """Stop the daemon and its servers: first with `quit`, then by signal. Can be repeated.

        `users_of` does not find `started` while the kernel loads its program. Raises: RetryableError, StateError.
        """
        patience_s = self.timings.patience

        def running() -> set[ProcessId]:
            own = {started} if started is not None and processes.is_alive(started) else set()
            return own.union(processes.users_of(self.directories.pipe))

        users = running()
        if any(processes.is_control_daemon(user, self.directories.pipe) for user in users):
            with suppress(RetryableError):
                self._pass(("quit",), patience_s)
                processes.wait_gone(users, patience_s)
        processes.end(running(), patience_s)
        if started is not None:
            processes.reap(started.pid)
        if left := running():
            numbers = ", ".join(str(process.pid) for process in sorted(left))
            raise RetryableError(f"MPS processes of {self.directories.pipe} do not stop: {numbers}")

    def _pass(self, questions: Sequence[str], timeout_s: float) -> list[str]:
        code, output = run_driver_program(
            self.find,
            CONTROL_PROGRAM,
            action=f"send {questions[0]!r} to the MPS daemon",
            timeout_s=timeout_s,
            subject=self.directories.pipe,
            variables=self._variables,
            text="".join(f"{question}\n" for question in questions),
        )
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if code != 0 or any(_NO_DAEMON in line for line in lines):
            reason = f"{lines[-1]} ({exit_text(code)})" if lines else exit_text(code)
            if not lines or _BUSY in reason.lower():  # if there is no daemon, the program prints a message
                raise BusyError(f"the MPS daemon does not answer {questions[0]!r}: {reason}")
            raise RetryableError(f"the MPS daemon does not answer {questions[0]!r}: {reason}")
        return lines

    @property
    def _variables(self) -> dict[str, str]:
        return {PIPE_VARIABLE: self.directories.pipe, "CUDA_MPS_LOG_DIRECTORY": self.directories.log}

    def _not_ready(self, what: str) -> RetryableError:
        printed = log_tail(self.directories)
        # Programs older than R555 print this for every unknown option.
        is_too_old = self.spec.multi_user and _NO_DAEMON in printed
        parts = (
            f"the MPS daemon of {self.spec.device} ({self.spec.uuid}) {what}",
            printed,
            f"it was started with {MULTI_USER}, which needs NVIDIA driver R555 or newer"
            if is_too_old
            else "",
        )
        return RetryableError("; ".join(filter(None, parts)))


@cache
def _log_one_user(uid: int) -> None:
    _log.warning("mps_serves_one_user", uid=uid, reason="multi-user mode needs root")


def status_text(code: int | None) -> str:
    """Return how a control daemon exited, with the remedy for a CUDA error."""
    if code is None:  # an earlier MPS host started the daemon
        return "an unknown exit status"
    cause = _CUDA_ENDS.get(code)
    if cause is None and code > 1:
        cause = "with NVIDIA driver R580 or newer, the exit code is the number of a CUDA error modulo 256"
    return exit_text(code) if cause is None else f"{exit_text(code)}: {cause}"


def log_tail(directories: MpsDirectories) -> str:
    """Return the last lines of log and output, without queries: the probes would hide why the daemon exited."""
    parts = []
    for name in LOGS:
        with suppress(OSError), Path(directories.log, name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = map(str.strip, file.read().decode(errors="replace").splitlines())
            kept = [line for line in lines if not _is_about_query(line)][-_TAIL_LINES:]
            parts += [f"{name}: {' | '.join(kept)}"] if kept else []
    return "; ".join(parts)


def _is_about_query(line: str) -> bool:
    """Whether a line is such as `[2026-11-27 04:42:31.798 Control  6833] Cmd:quit`."""
    text = line.rpartition("] ")[2]
    return text.startswith(_OF_QUESTIONS) or is_number(text)


def bound_logs(directories: MpsDirectories) -> None:
    """Keep only the end of each log that is too large. Daemons append, so they may write at the same time."""
    with suppress(OSError), os.scandir(directories.log) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                size = entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if size > _LARGEST_LOG:
                    _keep_end(entry.path)


def _keep_end(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        file.seek(-_KEPT_OF_LOG, os.SEEK_END)
        kept = file.read()
        file.truncate(0)
        file.write(kept.partition(b"\n")[2] or kept)


def check_spec(spec: MpsDaemonSpec) -> None:
    """Check UUIDs, which become command arguments. Raises: PermanentError."""
    for uuid, kind in {spec.uuid: spec.kind, **dict.fromkeys(spec.gpu_uuids, "gpu")}.items():
        if not _UUIDS[kind].fullmatch(uuid):
            whose = "MIG device" if kind == "mig" else "GPU"
            raise PermanentError(
                f"cannot start an MPS daemon for {spec.device}: {uuid!r} is not the UUID of a {whose}"
            )


def limit_commands(spec: MpsDaemonSpec) -> tuple[tuple[str, str, str], ...]:
    """Return (setter, getter, expected answer) for each default limit. They name devices by number, as every driver
    allows.
    """
    commands = []
    percentage = spec.default_active_thread_percentage
    if percentage is not None:
        name = "default_active_thread_percentage"
        commands.append((f"set_{name} {percentage}", f"get_{name}", f"{percentage} %"))
    for ordinal, memory in enumerate(spec.default_memory_limits_mib):
        if memory is None:
            continue
        name = f"default_device_pinned_mem_limit {ordinal}"
        commands.append((f"set_{name} {memory}M", f"get_{name}", f"{memory} MiB"))
    return tuple(commands)


def is_answer(wanted: str, text: str) -> bool:
    """Whether the getter's output equals the wanted value: `25 %` as `25.0`, `4096 MiB` as `4G` or `4096M`.

    NVIDIA's program rounds down to the displayed unit: 1536 MiB is shown as `1G`.
    """
    number, unit = wanted.split()
    if unit == "%":
        return is_number(text) and round(float(text), 3) == float(number)
    found = _SIZE.search(text.upper().rpartition(":")[2])
    return found is not None and 0 < int(found[1]) == int(number) // _MIB[found[2]]


def is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None
