"""Rules of the house that no linter knows: file length, package data, and what files may not say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
GENERATED = "dra_driver/kubelet/pb/"


def tracked_files() -> list[Path]:
    """Files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def too_long(files: list[Path]) -> list[str]:
    """Python files of the package and of hack/ that do more than one job."""
    faults = []
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        if (
            file.suffix == ".py"
            and name.startswith(("dra_driver/", "hack/"))
            and not name.startswith(GENERATED)
        ):
            lines = len(file.read_text().splitlines())
            if lines > MAX_LINES:
                faults.append(f"{name}: {lines} lines, at most {MAX_LINES}; split it")
    return faults


def main() -> int:
    """Print every fault; 1 if there is any."""
    faults = too_long(tracked_files())
    print("\n".join(faults) if faults else "tree: ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
