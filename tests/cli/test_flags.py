"""How flags and environment variables are read."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dra_driver.app.settings import FLAGS, Flag
from dra_driver.cli.flags import Command, read, switch
from dra_driver.cli.run import warn_ignored
from dra_driver.errors import InvalidConfigError
from dra_driver.model.schema import Choice, Scalar
from tests.fakes.tables import tabled

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


@tabled("arguments", "environ", "found")
def test_flags_win_over_variables_and_these_over_defaults(
    arguments: list[str], environ: dict[str, str], found: dict[str, Any]
) -> None:
    assert vars(parsed(arguments, environ)) == UNGIVEN | found


@tabled("arguments", "environ", "said")
def test_a_wrong_flag_is_one_sentence(arguments: list[str], environ: dict[str, str], said: str) -> None:
    assert [*parsed(arguments, environ).faults.values()] == [said]


def test_every_fault_is_reported_and_what_is_right_is_kept() -> None:
    given = parsed(["--burst", "x", "--port", "y", "--node-name", "n", "--zzz"], {"QPS": "-1"})
    assert given.node_name == "n"
    assert sorted(given.faults) == ["--zzz", "burst", "port", "qps"]


@tabled("arguments", "found")
def test_arguments_and_flags_may_come_in_any_order(arguments: list[str], found: dict[str, Any]) -> None:
    flags = (
        Flag("gpu", count="1"),
        Flag("number", shape=WHOLE, count="1"),
        Flag("rest", count="*"),
        switch("force", "Anyhow."),
    )
    assert vars(parsed(arguments, {"GPU": "env"}, flags)) == {"force": False, "faults": {}} | found
    with pytest.raises(InvalidConfigError, match="NUMBER; see `command --help`"):
        parsed(["1"], {}, flags)


def test_help_shows_what_is_not_hidden(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parsed(["-h"], {})
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: command [FLAGS]\n\nWhat it does: 100 % of it.\n")
    for part in (
        "--driver-root, --old_root TEXT",
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
    reported = [[set(re.findall(r"`([\w.-]+)", cell)) for cell in row[:2]] for row in rows]
    flags, keys = (set().union(*column) for column in zip(*reported, strict=True))
    settings = {name: flag for name, flag in FLAGS.items() if name != "config"}
    old = {"--host_driver-root", "HOST_DRIVER_ROOT"}  # for manifests of NVIDIA's own driver
    assert (
        flags
        - {"--no-dynamic-mig", "--no-mps", "--no-passthrough", "--no-usage-metrics", "--no-dev-char-links"}
        == {word for flag in settings.values() for word in flag.spellings} - old
    )
    assert keys == {flag.key for flag in settings.values()}
    irregular = {
        name
        for flag in settings.values()
        for name in flag.variables
        if f"--{name.lower().replace('_', '-')}" not in flag.spellings
    }
    assert irregular - old == {"DRIVER_ROOT_CTR_PATH"}
    assert "Only `--container-driver-root` differs: `DRIVER_ROOT_CTR_PATH`" in manual


@tabled("gates", "ignored")
def test_feature_gates_without_effect_are_named(gates: str | None, ignored: list[str]) -> None:
    with capture_logs() as logged:
        warn_ignored(gates)
    assert [entry["value"] for entry in logged] == ignored
