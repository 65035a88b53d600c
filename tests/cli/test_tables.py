"""Tables as kubectl prints them, and commands at the widths of real terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import forked_commands
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dra_driver.cli.main import main
from dra_driver.cli.output import drawn, hanging, table
from tests.fakes.tables import tabled
from tests.fakes.waiting import PATIENCE_S

COLUMNS = {"NAME": 0, "EMPTY?": 0, "BUS": 1, "UUID": 2, "PRODUCT": 0}
ROW = ("gpu-1", "-", "0000:ab:00.0", "GPU-4cf8db2d-06c0", "NVIDIA H100 80GB HBM3")


def lines(columns: dict[str, int], rows: list[tuple[str, ...]], width: int | None) -> list[str]:
    return [*drawn(table(columns, rows, width), width)]


def test_cell_has_no_markup_or_emoji_and_moves_no_cursor() -> None:
    assert lines({"A": 0}, [("[red]:ab:[/red]",), ("x\x1b[2J\ny",)], None) == [
        "A",
        "[red]:ab:[/red]",
        "x?[2J?y",
    ]


@tabled("width", "expected")
def test_columns_go_by_priority_and_then_cells_are_shortened(width: int | None, expected: list[str]) -> None:
    assert lines(COLUMNS, [ROW], width) == expected


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.text(max_size=30)] * 5), max_size=5), st.integers(1, 200))
def test_table_is_as_narrow_as_the_terminal_and_one_line_a_row_in_a_pipe(
    rows: list[tuple[str, ...]], width: int
) -> None:
    assert all(cell_len(line) <= width for line in lines(COLUMNS, rows, width))
    assert len(lines(COLUMNS, rows, None)) == len(rows) + bool(rows)


WORD = st.text("abcdefghijk0-", min_size=1, max_size=40)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(WORD, WORD, WORD, WORD, st.lists(WORD, min_size=1, max_size=9)), min_size=1, max_size=4
    ),
    st.integers(60, 200),
)
def test_each_cell_is_whole_or_ends_with_an_ellipsis_or_its_column_is_absent(
    rows: list[tuple[str, str, str, str, list[str]]], width: int
) -> None:
    columns = {"A": 0, "B": 2, "C": 1, "D": 0, "TEXT": 0}
    head, *shown = lines(columns, [(*names, " ".join(words)) for *names, words in rows], width)
    titles = head.split()
    assert titles == [title for title in columns if title in titles]
    starts = [head.index(title) for title in titles]
    for *names, words in rows:
        of_row = dict(zip(columns, names, strict=False))
        first = shown.pop(0)
        for title, start, end in zip(titles, starts, starts[1:], strict=False):
            cell = first[start:end].rstrip()
            assert cell == of_row[title] or (cell[-1] == "…" and of_row[title].startswith(cell[:-1]))
        said = first[starts[-1] :].split()
        while len(said) < len(words):
            said += shown.pop(0).split()
        assert all(
            one == word or (one[-1] == "…" and word.startswith(one[:-1]))
            for one, word in zip(said, words, strict=True)
        )
    assert shown == []


def on_terminal(columns: int, *arguments: str, **environment: str) -> list[str]:
    """What a command prints on a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = forked_commands.start(arguments, slave, slave, slave, env=kept | environment)
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
    process.join(PATIENCE_S)
    os.close(master)
    return printed.decode().splitlines()


@tabled("arguments", "said")
def test_an_error_is_one_line_with_one_prefix(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-dra-driver", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-dra-driver: ")
    assert said in line
    assert ended.value.code in (1, 2)


@tabled("prefix", "width", "lines")
def test_a_long_text_hangs_below_its_beginning(prefix: str, width: int | None, lines: list[str]) -> None:
    text = "7 GPUs answer, 8 are on\nthe PCI bus of this machine"
    assert hanging(prefix, text, width).splitlines() == lines


def test_a_long_word_stays_whole() -> None:
    path = "/" + "x" * 50
    assert hanging("OK  CDI directory  ", f"{path} is there", 60).splitlines() == [
        "OK  CDI directory",
        f"    {path} is",
        "    there",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_flags_and_words(shell: str) -> None:
    done = forked_commands.run(["completion", shell], env=os.environ)
    assert done.returncode == 0, done.stderr
    words = set(re.split(r"[^a-z-]+", done.stdout))
    assert {
        "validate", "reboot", "recovery-action", "--kubelet-plugins-directory-path", "utilisation",
    } <= words  # fmt: skip
    assert "service-account-name" not in done.stdout


def test_bash_completes_what_is_typed() -> None:
    script = forked_commands.run(["completion", "bash"], env=os.environ).stdout
    typed = "COMP_WORDS=(gpu-dra-driver simulate mig en) COMP_CWORD=3 COMP_TYPE=9\n"
    ask = f"{script}\n{typed}$(complete -p gpu-dra-driver | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split() == [
        "enable"
    ]
