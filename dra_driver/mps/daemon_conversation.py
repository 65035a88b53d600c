"""Talking with one control daemon: until it is ready, about its limits, about its servers and clients."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from dra_driver.errors import PermanentError, RetryableError
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.daemon_control import CONTROL_SOCKET, MULTI_USER, BusyError, ControlProgram, log_tail
from dra_driver.mps.daemon_limits import is_answer, limit_commands
from dra_driver.mps.daemon_processes import ProcessId

_POLL_S = 0.01
_FIRST_ASK_S, _ASK_EVERY_S = 0.05, 0.5
_BUSY_S = 0.05
_LONGEST_ADDRESS = 107
_LONGEST_SOCKET = "control_privileged"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `patience` is how long a process may take to end after `quit`, and again after TERM.

    `look` is between two looks at what shall run, `tick` between two at the processes of daemons, `probe` between two
    at servers and clients, `exclusive` at least between two at the compute mode.
    """

    start: float = 10.0
    answer: float = 5.0
    patience: float = 3.0
    first_backoff: float = 0.2
    longest_backoff: float = 30.0
    calm: float = 60.0
    look: float = 0.04
    tick: float = 0.5
    probe: float = 10.0
    exclusive: float = 30.0


class HostStoppingError(RetryableError):
    """This process ends; what it was doing stays as it is for the next one."""


class Conversation:
    """With the daemon of one device."""

    def __init__(
        self,
        spec: MpsDaemonSpec,
        directories: MpsDirectories,
        control: ControlProgram,
        timings: Timings,
        closing: threading.Event,
    ) -> None:
        self._spec = spec
        self._directories = directories
        self._control = control
        self._timings = timings
        self._closing = closing
        self._turn = threading.Lock()

    def wait_ready(self, process: ProcessId, unwanted: Path) -> None:
        """Return when the daemon answers. Asking costs a process, so its socket is waited for before. A file at
        `unwanted` says that it shall stop.

        Raises: RetryableError with the end of its log, HostStoppingError.
        """
        control = Path(self._directories.pipe, CONTROL_SOCKET)
        began = time.monotonic()
        deadline = began + self._timings.start
        ask_at, pause, reason = 0.0, _FIRST_ASK_S, "it has made no socket"
        ask_anyway_at = began + 2 * _ASK_EVERY_S
        while not self._closing.is_set():
            now = time.monotonic()
            if not processes.is_alive(process):
                raise self._not_ready("ended while it started")
            if unwanted.exists():
                raise RetryableError(
                    f"the MPS daemon of {self._spec.device} was to be stopped while it started"
                )
            if now >= deadline:
                raise self._not_ready(f"was not ready after {now - began:.1f} s ({reason})")
            if now >= ask_at and (now >= ask_anyway_at or control.exists()):
                reason = self._why_not_ready(max(0.1, min(deadline - now, self._timings.answer)))
                if not reason:
                    return
                ask_at = time.monotonic() + pause
                pause = min(2 * pause, _ASK_EVERY_S)
            time.sleep(_POLL_S)
        raise HostStoppingError("the MPS host is being stopped; its successor takes the daemon over")

    def apply_limits(self) -> None:
        """Set the defaults and read them back. Raises: PermanentError if another value is read."""
        for setter, getter, wanted in limit_commands(self._spec):
            lines = self._ask(setter, getter)
            if not lines or not is_answer(wanted, lines[-1]):
                raise PermanentError(
                    f"the MPS daemon of {self._spec.device} did not take {setter!r}: "
                    f"{getter!r} says {' | '.join(lines) or 'nothing'}"
                )

    def ask_servers(self) -> tuple[str | None, int]:
        """(what is wrong with the servers, clients of all servers). Raises: RetryableError."""
        faulty, clients = [], 0
        for server in filter(str.isdigit, self._ask("get_server_list")):
            if "FAULT" in " ".join(self._ask(f"get_server_status {server}")).upper():
                faulty.append(server)
            clients += sum(map(str.isdigit, self._ask(f"get_client_list {server}")))
        if not faulty:
            return None, clients
        return (
            f"MPS server {', '.join(faulty)} is in state FAULT: a client failed and took all others along",
            clients,
        )

    def _ask(self, *commands: str, timeout_s: float | None = None) -> list[str]:
        """One question of ours at a time, and again while the daemon talks with somebody else's program."""
        deadline = time.monotonic() + (self._timings.answer if timeout_s is None else timeout_s)
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BusyError(f"the MPS daemon of {self._spec.device} is still being asked something else")
        try:
            while True:
                left = max(0.1, deadline - time.monotonic())
                try:
                    return self._control.ask(self._directories, *commands, timeout_s=left)
                except BusyError:
                    if time.monotonic() + _BUSY_S >= deadline or self._closing.wait(_BUSY_S):
                        raise
        finally:
            self._turn.release()

    def _why_not_ready(self, timeout_s: float) -> str:
        try:
            self._ask(timeout_s=timeout_s)
        except RetryableError as error:
            return str(error)
        return ""

    def _not_ready(self, what: str) -> RetryableError:
        """What the program printed comes first; a guess only where it printed nothing."""
        said = log_tail(self._directories) or self._likely_cause()
        if self._spec.multi_user:
            said += f"; it was started with {MULTI_USER}, which needs NVIDIA driver R555 or newer"
        return RetryableError(f"the MPS daemon of {self._spec.device} ({self._spec.uuid}) {what}; {said}")

    def _likely_cause(self) -> str:
        address = f"{self._directories.pipe}/{_LONGEST_SOCKET}".encode()
        if len(address) <= _LONGEST_ADDRESS:
            return "it printed nothing"
        return f"it printed nothing; perhaps its pipe directory {self._directories.pipe} is too long for a socket"
