"""The driver's `nvidia-cuda-mps-control`: one process of it is the daemon, others pass it commands and end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.concurrency.bounded_program import run_program
from dra_driver.errors import RetryableError
from dra_driver.model.driver_programs import (
    CONTROL_PROGRAM,
    DriverPrograms,
    FindPrograms,
    check_started,
    not_run,
)
from dra_driver.model.mps import MpsDaemonSpec, MpsDirectories
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.daemon_limits import is_number
from dra_driver.mps.daemon_processes import PIPE_VARIABLE, ProcessId, spawn

_log = structlog.get_logger(__name__)

CONTROL_SOCKET = "control"
"""What a daemon makes in its pipe directory when it is about to answer. The pid file is none of R470 and R535."""
OUTPUT = "host.out"
LOGS = ("control.log", OUTPUT)
MULTI_USER = "-multiuser-server"
"""The option that all programs from R555 on know; older ones have none for it."""

SURELY_ANSWERED = "get_default_active_thread_percentage"

_BUSY = "cannot send command"
_LARGEST_LOG = 16 << 20
_TAIL_BYTES = 2048
_TAIL_LINES = 4


class BusyError(RetryableError):
    """The daemon talked with another program at that moment."""


class ControlProgram:
    """The installed program."""

    def __init__(self, find: FindPrograms) -> None:
        self._find = find
        self._told = False

    def start(self, spec: MpsDaemonSpec, directories: MpsDirectories) -> ProcessId:
        """Start a daemon in the foreground of a session of its own. Raises: RetryableError."""
        programs = self._find()
        arguments = [programs.path(CONTROL_PROGRAM), "-f", *([MULTI_USER] if self._multi_user(spec) else [])]
        environment = {**self._environment(programs, directories), "CUDA_VISIBLE_DEVICES": spec.visible}
        try:
            return spawn(arguments, environment, Path(directories.log, OUTPUT))
        except OSError as error:
            raise not_run(f"start the MPS daemon of {spec.device}", arguments[0], error) from error

    def ask(self, directories: MpsDirectories, *questions: str, timeout_s: float) -> list[str]:
        """The lines that the daemon answers.

        A daemon talks with one program at a time: another one gets no answer, and often exit code 0. So a question that
        has an answer for sure comes last. Raises: BusyError if that answer is missing, RetryableError if there is no
        daemon or it does not answer.
        """
        asked = (*questions, SURELY_ANSWERED)
        lines = self._pass(directories, asked, timeout_s)
        if not lines or not is_number(lines[-1]):
            raise BusyError(f"the MPS daemon did not answer {asked[0]!r}: it talked with another program")
        return lines[:-1]

    def _pass(self, directories: MpsDirectories, questions: Sequence[str], timeout_s: float) -> list[str]:
        programs = self._find()
        program = programs.path(CONTROL_PROGRAM)
        action = f"ask the MPS daemon {questions[0]!r}"
        try:
            code, output = run_program(
                [program],
                self._environment(programs, directories),
                timeout_s=timeout_s,
                lane=f"{CONTROL_PROGRAM} {directories.pipe}",
                text="".join(f"{question}\n" for question in questions),
            )
        except TimeoutError as error:
            raise RetryableError(
                f"the MPS daemon did not answer {questions[0]!r} within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise not_run(action, program, error) from error
        check_started(action, program, code, output)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        if code != 0 or any("cannot find mps control daemon" in line.lower() for line in lines):
            reason = lines[-1] if lines else f"exit code {code}"
            if not lines or _BUSY in reason.lower():  # where there is no daemon, the program says so
                raise BusyError(f"the MPS daemon does not answer {questions[0]!r}: {reason}")
            raise RetryableError(f"the MPS daemon does not answer {questions[0]!r}: {reason}")
        return lines

    def end_users(self, directories: MpsDirectories, patience_s: float) -> None:
        """End the control daemon and its servers: asked to quit, then by signal. Any number of times.

        Raises: RetryableError.
        """
        users = processes.users_of(directories.pipe)
        if not users:
            return
        if any(processes.is_control_daemon(user, directories.pipe) for user in users):
            with suppress(RetryableError):
                self._pass(directories, ("quit",), patience_s)
                processes.wait_gone(users, patience_s)
        processes.end(processes.users_of(directories.pipe), patience_s)
        for user in users:
            processes.reap(user.pid)
        left = processes.users_of(directories.pipe)
        if left:
            numbers = ", ".join(str(process.pid) for process in left)
            raise RetryableError(f"MPS processes of {directories.pipe} do not end: {numbers}")

    def _multi_user(self, spec: MpsDaemonSpec) -> bool:
        """As asked; the program takes the option from root only."""
        if spec.multi_user and os.geteuid() != 0:
            if not self._told:
                _log.warning("mps_serves_one_user", uid=os.geteuid(), reason="multi-user mode needs root")
            self._told = True
            return False
        return spec.multi_user

    def _environment(self, programs: DriverPrograms, directories: MpsDirectories) -> dict[str, str]:
        return {
            **programs.environment(),
            PIPE_VARIABLE: directories.pipe,
            "CUDA_MPS_LOG_DIRECTORY": directories.log,
        }


def log_tail(directories: MpsDirectories) -> str:
    """The last lines of the daemon's log and output, on one line; empty where there is nothing."""
    parts = []
    for name in LOGS:
        with suppress(OSError), Path(directories.log, name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
            parts += [f"{name}: {' | '.join(line.strip() for line in lines)}"] if lines else []
    return "; ".join(parts)


def shorten_logs(directories: MpsDirectories) -> None:
    """Empty what has grown too large; done before a daemon starts, when nobody writes."""
    with suppress(OSError):
        for path in Path(directories.log).iterdir():
            if path.is_file() and path.stat().st_size > _LARGEST_LOG:
                path.write_bytes(b"")
