"""`pip install` with one line of progress instead of pages; what pip says of an error or warning stays.

python hack/dependencies.py -r requirements.txt ...    arguments as for `pip install`
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

_NAMED = re.compile(r"(?:Collecting|Requirement already satisfied:|Obtaining) ([\w.-]+)")
_PINNED = re.compile(r"^[\w.-]+==", re.MULTILINE)
_EVERY = 10


def main(arguments: list[str]) -> int:
    """Pip's exit code."""
    # What is compiled when it is first imported need not be compiled now: that is half of the time.
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    files = [Path(file) for flag, file in pairwise(arguments) if flag == "-r"]
    total = sum(len(_PINNED.findall(file.read_text())) for file in files)
    live = sys.stdout.isatty()
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in progress(process.stdout, total, every=1 if live else _EVERY):
        print(f"\r\x1b[K  {line}" if live else f"  {line}", end="" if live else "\n", flush=True)
    if live:
        print(end="\r\x1b[K", flush=True)
    return process.wait()


def progress(lines: Iterable[str], total: int, every: int) -> Iterator[str]:
    """What to tell of pip's lines: each package, or one of `every`, and that they are all fetched."""
    number = 0
    for line in lines:
        if match := _NAMED.match(line):
            number += 1
            if number % every == 0:
                yield f"{number} of {total}: {match[1]}" if total else match[1]
        elif line.startswith("Installing collected packages"):
            yield "unpacking"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
