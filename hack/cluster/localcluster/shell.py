"""Running other programs, with their complaint in our error."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from localcluster.errors import ClusterError
from localcluster.layout import SYSTEM_PATH


def find_program(name: str) -> Path | None:
    """Where a program lies, /usr/sbin included, which a plain PATH may lack."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """What the program wrote to its standard output.

    Raises: ClusterError with the end of what it wrote when it fails.
    """
    program = find_program(str(argv[0]))
    if program is None:
        raise ClusterError(f"{argv[0]} is not installed.")
    done = subprocess.run(
        [str(program), *map(str, argv[1:])],
        env=dict(env) if env is not None else None,
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        command = " ".join(map(str, argv))
        raise ClusterError(f"'{command}' failed with status {done.returncode}: {said}")
    return done.stdout


def succeeds(argv: Sequence[str | Path]) -> bool:
    """Whether the program runs and answers with status 0."""
    try:
        run(argv)
    except ClusterError:
        return False
    return True


def require_root(purpose: str) -> None:
    """Refuse early: half a cluster is worse than none."""
    if os.geteuid() != 0:
        raise ClusterError(f"{purpose} needs root: run it with sudo.")
