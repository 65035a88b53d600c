"""Devices as a table for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any

JsonObject = dict[str, Any]

_PLAIN_WIDTH = 200


def value_of(entry: JsonObject | None) -> str:
    """The one value of an attribute as text; `-` where it is absent."""
    if not entry:
        return "-"
    value = next(iter(entry.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def device_table(devices: Iterable[JsonObject]) -> str:
    """One row a device: name, type, product, memory, where it is, and its NVLink domain.

    The MIG devices of one GPU and profile that are made on demand share a row: there are dozens a GPU.
    """
    columns = ("DEVICE", "TYPE", "PRODUCT", "MEMORY", "CC", "PCI BUS", "NUMA", "NVLINK DOMAIN", "UUID")
    rows: dict[str, list[JsonObject]] = {}
    for device in devices:
        rows.setdefault(_row_key(device), []).append(device)
    return table(
        columns,
        [
            _row(same[0]) if _row_key(same[0]) == same[0]["name"] else _common_row(same)
            for same in rows.values()
        ],
    )


def _row_key(device: JsonObject) -> str:
    """The name; for a MIG device on demand, which has no UUID yet, without the slice at which it begins."""
    attributes: JsonObject = device.get("attributes", {})
    on_demand = value_of(attributes.get("type")) == "mig" and "uuid" not in attributes
    return str(device["name"]).rpartition("-")[0] if on_demand else str(device["name"])


def _common_row(devices: Sequence[JsonObject]) -> tuple[str, ...]:
    starts = sorted(int(str(device["name"]).rpartition("-")[2]) for device in devices)
    where = ",".join(map(str, starts))
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
        kind if profile == "-" else f"{kind} {profile}",
        text("productName"),
        capacity.get("memory", {}).get("value", "-"),
        text("cudaComputeCapability").removesuffix(".0"),
        text("resource.kubernetes.io/pciBusID"),
        text("resource.kubernetes.io/numaNode"),
        text("nvlinkDomain"),
        text("uuid"),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table without frames, which pipes and small terminals take as well."""
    from rich.console import Console
    from rich.table import Table

    buffer = io.StringIO()
    on_terminal = sys.stdout.isatty()
    console = Console(file=buffer, width=None if on_terminal else _PLAIN_WIDTH, force_terminal=on_terminal)
    grid = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=not on_terminal)
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
