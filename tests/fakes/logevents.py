"""Every log event of the package, read from its source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dra_driver"
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_LOGGERS = {"_log", "log", "logger"}
_ON_BEHALF = ("dra_driver/base/json_store.py", "dra_driver/journal/setting_steps.py")
"""Log the events that their users name in these arguments."""
_ARGUMENTS = {
    "unreadable_event": ("error", ("kept_as", "reason", "remedy")),
    "set_again_event": ("info", ("gpu_uuid", "claim_uid")),
    "lost_event": ("error", ("gpu_uuid", "claim_uid", "reason")),
    "gone_event": ("info", ("gpu_uuid", "reason")),
}


@dataclass(frozen=True, slots=True)
class LogCall:
    """One call of a logger. `events` are the names that it may log, None if they are not literals."""

    place: str
    file: str
    levels: tuple[str, ...]
    events: tuple[str, ...] | None
    fields: tuple[str, ...]


@functools.cache
def log_calls() -> tuple[LogCall, ...]:
    """Return all calls in the package, without generated code."""
    files = sorted(file for file in PACKAGE.rglob("*.py") if "pb" not in file.parent.parts)
    return tuple(call for file in files for call in _calls(file))


def _calls(file: Path) -> Iterator[LogCall]:
    name = file.relative_to(PACKAGE.parent).as_posix()
    nodes = list(ast.walk(ast.parse(file.read_text())))
    aliases = dict(_aliases(nodes))
    for node in nodes:
        if isinstance(node, ast.Call):
            named = {item.arg: item.value for item in node.keywords}
            for argument in _ARGUMENTS.keys() & named.keys():
                level, fields = _ARGUMENTS[argument]
                fields += (_literals(named["name"]) or ()) if "name" in named else ()
                yield LogCall(f"{name}:{node.lineno}", name, (level,), _literals(named[argument]), fields)
            levels = _levels(node.func, aliases)
            events = _literals(_event_argument(node, levels)) if levels else None
            if levels and not (name in _ON_BEHALF and events is None):
                fields = tuple(keyword.arg or "**" for keyword in node.keywords)
                yield LogCall(f"{name}:{node.lineno}", name, levels, events, fields)


def _aliases(nodes: list[ast.AST]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return names for one of several methods: `tell = _log.warning if … else _log.info`."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = _methods(node.value)
            if found:
                yield node.targets[0].id, found


def _methods(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in _LOGGERS and attr in LEVELS:
            return (attr,)
        case ast.IfExp(body=body, orelse=orelse):
            return _methods(body) + _methods(orelse)
    return ()


def _levels(function: ast.expr, aliases: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    match function:
        case ast.Name(id=name):
            return aliases.get(name, ())
        case ast.Attribute(value=ast.Name(id=name), attr="log") if name in _LOGGERS:
            return ("any",)
    return _methods(function)


def _event_argument(call: ast.Call, levels: tuple[str, ...]) -> ast.expr | None:
    place = 1 if levels == ("any",) else 0
    return call.args[place] if len(call.args) == place + 1 else None


def _literals(node: ast.expr | None) -> tuple[str, ...] | None:
    match node:
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.IfExp(body=body, orelse=orelse):
            first, second = _literals(body), _literals(orelse)
            return None if first is None or second is None else first + second
    return None
