"""What a command prints on a terminal, and the picture of it."""

from __future__ import annotations

import io
import os
import pty
import termios
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import forked_commands
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

_LINES = 60
_COLORS = [
    (40, 44, 52), (240, 113, 120), (152, 195, 121), (229, 192, 123),
    (97, 175, 239), (198, 120, 221), (86, 182, 194), (215, 218, 224),
]  # fmt: skip
_GREY = (140, 148, 158)
_THEME = TerminalTheme((30, 33, 39), (215, 218, 224), _COLORS, [_GREY, *_COLORS[1:]])
# rich's own would load fonts from elsewhere. It fills in the names in braces.
_SVG = Path(__file__).with_name("picture.svg.in").read_text()


def printed(arguments: Sequence[str], columns: int, cwd: Path, environment: Mapping[str, str]) -> str:
    """What `gpu-dra-driver` prints on a terminal of so many columns, with its colours; it must end by itself."""
    ours, its = pty.openpty()
    try:
        termios.tcsetwinsize(its, (_LINES, columns))
        environment = {**environment, "TERM": "xterm-256color"}
        process = forked_commands.start(arguments, its, its, its, env=environment, cwd=cwd)
    finally:
        os.close(its)
    text = bytearray()
    try:
        while piece := _read(ours):
            text += piece
    finally:
        os.close(ours)
        process.join(60)
    return text.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the program has closed the other side
        return b""


def picture(title: str, text: str, columns: int) -> str:
    """An SVG of a terminal of so many columns with this text."""
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="standard"
    )
    console.print(Text.from_ansi(text.rstrip("\n")), overflow="fold", highlight=False)
    form = _SVG.replace("TITLE", escape(title)).replace("BACKGROUND", _THEME.background_color.hex)
    form = form.replace("DIM", "rgb" + str(_GREY))
    return console.export_svg(theme=_THEME, code_format=form, unique_id="t") + "\n"
