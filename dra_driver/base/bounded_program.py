"""Runs programs with a time limit, so that a program that hangs in the kernel does not hang its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from dra_driver.errors import RetryableError
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.driver_files import FindPrograms, check_started, not_run

_AFTER_KILL_S = 1.0

_stuck: dict[str, subprocess.Popen[str]] = {}
_guard = threading.Lock()


@dataclass(slots=True)
class Inherited:
    descriptors: list[int]
    left: list[subprocess.Popen[str]] = field(default_factory=list)


_inherited: ContextVar[Inherited | None] = ContextVar("inherited", default=None)


@contextmanager
def inherited(descriptors: Iterable[int]) -> Iterator[Inherited]:
    """Let programs that this context starts inside the block inherit `descriptors` and those of outer blocks.

    A lock on such a descriptor lasts until these programs exit, even if this process is killed first.
    """
    around = _inherited.get()
    block = Inherited([*(around.descriptors if around else ()), *descriptors])
    token = _inherited.set(block)
    try:
        yield block
    finally:
        _inherited.reset(token)
        block.descriptors.clear()  # an abandoned thread may still have a copy of this context


def start_program(arguments: Sequence[str], **more: Any) -> subprocess.Popen[str]:
    """Start a program in its own session. Raises: OSError.

    It inherits only the descriptors of `inherited`, so it cannot keep a killed plugin's sockets or locks open.
    """
    block = _inherited.get()
    return subprocess.Popen(
        list(arguments),
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=block.descriptors if block else (),
        **more,
    )


def run_program(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    slot: str,
    text: str | None = None,
) -> tuple[int, str]:
    """Return the exit code and the combined stdout and stderr.

    After `timeout_s` the program and its children are killed. If it survives SIGKILL, for example because a GPU hangs,
    no other program starts in the same `slot` until it exits. Raises: OSError, TimeoutError.
    """
    with _guard:
        stuck = _stuck.get(slot)
        if stuck is not None and stuck.poll() is None:
            raise TimeoutError(f"process {stuck.pid} of an earlier attempt still hangs in the kernel")
        _stuck.pop(slot, None)
    child = start_program(
        arguments,
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
    )
    try:
        output, _ = child.communicate(text, timeout=timeout_s)
    except BaseException as error:
        _give_up(child, slot)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"it did not finish within {timeout_s:.3g} s") from error
        raise
    return child.returncode, output


def run_driver_program(
    find: FindPrograms,
    name: str,
    *arguments: str,
    action: str,
    timeout_s: float,
    subject: str,
    variables: Mapping[str, str] | None = None,
    text: str | None = None,
) -> tuple[int, str]:
    """Run a program of the installed NVIDIA driver like `run_program`, in a slot of the program and `subject`.

    Raises: StateError; RetryableError that begins with "cannot" and `action`.
    """
    programs = find()
    program = programs.path(name)
    environment = {**programs.environment(), **(variables or {})}
    slot = f"{name} {subject}"
    try:
        code, output = run_program(
            [program, *arguments], environment, timeout_s=timeout_s, slot=slot, text=text
        )
    except TimeoutError as error:
        raise RetryableError(f"cannot {action}: {name} does not answer: {error}") from error
    except OSError as error:
        raise not_run(action, program, error) from error
    check_started(action, program, code, output)
    return code, output


def _give_up(child: subprocess.Popen[str], slot: str) -> None:
    _kill(child)
    try:
        child.wait(_AFTER_KILL_S)
    except subprocess.TimeoutExpired:
        with _guard:
            _stuck[slot] = child
        block = _inherited.get()
        if block is not None:
            block.left.append(child)
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _kill(child: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
