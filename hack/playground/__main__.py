"""`python hack/playground demo` and `run`: see `make demo` and `make playground`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from dra_driver.cli.main import EXIT_FAILED, EXIT_USAGE
from dra_driver.errors import DraDriverError, InvalidConfigError
from playground.demo import demo
from playground.run import run

app = typer.Typer(
    help="A GPU node of stand-ins: API server, scheduler and kubelet around the real daemon.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(run)


if __name__ == "__main__":
    try:
        app()
    except DraDriverError as error:
        typer.echo(f"playground: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, InvalidConfigError) else EXIT_FAILED)
