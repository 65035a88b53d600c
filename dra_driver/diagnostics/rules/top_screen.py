"""A node at one moment as text for people: its GPUs, the claims that hold them, and their health.

ASCII only; no line is longer than the width, unless that is below `NARROWEST`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dra_driver.diagnostics.rules.prepared_claims import age_text
from dra_driver.model.gpu import GpuLoad

WIDTH = 100
NARROWEST = 60
_INDENT = "  "
_GAP = "  "
_LEAST_COLUMN = 4
_MIB = 1 << 20
_SHARE_ID_SHOWN = 8
_LEAST_PODS, _MOST_PODS = 14, 28
_POD_TAIL = 8


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU. `name` is its device's, `mode` its MIG mode or None; `load` is None where NVML tells nothing of the GPU.

    `health` is the worst of what is known of it and its instances, as a word; `unknown` if it was not read.
    """

    name: str
    uuid: str
    product: str | None = None
    mode: str | None = None
    load: GpuLoad | None = None
    health: str = "unknown"


@dataclass(frozen=True, slots=True)
class Holding:
    """A device of a claim; `since_s` is None where it is not written down. `trouble` is how bad the device is,
    None if it is well as far as is known. `pods` are the names of those that the claim is for, None if unknown."""

    claim: str
    uid: str
    phase: str
    since_s: float | None
    device: str
    kind: str
    uuid: str
    usage: str | None = None
    share_id: str | None = None
    admin_access: bool = False
    mig: str | None = None
    boot: str = "this"
    trouble: str | None = None
    pods: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SeenInstance:
    """A GPU instance on the GPU with the device name `gpu`; its ID is None if it is held but not there."""

    gpu: str
    profile: str
    start: int
    size: int
    gpu_instance_id: int | None
    compute_instance_ids: tuple[int, ...]
    holder: str


@dataclass(frozen=True, slots=True)
class SeenReason:
    """Why a device is not well; `since_s` is None for what only this look showed."""

    subject: str
    severity: str
    reason: str
    since_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class SeenDaemon:
    """The MPS daemon of a device; `clients` is None before the first probe."""

    device: str
    state: str
    since_s: float
    clients: int | None = None
    pid: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """All that is shown. `domains` are NVLink domains with the names of their GPUs; `notes` are sentences."""

    node: str
    driver: str
    taken_at: str
    nvidia_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[SeenGpu, ...] = ()
    domains: tuple[tuple[str, tuple[str, ...]], ...] = ()
    holdings: tuple[Holding, ...] = ()
    instances: tuple[SeenInstance, ...] = ()
    health: tuple[SeenReason, ...] = ()
    mps: tuple[SeenDaemon, ...] = ()
    notes: tuple[str, ...] = ()


def draw_node(view: NodeView, width: int = WIDTH) -> str:
    """The whole view. Titles begin at the left edge, everything else is indented."""
    width = max(width, NARROWEST)
    sections = [_head(view, width), _gpus(view.gpus, width), _domains(view, width), _claims(view, width)]
    sections += [_instances(view, width), _health(view, width), _mps(view, width)]
    sections.append([line for note in view.notes for line in _folded(f"note: {note}", "", width)])
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(view: NodeView, width: int) -> list[str]:
    versions = [
        f"NVIDIA driver {view.nvidia_version}" if view.nvidia_version else "NVIDIA driver unknown",
        f"CUDA {view.cuda_version}" if view.cuda_version else None,
    ]
    parts = [view.driver, f"node {view.node}", *filter(None, versions), view.taken_at]
    return _folded(_GAP.join(parts), "", width)


def _gpus(gpus: Sequence[SeenGpu], width: int) -> list[str]:
    columns = ["GPU", "PRODUCT", "MIG", "MEMORY USED MiB", "UTIL", "TEMP", "POWER W", "HEALTH"]
    rows = [_gpu(gpu) for gpu in gpus]
    if sum(_widths([columns, *rows])) + _margins(len(columns)) > width:
        columns, rows = columns[:1] + columns[2:], [row[:1] + row[2:] for row in rows]
    return ["GPUS", *(_table(columns, rows, width) if rows else [f"{_INDENT}none is known"])]


def _gpu(gpu: SeenGpu) -> list[str]:
    load = gpu.load or GpuLoad()
    used, total = (_mib(value) for value in (load.memory_used_bytes, load.memory_total_bytes))
    power, limit = (_number(value) for value in (load.power_w, load.power_limit_w))
    return [
        gpu.name,
        gpu.product or "-",
        gpu.mode or "-",
        "-" if total == "-" else f"{used} of {total}",
        _with_unit(load.utilisation_percent, " %"),
        _with_unit(load.temperature_c, " C"),
        power if limit == "-" else f"{power} of {limit}",
        _word(gpu.health),
    ]


def _word(severity: str) -> str:
    """What needs a person is in capitals, so that it stands out without colours."""
    return severity.upper() if severity in ("degraded", "unhealthy", "lost") else severity


def _mib(value: int | None) -> str:
    return "-" if value is None else str(value // _MIB)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _with_unit(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def _domains(view: NodeView, width: int) -> list[str]:
    if not view.domains:
        return []
    rows = [[domain, " ".join(names)] for domain, names in view.domains]
    return ["NVLINK DOMAINS", *_table(["DOMAIN", "GPUS"], rows, width)]


def _claims(view: NodeView, width: int) -> list[str]:
    if not view.holdings:
        return ["CLAIMS", f"{_INDENT}none"]
    columns = ["CLAIM", "SINCE", "DEVICE", "USE"]
    rows = [
        [held.claim, _since(held.since_s), held.device, "; ".join(_how(held)) or "-"]
        for held in view.holdings
    ]
    *others, use = _widths([columns, *rows])
    # The widest column is folded first, which is to be the use and no name.
    room = width - _margins(len(columns) + 1) - sum(others) - min(use, max(others))
    if room >= _LEAST_PODS and any(held.pods is not None for held in view.holdings):
        columns.insert(1, "PODS")
        for row, held in zip(rows, view.holdings, strict=True):
            row.insert(1, _pods(held.pods, min(room, _MOST_PODS)))
    return ["CLAIMS", *_table(columns, rows, width)]


def _pods(names: tuple[str, ...] | None, size: int) -> str:
    """The first of the pods, and how many more there are, in so many characters; the end of a name tells pods apart."""
    if not names:
        return "-" if names is None else "none"
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    name, left = names[0], size - len(more)
    if len(name) > left:
        tail = min(_POD_TAIL, left // 2)
        name = f"{name[: left - tail - 2]}..{name[-tail:]}"
    return name + more


def _how(held: Holding) -> Iterator[str]:
    if held.trouble:
        yield _word(held.trouble)
    if held.phase != "prepared":
        yield held.phase.upper()
    if held.boot == "earlier":
        yield "EARLIER BOOT"
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


def _instances(view: NodeView, width: int) -> list[str]:
    if not view.instances:
        return []
    rows = [
        [seen.gpu, _slices(seen.start, seen.size), seen.profile, _ids(seen), seen.holder]
        for seen in view.instances
    ]
    return ["MIG INSTANCES", *_table(["GPU", "SLICES", "PROFILE", "IDS", "HELD BY"], rows, width)]


def _slices(start: int, size: int) -> str:
    return str(start) if size == 1 else f"{start}-{start + size - 1}"


def _ids(seen: SeenInstance) -> str:
    if seen.gpu_instance_id is None:
        return "not there"
    compute = ",".join(str(number) for number in seen.compute_instance_ids)
    return f"GI {seen.gpu_instance_id}" + (f" CI {compute}" if compute else "")


def _health(view: NodeView, width: int) -> list[str]:
    if not view.health:
        is_known = bool(view.gpus) and all(gpu.health != "unknown" for gpu in view.gpus)
        return ["HEALTH", _INDENT + ("nothing is wrong" if is_known else "nothing is known to be wrong")]
    rows = [
        [entry.subject, _word(entry.severity), entry.reason, _since(entry.since_s, "now"), entry.text]
        for entry in view.health
    ]
    return ["HEALTH", *_table(["DEVICE", "SEVERITY", "REASON", "SINCE", "WHAT"], rows, width)]


def _mps(view: NodeView, width: int) -> list[str]:
    if not view.mps:
        return []
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
    return ["MPS DAEMONS", *_table(["DEVICE", "STATE", "SINCE", "CLIENTS", "PID", "PROBLEM"], rows, width)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Aligned columns; where they do not fit, the widest are folded."""
    cells = [[_ascii(cell) for cell in row] for row in (columns, *rows)]
    widths = _widths(cells)
    room = width - _margins(len(columns))
    while sum(widths) > room and max(widths) > _LEAST_COLUMN:
        widths[widths.index(max(widths))] -= 1
    return [line for row in cells for line in _row(row, widths)]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]


def _margins(columns: int) -> int:
    return len(_INDENT) + len(_GAP) * (columns - 1)


def _row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    folded = [
        textwrap.wrap(cell, size, break_on_hyphens=False) or [""]
        for cell, size in zip(cells, widths, strict=True)
    ]
    for parts in zip_longest(*folded, fillvalue=""):
        padded = (f"{part:<{size}}" for part, size in zip(parts, widths, strict=True))
        yield (_INDENT + _GAP.join(padded)).rstrip()


def _ascii(text: str) -> str:
    """Names come from the driver and from files: nothing in them may move a terminal's cursor."""
    return "".join(sign if " " <= sign <= "~" else "?" for sign in text)


def _folded(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        _ascii(text), width, initial_indent=indent, subsequent_indent=indent + _INDENT, break_on_hyphens=False
    )
