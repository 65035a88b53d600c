"""Runs other programs, shows progress to the user, and locks directories."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localcluster.layout import SYSTEM_PATH

_HEARTBEAT_SECONDS = 20.0


class ClusterError(Exception):
    """An error for the user, in one sentence that says what to do."""


def say(text: str) -> None:
    """Print a line on standard error, because standard output is for data."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print ``title ... 23 s`` after a step, and a progress line every 20 s while it runs."""
    started = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT_SECONDS):
            say(f"{title} ... {time.monotonic() - started:.0f} s, still running")

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    try:
        yield
    except BaseException:
        say(f"{title} ... failed after {time.monotonic() - started:.1f} s")
        raise
    else:
        say(f"{title} ... {time.monotonic() - started:.1f} s")
    finally:
        done.set()
        heart.join()


@contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on the file ``path``. With ``wait``, wait for the lock. Raises: without ``wait``, ClusterError if
    another process holds it.

    The process that holds the lock may delete the file (``down`` removes the whole
    directory), so a lock is valid only if the path still leads to the locked file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, path, wait)
            if _leads_to(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path, wait: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode() or "unknown"
        raise ClusterError(
            f"Process {holder} is working on this cluster (lock {path}): wait until it has finished."
        ) from None


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def find_program(name: str) -> Path | None:
    """Return the path of a program. Also search /usr/sbin, which PATH may not contain."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def run(argv: Sequence[str | Path], *, cwd: Path | None = None) -> str:
    """Run a program, and return its standard output.

    Raises: ClusterError with the end of its output if it fails.
    """
    program = find_program(str(argv[0]))
    if program is None:
        raise ClusterError(f"{argv[0]} is not installed.")
    command = [str(program), *map(str, argv[1:])]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise ClusterError(f"'{' '.join(map(str, argv))}' failed with status {done.returncode}: {said}")
    return done.stdout


def succeeds(argv: Sequence[str | Path]) -> bool:
    """Whether the program can be run and exits with 0."""
    try:
        run(argv)
    except ClusterError:
        return False
    return True


def require_root(purpose: str) -> None:
    """Raise ClusterError without root, before anything is changed."""
    if os.geteuid() != 0:
        raise ClusterError(f"{purpose} needs root: run it with sudo.")
