"""`gpu-dra-driver` and its commands. Errors are one line and an exit code, never a traceback."""

from __future__ import annotations

import importlib
import sys

if sys.argv[1:2] in (["run"], ["mps-host"]):
    # structlog imports rich for coloured tracebacks, which the daemon never draws: 7 MiB and 45 ms.
    sys.modules["rich"] = None  # type: ignore[assignment]

import typer

from dra_driver import __version__
from dra_driver.cli import device_classes, inspect, mps_host, run
from dra_driver.errors import DraDriverError, InvalidConfigError

EXIT_USAGE = 2
EXIT_FAILED = 1

app = typer.Typer(
    name="gpu-dra-driver",
    help="Kubernetes DRA driver for NVIDIA GPUs: publishes a node's GPUs and prepares them for pods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("run")(run.run)
app.command("inspect")(inspect.inspect)
app.command("device-classes")(device_classes.device_classes)
app.command("mps-host")(mps_host.mps_host)


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


def _add_late_commands(first: list[str]) -> None:
    """Commands that the daemon does not need: imported only when they are called or listed."""
    listed = not first or first[0] in ("-h", "--help")
    for name in ("doctor", "claims", "debts", "detach", "top", "validate"):
        if listed or first == [name]:
            module = importlib.import_module(f"dra_driver.cli.{name}")
            app.command(name)(getattr(module, name))


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration."""
    if "simulate" in sys.argv[1:2] or {"-h", "--help"} & set(sys.argv[1:2]) or len(sys.argv) == 1:
        # The sub-commands of the simulator are imported only when they are called or listed.
        from dra_driver.cli import simulate

        app.add_typer(simulate.app, name="simulate")
    _add_late_commands(sys.argv[1:2])
    try:
        app()
    except InvalidConfigError as error:
        typer.echo(f"gpu-dra-driver: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except DraDriverError as error:
        typer.echo(f"gpu-dra-driver: {error}", err=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
