"""The forms in which commands print what they found, and devices as a table for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

from dra_driver.app.settings import Flag
from dra_driver.cli.rules.tables import Column, table
from dra_driver.model.schema import Choice, JsonObject

_DEVICE_COLUMNS = (
    Column("DEVICE"), Column("INDEX", drop=3), Column("TYPE"), Column("PRODUCT", drop=1, cut=16), Column("MEMORY"),
    Column("CC", drop=7), Column("PCI BUS ID", drop=2), Column("NUMA", drop=6), Column("NVLINK DOMAIN", drop=4),
    Column("SHARED", drop=2, optional=True), Column("TAINTS", cut=12, optional=True), Column("UUID", drop=5),
)  # fmt: skip


_PCI_BUS_ID = [column.title for column in _DEVICE_COLUMNS].index("PCI BUS ID")
_OF_ONE_GPU = (_PCI_BUS_ID, _PCI_BUS_ID + 1)
"""Its place in the machine: PCI bus ID and NUMA node."""


def value_of(entry: JsonObject | None) -> str:
    """The one value of an attribute as text; `-` where it is absent."""
    if not entry:
        return "-"
    value = next(iter(entry.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def device_table(devices: Iterable[JsonObject], width: int | None) -> str:
    """One row a device: name, index, type, product, memory, where it is, and its NVLink domain.

    The MIG devices of one profile that are made on demand share a row, also those of GPUs that differ in nothing else:
    there are dozens a GPU.
    """
    rows: dict[str, list[JsonObject]] = {}
    for device in devices:
        rows.setdefault(_row_key(device), []).append(device)
    cells: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for key, same in rows.items():
        row = _row(same[0]) if key == same[0]["name"] else _common_row(same)
        cells.setdefault(row if key == same[0]["name"] else _without_gpu(row), []).append(row)
    common_last = sorted(cells.values(), key=lambda alike: len(alike) > 1)
    return table(_DEVICE_COLUMNS, [_of_all_gpus(alike) for alike in common_last], width)


def _without_gpu(row: Sequence[str]) -> tuple[str, ...]:
    """What rows of equal GPUs have in common."""
    return tuple(
        cell.partition("-mig-")[2] if number == 0 else cell
        for number, cell in enumerate(row)
        if number not in _OF_ONE_GPU
    )


def _of_all_gpus(rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    if len(rows) == 1:
        return rows[0]
    cells = [values[0] if len(set(values)) == 1 else "-" for values in zip(*rows, strict=True)]
    cells[0] = f"gpu-*-mig-{rows[0][0].partition('-mig-')[2]}"
    cells[_PCI_BUS_ID] = f"{len(rows)} GPUs"
    cells[-1] = f"{sum(int(row[-1].partition(' ')[0]) for row in rows)} on demand"
    return tuple(cells)


def _row_key(device: JsonObject) -> str:
    """The name; for a MIG device on demand, which has no UUID yet, without the slice at which it begins."""
    attributes: JsonObject = device.get("attributes", {})
    on_demand = value_of(attributes.get("type")) == "mig" and "uuid" not in attributes
    return str(device["name"]).rpartition("-")[0] if on_demand else str(device["name"])


def _common_row(devices: Sequence[JsonObject]) -> tuple[str, ...]:
    starts = sorted(int(str(device["name"]).rpartition("-")[2]) for device in devices)
    where = ",".join(map(str, starts))
    if len(starts) > 2 and starts == [*range(starts[0], starts[-1] + 1)]:
        where = f"{starts[0]}..{starts[-1]}"  # as the shell writes it
    name = f"{_row_key(devices[0])}-{where if len(starts) == 1 else f'{{{where}}}'}"
    return (name, *_row(devices[0])[1:-1], f"{len(devices)} on demand")


def _row(device: JsonObject) -> tuple[str, ...]:
    attributes: JsonObject = device.get("attributes", {})
    capacity: JsonObject = device.get("capacity", {})

    def text(name: str) -> str:
        return value_of(attributes.get(name))

    profile = text("profile")
    kind = text("type")
    return (
        device["name"],
        text("index"),
        kind if profile == "-" else f"{kind} {profile}",
        text("productName"),
        capacity.get("memory", {}).get("value", "-"),
        text("cudaComputeCapability").removesuffix(".0"),
        text("resource.kubernetes.io/pciBusID"),
        text("resource.kubernetes.io/numaNode"),
        text("nvlinkDomain"),
        "yes" if device.get("allowMultipleAllocations") else "-",
        ",".join(map(_taint, device.get("taints", ()))) or "-",
        text("uuid"),
    )


def _taint(taint: JsonObject) -> str:
    """As kubectl writes it, without the prefix of our keys: `xid=48:NoSchedule`."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key'].rpartition('/')[2]}{value}:{taint['effect']}"


def terminal_width(*, all_columns: bool = False) -> int | None:
    """How wide a table may be: that of the terminal, and None for a pipe or where all columns are asked for."""
    if all_columns or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


class Output(StrEnum):
    """Forms of output."""

    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"

    @property
    def is_for_people(self) -> bool:
        """A table or a text, of which `wide` shows every column at full length on any terminal."""
        return self in (Output.table, Output.wide)


class Color(StrEnum):
    """When to colour."""

    auto = "auto"
    always = "always"
    never = "never"

    def is_on(self) -> bool:
        """With auto on a terminal that is not dumb, unless NO_COLOR is set (no-color.org)."""
        if self is not Color.auto:
            return self is Color.always
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


_COLORS = {
    "OK": "\x1b[32m", "WARN": "\x1b[33m", "not judged": "\x1b[33m",
    "FAIL": "\x1b[91m", "FAULT": "\x1b[91m", "SKIP": "\x1b[90m",
}  # fmt: skip


def colored(status: str, line: str, *, is_on: bool) -> str:
    """A line that begins with a status, with that in its color."""
    return f"{_COLORS[status]}{status}\x1b[0m{line.removeprefix(status)}" if is_on else line


COLOR = Flag(
    "color",
    "Colour the text. With auto: on a terminal, unless NO_COLOR is set.",
    Choice(tuple(Color)),
    env=(),
    default="auto",
    to=Color,
)
OUTPUT = Flag(
    "output", "How to print.", Choice(tuple(Output)), ("-o", "--output"), env=(), default="table", to=Output
)


def answer(output: Output, lines: Callable[[int | None], Iterable[str]], content: Callable[[], Any]) -> None:
    """For people the lines, made for the width of the terminal, None for any; else the content as JSON or YAML."""
    if output.is_for_people:
        print("\n".join(lines(terminal_width(all_columns=output is Output.wide))))
    else:
        print_object(content(), output)


def print_object(content: Any, output: Output) -> None:
    """One object as JSON or YAML; tuples become lists."""
    if output is Output.json:
        print(json.dumps(content, indent=2))
    else:
        import yaml

        # Through JSON, because YAML would write a value that occurs twice as an anchor and an alias.
        print(yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False), end="")


def print_objects(objects: list[dict[str, Any]], output: Output) -> None:
    """Kubernetes objects: a List in JSON, or several YAML documents."""
    if output is Output.json:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        import yaml

        print(yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=False), end="")
