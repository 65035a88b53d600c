"""The commands for people, as one typer application. A command's module is imported when it is called or listed."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence

import typer

from dra_driver import __version__
from dra_driver.cli.main import run_daemon
from dra_driver.errors import DraDriverError, InvalidConfigError

app = typer.Typer(
    name="gpu-dra-driver",
    help="Kubernetes DRA driver for NVIDIA GPUs: publishes a node's GPUs and prepares them for pods.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
_FOR_PEOPLE = (
    "inspect",
    "cluster",
    "device-classes",
    "doctor",
    "claims",
    "debts",
    "detach",
    "top",
    "validate",
)
_OWN_WORDS = (
    (r"Input should be (greater|less) than or equal to", r"expected a number \1 than or equal to"),
    ("Input should be a valid number, .*? as a number", "expected a number"),
    ("Input should be a valid integer, .*? as an integer", "expected a whole number"),
)
"""For what typer says in pydantic's."""
_DAEMON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("run", context_settings=_DAEMON)
def run(context: typer.Context) -> None:
    """Publish this node's GPUs and prepare them for pods.

    Until SIGTERM.
    """
    run_daemon("run", context.args)


@app.command("mps-host", context_settings=_DAEMON)
def mps_host(context: typer.Context) -> None:
    """Start and watch the MPS daemons of this node.

    One nvidia-cuda-mps-control for each shared GPU or MIG device, until SIGTERM.
    """
    run_daemon("mps-host", context.args)


@app.command("demo", hidden=True)
def demo() -> None:
    """Moved to `make demo`."""
    raise InvalidConfigError(
        "the demo is not part of the installed package any more; run `make demo` in a clone of the repository"
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpu-dra-driver {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Kubernetes DRA driver for NVIDIA GPUs: publishes a node's GPUs and prepares them for pods."""


def call(arguments: Sequence[str]) -> int:
    """Carry one command out; its exit code. Raises InvalidConfigError for what was mistyped."""
    from typer._click.exceptions import ClickException, NoArgsIsHelpError

    try:
        return commands_for(arguments)(list(arguments), prog_name=app.info.name, standalone_mode=False) or 0
    except NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except ClickException as error:
        context = getattr(error, "ctx", None)
        command = app.info.name if context is None else context.command_path
        said = error.format_message().removeprefix("Error: ").rstrip(".").replace("Value error, ", "")
        for theirs, own in _OWN_WORDS:
            said = re.sub(theirs, own, said)
        raise InvalidConfigError(f"{said} (see {command} -h)") from error
    except OSError as error:
        if error.filename is not None:
            raise DraDriverError(f"{error.filename} cannot be used: {error.strerror}") from error
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise DraDriverError(f"standard output cannot be used: {error.strerror or error}") from error


def commands_for(arguments: Sequence[str]) -> typer.Typer:
    """The application with all that these arguments can reach."""
    known = ("run", "mps-host", "demo", "simulate", *_FOR_PEOPLE)
    # A name that is not known is answered with those that are.
    wanted = arguments[0] if arguments and arguments[0] in known else None
    there = {command.name for command in app.registered_commands}
    for name in _FOR_PEOPLE:
        if wanted in (None, name) and name not in there:
            function = name.replace("-", "_")
            module = importlib.import_module(f"dra_driver.cli.{function}")
            app.command(name)(getattr(module, function))
    if wanted in (None, "simulate") and not app.registered_groups:
        from dra_driver.cli import simulate

        app.add_typer(simulate.app, name="simulate")
    return app
