"""How flags and environment variables are read."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.cli.flags import Command, read, switch
from dra_driver.errors import InvalidConfigError
from dra_driver.model.shapes import Choice, Scalar
from dra_driver.settings import FLAGS, Flag

WHOLE = Scalar(int)
ALL = (
    Flag("node_name"),
    Flag("driver_root", "Where it is.", spelled=("--old_root", "--driver-root"), env=("ROOT", "OLD_ROOT")),
    Flag("burst", shape=Scalar(int, least=1)),
    Flag("qps", "100 % of calls", Scalar(float, least=0, most=10), default=5.0),
    Flag("port", shape=WHOLE),
    Flag("mig", "MIG or not.", Scalar(bool)),
    Flag("machine", is_repeated=True),
    Flag("form", "How.", Choice(("json", "yaml")), ("-o", "--form"), env=(), default="json"),
    switch("watch", "Again and again.", "-w", "--watch"),
    Flag("verbosity", shape=WHOLE, spelled=("-v",), env=(), hidden=True),
)
UNGIVEN = dict.fromkeys(flag.name for flag in ALL) | {
    "qps": 5.0, "form": "json", "watch": False, "faults": {},
}  # fmt: skip


def parsed(arguments: list[str], environ: dict[str, str], flags: tuple[Flag, ...] = ALL) -> Namespace:
    return read(Command("What it does: 100 % of it.", "", flags).parser("command"), flags, arguments, environ)


@pytest.mark.parametrize(
    ("arguments", "environ", "found"),
    [
        ([], {}, {}),
        (["--node-name", "n"], {}, {"node_name": "n"}),
        (["--node-name=n"], {"NODE_NAME": "other"}, {"node_name": "n"}),
        (["--node-name=a", "--node-name=b"], {}, {"node_name": "b"}),
        (["--node-name="], {"NODE_NAME": "other"}, {"node_name": ""}),
        ([], {"NODE_NAME": "n"}, {"node_name": "n"}),
        ([], {"NODE_NAME": ""}, {}),
        (["--old_root", "/x"], {}, {"driver_root": "/x"}),
        ([], {"ROOT": "", "OLD_ROOT": "/x"}, {"driver_root": "/x"}),
        ([], {"ROOT": "/y", "OLD_ROOT": "/x"}, {"driver_root": "/y"}),
        (["--port", "-1"], {}, {"port": -1}),
        (["--node-name=-x"], {}, {"node_name": "-x"}),
        (["--port", "4", "--"], {}, {"port": 4}),
        ([], {"MIG": " "}, {}),
        (["--qps", "0.5", "--burst", "3"], {}, {"qps": 0.5, "burst": 3}),
        ([], {"QPS": "7"}, {"qps": 7.0}),
        (["--mig"], {"MIG": "false"}, {"mig": True}),
        (["--no-mig"], {"MIG": "true"}, {"mig": False}),
        ([], {"MIG": "On"}, {"mig": True}),
        ([], {"MIG": "0"}, {"mig": False}),
        (["-v", "5"], {}, {"verbosity": 5}),
        (["-v=5"], {"VERBOSITY": "1"}, {"verbosity": 5}),
        ([], {"VERBOSITY": "1"}, {}),
        (["--machine", "a", "--machine=b"], {"MACHINE": "c d"}, {"machine": ["a", "b"]}),
        ([], {"MACHINE": "c d"}, {"machine": ["c", "d"]}),
        (["-oyaml"], {"FORM": "x"}, {"form": "yaml"}),
        (["-wo", "yaml"], {}, {"watch": True, "form": "yaml"}),
        (["-wv5"], {}, {"watch": True, "verbosity": 5}),
    ],
)
def test_flags_win_over_variables_and_these_over_defaults(
    arguments: list[str], environ: dict[str, str], found: dict[str, Any]
) -> None:
    assert vars(parsed(arguments, environ)) == UNGIVEN | found


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--burst", "x"], {}, "--burst 'x': expected a whole number"),
        (["--burst", "1.5"], {}, "--burst '1.5': expected a whole number"),
        (["--burst", "0"], {}, "--burst '0': expected 1 or more"),
        (["--qps", "nan"], {}, "--qps 'nan': expected a number"),
        (["-o", "x"], {}, "--form 'x': expected json or yaml"),
        ([], {"QPS": "11"}, "the environment variable QPS '11': expected 10 or less"),
        ([], {"QPS": "fast"}, "the environment variable QPS 'fast': expected a number"),
        ([], {"MIG": "maybe"}, "the environment variable MIG 'maybe': expected true or false"),
        (["--nodename", "n"], {}, "there is no flag --nodename (did you mean --node-name?)"),
        (["--node=n"], {}, "there is no flag --node (did you mean --node-name?)"),
        (["--zzz=4"], {}, "there is no flag --zzz; `command --help` says more"),
        (["--no-watch"], {}, "there is no flag --no-watch (did you mean --watch?)"),
        (["stray"], {}, "there is no argument stray"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments: list[str], environ: dict[str, str], said: str) -> None:
    assert [*parsed(arguments, environ).faults.values()] == [said]


def test_every_fault_is_told_and_what_is_right_is_kept() -> None:
    given = parsed(["--burst", "x", "--port", "y", "--node-name", "n", "--zzz"], {"QPS": "-1"})
    assert given.node_name == "n"
    assert sorted(given.faults) == ["--zzz", "burst", "port", "qps"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["1", "2"], {"gpu": "1", "number": 2, "rest": []}),
        (["1", "--force", "2", "a", "b"], {"gpu": "1", "number": 2, "rest": ["a", "b"], "force": True}),
        (["1", "-2"], {"gpu": "1", "number": -2, "rest": []}),
        (["-", "2", "-"], {"gpu": "-", "number": 2, "rest": ["-"]}),
    ],
)
def test_arguments_and_flags_may_come_in_any_order(arguments: list[str], found: dict[str, Any]) -> None:
    flags = (
        Flag("gpu", count="1"),
        Flag("number", shape=WHOLE, count="1"),
        Flag("rest", count="*"),
        switch("force", "Anyhow."),
    )
    assert vars(parsed(arguments, {"GPU": "env"}, flags)) == {"force": False, "faults": {}} | found
    with pytest.raises(InvalidConfigError, match="NUMBER; `command --help` says more"):
        parsed(["1"], {}, flags)


def test_help_shows_what_is_not_hidden(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parsed(["-h"], {})
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: command [FLAGS]\n\nWhat it does: 100 % of it.\n")
    for part in (
        "--old_root, --driver-root TEXT",
        "[env: ROOT OLD_ROOT]",
        "--mig, --no-mig",
        "100 % of calls [from 0 to 10] [default: 5] [env: QPS]",
        "-o, --form json|yaml",
        "How. [default: json]\n",
        "-w, --watch ",
    ):
        assert part in text, part
    assert "-v" not in text


def test_manual_has_flag_variable_and_key_of_every_setting() -> None:
    manual = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    rows = [line.split(" | ") for line in manual.splitlines() if line.startswith("| `--")]
    told = [[set(re.findall(r"`([\w.-]+)", cell)) for cell in row[:3]] for row in rows]
    flags, variables, keys = (set().union(*column) for column in zip(*told, strict=True))
    settings = {name: flag for name, flag in FLAGS.items() if name != "config"}
    old = {"--host_driver-root", "HOST_DRIVER_ROOT"}  # for manifests of NVIDIA's own driver
    assert (
        flags - {"--no-dynamic-mig", "--no-usage-metrics"}
        == {word for flag in settings.values() for word in flag.spellings} - old
    )
    assert variables == {name for flag in settings.values() for name in flag.variables} - old
    assert keys == {flag.key for flag in settings.values()}
