"""Starts commands of the driver as separate processes in a few milliseconds. It forks a process that has already
imported their modules, because imports take most of the time of a short command.

Only for short commands: daemons import less, and tests start them as in a pod.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from playground import PATIENCE_S

_COMMANDS = (
    "claims", "cleanup", "cluster", "detach", "device_classes", "doctor", "inspect", "serviced", "simulate", "top",
    "validate",
)  # fmt: skip
_PRELOADED = (
    "cel_expr_python.cel", "dra_driver.claims.specs_without_record", "dra_driver.cli.commands",
    *(f"dra_driver.cli.{name}" for name in _COMMANDS),
    "dra_driver.cli.rules.cluster_rows", "dra_driver.cli.checks.check", "dra_driver.cli.node",
    "dra_driver.inventory.discovery", "kubernetes.config.kube_config", "dra_driver.app.logs",
    "dra_driver.mps_host.host_files", "dra_driver.nvml.mig_reading", "dra_driver.nvml.scan",
    "dra_driver.nvml.session", "dra_driver.sharing.steps", "dra_driver.simulator.simulate_commands",
    "dra_driver.slices.rules.diff", "dra_driver.cli.validation.machine_fit",
    "dra_driver.cli.validation.manifest_check", "dra_driver.cli.validation.cluster_objects",
    "google.protobuf.reflection",
)  # fmt: skip
"""The modules that commands import. If one is missing here, commands are only slower. None of them may import grpc,
because a process with grpc's threads must not be forked."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*_PRELOADED])


class _OpenFile:
    """An open file of this process, by its descriptor. The started process gets its own descriptor for the file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], _OpenFile], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(file: Any) -> _OpenFile:
    return _OpenFile(file.detach())


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: str = "",
    cwd: Path | None = None,
    timeout_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run `gpu-dra-driver` with these arguments, and return a result like `subprocess.run`. Raises: TimeoutExpired."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given.write(stdin)
        given.seek(0)
        process = start(arguments, given.fileno(), out.fileno(), err.fileno(), env=env, cwd=cwd)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired([*arguments], timeout_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([*arguments], process.exitcode, out.read(), err.read())


def start(
    arguments: Sequence[str],
    stdin: int,
    stdout: int,
    stderr: int,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    new_session: bool = False,
) -> BaseProcess:
    """Start `gpu-dra-driver` with these arguments and these open files."""
    files = [_OpenFile(descriptor) for descriptor in (stdin, stdout, stderr)]
    request = (files, list(arguments), dict(env), cwd or Path.cwd(), new_session)
    process = _CONTEXT.Process(target=_command, args=request, daemon=True)
    process.start()
    return process


def _command(
    files: Sequence[_OpenFile], arguments: Sequence[str], env: Mapping[str, str], cwd: Path, new_session: bool
) -> None:
    """Do what `execve` and the start of Python would do, then run the command."""
    from dra_driver.cli.main import main

    # A shell's background job ignores SIGINT, and its child processes inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file.descriptor, number)
        os.close(file.descriptor)
    # New objects, because they detect only once whether they are a terminal.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["gpu-dra-driver", *arguments]
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
