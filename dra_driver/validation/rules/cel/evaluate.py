"""Evaluates CEL over one device as kube-scheduler does: missing keys are errors, `&&` and `||` absorb them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dra_driver.validation.rules.cel.patterns import search
from dra_driver.validation.rules.cel.syntax import (
    Call,
    Expression,
    Field,
    Index,
    ListOf,
    Literal,
    MapOf,
    Name,
)
from dra_driver.validation.rules.cel.values import (
    CelError,
    Optional,
    Quantity,
    Semver,
    quantity,
    semver,
    type_name,
)

Variables = Mapping[str, Any]

_MOST_STEPS = 200_000
_CHARACTERS_A_STEP = 16
_INTEGERS = range(-(2**63), 2**64)


def evaluate(tree: Expression, variables: Variables) -> Any:
    """The value of an expression. Raises: CelError."""
    try:
        return _Evaluation().value(tree, variables)
    except RecursionError as error:
        raise CelError("the expression is too long") from error


class _Evaluation:
    """One evaluation; counts its steps, since macros can nest, and the size of what it makes as steps."""

    def __init__(self) -> None:
        self._steps = 0

    def value(self, tree: Expression, variables: Variables) -> Any:
        self._spend(1)
        match tree:
            case Literal(value=value):
                return value
            case Name(name=name):
                if name not in variables:
                    raise CelError(f"undeclared reference to {name!r}")
                return variables[name]
            case Field(operand=operand, name=name, optional=optional):
                return _lookup(self.value(operand, variables), name, optional)
            case Index(operand=operand, index=index, optional=optional):
                return _lookup(self.value(operand, variables), self.value(index, variables), optional)
            case ListOf(items=items):
                return self._made([self.value(item, variables) for item in items])
            case MapOf(entries=entries):
                return self._made(self._map(entries, variables))
            case Call():
                return self._call(tree, variables)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise CelError("the expression is too expensive")

    def _made(self, value: Any) -> Any:
        """The value, paid for with everything in it: what stands in it twice counts twice."""
        match value:
            case str():
                self._spend(len(value) // _CHARACTERS_A_STEP)
            case int() if value not in _INTEGERS:
                raise CelError("integer overflow")
            case list() | dict():
                self._spend(len(value))
                for item in value.values() if isinstance(value, dict) else value:
                    self._made(item)
        return value

    def _map(self, entries: Sequence[tuple[Expression, Expression]], variables: Variables) -> dict[Any, Any]:
        try:
            return {self.value(key, variables): self.value(item, variables) for key, item in entries}
        except TypeError as error:
            raise CelError("a list or a map is no key") from error

    def _call(self, call: Call, variables: Variables) -> Any:
        match call.function:
            case "&&" | "||":
                parts = [(argument, variables) for argument in call.arguments]
                return self._any(parts, call.function, stop=call.function == "||")
            case "?:":
                condition = self.value(call.arguments[0], variables)
                return self.value(call.arguments[1 if _boolean(condition, "?:") else 2], variables)
            case "has":
                return self._has(call, variables)
            case "all" | "exists" | "exists_one" | "map" | "filter" if _is_macro(call):
                return self._made(self._macro(call, variables))
            case "bind" if isinstance(call.target, Name) and call.target.name == "cel":
                inner = {**variables, _name_of(call): self.value(call.arguments[1], variables)}
                return self.value(call.arguments[2], inner)
        if isinstance(call.target, Name) and call.target.name == "optional":
            return _optional(call.function, [self.value(item, variables) for item in call.arguments])
        target = () if call.target is None else (self.value(call.target, variables),)
        arguments = (*target, *(self.value(item, variables) for item in call.arguments))
        table = FUNCTIONS if call.target is None else METHODS
        function = table.get(call.function)
        if function is None:
            raise CelError(f"undeclared function {call.function!r}")
        try:
            return self._made(function(*arguments))
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, re.error) as error:
            shown = ", ".join(type_name(argument) for argument in arguments)
            raise CelError(f"{_shown_function(call.function)} does not take ({shown})") from error

    def _any(self, parts: list[tuple[Expression, Variables]], where: str, *, stop: bool) -> bool:
        """`stop` as soon as a part is that; an error does not matter if another part decides."""
        failure: CelError | None = None
        for tree, variables in parts:
            try:
                if _boolean(self.value(tree, variables), where) == stop:
                    return stop
            except CelError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return not stop

    def _has(self, call: Call, variables: Variables) -> bool:
        field = call.arguments[0] if len(call.arguments) == 1 else None
        if not isinstance(field, Field):
            raise CelError("has() takes a field, such as has(a.b)")
        operand = self.value(field.operand, variables)
        if isinstance(operand, Optional):
            operand = operand.value if operand.present else {}
        return isinstance(operand, dict) and field.name in operand

    def _macro(self, call: Call, variables: Variables) -> Any:
        over = None if call.target is None else self.value(call.target, variables)
        if not isinstance(over, (list, dict)):
            raise CelError(f"{call.function}() does not take a {type_name(over)}")
        name, body = _name_of(call), call.arguments[1:]
        scopes = [{**variables, name: item} for item in over]
        if call.function == "map":
            if len(body) == 2:
                scopes = [scope for scope in scopes if _boolean(self.value(body[0], scope), "map")]
            return [self.value(body[-1], scope) for scope in scopes]
        if call.function == "filter":
            return [scope[name] for scope in scopes if _boolean(self.value(body[0], scope), "filter")]
        if call.function == "exists_one":
            return sum(_boolean(self.value(body[0], scope), "exists_one") for scope in scopes) == 1
        stop = call.function == "exists"
        return self._any([(body[0], scope) for scope in scopes], call.function, stop=stop)


def _is_macro(call: Call) -> bool:
    return call.target is not None and len(call.arguments) >= 2 and isinstance(call.arguments[0], Name)


def _name_of(call: Call) -> str:
    first = call.arguments[0] if call.arguments else None
    if not isinstance(first, Name):
        raise CelError(f"{call.function}() takes the name of a variable first")
    return first.name


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise CelError(f"{where} takes a bool, not a {type_name(value)}")
    return value


def _lookup(operand: Any, key: Any, optional: bool) -> Any:
    if isinstance(operand, Optional):
        return _lookup(operand.value, key, True) if operand.present else operand
    if isinstance(operand, list):
        found = isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(operand)
    elif isinstance(operand, dict):
        found = key in operand or hasattr(operand, "__missing__")
    else:
        raise CelError(f"{type_name(operand)} has no field {key!r}")
    if optional:
        there = found and (isinstance(operand, list) or key in operand)
        return Optional(operand[key], True) if there else Optional()
    if not found:
        raise CelError(f"no such key: {key}")
    return operand[key]


def _optional(function: str, arguments: list[Any]) -> Optional:
    if function == "of" and len(arguments) == 1:
        return Optional(arguments[0], True)
    if function == "none" and not arguments:
        return Optional()
    raise CelError(f"undeclared function 'optional.{function}'")


def _shown_function(name: str) -> str:
    return name.removeprefix("unary") if not name[0].isalpha() or name.startswith("unary") else f"{name}()"


def equal(one: Any, other: Any) -> bool:
    """Values of different types differ; numbers compare across their types."""
    if isinstance(one, bool) or isinstance(other, bool):
        return isinstance(one, bool) and isinstance(other, bool) and one == other
    if isinstance(one, Semver) != isinstance(other, Semver):
        return False
    return bool(one == other)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def ordered(one: Any, other: Any) -> bool:
        number = (int, float)
        plain = not isinstance(one, (Semver, bool)) and not isinstance(other, (Semver, bool))
        alike = (isinstance(one, str) and isinstance(other, str)) or (
            isinstance(one, number) and isinstance(other, number)
        )
        if not plain or not alike:
            raise TypeError
        return compare(one, other)

    return ordered


def _arithmetic(compute: Callable[[Any, Any], Any], *more: type) -> Callable[[Any, Any], Any]:
    def computed(one: Any, other: Any) -> Any:
        if isinstance(one, bool) or not isinstance(one, (int, float, *more)) or type(one) is not type(other):
            raise TypeError
        return compute(one, other)

    return computed


def _divided(one: Any, other: Any) -> Any:
    """Integers are cut towards zero."""
    if isinstance(one, float):
        return one / other
    quotient = abs(one) // abs(other)
    return quotient if (one < 0) == (other < 0) else -quotient


def _contained(item: Any, container: Any) -> bool:
    if isinstance(container, dict):
        return item in container
    if isinstance(container, list):
        return any(equal(item, other) for other in container)
    raise TypeError


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return value


def _key(one: Any, other: Any) -> tuple[Any, Any]:
    """What two quantities or two versions are compared by."""
    if isinstance(one, Quantity) and isinstance(other, Quantity):
        return one.amount, other.amount
    if isinstance(one, Semver) and isinstance(other, Semver):
        return one.key, other.key
    raise TypeError


def _compared(one: Any, other: Any) -> int:
    left, right = _key(one, other)
    return int(left > right) - int(left < right)


def _text(method: Callable[..., Any]) -> Callable[..., Any]:
    """Methods of strings refuse everything else, versions too."""

    def called(target: Any, *arguments: Any) -> Any:
        if not isinstance(target, str) or isinstance(target, Semver):
            raise TypeError
        return method(target, *arguments)

    return called


def _replaced(text: str, old: str, new: str, *count: int) -> str:
    if len(text) + (text.count(old) + 1) * len(new) > _MOST_STEPS * _CHARACTERS_A_STEP:
        raise CelError("the expression is too expensive")
    return text.replace(old, new, *count)


def _can(convert: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def test(text: Any) -> bool:
        try:
            convert(text)
        except CelError:
            return False
        return True

    return test


def _size(value: Any) -> int:
    if isinstance(value, Semver):
        raise TypeError
    return len(value)


def _as_integer(value: Quantity) -> int:
    if value.amount.denominator != 1:
        raise ValueError
    return value.amount.numerator


def _includes(value: Any, item: Any) -> bool:
    """A list attribute and a plain one answer alike."""
    return _contained(item, value) if isinstance(value, list) else equal(value, item)


def _or_value(target: Optional, otherwise: Any) -> Any:
    return target.value if target.present else otherwise


def _present(target: Optional) -> Any:
    if not target.present:
        raise CelError("optional.none() has no value")
    return target.value


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "==": equal,
    "!=": lambda one, other: not equal(one, other),
    "<": _ordered(lambda one, other: one < other),
    "<=": _ordered(lambda one, other: one <= other),
    ">": _ordered(lambda one, other: one > other),
    ">=": _ordered(lambda one, other: one >= other),
    "in": _contained,
    "+": _arithmetic(lambda one, other: one + other, str, list),
    "-": _arithmetic(lambda one, other: one - other),
    "*": _arithmetic(lambda one, other: one * other),
    "/": _arithmetic(_divided),
    "%": _arithmetic(lambda one, other: one - other * _divided(one, other)),
    "unary-": lambda value: -_number(value),
    "unary!": lambda value: not _boolean(value, "!"),
    "size": _size,
    "int": int,
    "double": float,
    "string": lambda value: str(value).lower() if isinstance(value, bool) else str(value),
    "quantity": quantity,
    "isQuantity": _can(quantity),
    "semver": semver,
    "isSemver": _can(semver),
}
"""Functions and operators that are not methods."""

METHODS: Mapping[str, Callable[..., Any]] = {
    "contains": _text(lambda text, part: str(part) in text),
    "startsWith": _text(lambda text, part: text.startswith(part)),
    "endsWith": _text(lambda text, part: text.endswith(part)),
    "matches": _text(lambda text, pattern: search(pattern, text) is not None),
    "lowerAscii": _text(lambda text: text.lower()),
    "upperAscii": _text(lambda text: text.upper()),
    "trim": _text(lambda text: text.strip()),
    "replace": _text(_replaced),
    "split": _text(lambda text, part: text.split(part)),
    "substring": _text(lambda text, start, *end: text[start : end[0] if end else None]),
    "indexOf": _text(lambda text, part: text.find(part)),
    "find": _text(lambda text, pattern: found[0] if (found := search(pattern, text)) else ""),
    "size": _size,
    "compareTo": _compared,
    "isGreaterThan": lambda one, other: _compared(one, other) > 0,
    "isLessThan": lambda one, other: _compared(one, other) < 0,
    "add": lambda one, other: Quantity(sum(_key(one, other))),
    "sub": lambda one, other: Quantity(one.amount - other.amount),
    "sign": lambda value: (value.amount > 0) - (value.amount < 0),
    "isInteger": lambda value: value.amount.denominator == 1,
    "asInteger": _as_integer,
    "asApproximateFloat": lambda value: float(value.amount),
    "major": lambda version: version.key[0],
    "minor": lambda version: version.key[1],
    "patch": lambda version: version.key[2],
    "includes": _includes,
    "hasValue": lambda target: bool(target.present),
    "value": _present,
    "or": lambda target, other: target if target.present else other,
    "orValue": _or_value,
}
"""Methods by name."""

MACROS = frozenset({"has", "all", "exists", "exists_one", "map", "filter", "bind"})
"""Calls that name a variable or test for a field."""
