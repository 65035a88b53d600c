"""`gpu-dra-driver top`."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Literal, get_args

from dra_driver.app.settings import Flag
from dra_driver.cli.flags import OF_NODE, of_run, switch
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.node import NodeSnapshot
from dra_driver.cli.output import COLOR, OUTPUT, Output, answer, console, drawn, table
from dra_driver.cli.rules.node_view import Holding, NodeView, SeenGpu, SeenProcess, SeenReason, searched
from dra_driver.cli.rules.prepared_claims import age_text
from dra_driver.cli.scratch import scratch_settings
from dra_driver.model.dataclass import asdict, dataclass, replace
from dra_driver.model.gpu import GpuLoad
from dra_driver.model.ids import printable
from dra_driver.model.schema import Choice, Scalar
from dra_driver.model.units import first_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Order = Literal["index", "memory", "utilisation", "health"]

_WAIT_ONCE_S = 25.0
"""If NVML has no other client it wakes every GPU first, which takes seconds each. A GPU that hangs takes 15 s."""
_WAIT_LIVE_S = 2.0
_WAIT_FIRST_S = 0.3
"""The first screen appears after this time, even if NVML hangs."""
_MIB = 1 << 20
_SAMPLES = 12
_LEVELS = " .:-=+*#%@"
_SEVERITY = ("ok", "information", "unknown", "degraded", "unhealthy", "lost")
_ORDERS: Mapping[str, Callable[[SeenGpu], float]] = {
    "index": lambda _: 0,
    "memory": lambda gpu: -(_fraction(gpu.load) or 0),
    "utilisation": lambda gpu: -((gpu.load and gpu.load.utilisation_percent) or 0),
    "health": lambda gpu: -(_SEVERITY.index(gpu.health) if gpu.health in _SEVERITY else 0),
}
_KEYS = re.compile(r"\x1b(?:\[|O)[A-Z]|\x1b\[[0-9]+~|.", re.S)
_MOVES = {"j": 1, "\x1b[B": 1, "\x1bOB": 1, "k": -1, "\x1b[A": -1, "\x1bOA": -1}
_PAGES = {" ": 1, "\x1b[6~": 1, "b": -1, "\x1b[5~": -1}

FLAGS = (
    Flag(
        "interval", "Seconds between two updates.", Scalar(float, least=0.2, most=86400), env=(), default=2.0
    ),
    switch("once", "Print once and exit, even on a terminal."),
    replace(OUTPUT, help="Output format; wide, json and yaml print once."),
    Flag("sort", "How to sort the GPUs.", Choice(get_args(Order)), env=(), default="index"),
    Flag(
        "filter",
        "Show only GPUs, claims and pods with this text; details if only one GPU or claim matches.",
        env=(),
        default="",
    ),
    COLOR,
    *of_run("node_name", "dynamic_mig"),
    *OF_NODE,
)
EXAMPLES = (
    "",
    "--once --sort health",
    "--once --filter gpu-6b45fc99",
    "-o json",
)


def top(given: Namespace) -> None:
    """Also shows pods and MPS daemons. Changes nothing. On a terminal it refreshes at each interval, until you press
    q or Ctrl-C; in a pipe it prints once. Works without the API server, and even if gpu-dra-driver is not running.
    Without NVML it shows the saved state of the node, and why NVML fails. Run it in the pod of gpu-dra-driver
    (`kubectl gpus top NODE`, `kubectl exec`), or on the node with the flags of `run`.
    """
    with (
        scratch_settings("top", vars(given), given.config) as settings,
        closing(NodeSnapshot(CommandMachine(settings))) as snapshot,
    ):
        is_colored = given.color.is_on()
        if (
            sys.stdout.isatty()
            and os.environ.get("TERM") != "dumb"
            and not given.once
            and given.output is Output.table
        ):
            _run_live(snapshot, given.interval, Screen(given.sort, given.filter), is_colored=is_colored)
            return
        view = searched(snapshot.view(_WAIT_ONCE_S), given.filter)

        def lines(width: int | None) -> Iterator[str]:
            return drawn(node_picture(view, width, given.sort, given.filter), width, is_colored=is_colored)

        answer(given.output, lines, lambda: asdict(view))


# --- the picture --------------------------------------------------------------------------------


def node_picture(
    view: NodeView,
    width: int | None,
    order: Order = "index",
    text: str = "",
    history: Mapping[str, Sequence[int]] | None = None,
) -> list[RenderableType]:
    """Return the whole view.

    `order` sorts the GPUs: busiest or worst first; `memory` also sorts the pods. The only match of the search `text`
    is shown in detail. `history` has utilisations in percent by device name, newest last.
    """
    sections = [
        [_head(view, width), *_problems(view)],
        _gpus(view, width, order, history or {}),
        [*_details(view)] if text else [],
        _health(view, width),
        _claims(view, width),
        _pods(view, width, order),
        _mps(view, width),
        [_text(f"note: {note}", "yellow") for note in view.notes],
    ]
    parts: list[RenderableType] = []
    for section in filter(None, sections):
        parts += ["", *section] if parts else section
    return parts


def _text(text: str, style: str = "") -> RenderableType:
    from rich.text import Text

    return Text(printable(text), style)


def _head(view: NodeView, width: int | None) -> RenderableType:
    nvidia = f"NVIDIA driver {view.nvidia_version or 'unknown'}"
    cuda = f"CUDA {view.cuda_version}" if view.cuda_version else None
    parts = [view.node, nvidia, cuda, view.driver, view.taken_at]
    for at in (3, 2, 1):
        if width is not None and len("  ".join(filter(None, parts))) > width:
            parts[at] = None
    return _text("  ".join(filter(None, parts)))


def _problems(view: NodeView) -> Iterator[RenderableType]:
    for problem in view.problems:
        lasted = "" if problem.since_s is None else f" for {age_text(problem.since_s)}"
        yield _text(f"PROBLEM{lasted}: {problem.text}", "bold red")


def _gpus(
    view: NodeView, width: int | None, order: Order, history: Mapping[str, Sequence[int]]
) -> list[RenderableType]:
    columns = {
        "#": 0, "GPU": 0, "PRODUCT": 7, "PCI BUS ID": 8, "MIG?": 6, "MEMORY MiB": 0, "UTIL %": 0, "UTIL?": 5,
        "TEMP": 3, "POWER W": 4, "HEALTH": 0, "CLAIM?": 1, "POD?": 2,
    }  # fmt: skip
    rows = [
        _gpu(gpu, history.get(gpu.name, ()), view.holdings) for gpu in sorted(view.gpus, key=_ORDERS[order])
    ]
    return table(columns, rows, width) or [_text("no GPU was found", "bold")]


def _gpu(gpu: SeenGpu, history: Sequence[int], holdings: Iterable[Holding]) -> list[object]:
    held = [one for one in holdings if gpu.uuid and one.gpu_uuid == gpu.uuid]
    load = gpu.load or GpuLoad()
    used, total, percent = load.memory_used_bytes, load.memory_total_bytes, load.utilisation_percent
    watts = [None if value is None else f"{value:.0f}" for value in (load.power_w, load.power_limit_w)]
    return [
        gpu.index,
        gpu.name,
        gpu.product,
        gpu.pci_bus_id,
        gpu.mode,
        total and f"{'-' if used is None else used // _MIB}/{total // _MIB}",
        percent,
        "".join(_LEVELS[min(value, 99) // 10] for value in history),
        load.temperature_c and f"{load.temperature_c}C",
        watts[0] if watts[1] is None else f"{watts[0] or '-'}/{watts[1]}",
        _word(gpu.health),
        first_of([*dict.fromkeys(one.claim for one in held)]) or None,
        first_of([*dict.fromkeys(pod for one in held for pod in one.pods or ())]) or None,
    ]


def _fraction(load: GpuLoad | None) -> float | None:
    if load is None or load.memory_used_bytes is None or not load.memory_total_bytes:
        return None
    return load.memory_used_bytes / load.memory_total_bytes


def _word(severity: str) -> str:
    """Write what needs attention in capitals, which are visible without colours too."""
    return severity.upper() if severity in ("degraded", "unhealthy", "lost", "unknown") else severity


def _details(view: NodeView) -> Iterator[RenderableType]:
    if len(view.gpus) == 1:
        gpu = view.gpus[0]
        shown = [gpu.name, gpu.uuid, gpu.product, gpu.pci_bus_id, f"MIG {gpu.mode}" if gpu.mode else None]
        yield _text("  ".join(filter(None, shown)))
    if len({one.uid for one in view.holdings}) == 1:
        first = view.holdings[0]
        pods = "unknown" if first.pods is None else ", ".join(first.pods) or "none"
        yield _text(f"claim {first.claim}  uid {first.uid}  pods: {pods}")
        for one in view.holdings:
            yield _text(f"  {one.device}  {one.kind}  {one.uuid or '-'}")


def _health(view: NodeView, width: int | None) -> list[RenderableType]:
    columns = {"HEALTH": 0, "SEVERITY": 0, "REASON": 0, "SINCE": 1, "TEXT": 0}
    rows = [
        (one.subject, _word(one.severity), one.reason, _since(one.since_s, "now"), _reason_text(one))
        for one in view.health
    ]
    unknown = [gpu.name for gpu in view.gpus if gpu.health == "unknown"]
    title = [] if rows else [_text("HEALTH", "bold")]
    if unknown or not view.gpus:
        whose = "" if len(unknown) == len(view.gpus) else f" of {', '.join(unknown)}"
        return [
            *title,
            *table(columns, rows, width),
            _text(f"Health{whose} unknown: {_why(view, unknown)}", "bold red"),
        ]
    return table(columns, rows, width) or [*title, _text("All listed GPUs are healthy.", "green")]


def _reason_text(reason: SeenReason) -> str:
    return reason.text if reason.saved_s is None else f"{reason.text} (saved {age_text(reason.saved_s)} ago)"


def _why(view: NodeView, unknown: Sequence[str]) -> str:
    if view.unwatched is not None:
        return f"{view.unwatched}."
    for problem in view.problems:
        if problem.problem == "nvml-unavailable" or problem.subject in unknown:
            return problem.text
    return "gpu-dra-driver has not read it recently." if view.gpus else "no GPU is listed."


def _claims(view: NodeView, width: int | None) -> list[RenderableType]:
    columns = {"CLAIM": 0, "POD?": 1, "SINCE": 2, "DEVICE": 0, "USE": 0}
    rows = [
        (
            one.claim,
            None if one.pods is None else first_of(one.pods) or "none",
            _since(one.since_s),
            one.device,
            "; ".join(_how(one)) or None,
        )
        for one in view.holdings
    ]
    return table(columns, rows, width) or [_text("CLAIM", "bold"), _text("no prepared claims found")]


def _how(held: Holding) -> Iterator[str]:
    if held.trouble:
        yield _word(held.trouble)
    if held.phase != "prepared":
        yield held.phase.upper()
    if held.boot != "this":
        yield f"{held.boot.upper()} BOOT"
    yield from filter(None, [held.usage, held.share_id and f"share {held.share_id[:8]}"])
    yield from filter(None, ["admin access" if held.admin_access else None, held.mig])


def _since(seconds: float | None, unknown: str = "unknown") -> str:
    return unknown if seconds is None else age_text(seconds)


def _pods(view: NodeView, width: int | None, order: Order) -> list[RenderableType]:
    of_pods: dict[object, list[SeenProcess]] = {}
    for process in view.processes:
        of_pods.setdefault(process.pod or process.pid, []).append(process)

    def memory(processes: Iterable[SeenProcess]) -> int:
        return sum(one.memory_bytes or 0 for one in processes)

    def percent(processes: Iterable[SeenProcess]) -> int | None:
        """Return None if a value is unknown."""
        of_gpus: dict[str, list[int | None]] = {}
        for one in processes:
            of_gpus.setdefault(one.gpu, []).append(one.utilisation_percent)
        busy = [None if None in each else min(100, sum(filter(None, each))) for each in of_gpus.values()]
        return None if None in busy else round(sum(filter(None, busy)) / len(busy))

    rows = [
        (
            mine[0].pod or ("NO CLAIM" if mine[0].is_unclaimed else None),
            None if all(one.memory_bytes is None for one in mine) else memory(mine) // _MIB,
            percent(mine),
            ", ".join(dict.fromkeys(_place(one) for one in mine)),
            ", ".join(f"{one.pid} {one.name}".rstrip() for one in mine),
        )
        for mine in sorted(of_pods.values(), key=lambda mine: -memory(mine) if order == "memory" else 0)
    ]
    return table({"POD": 0, "MEMORY MiB": 0, "UTIL %": 0, "GPU": 1, "PROCESSES": 0}, rows, width)


def _place(process: SeenProcess) -> str:
    gi = process.gpu_instance_id
    return process.gpu if gi is None else f"{process.gpu} GI {gi}"


def _mps(view: NodeView, width: int | None) -> list[RenderableType]:
    columns = {"MPS DAEMON": 0, "STATE": 0, "SINCE": 1, "CLIENTS": 2, "PID": 3, "PROBLEM": 0}
    rows = [
        (
            one.device,
            one.state if one.state in ("ready", "starting") else one.state.upper(),
            age_text(one.since_s),
            one.clients,
            one.pid,
            one.problem,
        )
        for one in view.mps
    ]
    return table(columns, rows, width)


# --- the screen ---------------------------------------------------------------------------------


@dataclass
class Screen:
    """`first` is the top line; `typing`: keys edit the search text."""

    order: Order = "index"
    text: str = ""
    first: int = 0
    typing: bool = False

    def press(self, key: str, height: int) -> bool:
        """Handle a key; returns whether the screen stays open."""
        if self.typing:
            self.typing = key not in "\r\n\x1b"
            self.text = "" if key == "\x1b" else self.text[:-1] if key in "\x7f\b" else self.text + key
            self.text = self.text.strip("\r\n")
            return True
        self.typing = key == "/"
        self.text = "" if key in "/\x1b" else self.text
        self.order = next((order for order in get_args(Order) if order[0] == key), self.order)
        self.first = max(0, self.first + _MOVES.get(key, 0) + _PAGES.get(key, 0) * (height - 2))
        return key not in "qQ"

    def picture(
        self, view: NodeView, console: Console, history: Mapping[str, Sequence[int]]
    ) -> RenderableType:
        from rich.console import Group
        from rich.segment import Segment, Segments

        width, room = console.width, max(0, console.height - 1)
        shown = node_picture(searched(view, self.text), width, self.order, self.text, history)
        lines = console.render_lines(Group(*shown), console.options.update(height=None), pad=False)
        self.first = max(0, min(self.first, len(lines) - room))
        window = lines[self.first : self.first + room]
        keys = f"q quits  / searches  i m u h sort by {self.order}"
        if self.typing or self.text:
            keys = f"/{self.text}{'_' if self.typing else '  Esc shows all'}"
        if len(lines) > room:
            keys += f"  j k b space: lines {self.first + 1}-{self.first + len(window)} of {len(lines)}"
        window += [[] for _ in range(room - len(window))]
        segments = [segment for line in window for segment in (*line, Segment.line())]
        return Segments([*segments, Segment(printable(keys)[:width])])


def _run_live(snapshot: NodeSnapshot, interval_s: float, screen: Screen, *, is_colored: bool) -> None:
    from rich.live import Live

    terminal, wait_nvml_s = console(None, None, is_colored=is_colored), _WAIT_FIRST_S
    history: dict[str, deque[int]] = {}
    with (
        suppress(KeyboardInterrupt),
        _keys() as keys,
        Live(console=terminal, screen=True, auto_refresh=False) as live,
    ):
        while True:
            view, wait_nvml_s = snapshot.view(wait_nvml_s), _WAIT_LIVE_S
            for gpu in view.gpus:
                if gpu.load is not None and gpu.load.utilisation_percent is not None:
                    history.setdefault(gpu.name, deque(maxlen=_SAMPLES)).append(gpu.load.utilisation_percent)
            next_look = time.monotonic() + interval_s
            while (wait_s := next_look - time.monotonic()) > 0:
                live.update(screen.picture(view, terminal, history), refresh=True)
                typed = _typed(keys, max(0.0, wait_s))
                if typed is None:
                    break
                if not all(screen.press(key, terminal.height) for key in _KEYS.findall(typed)):
                    return


@contextmanager
def _keys() -> Iterator[int | None]:
    """Yield a descriptor for unbuffered key input without echo. SIGTERM acts like Ctrl-C."""
    import termios
    import tty

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = None if keys is None else termios.tcgetattr(keys)
    former = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        yield keys
    finally:
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, former)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _typed(keys: int | None, wait_s: float) -> str | None:
    """Return the keys typed within `wait_s` seconds; q if the terminal is gone."""
    ready, _, _ = select.select([] if keys is None else [keys], [], [], wait_s)
    if not ready or keys is None:
        return None
    return os.read(keys, 64).decode(errors="replace") or "q"
