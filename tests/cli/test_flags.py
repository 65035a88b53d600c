"""How the daemons read their flags and environment variables."""

from typing import Any

import pytest

from dra_driver.cli import mps_host, run
from dra_driver.cli.flags import Flag, parse
from dra_driver.errors import InvalidConfigError


def command(_arguments: list[str]) -> None:
    """What it does: 100 % of it."""


ALL = (
    Flag("node_name"),
    Flag("driver_root", "Where it is.", spelled=("--driver-root", "--old_root"), env=("ROOT", "OLD_ROOT")),
    Flag("burst", kind=int, least=1),
    Flag("qps", "100 % of calls", float, least=0, most=10, default=5.0),
    Flag("port", kind=int),
    Flag("mig", "MIG or not.", bool),
    Flag("verbosity", kind=int, spelled=("-v",), env=(), hidden=True),
)
NOTHING = dict.fromkeys(("node_name", "driver_root", "burst", "port", "mig", "verbosity")) | {"qps": 5.0}


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
        (["--node-name", "-x"], {}, {"node_name": "-x"}),
        (["--node-name", "--port", "--port", "4"], {}, {"node_name": "--port", "port": 4}),
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
    ],
)
def test_flags_win_over_variables_and_these_over_defaults(
    arguments: list[str], environ: dict[str, str], found: dict[str, Any]
) -> None:
    assert parse(command, ALL, arguments, environ) == NOTHING | found


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--burst", "x"], {}, "--burst: 'x' is not a whole number"),
        (["--burst", "1.5"], {}, "--burst: '1.5' is not a whole number"),
        (["--burst", "0"], {}, "--burst: 0 is below 1"),
        (["--qps", "nan"], {}, "--qps: nan is below 0"),
        (["--old_root"], {}, "expected one argument"),
        ([], {"QPS": "11"}, "the environment variable QPS: 11 is above 10"),
        ([], {"QPS": "fast"}, "the environment variable QPS: 'fast' is not a number"),
        ([], {"MIG": "maybe"}, "the environment variable MIG: 'maybe' is not true or false"),
        (["--nodename", "n"], {}, "there is no flag --nodename (did you mean --node-name?)"),
        (["--node", "n"], {}, "there is no flag --node"),
        (["--zzz=4"], {}, "there is no flag --zzz=4; `gpu-dra-driver command --help`"),
        (["stray"], {}, "stray"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        parse(command, ALL, arguments, environ)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_shows_what_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(command, ALL, ["-h"], {})
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: gpu-dra-driver command [FLAGS]\n\nWhat it does: 100 % of it.\n")
    for part in ("--old_root TEXT", "[env: ROOT OLD_ROOT]", "--mig, --no-mig", "100 % of calls [env: QPS]"):
        assert part in text, part
    assert "-v" not in text


@pytest.mark.parametrize("module", [run, mps_host])
def test_help_of_the_daemons_fits_80_columns(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(getattr(module, module.__name__.rpartition(".")[2]), module.FLAGS, ["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
