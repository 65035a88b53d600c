"""The command line: `python hack/playground demo` and `run`, for `make demo` and `make playground`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dra_driver.cli.main import EXIT_FAILED, EXIT_USAGE
from dra_driver.errors import DraDriverError, InvalidConfigError
from playground.demo import demo
from playground.run import run


def main(arguments: list[str]) -> None:
    """Run `demo` or `run`. Raises: DraDriverError."""
    parser = argparse.ArgumentParser(
        "playground",
        description="A simulated GPU node: the real daemon with a simulated API server, scheduler and kubelet.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for act in (demo, run):
        command = commands.add_parser(act.__name__, description=act.__doc__, help=act.__doc__)
        command.set_defaults(act=act)
        command.add_argument(
            "--simulate",
            metavar="MACHINE",
            default="dgx-h100",
            help="A name from `gpu-dra-driver simulate list`.",
        )
    commands.choices["run"].add_argument(
        "--config", metavar="FILE", type=Path, help="Settings of the driver, as for `run`."
    )
    commands.choices["run"].add_argument(
        "--log-level",
        default="error",
        help="The minimum level of the log lines to show: debug, info, warning or error.",
    )
    given = vars(parser.parse_args(arguments))
    given.pop("act")(given.pop("simulate"), **given)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DraDriverError as error:
        print(f"playground: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE if isinstance(error, InvalidConfigError) else EXIT_FAILED)
