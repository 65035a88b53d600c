"""Flags as data, and how the two daemons read theirs.

`run` and `mps-host` stay for the life of a node, so they read their flags with the standard library: typer would stay
in their memory with pydantic, which it needs (12 MiB, and a quarter of the time of a start). The commands for people
make typer's options of the same flags, in `options`.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dra_driver.errors import InvalidConfigError

_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("0", "false", "f", "no", "n", "off")
_EXPECTED: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Flag:
    """One flag. `name` is that of the setting; the spelling and the environment variable follow from it if none are
    given. `least` and `most` bound a number. `default` is the value if nothing is given."""

    name: str
    help: str = ""
    kind: type[str] | type[int] | type[float] | type[bool] | type[Path] = str
    spelled: tuple[str, ...] = ()
    env: tuple[str, ...] | None = None
    metavar: str | None = None
    hidden: bool = False
    least: float | None = None
    most: float | None = None
    default: Any = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """As on the command line."""
        return self.spelled or (f"--{self.name.replace('_', '-')}",)

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that are asked in turn. An empty one counts as not set."""
        return (self.name.upper(),) if self.env is None else self.env

    def value(self, text: str, source: str) -> Any:
        """The value that a text stands for. Raises: InvalidConfigError that names the `source`."""
        try:
            found = self._parsed(text)
        except ValueError:
            raise InvalidConfigError(f"{source}: {text!r} is not {_EXPECTED[self.kind]}") from None
        if self.least is not None and not found >= self.least:
            raise InvalidConfigError(f"{source}: {text} is below {self.least:g}")
        if self.most is not None and not found <= self.most:
            raise InvalidConfigError(f"{source}: {text} is above {self.most:g}")
        return found

    def _parsed(self, text: str) -> Any:
        if self.kind is not bool:
            return self.kind(text)
        if text.strip().lower() not in _TRUE + _FALSE:
            raise ValueError
        return text.strip().lower() in _TRUE


DRIVER_NAME = Flag("driver_name", "DRA driver name. [default: gpu.nvidia.com]")
NODE_NAME = Flag("node_name", "Name of this node; also the pool's name.")
NVIDIA_DRIVER_ROOT = Flag(
    "nvidia_driver_root",
    "Driver root on the host. [default: /]",
    spelled=("--nvidia-driver-root", "--host_driver-root"),
    env=("NVIDIA_DRIVER_ROOT", "HOST_DRIVER_ROOT"),
)
CONTAINER_DRIVER_ROOT = Flag(
    "container_driver_root",
    "Driver root as this process sees it, if that directory exists. [default: /driver-root]",
    env=("DRIVER_ROOT_CTR_PATH",),
)
CONFIG = Flag("config", "YAML file with settings; flags and environment win.", Path, env=("CONFIG_FILE",))
SIMULATE = Flag(
    "simulate",
    "Run on a simulated machine: a name from `gpu-dra-driver simulate list`, or a YAML file.",
    metavar="MACHINE",
)
SIMULATOR_DIR = Flag("simulator_dir", "Where the simulated machine keeps its state.", Path)
DYNAMIC_MIG = Flag(
    "dynamic_mig", "Make MIG devices on demand, on every GPU that is capable of it. [default: off]", bool
)
IMEX_CHANNEL = Flag(
    "imex_channel",
    "The IMEX channel for claims on GPUs in a multi-node NVLink fabric: a number, all or off. [default: off]",
)
HOST_DEVICES = Flag(
    "host_devices",
    "Nodes of the host that every claim gets beside its GPUs: of gds, mofed, gdrcopy and nvswitch, with commas "
    "between them. [default: none]",
)
CDI_ROOT = Flag("cdi_root", "Directory for CDI specs. [default: /etc/cdi]")
KUBELET_REGISTRAR_DIRECTORY = Flag(
    "kubelet_registrar_directory_path",
    "The kubelet's plugin registry. [default: /var/lib/kubelet/plugins_registry]",
)
KUBELET_PLUGINS_DIRECTORY = Flag(
    "kubelet_plugins_directory_path",
    "The kubelet's plugin data directory. [default: /var/lib/kubelet/plugins]",
)
KUBECONFIG = Flag("kubeconfig", "[default: in-cluster]")
HOST_ROOT = Flag(
    "host_root",
    "The host's / as this process sees it, if it is mounted; nvidia-cdi-hook is looked for there.",
)
CDI_HOOK_PATH = Flag(
    "nvidia_cdi_hook_path",
    "nvidia-cdi-hook on the host. [default: looked for on the host, in our own directory, in the driver root]",
)


def parse(
    command: Callable[..., None],
    flags: Sequence[Flag],
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """The value of each flag by its name, for a daemon's `command`, whose docstring explains it in --help.

    A flag wins over its environment variable. Raises: InvalidConfigError, and SystemExit for --help.
    """
    parser = _Parser(
        prog=f"gpu-dra-driver {command.__name__.replace('_', '-')}",
        usage="%(prog)s [FLAGS]",
        description=inspect.getdoc(command),
        formatter_class=_HelpText,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for flag in flags:
        _add(parser, flag)
    found, unknown = parser.parse_known_args(_joined(flags, arguments))
    if unknown:
        parser.error(_unknown(unknown[0], [spelled for flag in flags for spelled in flag.spellings]))
    given = vars(found)
    return {flag.name: _resolved(flag, given, environ) for flag in flags}


def _unknown(argument: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(argument.partition("=")[0], known, 1)
    return f"there is no flag {argument}" + (f" (did you mean {near[0]}?)" if near else "")


class _HelpText(argparse.HelpFormatter):
    """Begins as the help of the other commands does, and keeps paragraphs."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = super()._fill_text
        return "\n\n".join(filled(part, width, indent) for part in text.split("\n\n"))

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidConfigError(f"{message}; `{self.prog} --help` lists all flags")


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    names = " ".join(flag.variables)
    text = f"{flag.help} [env: {names}]".strip().replace("%", "%%") if names else flag.help
    shown = argparse.SUPPRESS if flag.hidden else text
    if flag.kind is bool:
        parser.add_argument(
            *flag.spellings, dest=flag.name, help=shown, action=argparse.BooleanOptionalAction
        )
    else:
        kind = "TEXT" if flag.kind in (str, Path) else "NUMBER"
        parser.add_argument(*flag.spellings, dest=flag.name, help=shown, metavar=flag.metavar or kind)


def _resolved(flag: Flag, given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    if flag.name in given:
        value = given[flag.name]
        return value if flag.kind is bool else flag.value(value, flag.spellings[0])
    for name in flag.variables:
        text = environ.get(name, "")
        if text.strip() if flag.kind is bool else text:
            return flag.value(text, f"the environment variable {name}")
    return flag.default


def _joined(flags: Sequence[Flag], arguments: Sequence[str]) -> list[str]:
    """A flag takes the next word as its value, whatever that begins with; argparse would take `-x` for a flag."""
    wanting = {spelled for flag in flags if flag.kind is not bool for spelled in flag.spellings}
    joined: list[str] = []
    waiting = list(arguments[:-1] if arguments and arguments[-1] == "--" else arguments)
    while waiting:
        word = waiting.pop(0)
        joined.append(f"{word}={waiting.pop(0)}" if word in wanting and waiting else word)
    return joined
