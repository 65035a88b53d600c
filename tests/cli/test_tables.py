"""Tables as kubectl prints them, and commands at the widths of real terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.diagnostics.rules.tables import Column, table

COLUMNS = (Column("NAME"), Column("BUS", drop=1), Column("UUID", drop=2), Column("PRODUCT", cut=16))
ROW = ("gpu-1", "0000:ab:00.0", "GPU-4cf8db2d-06c0", "NVIDIA H100 80GB HBM3")


def test_nothing_is_read_as_markup_or_emoji() -> None:
    assert ":ab:" in table(COLUMNS, [ROW], None)
    assert "[red]x[/red]" in table((Column("A"),), [("[red]x[/red]",)], None)


def test_a_cell_cannot_move_the_cursor() -> None:
    assert table((Column("A"),), [("x\x1b[2J\ny",)], None) == "A\nx?[2J?y\n"


@pytest.mark.parametrize(
    ("width", "titles", "product"),
    [
        (None, ["NAME", "BUS", "UUID", "PRODUCT"], ROW[3]),
        (80, ["NAME", "BUS", "UUID", "PRODUCT"], ROW[3]),
        (60, ["NAME", "BUS", "UUID", "PRODUCT"], "NVIDIA H100 80G.."),
        (50, ["NAME", "BUS", "PRODUCT"], ROW[3]),
        (32, ["NAME", "PRODUCT"], ROW[3]),
        (24, ["NAME", "PRODUCT"], "NVIDIA H100 80.."),
        (3, ["NAME", "PRODUCT"], "NVIDIA H100 80.."),
    ],
)
def test_columns_go_by_priority_and_then_cells_are_shortened(
    width: int | None, titles: list[str], product: str
) -> None:
    head, row = table(COLUMNS, [ROW], width).splitlines()
    assert head.split() == titles
    assert row.endswith(product)
    assert width is None or width < 20 or len(row) <= width


def test_without_rows_there_are_titles() -> None:
    assert table(COLUMNS, [], None) == "NAME   BUS   UUID   PRODUCT\n"


@given(st.lists(st.tuples(*[st.text(max_size=30)] * 4), max_size=5), st.integers(1, 200))
def test_one_line_a_row(rows: list[tuple[str, str, str, str]], width: int) -> None:
    assert len(table(COLUMNS, rows, width).splitlines()) == 1 + len(rows)


def on_terminal(columns: int, *arguments: str, **environment: str) -> list[str]:
    """What a command prints on a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "dra_driver.cli.main", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=kept | environment,
    ):
        os.close(slave)
        printed = b""
        while True:
            try:
                more = os.read(master, 1 << 16)
            except OSError:  # the last writer has closed it
                break
            if not more:
                break
            printed += more
    os.close(master)
    return printed.decode().splitlines()


def test_inspect_fits_each_width_and_cuts_no_identity() -> None:
    command = ["inspect", "--simulate", "gb200-nvl72-tray"]
    piped = subprocess.run(
        [sys.executable, "-m", "dra_driver.cli.main", *command], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    whole = {cell for line in piped for cell in line.split()}
    for columns in (80, 100, 160):
        shown = on_terminal(columns, *command)
        assert max(map(len, shown)) <= columns
        assert len(shown) == len(piped)
        assert {cell for line in shown for cell in line.split()} <= whole
        assert "PCI BUS ID" in shown[0]
    assert on_terminal(80, *command, "-o", "wide") == piped


@pytest.mark.parametrize("command", [[], ["simulate"], ["simulate", "mig"]])
def test_help_says_at_80_columns_what_each_command_does(command: list[str]) -> None:
    shown = on_terminal(80, *command, "-h")
    assert max(map(len, shown)) <= 80
    assert not [line for line in shown[1:] if line.endswith("...")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["docter"], "No such command 'docter'. Did you mean 'doctor'"),
        (["simulate", "lst"], "No such command 'lst'. Did you mean 'list'? (see gpu-dra-driver simulate -h)"),
        (["inspect", "--outptu", "json"], "No such option: --outptu (Possible options: --output)"),
        (["inspect", "-o", "jsn"], "'jsn' is not one of 'table', 'wide', 'json', 'yaml'"),
        (["simulate", "lose"], "Missing argument 'GPU'"),
        (["simulate", "create", "dgx-h100", "--simulator-dir", "/proc/none"], "/proc/none"),
    ],
)
def test_an_error_is_one_line_with_one_prefix(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dra_driver.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    [line] = done.stderr.splitlines()
    assert line.startswith("gpu-dra-driver: ")
    assert said in line
    assert "Value error" not in line
    assert done.returncode in (1, 2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, tmp_path: Path) -> None:
    words = {"COMP_WORDS": "gpu-dra-driver simulate re", "COMP_CWORD": "2"}
    typed = {"_TYPER_COMPLETE_ARGS": "gpu-dra-driver simulate re", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-m", "dra_driver.cli.main"],
        env={**os.environ, **words, **typed, "_GPU_DRA_DRIVER_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert {"reboot", "remap", "reset"} <= set(done.stdout.replace('"', " ").replace("\t", " ").split())
