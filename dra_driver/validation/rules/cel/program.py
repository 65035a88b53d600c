"""Compiled expressions of CEL, run on a device as Kubernetes' scheduler runs them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dra_driver.validation.rules.cel.checked import Checked, children, string_of
from dra_driver.validation.rules.cel.libraries import MARK, compiler, message, plain, runtime
from dra_driver.validation.rules.cel.refusals import refusal
from dra_driver.validation.rules.cel.values import CelError, NotJudgedError

_CODE = re.compile(r"^[A-Z_]+: ")
_MISSING = re.compile(r'Key not found in map : "?([^"]*)"?$')


class Program:
    """A compiled expression, or a part of one."""

    def __init__(self, text: str) -> None:
        """Raises: CompileError; NotJudgedError where cel-expr-python is not installed or the answer not sure."""
        try:
            serialized = compiler().compile(text).serialize()
        except RuntimeError as error:
            raise refusal(text, str(error)) from None
        self.checked = Checked(serialized)
        self._text = text
        self._expression = runtime().deserialize(serialized)
        self._domains = _domains(self.checked)

    def value(self, device: Mapping[str, Any]) -> Any:
        """The value for a device, the variable that `device_variable` makes. Raises: CelError, NotJudgedError."""
        data = {
            "device.driver": device["driver"],
            "device.allowMultipleAllocations": bool(device.get("allowMultipleAllocations")),
            "device.attributes": self._filled(device["attributes"]),
            "device.capacity": self._filled(device["capacity"]),
        }
        result = self._expression.eval(data=data)
        if result.type().name() == "ERROR":
            raise self._failure(str(result.value()), device)
        return plain(result.plain_value())

    def _filled(self, domains: Mapping[str, Any]) -> dict[str, Any]:
        """With the domains that the expression names: one of which a device has nothing is empty in Kubernetes."""
        filled: dict[str, Any] = {name: {} for name in self._domains or ()}
        for domain, entries in domains.items():
            filled[domain] = {name: message(value) for name, value in entries.items()}
        return filled

    def _failure(self, text: str, device: Mapping[str, Any]) -> Exception:
        if MARK in text:
            return NotJudgedError(text.partition(MARK)[2])
        text = _CODE.sub("", text)
        missing = _MISSING.search(text)
        if missing is None:
            return CelError(text)
        if self._domains is None and missing[1] not in (*device["attributes"], *device["capacity"]):
            return NotJudgedError(f"it asks for the domain {missing[1]!r} in a way that is not tried here")
        return CelError(f"no such key: {missing[1]}")


@lru_cache(maxsize=2048)
def program(text: str) -> Program:
    """Raises: CompileError, NotJudgedError."""
    return Program(text)


def _domains(checked: Checked) -> frozenset[str] | None:
    """The domains that an expression looks up by their names; None if it does anything else with all of them."""
    found: set[str] = set()
    for node in [*checked.nodes()]:
        for part in children(node):
            if part.WhichOneof("kind") != "ident_expr" or part.ident_expr.name not in (
                "device.attributes",
                "device.capacity",
            ):
                continue
            name = _looked_up(node)
            if name is None:
                return None
            found.add(name)
    return frozenset(found)


def _looked_up(node: Any) -> str | None:
    if node.WhichOneof("kind") == "select_expr" and not node.select_expr.test_only:
        return str(node.select_expr.field)
    call = node.call_expr
    if node.WhichOneof("kind") == "call_expr" and call.function in ("_[_]", "_[?_]", "_?._"):
        return string_of(call.args[1])
    return None
