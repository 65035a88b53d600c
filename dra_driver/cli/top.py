"""`gpu-dra-driver top`: the node's GPUs, the claims that hold them, and their health, drawn again and again."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dra_driver.cli.options import (
    CdiRoot,
    Config,
    ContainerDriverRoot,
    DriverName,
    DynamicMig,
    KubeletPluginsDirectory,
    NodeName,
    NvidiaDriverRoot,
    Simulate,
    SimulatorDir,
)
from dra_driver.cli.output import Output, print_object
from dra_driver.cli.scratch import scratch_settings

if TYPE_CHECKING:
    from dra_driver.diagnostics.rules.top_screen import NodeView
    from dra_driver.diagnostics.snapshot import NodeSnapshot

_WAIT_ONCE_S = 15.0
"""Without another client NVML wakes every GPU first, which takes seconds each."""
_WAIT_LIVE_S = 2.0
_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_FROM_TOP = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_REST = "\x1b[J"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def top(
    interval: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end, also on a terminal.")] = False,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="How to print; json and yaml print one look.")
    ] = Output.table,
    node_name: NodeName = None,
    driver_name: DriverName = None,
    config: Config = None,
    cdi_root: CdiRoot = None,
    nvidia_driver_root: NvidiaDriverRoot = None,
    container_driver_root: ContainerDriverRoot = None,
    kubelet_plugins_directory_path: KubeletPluginsDirectory = None,
    simulate: Simulate = None,
    simulator_dir: SimulatorDir = None,
    dynamic_mig: DynamicMig = None,
) -> None:
    """Show this node live: GPUs, claims, health.

    Also NVLink domains, MIG instances and MPS daemons. Changes nothing. On a terminal it is drawn again at each
    interval, until q or Ctrl-C; into a pipe it is printed once. Works without API server and without a running
    driver; without NVML it shows what the driver wrote down, and why NVML says nothing. Run it in the driver's pod
    (`kubectl exec`), or on the node with the options of `run`.
    """
    given = dict(locals())
    from dra_driver.app.offline import node_snapshot
    from dra_driver.logs import configure_logs

    configure_logs("critical", "console")
    with scratch_settings("top", given, config) as settings, closing(node_snapshot(settings)) as snapshot:
        if once or not output.is_for_people or not _is_screen():
            _print(snapshot.view(_WAIT_ONCE_S), output)
        else:
            _run_live(snapshot, interval)


def _print(view: NodeView, output: Output) -> None:
    if not output.is_for_people:
        print_object(asdict(view), output)
        return
    from dra_driver.diagnostics.rules.top_screen import WIDTH, draw_node

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    typer.echo(draw_node(view, width), nl=False)


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _run_live(snapshot: NodeSnapshot, interval_s: float) -> None:
    """Draw until q, Ctrl-C or SIGTERM; the terminal is left as it was found."""
    from dra_driver.diagnostics.rules.top_screen import draw_node

    with suppress(KeyboardInterrupt), _own_screen() as keys:
        while True:
            size = shutil.get_terminal_size()
            text = draw_node(snapshot.view(_WAIT_LIVE_S), size.columns)
            sys.stdout.write(screen(text, size.columns, size.lines))
            sys.stdout.flush()
            if _wants_end(keys, interval_s):
                return


def screen(text: str, columns: int, lines: int) -> str:
    """The text as what a terminal of that size is sent: titles in bold, and what does not fit cut off."""
    rows = text.splitlines()
    if len(rows) > lines - 1:
        hidden = len(rows) - (lines - 2)
        rows = [*rows[: max(0, lines - 2)], f"... {hidden} more lines: a larger window or --once shows them"]
    drawn = []
    for row in [*rows, "q ends"] if len(rows) < lines - 1 else rows:
        cut = row[: max(1, columns)]
        drawn.append((f"{_BOLD}{cut}{_PLAIN}" if cut.isupper() and cut[0] != " " else cut) + _CLEAR_LINE)
    return _FROM_TOP + "\r\n".join(drawn) + _CLEAR_REST


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


def _wants_end(keys: int | None, wait_s: float) -> bool:
    """Wait for the next drawing, or for q, or for the terminal to go away."""
    ready, _, _ = select.select([] if keys is None else [keys], [], [], wait_s)
    if not ready or keys is None:
        return False
    typed = os.read(keys, 64)
    return not typed or b"q" in typed.lower()
