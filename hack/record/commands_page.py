"""`make docs`: writes docs/commands.md with the output of the commands on a running node, and images of two of them.

    python hack/record/commands_page.py            writes the page and the images
    python hack/record/commands_page.py --check    compares them; the exit code is 1 if they differ

Values that change from run to run (times, ports, UIDs of claims, temporary directories) are replaced by fixed ones.
"""

from __future__ import annotations

import difflib
import io
import os
import pty
import re
import sys
import tempfile
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked_commands
from recorded_node import RecordedNode

from dra_driver.cli.commands import ROOT as COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/commands.md"
PICTURES = ROOT / "docs/pictures"
_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text())
_ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
_PLACES = {
    "machine/root/etc/containerd": "/etc/containerd", "machine/root": "/driver-root", "cdi": "/etc/cdi",
    "plugins_registry": "/var/lib/kubelet/plugins_registry", "plugins": "/var/lib/kubelet/plugins",
    "device-plugins": "/var/lib/kubelet/device-plugins",
}  # fmt: skip
_REPLACED = (
    (r"\d{4}-\d\d-\d\d(\s+)\d\d:\d\d:\d\d UTC", r"2026-01-05\g<1>09:30:00 UTC"),
    (r"127\.0\.0\.1:\d+", "10.96.0.1:443"),
    (  # age, clients and process ID of an MPS daemon, which `top` shows
        r"(MPS DAEMON) .*?(\x1b\[0m)?\n(gpu-\w+) .*\n",
        r"\1    STATE  SINCE  CLIENTS  PID   PROBLEM\2\n\3  ready  40m    0        4242  -\n",
    ),
)
_LINES = 60
_COLORS = [
    (40, 44, 52), (240, 113, 120), (152, 195, 121), (229, 192, 123),
    (97, 175, 239), (198, 120, 221), (86, 182, 194), (215, 218, 224),
]  # fmt: skip
_GREY = (140, 148, 158)
_THEME = TerminalTheme((30, 33, 39), (215, 218, 224), _COLORS, [_GREY, *_COLORS[1:]])
# Used instead of rich's own template, which loads fonts from another site. rich fills in the names in braces.
_SVG = Path(__file__).with_name("picture.svg.in").read_text()

Command = dict[str, Any]
"""A command of commands.yaml, with the keys `arguments`, `where`, `exit_code`, `text` and `lines`."""


@contextmanager
def fresh_node() -> Iterator[RecordedNode]:
    """Yield a node. Its path is short, because a socket's path can have only 107 bytes, and always as long, so that
    lines wrap at the same place.
    """
    with (
        tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as directory,
        RecordedNode(Path(directory)) as node,
    ):
        yield node


def recorded(node: RecordedNode) -> dict[Path, str]:
    """Return the contents of the page and the pictures, by file."""
    with ThreadPoolExecutor(2) as pool:
        shown = [command for command in _TABLE["commands"] if "text" in command]
        texts = list(pool.map(lambda command: _run(command, node), shown))
        node.grow_old()
        pictures = dict(pool.map(lambda one: _picture(one[0], one[1], node), _TABLE["pictures"]))
    parts = [_TABLE["introduction"], _table(), _TABLE["more"]]
    for command, printed in zip(shown, texts, strict=True):
        kept = command.get("lines")
        text = printed if kept is None else "".join(printed.splitlines(keepends=True)[:kept]) + "…\n"
        parts.append(
            f"## {_name(command)}\n\n{command['text']}\n\n"
            f"```text\n$ gpu-dra-driver {command['arguments']}\n{text}```\n"
        )
    return {PAGE: "\n".join(parts), **pictures}


def _table() -> str:
    """Return the table of all commands with their arguments."""
    rows = ["| Command | What it does |", "|---|---|"]
    for name, command in COMMANDS.commands.items():
        arguments = [flag.metavar or flag.name.upper() for flag in command.loaded().flags if flag.count]
        rows.append(f"| `{' '.join([name, *arguments])}` | {command.summary} |")
    return "\n".join(rows) + "\n"


def _name(command: Command) -> str:
    return str(command["arguments"].split()[0])


def _called(command: Command, node: RecordedNode) -> list[str]:
    return [*command["arguments"].split(), *node.flags(command.get("where", ()))]


def _run(command: Command, node: RecordedNode) -> str:
    done = forked_commands.run(_called(command, node), cwd=ROOT, env=_ENVIRONMENT)
    if done.returncode != command.get("exit_code", 0) or done.stderr:
        raise SystemExit(f"record: {command} exited with {done.returncode}: {done.stdout}{done.stderr}")
    return _stable(done.stdout, node)


def _picture(name: str, columns: int, node: RecordedNode) -> tuple[Path, str]:
    """Return the file and content of a picture of the first command of this name, with `columns` columns."""
    command = next(one for one in _TABLE["commands"] if _name(one) == name)
    text = _stable(_on_terminal(command, columns, node), node)
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="standard"
    )
    console.print(Text.from_ansi(text.rstrip("\n")), overflow="fold", highlight=False)
    form = _SVG.replace("TITLE", escape(f"gpu-dra-driver {command['arguments']}"))
    form = form.replace("BACKGROUND", _THEME.background_color.hex).replace("DIM", "rgb" + str(_GREY))
    svg = console.export_svg(theme=_THEME, code_format=form, unique_id="t") + "\n"
    return PICTURES / f"{name}-{columns}.svg", svg


def _on_terminal(command: Command, columns: int, node: RecordedNode) -> str:
    """Return the output, with colours, of a command that needs no input."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (_LINES, columns))
    environment = {**_ENVIRONMENT, "TERM": "xterm-256color"}
    process = forked_commands.start(_called(command, node), its, its, its, env=environment, cwd=ROOT)
    os.close(its)
    text = b""
    try:
        while piece := os.read(ours, 65536):
            text += piece
    except OSError:  # the program has closed the other side
        process.join(60)
    os.close(ours)
    return text.decode().replace("\r\n", "\n")


def _stable(text: str, node: RecordedNode) -> str:
    """Return the text without values that differ between runs or machines."""
    for name, shown in _PLACES.items():
        text = text.replace(f"{node.root}/{name}", shown)
    for number, uid in enumerate(node.uids, 1):
        text = text.replace(uid, f"{number:08}-0000-4000-8000-000000000000")
    for pattern, by in _REPLACED:
        text = re.sub(pattern, by, text)
    if str(node.root) in text:
        raise SystemExit(f"record: the text still contains a path of this machine: {text}")
    return text


def main() -> int:
    """Write the files or, with `--check`, compare them."""
    with fresh_node() as node:
        new = recorded(node)
    if sys.argv[1:] != ["--check"]:
        for file, text in new.items():
            file.write_text(text)
        return 0
    others = {file: file.read_text() if file.exists() else "" for file in new}
    for file, old in others.items():
        shown = (str(file.relative_to(ROOT)), "printed now")
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new[file].splitlines(True), *shown))
    if others != new:
        print("record: run `make docs`")
    return int(others != new)


if __name__ == "__main__":
    sys.exit(main())
