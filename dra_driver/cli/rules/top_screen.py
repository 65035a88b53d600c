"""A node at one moment as lines for people: its GPUs, the claims that hold them, who computes there, and their health.

ASCII only; no line is longer than the width, unless that is below `NARROWEST`. Each line is a row of spans with a style
in words: whoever draws it decides what a style looks like, and every style says something that the text says too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dra_driver.cli.rules.node_view import Holding, NodeView, SeenGpu, SeenInstance
from dra_driver.cli.rules.prepared_claims import age_text
from dra_driver.cli.rules.tables import Column, ascii_only, fitted, folded
from dra_driver.model.gpu import GpuLoad

NARROWEST = 60
Style = Literal["", "title", "good", "notice", "warning", "bad", "dim"]
_INDENT = "  "
_GAP = "  "
_MIB = 1 << 20
_SHARE_ID_SHOWN = 8
_MOST_PODS = 28
_POD_TAIL = 8
_BAR = 10
_LEAST_TEXT = 30
_STYLES: Mapping[str, Style] = {
    "ok": "good",
    "information": "notice",
    "degraded": "warning",
    "unhealthy": "bad",
    "lost": "bad",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a line."""

    text: str
    style: Style = ""


Line = tuple[Span, ...]


def node_lines(view: NodeView, width: int, order: Order = "index") -> list[Line]:
    """The whole view: GPUs with their MIG devices, what is wrong, claims, processes, MPS daemons, NVLink domains.

    `order` is that of GPUs and processes: by memory or utilisation the busiest come first, by health the worst.
    """
    width = max(width, NARROWEST)
    sections = [
        _head(view, width),
        _problems(view, width),
        _gpus(view, width, order),
        _health(view, width),
        _claims(view, width),
        _processes(view, width, order),
        _mps(view, width),
        _domains(view, width),
        [line for note in view.notes for line in _folded(f"note: {note}", "", width, "warning")],
    ]
    lines: list[Line] = []
    for section in filter(None, sections):
        lines += [(), *section] if lines else section
    return lines


def _head(view: NodeView, width: int) -> list[Line]:
    versions = [
        f"NVIDIA driver {view.nvidia_version}" if view.nvidia_version else "NVIDIA driver unknown",
        f"CUDA {view.cuda_version}" if view.cuda_version else None,
    ]
    return _folded(_GAP.join([view.node, *filter(None, versions), view.driver, view.taken_at]), "", width)


_SEVERITY = ("unknown", "ok", "information", "degraded", "unhealthy", "lost")
_ORDERS: Mapping[str, Callable[[SeenGpu], float]] = {
    "index": lambda _: 0,
    "memory": lambda gpu: -(_fraction(gpu) or 0),
    "utilisation": lambda gpu: -((gpu.load and gpu.load.utilisation_percent) or 0),
    "health": lambda gpu: -(_SEVERITY.index(gpu.health) if gpu.health in _SEVERITY else 0),
}
Order = Literal["index", "memory", "utilisation", "health"]

_GPU_COLUMNS = (
    Column("#"),
    Column("GPU"),
    Column("PRODUCT", drop=5),
    Column("PCI BUS ID", drop=6),
    Column("MIG", drop=3, optional=True),
    Column("MEMORY", drop=2),
    Column("USED MiB"),
    Column("UTIL", drop=4),
    Column("%"),
    Column("TEMP"),
    Column("POWER W", drop=1),
    Column("HEALTH"),
)


def _gpus(view: NodeView, width: int, order: Order) -> list[Line]:
    """A line a GPU, and below it one for each of its GPU instances."""
    if not view.gpus:
        return [(Span("no GPU is known", "title"),)]
    gpus = sorted(view.gpus, key=_ORDERS[order])
    cells = [_gpu(gpu) for gpu in gpus]
    head, *rows = fitted(_GPU_COLUMNS, [[cell.text for cell in row] for row in cells], width, _GAP)
    lines: list[Line] = [_cut(_spans(head, {}, "title"), width)]
    for gpu, row, styled in zip(gpus, rows, cells, strict=True):
        lines.append(_cut(_spans(row, {index: cell.style for index, cell in enumerate(styled)}), width))
        lines += [_instance(seen, width) for seen in view.instances if seen.gpu == gpu.name]
    return lines


def _gpu(gpu: SeenGpu) -> list[Span]:
    load = gpu.load or GpuLoad()
    used, total = (_mib(value) for value in (load.memory_used_bytes, load.memory_total_bytes))
    power, limit = (_number(value) for value in (load.power_w, load.power_limit_w))
    percent = load.utilisation_percent
    return [
        Span("-" if gpu.index is None else str(gpu.index)),
        Span(gpu.name),
        Span(gpu.product or "-", "dim"),
        Span(gpu.pci_bus_id or "-", "dim"),
        Span(gpu.mode or "-"),
        _bar(_fraction(gpu)),
        Span("-" if total == "-" else f"{used}/{total}"),
        _bar(None if percent is None else percent / 100),
        Span("-" if percent is None else str(percent)),
        Span("-" if load.temperature_c is None else f"{load.temperature_c}C"),
        Span(power if limit == "-" else f"{power}/{limit}"),
        Span(_word(gpu.health), _STYLES.get(gpu.health, "dim")),
    ]


def _fraction(gpu: SeenGpu) -> float | None:
    """How much of the memory is in use."""
    if gpu.load is None or gpu.load.memory_used_bytes is None or not gpu.load.memory_total_bytes:
        return None
    return gpu.load.memory_used_bytes / gpu.load.memory_total_bytes


def _bar(fraction: float | None) -> Span:
    """`[|||       ]`; what is used at all shows."""
    if fraction is None:
        return Span("-")
    filled = min(_BAR, max(round(fraction * _BAR), 1 if fraction > 0 else 0))
    style: Style = "bad" if fraction > 0.9 else "warning" if fraction > 0.7 else "good"
    return Span(f"[{'|' * filled}{' ' * (_BAR - filled)}]", style)


def _instance(seen: SeenInstance, width: int) -> Line:
    text = f"   `- {seen.profile}  slices {seen.slices}  {seen.ids}  {seen.holder}"
    return (Span(ascii_only(text)[:width]),)


def _word(severity: str) -> str:
    """What needs a person is in capitals, so that it stands out without colours."""
    return severity.upper() if severity in ("degraded", "unhealthy", "lost") else severity


def _mib(value: int | None) -> str:
    return "-" if value is None else str(value // _MIB)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _problems(view: NodeView, width: int) -> list[Line]:
    """What is wrong with the node, in red, before everything else."""
    lines: list[Line] = []
    for problem in view.problems:
        lasted = "" if problem.since_s is None else f" for {age_text(problem.since_s).removesuffix(' ago')}"
        lines += _folded(f"PROBLEM{lasted}: {problem.text}", "", width, "bad")
    return lines


def _unknown_health(view: NodeView) -> str | None:
    """Whose health is not known, None if all is."""
    unknown = [gpu.name for gpu in view.gpus if gpu.health == "unknown"]
    if view.gpus and not unknown:
        return None
    whose = "" if len(unknown) == len(view.gpus) else f" of {', '.join(unknown)}"
    silent = any(problem.problem == "nvml-unavailable" for problem in view.problems)
    return f"Health{whose} unknown: NVML {'does not answer' if silent else 'did not report it'}."


def _health(view: NodeView, width: int) -> list[Line]:
    unknown = _unknown_health(view)
    unknown_lines = [] if unknown is None else _folded(unknown, "", width, "bad")
    if not view.health:
        return [
            (Span("HEALTH", "title"),),
            *(unknown_lines or _folded("All GPUs are well.", "", width, "good")),
        ]
    columns = [Column("HEALTH", cut=12), Column("SEVERITY"), Column("REASON", cut=12), Column("SINCE")]
    rows = [
        [entry.subject, _word(entry.severity), entry.reason, _since(entry.since_s, "now")]
        for entry in view.health
    ]
    head, *found = fitted(columns, rows, width, _GAP)
    lines: list[Line] = [_spans(head, {}, "title")]
    for entry, row in zip(view.health, found, strict=True):
        line = _spans(row, {1: _STYLES.get(entry.severity, "")})
        taken = sum(len(span.text) for span in line)
        room = width - taken - len(_GAP)
        texts = (
            textwrap.wrap(ascii_only(entry.text), room, break_on_hyphens=False) if room >= _LEAST_TEXT else []
        )
        if texts:
            lines.append((*line, Span(_GAP + texts[0])))
            lines += [(Span(" " * (taken + len(_GAP)) + text),) for text in texts[1:]]
        else:
            lines += [line, *_folded(entry.text, _INDENT * 2, width)]
    return [*lines, *unknown_lines]


def _claims(view: NodeView, width: int) -> list[Line]:
    if not view.holdings:
        return [(Span("CLAIM", "title"),), (Span("no claim is prepared"),)]
    columns = [
        Column("CLAIM", cut=14),
        Column("POD", drop=1, cut=14, optional=True),
        Column("SINCE", drop=2),
        Column("DEVICE", cut=14),
        Column("USE", cut=16),
    ]
    rows = [
        [held.claim, _pods(held.pods), _since(held.since_s), held.device, "; ".join(_how(held)) or "-"]
        for held in view.holdings
    ]
    styles = [_STYLES.get(held.trouble or "", "") for held in view.holdings]
    return _table(columns, rows, width, len(columns) - 1, styles)


def _pods(names: tuple[str, ...] | None) -> str:
    """The first of the pods, and how many more there are; the end of a name tells pods apart."""
    if not names:
        return "-" if names is None else "none"
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    name, left = names[0], _MOST_PODS - len(more)
    if len(name) > left:
        name = f"{name[: left - _POD_TAIL - 2]}..{name[-_POD_TAIL:]}"
    return name + more


def _how(held: Holding) -> Iterator[str]:
    if held.trouble:
        yield _word(held.trouble)
    if held.phase != "prepared":
        yield held.phase.upper()
    if held.boot != "this":
        yield f"{held.boot.upper()} BOOT"
    if held.usage:
        yield held.usage
    if held.share_id:
        yield f"share {held.share_id[:_SHARE_ID_SHOWN]}"
    if held.admin_access:
        yield "admin access"
    if held.mig:
        yield held.mig


def _since(seconds: float | None, unknown: str = "unknown") -> str:
    return unknown if seconds is None else age_text(seconds)


def _processes(view: NodeView, width: int, order: Order) -> list[Line]:
    if not view.processes:
        return []
    columns = [
        Column("PROCESS"),
        Column("GPU"),
        Column("GI", drop=2, optional=True),
        Column("MEMORY MiB"),
        Column("POD", drop=1, cut=12),
        Column("COMMAND", cut=12),
    ]
    found = sorted(view.processes, key=lambda one: -(one.memory_bytes or 0) if order == "memory" else 0)
    rows = [
        [
            str(one.pid),
            one.gpu,
            "-" if one.gpu_instance_id is None else str(one.gpu_instance_id),
            _mib(one.memory_bytes),
            one.pod or ("NO CLAIM" if one.is_unclaimed else "-"),
            one.name or "-",
        ]
        for one in found
    ]
    return _table(columns, rows, width)


def _mps(view: NodeView, width: int) -> list[Line]:
    if not view.mps:
        return []
    columns = [
        Column("MPS DAEMON", cut=12),
        Column("STATE", cut=12),
        Column("SINCE", drop=1),
        Column("CLIENTS", drop=2),
        Column("PID", drop=3),
        Column("PROBLEM", cut=12),
    ]
    rows = [
        [
            daemon.device,
            daemon.state if daemon.state in ("ready", "starting") else daemon.state.upper(),
            age_text(daemon.since_s),
            "-" if daemon.clients is None else str(daemon.clients),
            "-" if daemon.pid is None else str(daemon.pid),
            daemon.problem or "-",
        ]
        for daemon in view.mps
    ]
    states: Mapping[str, Style] = {"ready": "good", "starting": "notice"}
    return _table(columns, rows, width, 1, [states.get(daemon.state, "bad") for daemon in view.mps])


def _domains(view: NodeView, width: int) -> list[Line]:
    if not view.domains:
        return []
    numbers = {gpu.name: str(gpu.index) for gpu in view.gpus if gpu.index is not None}
    rows = [
        [domain, str(len(names)), " ".join(numbers.get(name, name) for name in names)]
        for domain, names in view.domains
    ]
    return _table([Column("NVLINK DOMAIN", cut=12), Column("GPUS"), Column("#", cut=12)], rows, width)


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int,
    styled: int | None = None,
    styles: Sequence[Style] = (),
) -> list[Line]:
    """A table whose column `styled` has a style a row."""
    head, *found = fitted(columns, rows, width, _GAP)
    lines = [_spans(head, {}, "title")]
    for number, row in enumerate(found):
        lines.append(_spans(row, {} if styled is None else {styled: styles[number]}))
    return [_cut(line, width) for line in lines]


def _spans(row: Sequence[tuple[int, str]], styles: Mapping[int, Style], others: Style = "") -> Line:
    """A row of a table with what lies between the columns; `styles` by the index of a column."""
    made: list[Span] = []
    for index, text in row:
        gap = [Span(_GAP)] if made else []
        made += [*gap, Span(ascii_only(text), styles.get(index, others))]
    return tuple(made)


def _cut(line: Line, width: int) -> Line:
    """What of the line a terminal of that width shows."""
    made: list[Span] = []
    for span in line:
        text = span.text[: max(0, width - sum(len(done.text) for done in made))]
        if text:
            made.append(Span(text, span.style))
    return tuple(made)


def _folded(text: str, indent: str, width: int, style: Style = "") -> list[Line]:
    return [(Span(line, style),) for line in folded(text, indent, width)]
