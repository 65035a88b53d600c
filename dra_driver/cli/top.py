"""`gpu-dra-driver top`: the node's GPUs, the claims that hold them, and their health, drawn again and again."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from types import FrameType
from typing import TYPE_CHECKING, get_args

from dra_driver.app.settings import Flag
from dra_driver.cli.flags import of_run, switch
from dra_driver.cli.output import COLOR, OUTPUT, Color, Output, answer
from dra_driver.cli.rules.top_screen import Order
from dra_driver.cli.scratch import scratch_settings
from dra_driver.model.shapes import Choice, Scalar

if TYPE_CHECKING:
    from dra_driver.cli.rules.node_view import NodeView
    from dra_driver.cli.rules.top_screen import Line, Style
    from dra_driver.cli.snapshot import NodeSnapshot

_LAST = 1 << 30
_WAIT_ONCE_S = 25.0
"""Without another client NVML wakes every GPU first, which takes seconds each. A GPU that hangs takes 15 s."""
_WAIT_LIVE_S = 2.0
_WAIT_FIRST_S = 0.5
"""The first screen appears after this time even if NVML hangs or still wakes GPUs."""
_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_FROM_TOP = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_REST = "\x1b[J"
_WIDE = 1 << 20
_PLAIN = "\x1b[0m"
_BOLD = "\x1b[1m"
_COLORS: Mapping[Style, str] = {
    "title": _BOLD,
    "good": "\x1b[32m",
    "notice": "\x1b[36m",
    "warning": "\x1b[33m",
    "bad": "\x1b[1;31m",
    "dim": "\x1b[2m",
}
_ORDERS: Mapping[str, Order] = {"i": "index", "m": "memory", "u": "utilisation", "h": "health"}
_KEYS = re.compile(r"\x1b(?:\[|O)[A-Z]|\x1b\[[0-9]+~|.", re.S)
_MOVES = {"j": 1, "\x1b[B": 1, "\x1bOB": 1, "k": -1, "\x1b[A": -1, "\x1bOA": -1}
_PAGES = {" ": 1, "\x1b[6~": 1, "b": -1, "\x1b[5~": -1}
_HELP = (
    "i m u h            sort by index, memory, utilisation, health",
    "j k, arrows        one line down, up",
    "space b, Page keys one page down, up",
    "g G, Home End      to the first, the last line",
    "q, Ctrl-C          quit",
    "?                  this text; any key shows the node again",
)
_ENDS = {"g": 0, "\x1b[H": 0, "\x1b[1~": 0, "G": _LAST, "\x1b[F": _LAST, "\x1b[4~": _LAST}


FLAGS = (
    Flag("interval", "Seconds between two looks.", Scalar(float, least=0.2, most=86400), env=(), default=2.0),
    switch("once", "Print one look and end, also on a terminal."),
    replace(OUTPUT, help="How to print; wide, json and yaml print one look."),
    Flag("sort", "Which GPUs come first.", Choice(get_args(Order)), env=(), default="index"),
    COLOR,
    *of_run("node_name", "driver_name", "config", "cdi_root", "nvidia_driver_root", "container_driver_root"),
    *of_run("kubelet_plugins_directory_path", "simulate", "simulator_dir", "dynamic_mig", "device_names"),
    *of_run("http_endpoint"),
)
EXAMPLES = (
    "",
    "--once --sort health",
    "-o json",
)


def top(given: Namespace) -> None:
    """Also NVLink domains, MIG instances and MPS daemons. Changes nothing. On a terminal it is drawn again at each
    interval, until q or Ctrl-C; into a pipe it is printed once. Works without API server, and while
    gpu-dra-driver does not run; without NVML it shows what is written down on the node, and why NVML fails. Run it in
    the pod of gpu-dra-driver (`kubectl exec`), or on the node with the flags of `run`.
    """
    from dra_driver.cli.machine import CommandMachine
    from dra_driver.cli.node import node_snapshot

    output, sort, color = given.output, given.sort, given.color
    with (
        scratch_settings("top", vars(given), given.config) as settings,
        closing(node_snapshot(CommandMachine(settings))) as snapshot,
    ):
        if given.once or output is not Output.table or not _is_screen():
            _print(snapshot.view(_WAIT_ONCE_S), output, sort, color)
        else:
            _run_live(snapshot, given.interval, sort, is_coloured=color.is_on())


def _print(view: NodeView, output: Output, order: Order, color: Color) -> None:
    from dra_driver.cli.rules.top_screen import node_lines

    def lines(width: int | None) -> Iterator[str]:
        return (drawn(line, is_coloured=color.is_on()) for line in node_lines(view, width or _WIDE, order))

    answer(output, lines, lambda: asdict(view))


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _run_live(snapshot: NodeSnapshot, interval_s: float, order: Order, *, is_coloured: bool) -> None:
    """Draw until q, Ctrl-C or SIGTERM; the terminal is left as it was found."""
    from dra_driver.cli.rules.top_screen import Span, node_lines

    first, explains, wait_nvml_s = 0, False, _WAIT_FIRST_S
    with suppress(KeyboardInterrupt), _own_screen() as keys:
        while True:
            view, wait_nvml_s = snapshot.view(wait_nvml_s), _WAIT_LIVE_S
            next_look = time.monotonic() + interval_s
            while (wait_s := next_look - time.monotonic()) > 0:
                size = shutil.get_terminal_size()
                lines = (
                    [(Span(text),) for text in _HELP] if explains else node_lines(view, size.columns, order)
                )
                first = max(0, min(first, len(lines) - (size.lines - 1)))
                sys.stdout.write(screen(lines, first, size, order, is_coloured=is_coloured))
                sys.stdout.flush()
                typed = _typed(keys, max(0.0, wait_s))
                if typed is None:
                    break
                for key in _KEYS.findall(typed):
                    if key in "qQ":
                        return
                    explains = key == "?" and not explains
                    order = _ORDERS.get(key, order)
                    first += _MOVES.get(key, 0) + _PAGES.get(key, 0) * (size.lines - 2)
                    first = _ENDS.get(key, max(0, first))


def screen(
    lines: Sequence[Line], first: int, size: os.terminal_size, order: Order, *, is_coloured: bool
) -> str:
    """What a terminal of that size is sent: the lines from `first` on, and below them the keys."""
    room = max(0, size.lines - 1)
    shown = [drawn(line, is_coloured=is_coloured) for line in lines[first : first + room]]
    last = first + len(shown)
    where = f"  lines {first + 1}-{last} of {len(lines)}" if len(lines) > room else ""
    keys = f"q quits  ? explains keys  sorted by {order}{where}"
    shown += [""] * (room - len(shown)) + [keys[: max(1, size.columns)]]
    return _FROM_TOP + "\r\n".join(text + _CLEAR_LINE for text in shown) + _CLEAR_REST


def drawn(line: Line, *, is_coloured: bool) -> str:
    """A line as text, with the codes of a terminal if it is coloured."""
    if not is_coloured:
        return "".join(span.text for span in line).rstrip()
    codes = (_COLORS.get(span.style, "") if span.text.strip() else "" for span in line)
    return "".join(
        f"{code}{span.text}{_PLAIN}" if code else span.text for code, span in zip(codes, line, strict=True)
    )


@contextmanager
def _own_screen() -> Iterator[int | None]:
    """The terminal's second screen, without cursor; keys come at once and unseen. Yields where to read keys from."""
    import termios
    import tty

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = None if keys is None else termios.tcgetattr(keys)
    former = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write(_ENTER)
        yield keys
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, former)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _typed(keys: int | None, wait_s: float) -> str | None:
    """What is typed within that time; None for nothing, and q where the terminal has gone away."""
    ready, _, _ = select.select([] if keys is None else [keys], [], [], wait_s)
    if not ready or keys is None:
        return None
    return os.read(keys, 64).decode(errors="replace") or "q"
