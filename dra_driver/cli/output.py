"""The forms in which commands print what they found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from dra_driver.app.settings import Flag
from dra_driver.cli.tables import terminal_width
from dra_driver.model.schema import Choice


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
