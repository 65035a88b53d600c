"""A command's module is imported when it is called."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

from dra_driver import __version__
from dra_driver.app.settings import Flag
from dra_driver.cli.flags import Command, Parser, read, suggestion
from dra_driver.errors import DraDriverError, InvalidConfigError
from dra_driver.model.schema import Choice

DAEMONS = ("run", "mps-host")
_PROGRAM = "gpu-dra-driver"
_EXIT_USAGE = 2


def _completion(given: argparse.Namespace) -> None:
    """bash: `source <(gpu-dra-driver completion bash)`. zsh: write the output to a file `_gpu-dra-driver` in a
    directory of `$fpath`. fish: `gpu-dra-driver completion fish | source`.
    """
    import shtab

    parser = _parser(ROOT, _PROGRAM, is_whole=True)
    _complete_values(parser, shtab.FILE)
    print(shtab.complete(parser, given.shell))


def _complete_values(parser: argparse.ArgumentParser, files: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _complete_values(child, files)
        elif action.metavar == "FILE":
            action.complete = files  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and "|" in action.metavar:
            action.choices = action.metavar.split("|")


_LOOK, _ACT, _DAEMONS = "Look", "Act", "Daemons, which the Helm chart starts"
_SUMMARIES = {
    "top": (_LOOK, "Show this node live: GPUs, claims, health."),
    "cluster": (_LOOK, "Show the GPUs of the whole cluster and who uses them."),
    "claims": (_LOOK, "Print the claims that are prepared on this node."),
    "cleanup": (_LOOK, "Print the pending cleanup of claims, or retry it."),
    "inspect": (_LOOK, "Print the slices that `run` would publish here."),
    "doctor": (_LOOK, "Check this node and its GPUs, and suggest remedies."),
    "validate": (_LOOK, "Check manifests and configuration files."),
    "device-classes": (_ACT, "Print a DeviceClass for each MIG profile."),
    "detach": (_ACT, "Close NVML on this node for a limited time."),
    "serviced": (_ACT, "Confirm that a GPU was reset or replaced."),
    "run": (_DAEMONS, "Publish this node's GPUs and prepare them for pods."),
    "mps-host": (_DAEMONS, "Start and watch the MPS daemons of this node."),
}
ROOT: Final = Command(
    "Kubernetes DRA driver for NVIDIA GPUs: publishes a node's GPUs and prepares them for pods.",
    commands={
        **{
            name: Command(text, module=name.replace("-", "_"), title=title)
            for name, (title, text) in _SUMMARIES.items()
        },
        "simulate": Command(
            "Create simulated machines, and break and repair them.",
            "For tests, and for clusters without GPUs.",
            module="simulate",
            title=_ACT,
        ),
        "completion": Command(
            "Print a shell completion script.",
            _completion.__doc__ or "",
            (Flag("shell", "The shell.", Choice(("bash", "zsh", "fish")), metavar="SHELL", count="1"),),
            _completion,
            examples=("bash", "zsh", "fish"),
            title=_ACT,
        ),
    },
)


def _parser(command: Command, prog: str, *, is_whole: bool = False) -> Parser:
    parser = command.parser(prog, is_whole=is_whole)
    if command is ROOT:
        version = f"{_PROGRAM} {__version__}"
        parser.flags.add_argument(
            "--version", action="version", version=version, help="Print the version and exit."
        )
    return parser


def call(arguments: Sequence[str], called: str | None = None) -> int:
    """Run one command; returns its exit code. `called` replaces the command's name in its help.

    Raises: InvalidConfigError for wrong usage; the errors of the command.
    """
    if arguments and arguments[0] in DAEMONS:
        # structlog imports rich (7 MiB, 45 ms) for coloured tracebacks, which a daemon never prints.
        sys.modules["rich"] = None  # type: ignore[assignment]
        return _carried_out(arguments, called)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _ended)
    try:
        try:
            return _carried_out(arguments, called)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise DraDriverError(f"{error.filename} cannot be used: {error.strerror}") from error
        # Otherwise flushing the buffer would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return 1
        raise DraDriverError(f"standard output cannot be used: {error.strerror or error}") from error


def _ended(number: int, _frame: object) -> None:
    """Exit through an exception, like Ctrl-C, so that everything is cleaned up."""
    raise SystemExit(128 + number)


def _carried_out(arguments: Sequence[str], called: str | None) -> int:
    command, prog, words = ROOT, _PROGRAM, [*arguments]
    while command.commands:
        parser = _parser(command, prog)
        if not words:
            parser.print_help(sys.stderr)
            return _EXIT_USAGE
        word = words.pop(0)
        if word.startswith("-"):
            parser.parse_args([word])
        if word not in command.commands:
            parser.error(f"there is no command {word}{suggestion(word, command.commands)}")
        command, prog = command.commands[word].loaded(), f"{prog} {word}"
    given = read(_parser(command, called or prog), command.flags, words)
    faults = tuple(given.faults.values())
    if faults and not hasattr(given, "config"):  # for commands with --config, `resolve` reports all faults
        raise InvalidConfigError("; ".join(faults), faults=faults)
    return command.act(given) or 0
