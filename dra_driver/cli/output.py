"""Tables and texts that fit the terminal, JSON, YAML."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any

from dra_driver.app.settings import Flag
from dra_driver.cli.rules.cluster_rows import taint_text
from dra_driver.model.ids import printable
from dra_driver.model.schema import Choice, JsonObject

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDE = 1 << 16
_MIN_TEXT = 24
"""Minimum width of a text after a prefix, and of a table's last column while another column can be dropped."""
_MIN_LAST, _MIN_NAME = 12, 8
"""Minimum widths of the last column and the others if no column can be dropped."""
_DEEPER = 4
_STYLES = {
    "ok": "green", "information": "cyan", "degraded": "yellow", "unhealthy": "bold red", "lost": "bold red",
    "unknown": "bold red", "ready": "green", "starting": "cyan", "failed": "bold red", "fault": "bold red",
}  # fmt: skip


def table(
    columns: Mapping[str, int], rows: Iterable[Sequence[object]], width: int | None
) -> list[RenderableType]:
    """Return a table; empty without rows. `width` None means unlimited.

    If the table is too wide, columns with the highest numbers are dropped first, except those with 0. A column whose
    title ends with `?` is also dropped if it is empty. The last column is wrapped. Then columns are shortened, from
    right to left.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if not cells:
        return []
    titles, room = [*columns], width or _WIDE
    sizes = {
        title: max(cell_len(title.rstrip("?")), *(cell_len(row[at]) for row in cells))
        for at, title in enumerate(titles)
    }
    for at, title in enumerate(titles):
        if title[-1] == "?" and all(row[at] in ("-", "") for row in cells):
            del sizes[title]

    def lacks(least: int) -> int:
        """Return how much the columns are too wide if the last has `least`."""
        *others, last = sizes.values()
        return sum(others) + 2 * len(others) + min(last, least) - room

    for title in sorted(columns, key=lambda title: -columns[title]):
        if columns[title] and title in sizes and lacks(_MIN_TEXT) > 0:
            del sizes[title]
    *others, last = sizes
    for title in reversed(others):
        sizes[title] = max(min(sizes[title], _MIN_NAME), sizes[title] - max(0, lacks(_MIN_LAST)))
    sizes[last] = max(1, sizes[last] - max(0, lacks(_WIDE)))
    made = Table(box=None, pad_edge=False, padding=0, header_style="bold")
    for title, size in sizes.items():
        gap = 0 if title == last else 2
        made.add_column(title.rstrip("?"), width=size + gap, overflow="ellipsis", no_wrap=title != last)
    for row in cells:
        texts = {
            title: Text(cell, _STYLES.get(cell.partition(";")[0].lower(), ""))
            for cell, title in zip(row, titles, strict=True)
            if title in sizes
        }
        for title in others:
            texts[title].truncate(sizes[title], overflow="ellipsis")
        made.add_row(*texts.values())
    return [made]


def drawn(picture: Iterable[RenderableType], width: int | None, *, is_colored: bool = False) -> Iterator[str]:
    from rich.console import Group

    text = io.StringIO()
    console(text, width or _WIDE, is_colored=is_colored).print(Group(*picture))
    return (line.rstrip() for line in text.getvalue().splitlines())


def console(file: IO[str] | None, width: int | None, *, is_colored: bool) -> Console:
    from rich.console import Console

    return Console(
        file=file,
        width=width,
        # Without a height, rich takes every dumb terminal for 80 columns wide.
        height=None if width is None else 25,
        force_terminal=True,
        color_system="standard" if is_colored else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def hanging(prefix: str, text: str, width: int | None) -> str:
    """Return the text after its prefix, wrapped and indented to it; on one line without a width.

    Words are never broken, so that paths and commands can be copied.
    """
    prefix, words = printable(prefix), [printable(word) for word in text.split()]
    line = (prefix + " ".join(words)).rstrip()
    if width is None or len(line) <= width:
        return line
    first, indent = prefix, " " * len(prefix)
    if width - len(prefix) < max(_MIN_TEXT, *map(len, words)):
        first = indent = " " * (len(prefix) - len(prefix.lstrip()) + _DEEPER)
    folded = textwrap.fill(
        " ".join(words),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return folded if first == prefix else f"{prefix.rstrip()}\n{folded}"


_DEVICE_COLUMNS = {
    "DEVICE": 0, "INDEX": 3, "TYPE": 0, "PRODUCT": 1, "MEMORY": 0, "CC": 7, "PCI BUS ID": 2, "NUMA": 6,
    "NVLINK DOMAIN": 4, "SHARED?": 2, "TAINTS?": 0, "UUID": 5,
}  # fmt: skip
_PCI = [*_DEVICE_COLUMNS].index("PCI BUS ID")
"""This column and the next are the device's place in the machine."""
_TAINTS = [*_DEVICE_COLUMNS].index("TAINTS?")
_EACH_GPU = "gpu-*"


def value_of(entry: JsonObject | None) -> str:
    if not entry:
        return "-"
    value = next(iter(entry.values()))
    return str(value).lower() if isinstance(value, bool) else str(value)


def device_table(devices: Iterable[JsonObject], width: int | None) -> Iterator[str]:
    """Yield the lines of a table of devices, those with taints first.

    MIG devices on demand of one profile share a row, even across otherwise equal GPUs: there are dozens per GPU.
    """
    rows, starts = [_row(device) for device in devices], dict[str, list[int]]()
    for row in filter(_is_on_demand, rows):
        stem, _, start = row[0].rpartition("-")
        starts.setdefault(stem, []).append(int(start))
    alike: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        key: tuple[object, ...] = row
        if _is_on_demand(row):
            stem = row[0].rpartition("-")[0]
            key = (stem.partition("-mig-")[2], *sorted(starts[stem]), *row[1:_PCI], *row[_PCI + 2 :])
        alike.setdefault(key, []).append(row)
    cells = [_common(same, starts) if _is_on_demand(same[0]) else same[0] for same in alike.values()]
    cells.sort(key=lambda row: (row[_TAINTS] == "-", row[0].startswith(_EACH_GPU)))
    return drawn(table(_DEVICE_COLUMNS, cells, width), width)


def _is_on_demand(row: Sequence[str]) -> bool:
    return "-mig-" in row[0] and row[-1] == "-"


def _common(rows: Sequence[Sequence[str]], starts: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    gpus = [*dict.fromkeys(row[0].partition("-mig-")[0] for row in rows)]
    stem = rows[0][0].rpartition("-")[0]
    first, *others = found = sorted(starts[stem])
    where = ",".join(map(str, found))
    if len(others) > 1 and found == [*range(first, found[-1] + 1)]:
        where = f"{first}..{found[-1]}"  # shell notation
    name = f"{stem}-{{{where}}}" if others else f"{stem}-{where}"
    cells = [column[0] if len({*column}) == 1 else "-" for column in zip(*rows, strict=True)]
    if len(gpus) > 1:
        name, cells[_PCI] = _EACH_GPU + name.removeprefix(gpus[0]), f"{len(gpus)} GPUs"
    return (name, *cells[1:-1], f"{len(rows)} on demand")


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
        ",".join(map(taint_text, device.get("taints", ()))) or "-",
        text("uuid"),
    )


def terminal_width(*, all_columns: bool = False) -> int | None:
    if all_columns or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


class Output(StrEnum):
    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"

    @property
    def is_for_people(self) -> bool:
        """`wide` shows every column at full length."""
        return self in (Output.table, Output.wide)


class Color(StrEnum):
    auto = "auto"
    always = "always"
    never = "never"

    def is_on(self) -> bool:
        """Follow no-color.org."""
        if self is not Color.auto:
            return self is Color.always
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


_COLORS = {
    "OK": "\x1b[32m", "WARN": "\x1b[33m", "not judged": "\x1b[33m",
    "FAIL": "\x1b[91m", "FAULT": "\x1b[91m", "SKIP": "\x1b[90m",
}  # fmt: skip


def colored(status: str, line: str, *, is_on: bool) -> str:
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
    "output", "Output format.", Choice(tuple(Output)), ("-o", "--output"), env=(), default="table", to=Output
)


def answer(output: Output, lines: Callable[[int | None], Iterable[str]], content: Callable[[], Any]) -> None:
    if output.is_for_people:
        print("\n".join(lines(terminal_width(all_columns=output is Output.wide))))
    else:
        print_object(content(), output)


def print_object(content: Any, output: Output) -> None:
    if output is Output.json:
        print(json.dumps(content, indent=2))
    else:
        import yaml

        # Converted through JSON, because YAML would write a repeated value as an anchor and an alias.
        print(yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False), end="")


def print_objects(objects: list[dict[str, Any]], output: Output) -> None:
    if output is Output.json:
        print_object({"apiVersion": "v1", "kind": "List", "items": objects}, output)
        return
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    print(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, default_flow_style=False), end="")
