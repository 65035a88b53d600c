"""Commands of the driver as processes of their own that start in a moment: forks of one that has imported what they
import. Most of what a short command costs is that.

For commands that end. The daemons import less than this, and are started as they are in a pod.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_LONGEST_REQUEST = 1 << 17
_COMMANDS = (
    "claims", "cluster", "debts", "detach", "device_classes", "doctor", "inspect", "simulate", "top", "validate",
)  # fmt: skip
_PRELOADED = (
    "cel_expr_python.cel",
    "dra_driver.app.commands.doctor",
    "dra_driver.app.commands.validate",
    "dra_driver.claims.specs_without_record",
    "dra_driver.cli.commands",
    *(f"dra_driver.cli.{name}" for name in _COMMANDS),
    "dra_driver.diagnostics.cluster_lists",
    "dra_driver.diagnostics.doctor.checks",
    "dra_driver.diagnostics.snapshot",
    "dra_driver.inventory.discovery",
    "dra_driver.logs",
    "dra_driver.mps.without_host",
    "dra_driver.nvml.profiles",
    "dra_driver.nvml.session",
    "dra_driver.sharing.steps",
    "dra_driver.simulator.commands",
    "dra_driver.slices.rules.diff",
    "dra_driver.validation.machine_fit",
    "dra_driver.validation.manifest_check",
    "dra_driver.validation.server_trial",
)
"""What commands import when they are called. One that is missing here costs time, nothing else."""
_WITH_THREADS = "grpc"
"""Not to be forked with."""


class ForkedCommand:
    """A command that runs; `pid` is its process."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.returncode if self.returncode is not None or not self._ended(0) else self._read()

    def wait(self, timeout_s: float) -> int:
        """The exit code, negative for a signal. Raises: TimeoutExpired."""
        if self.returncode is None and not self._ended(timeout_s):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
        return self._read()

    def send_signal(self, number: int) -> None:
        """Not to one that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float) -> bool:
        return bool(select.select([self._status], [], [], timeout_s)[0])

    def _read(self) -> int:
        if self.returncode is None:
            with os.fdopen(self._status) as status:
                self.returncode = int(status.readline())
        return self.returncode


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: str = "",
    cwd: Path | None = None,
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """`gpu-dra-driver` with these arguments, as `subprocess.run` would have it. Raises: TimeoutExpired."""
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    try:
        os.write(files[0], stdin.encode())
        os.lseek(files[0], 0, os.SEEK_SET)
        process = start(arguments, *files, env=env, cwd=cwd)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(["gpu-dra-driver", *arguments], code, *map(_content, files[1:]))
    finally:
        for file in files:
            os.close(file)


def start(
    arguments: Sequence[str],
    stdin: int,
    stdout: int,
    stderr: int,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    new_session: bool = False,
) -> ForkedCommand:
    """`gpu-dra-driver` with these arguments on these open files."""
    request = {
        "arguments": list(arguments),
        "env": dict(env),
        "cwd": str(cwd or Path.cwd()),
        "new_session": new_session,
    }
    status, theirs = os.pipe()
    try:
        message = json.dumps(request).encode()
        assert len(message) < _LONGEST_REQUEST
        # A file of its own for each, so that the command shares no position in it with others.
        socket.send_fds(_server(), [message], [stdin, stdout, stderr, theirs])
    finally:
        os.close(theirs)
    # Unbuffered: what follows is read when the command has ended.
    pid = b""
    while not pid.endswith(b"\n"):
        more = os.read(status, 1)
        assert more, "the process that starts commands has ended"
        pid += more
    return ForkedCommand(int(pid), status)


def _content(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file)) as opened:
        return opened.read()


_STARTING = threading.Lock()


def _server() -> socket.socket:
    with _STARTING:
        return _start_server()


@functools.cache
def _start_server() -> socket.socket:
    """The connection to the process that forks; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # -P: the neighbours of this file are no modules of the command.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- the process that forks ------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Comes back in each command's process, with its arguments in `sys.argv` and on its files."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        message, files, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            child = os.fork()
            if child:
                _tell_the_end(child, files)
            _become(json.loads(message), files)
            return
        for file in files:
            os.close(file)


_code = 1
"""Unless `main` says another one."""


def _leave() -> None:
    """Ends without taking apart what was imported: that would copy all memory that is shared with others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _tell_the_end(child: int, files: list[int]) -> NoReturn:
    """The process ID of a command, and its exit code when it has ended."""
    for file in (0, 1, 2, *files[:3]):
        os.close(file)
    os.write(files[3], f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    os.write(files[3], f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, object], files: list[int]) -> None:
    """What `execve` and the start of Python would do."""
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    # They find out anew whether they are a terminal.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(str(request["cwd"]))
    environment, arguments = request["env"], request["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [sys.argv[0], *arguments]


if __name__ == "__main__":
    import gc
    import importlib

    # Registered before all others, so it runs after them.
    atexit.register(_leave)
    for _name in _PRELOADED:
        importlib.import_module(_name)
    from dra_driver.cli.main import main

    assert _WITH_THREADS not in sys.modules
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        main()
        _code = 0
    except SystemExit as ended:
        _code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
