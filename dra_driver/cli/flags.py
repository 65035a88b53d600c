"""Commands as data: argparse parsers, and flag values from the command line and the environment."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dra_driver.app.settings import FLAGS, Flag
from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass, field, replace
from dra_driver.model.schema import Choice, Scalar

_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("0", "false", "f", "no", "n", "off")
_WIDEST = 110
_HELP_COLUMN = 34
_EXAMPLES = "Examples:"

SIMULATE_SEVERAL = replace(
    FLAGS["simulate"],
    help="Use a simulated machine instead of this one; repeat the flag for several machines.",
    is_repeated=True,
)
CONTEXT = Flag("context", "Context in the kubeconfig.", env=())
CLUSTER_KUBECONFIG = Flag(
    "kubeconfig", env=(), shown="KUBECONFIG, then ~/.kube/config, then the pod's service account"
)


def of_run(*names: str) -> tuple[Flag, ...]:
    return tuple(FLAGS[name] for name in names)


OF_NODE = of_run(
    "driver_name", "kubelet_plugins_directory_path", "cdi_root", "config", "nvidia_driver_root",
    "container_driver_root", "simulate", "simulator_dir", "device_names", "http_endpoint",
)  # fmt: skip


def switch(name: str, help_text: str, *spelled: str) -> Flag:
    return Flag(name, help_text, Scalar(bool), spelled, env=(), default=False)


def usual_kubeconfig() -> str | None:
    if named := os.environ.get("KUBECONFIG", "").strip(os.pathsep):
        return named
    usual = Path("~/.kube/config").expanduser()
    return str(usual) if usual.exists() else None


class Parser(argparse.ArgumentParser):
    def __init__(
        self, prog: str, about: str, usage: str, *, help_column: int = _HELP_COLUMN, **more: Any
    ) -> None:
        super().__init__(
            prog,
            f"%(prog)s {usage}",
            about,
            formatter_class=partial(_HelpText, help_column=help_column),
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            **more,
        )
        self.arguments = self.add_argument_group("Arguments")
        self.flags = self.add_argument_group("Flags")
        self.flags.add_argument("-h", "--help", action="help", help="Show this message and exit.")

    def error(self, message: str) -> NoReturn:
        """Raise InvalidConfigError."""
        raise InvalidConfigError(f"{message}; see `{self.prog} --help`")


class _HelpText(argparse.HelpFormatter):
    def __init__(self, prog: str, *, help_column: int) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        super().__init__(prog, max_help_position=help_column, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLES):
            return text
        filled = super()._fill_text
        return "\n\n".join(filled(part, width, indent) for part in text.split("\n\n"))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar}"

    def add_usage(self, *args: Any, **more: Any) -> None:
        super().add_usage(*args, **{"prefix": "Usage: ", **more})


@dataclass(frozen=True)
class Command:
    """A command, or a group of `commands` by name. Its help shows `about` after the summary.

    A `module` of `cli` provides everything except the summary: FLAGS, EXAMPLES, COMMANDS, and a function of the
    module's name whose docstring is `about`.
    """

    summary: str
    about: str = ""
    flags: Sequence[Flag] = ()
    act: Callable[[argparse.Namespace], int | None] = lambda given: None
    commands: Mapping[str, Command] = field(default_factory=dict)
    module: str = ""
    examples: Sequence[str] = ()
    title: str = "Commands"

    def loaded(self) -> Command:
        if not self.module:
            return self
        module = importlib.import_module(f"dra_driver.cli.{self.module}")
        act = getattr(module, self.module, self.act)
        flags, commands = getattr(module, "FLAGS", ()), getattr(module, "COMMANDS", {})
        examples = getattr(module, "EXAMPLES", ())
        return Command(self.summary, self.about or act.__doc__ or "", flags, act, commands, examples=examples)

    def parser(self, prog: str, *, is_whole: bool = False) -> Parser:
        column = max((len(name) + 4 for name in self.commands), default=_HELP_COLUMN)
        parser = Parser(prog, *self._texts(), help_column=column)
        if self.examples:
            parser.epilog = "\n".join([_EXAMPLES, *(f"  {prog} {words}".rstrip() for words in self.examples)])
        self._declare(parser, is_whole)
        return parser

    def _texts(self) -> tuple[str, str]:
        forms = {"1": "{}", "?": "[{}]", "*": "[{}...]", "+": "{}..."}
        arguments = [forms[flag.count].format(_called(flag)) for flag in self.flags if flag.count]
        usage = ["[FLAGS]", *arguments, *(["COMMAND ..."] if self.commands else [])]
        return f"{self.summary}\n\n{self.about}".strip(), " ".join(usage)

    def _declare(self, parser: Parser, is_whole: bool) -> None:
        for flag in self.flags:
            _add(parser, flag)
        if is_whole and self.commands:
            within = parser.add_subparsers(prog=parser.prog)
            for name, command in self.commands.items():
                below = command.loaded()
                about, usage = below._texts()
                below._declare(
                    within.add_parser(name, help=command.summary, about=about, usage=usage), is_whole
                )
            return
        groups = {
            title: parser.add_argument_group(title)
            for title in dict.fromkeys(one.title for one in self.commands.values())
        }
        for name, command in self.commands.items():
            groups[command.title].add_argument(name, nargs="?", metavar=name, help=command.summary)


def _add(parser: Parser, flag: Flag) -> None:
    text = argparse.SUPPRESS if flag.hidden else _help(flag).replace("%", "%%")
    form: dict[str, Any] = {"metavar": _called(flag) if flag.count else _kind(flag)}
    if flag.count:
        form |= {"nargs": flag.count, "default": None} if flag.count != "1" else {}
    elif flag.is_repeated:
        form["action"] = "append"
    elif _is_switch(flag):
        form = {"action": argparse.BooleanOptionalAction if flag.default is None else "store_true"}
    if flag.count:
        parser.arguments.add_argument(flag.name, help=text, **form)
    else:
        # Spellings of NVIDIA's own DRA driver, which contain underscores, come last.
        spelled = sorted(flag.spellings, key=lambda name: "_" in name)
        parser.flags.add_argument(*spelled, dest=flag.name, help=text, **form)


def _help(flag: Flag) -> str:
    parts = [flag.help or ""]
    if isinstance(flag.kind, Scalar) and flag.kind.type in (int, float):
        bounds = [(flag.kind.least, "from"), (flag.kind.most, "to")]
        parts.append(" ".join(f"{word} {bound}" for bound, word in bounds if bound is not None))
    shown = flag.shown
    if shown is None and flag.default not in (None, False):
        shown = f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)
    parts.append("" if shown is None else f"default: {shown}")
    parts.append(f"env: {' '.join(flag.variables)}" if flag.variables and not flag.count else "")
    return " ".join([parts[0], *(f"[{part}]" for part in parts[1:] if part)]).strip()


def _called(flag: Flag) -> str:
    return flag.metavar or flag.name.upper()


def _kind(flag: Flag) -> str:
    if flag.metavar is not None:
        return flag.metavar
    if isinstance(flag.kind, Choice):
        return "|".join(flag.kind.words)
    return "NUMBER" if isinstance(flag.kind, Scalar) and flag.kind.type in (int, float) else "TEXT"


def _is_switch(flag: Flag) -> bool:
    return isinstance(flag.kind, Scalar) and flag.kind.type is bool


def read(
    parser: Parser, flags: Sequence[Flag], arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Return the value of each flag by name. `faults` are the errors in flags and variables, by flag.

    A flag overrides its environment variable. Raises: InvalidConfigError for what argparse rejects.
    """
    found, unknown = parser.parse_known_intermixed_args(arguments)
    faults: dict[str, str] = {}
    for word in unknown:
        name = word.partition("=")[0]
        if name.strip("-") and name.startswith("-"):
            meant = suggestion(name, parser._option_string_actions) or f"; see `{parser.prog} --help`"
            faults[word] = f"there is no flag {name}{meant}"
        elif name != "--" and not faults:  # otherwise it may be the value of an unknown flag
            faults[word] = f"unexpected argument {word}"
    given = argparse.Namespace(faults=faults)
    for flag in flags:
        setattr(given, flag.name, _value(flag, vars(found), environ, faults))
    return given


def _value(flag: Flag, found: Mapping[str, Any], environ: Mapping[str, str], faults: dict[str, str]) -> Any:
    source = _called(flag) if flag.count else flag.spellings[-1]
    raw = found.get(flag.name)
    if raw is None:
        for name in flag.variables if flag.count is None else ():
            text = environ.get(name, "")
            if text.strip() if _is_switch(flag) else text:
                source, raw = f"the environment variable {name}", text.split() if flag.is_repeated else text
                break
    if isinstance(raw, list) or flag.count in ("*", "+"):
        return raw or []
    value = flag.default
    if raw is not None:
        typed = _typed(flag, raw)
        fault = flag.fault(typed)
        if fault is None:
            value = typed
        else:
            faults[flag.name] = f"{source} {raw!r}: {fault}"
    return value if flag.to is None or value is None else flag.to(value)


def _typed(flag: Flag, text: Any) -> Any:
    """Leave invalid texts unchanged; they are validated later."""
    kind = flag.kind.type if isinstance(flag.kind, Scalar) else str
    if kind is bool and isinstance(text, str):
        word = text.strip().lower()
        return word in _TRUE if word in _TRUE + _FALSE else text
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def suggestion(word: str, known: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(word, [*known], 1)
    return f" (did you mean {found[0]}?)" if found else ""
