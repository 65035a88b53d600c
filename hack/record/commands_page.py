"""`make docs`: writes docs/commands.md with what the commands print on a node at work, and pictures of some of them.

    python hack/record/commands_page.py            write page and pictures
    python hack/record/commands_page.py --check    compare them, exit code 1 if they would be others

What differs from run to run (times, ports, UIDs of claims, temporary directories) is replaced.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import forked_commands
from recorded_node import RecordedNode
from terminal import picture, printed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/commands.md"
PICTURES = ROOT / "docs/pictures"
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")
_AT_ONCE = 2
_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text())
_SGR = re.compile(r"\x1b\[[\d;]*m")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(\s+)\d\d:\d\d:\d\d UTC")
_PORT = re.compile(r"127\.0\.0\.1:\d+")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A command: the question that it answers, how it is called, and the options that say where the node is."""

    question: str
    arguments: str
    where: Sequence[str] = ()
    exit_code: int = 0

    @property
    def title(self) -> str:
        """The name of the command."""
        return self.arguments.split()[0]


COMMANDS = [Recorded(**entry) for entry in _TABLE["commands"]]


def pages() -> dict[Path, str]:
    """The page and the pictures, by their files."""
    # Short, because the path of a socket has 107 bytes at most, and of one length, for lines that are folded.
    with (
        tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory,
        RecordedNode(Path(directory)) as node,
    ):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            texts = list(pool.map(lambda command: _run(command, node.flags(command.where)), COMMANDS))
            node.grow_old()
            pictures = dict(pool.map(lambda one: _picture(one[0], one[1], node), _TABLE["pictures"]))
        stable = [_stable(text, Path(directory), node.uids) for text in texts]
    parts = [_TABLE["introduction"]]
    title = ""
    for command, text in zip(COMMANDS, stable, strict=True):
        shown = ""
        if command.title != title:
            title = command.title
            parts.append(f"## {title}\n")
            shown = "".join(_shown(file) for file in pictures if file.stem.startswith(f"{title}-"))
        parts.append(
            f"{command.question}\n\n```text\n$ gpu-dra-driver {command.arguments}\n{text}```\n{shown}"
        )
    return {PAGE: "\n".join(parts), **pictures}


def _shown(file: Path) -> str:
    name, _, columns = file.stem.rpartition("-")
    return f"\n![{name} on a terminal of {columns} columns]({file.relative_to(PAGE.parent)})\n"


def _picture(title: str, columns: int, node: RecordedNode) -> tuple[Path, str]:
    """The first command of this name, on a terminal."""
    command = next(one for one in COMMANDS if one.title == title)
    text = printed(_call(command, node.flags(command.where)), columns, ROOT, _environment())
    shown = picture(f"gpu-dra-driver {command.arguments}", _stable(text, node.root, node.uids), columns)
    return PICTURES / f"{title}-{columns}.svg", shown


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}


def _call(command: Recorded, where: Sequence[str]) -> list[str]:
    return [*command.arguments.split(), *where]


def _run(command: Recorded, where: Sequence[str]) -> str:
    done = forked_commands.run(_call(command, where), cwd=ROOT, env=_environment())
    if done.returncode != command.exit_code or done.stderr:
        raise SystemExit(
            f"record: {command.arguments} ended with {done.returncode}, not {command.exit_code}: "
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout


def _stable(text: str, directory: Path, uids: Sequence[str]) -> str:
    """The same text in every run and on every machine."""
    for name, shown in (
        ("machine/root/etc/containerd", "/etc/containerd"),
        ("machine/root", "/driver-root"),
        ("cdi", "/etc/cdi"),
        ("plugins_registry", "/var/lib/kubelet/plugins_registry"),
        ("plugins", "/var/lib/kubelet/plugins"),
        ("device-plugins", "/var/lib/kubelet/device-plugins"),
    ):
        text = text.replace(f"{directory}/{name}", shown)
    for number, uid in enumerate(uids, 1):
        text = text.replace(uid, f"{number:08}-0000-4000-8000-000000000000")
    text = _DATE.sub(r"2026-01-05\g<1>09:30:00 UTC", text)
    text = _PORT.sub("10.96.0.1:443", text)
    text = _with_made_up_daemons(text)
    if str(directory) in text:
        raise SystemExit(f"record: a path of this machine is left in: {text}")
    return text


def _with_made_up_daemons(text: str) -> str:
    """`top` tells the age, the process ID and, from its second look at it on, the clients of an MPS daemon."""
    before, title, after = text.partition("MPS DAEMON  ")
    if not title:
        return text
    table, blank, rest = (title + after).partition("\n\n")
    rows = [re.split(r"\s{2,}", _SGR.sub("", line).strip()) for line in table.splitlines()]
    for row in rows[1:]:
        row[2:5] = ["40m", "0", "4242"]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if before.endswith("m"):  # the heading is bold on a terminal
        lines[0] += "\x1b[0m"
    return before + "\n".join(lines) + (blank + rest if blank else "\n")


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description="Record what the commands print.")
    parser.add_argument("--check", action="store_true", help="compare with what is there, write nothing")
    check = parser.parse_args().check
    new = pages()
    if not check:
        PICTURES.mkdir(exist_ok=True)
        for file, text in new.items():
            file.write_text(text)
        return 0
    others = {file: file.read_text() if file.exists() else "" for file in new}
    if others == new:
        return 0
    for file, old in others.items():
        name = str(file.relative_to(ROOT))
        sys.stdout.writelines(
            difflib.unified_diff(old.splitlines(True), new[file].splitlines(True), name, "printed now")
        )
    print("record: run `make docs`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
