"""Every command as a person types it: on terminals of common widths, piped, without colour, in a dumb
terminal.

The commands are those of docs/commands.md, on the recorded node, and the help of each.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pynvml
import pytest

from dra_driver.app.logs import configure_logs
from dra_driver.cli.commands import ROOT as ALL
from dra_driver.cli.commands import call
from dra_driver.cli.flags import Command, read
from tests.fakes.tables import read_yaml

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "hack"), str(ROOT / "hack/record")]

from recorded_node import RecordedNode  # noqa: E402

Recorded = dict[str, Any]
COMMANDS: list[Recorded] = read_yaml(ROOT / "hack/record/commands.yaml")["commands"]
WIDTHS = (80, 100, 160)
ENVIRONMENTS: tuple[dict[str, str], ...] = ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"})
"""The first has colours."""
_ESCAPE = "\x1b"
_MANIFESTS = ("device-classes",)
"""They print YAML, which is never folded."""
_DRAWN = ("top",)
"""Bars are as wide as there is room."""

Prints = Callable[..., list[str]]


@pytest.fixture(scope="module")
def node() -> Iterator[RecordedNode]:
    # Short, because the path of a socket has 107 bytes at most; on the disk, because of the MPS daemon's own /dev/shm.
    with TemporaryDirectory(prefix="w-", dir="/tmp") as directory, RecordedNode(Path(directory)) as made:
        yield made


class _Terminal(io.StringIO):
    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self._is_one = is_one

    def isatty(self) -> bool:
        return self._is_one


@pytest.fixture
def prints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prints]:
    """The lines that a command prints on a terminal of so many columns, or into a pipe."""

    def run(arguments: list[str], columns: int | None, **environment: str) -> list[str]:
        output = _Terminal(is_one=columns is not None)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns or 80), **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "rich", sys.modules.get("rich"))
        with suppress(SystemExit):
            call(arguments)
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)
        return output.getvalue().splitlines()

    yield run
    configure_logs("critical", "console")
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def _plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


def _arguments(command: Recorded, node: RecordedNode) -> list[str]:
    return [*command["arguments"].split(), *node.flags(command.get("where", ()))]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command["arguments"])
def test_output_fits_each_terminal_and_is_whole_in_a_pipe(
    command: Recorded, node: RecordedNode, prints: Prints
) -> None:
    arguments, title = _arguments(command, node), command["arguments"].split()[0]
    piped = prints(arguments, None)
    assert piped
    assert not [line for line in piped if _ESCAPE in line]
    whole = " ".join(piped)
    for columns, environment in zip(WIDTHS, ENVIRONMENTS, strict=True):
        lines = prints(arguments, columns, **environment)
        assert not environment or not [line for line in lines if _ESCAPE in line], environment
        shown = [_plain(line) for line in lines]
        assert all(map(str.isprintable, shown))
        assert title in _MANIFESTS or not [line for line in shown if _is_too_long(line, columns)]
        # Nothing is said on a terminal that a pipe does not get: columns go, cells are wrapped or end with an ellipsis.
        assert title in _DRAWN or [word for word in _words(shown) if word.rstrip("…") not in whole] == []


@pytest.mark.parametrize("arguments", ["inspect", "cluster", "cluster --filter taint"])
def test_wide_prints_on_a_terminal_what_a_pipe_gets(
    arguments: str, node: RecordedNode, prints: Prints
) -> None:
    [command] = [one for one in COMMANDS if one["arguments"] == arguments]
    words = _arguments(command, node)
    assert prints([*words, "-o", "wide"], 80) == prints(words, None)


def _is_too_long(line: str, columns: int) -> bool:
    """A word that is wider than the terminal stays whole: a path or an expression can be copied."""
    return len(line) > columns and (len(line.split()) > 1 or len(line.strip()) < columns - 24)


def _words(lines: list[str]) -> set[str]:
    """Without drawings, times and numbers, which change."""
    words = {word for line in lines if not line.startswith(("|", "+")) for word in line.split()}
    return {word for word in words if not re.search(r"\d[smh]$|\d:\d|^\d+$", word)}


def _paths(command: Command, path: list[str]) -> Iterator[list[str]]:
    """The words that lead to the command and to each below it."""
    yield path
    for name, child in command.loaded().commands.items():
        yield from _paths(child, [*path, name])


HELPS = [*_paths(ALL, [])]


@pytest.mark.parametrize("path", HELPS, ids=" ".join)
def test_help_fits_each_terminal_and_has_examples_that_can_be_typed(path: list[str], prints: Prints) -> None:
    shown = {columns: prints([*path, "-h"], columns) for columns in (None, *WIDTHS)}
    assert shown[None] == shown[80] != []
    for columns in WIDTHS:
        assert max(map(len, shown[columns])) <= columns
        assert not [line for line in shown[columns][1:] if line.endswith("...") or _ESCAPE in line]
    command = ALL
    for word in path:
        command = command.commands[word].loaded()
    prog = " ".join(["gpu-dra-driver", *path])
    assert command.commands or command.examples
    for example in command.examples:
        assert f"  {prog} {example}".rstrip() in shown[80]
        words = example.partition(" |")[0].split()
        assert read(command.parser(prog), command.flags, words, {}).faults == {}
