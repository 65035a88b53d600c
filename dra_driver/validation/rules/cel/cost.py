"""An upper bound of what Kubernetes thinks an expression can cost; the API server refuses what may cost too much.

Kubernetes' own estimate is finer. A bound that is above its limit says nothing, one below says that the server takes
the expression: so the bound may be generous, and never forgets a cost. Sizes that Kubernetes does not know are not
known here either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.validation.rules.cel.checked import Checked

LIMIT = 1_000_000
"""CELSelectorExpressionMaxCost of resource.k8s.io."""

_UNKNOWN = float("inf")
_DOMAIN, _ID, _VALUE, _ENTRIES = 63, 32, 64, 32
_LIST, _MAP, _STRUCT = 10, 30, 40


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a value can be, and its keys and members."""

    size: float = _UNKNOWN
    key: Shape | None = None
    member: Shape | None = None


_NOWHERE = Shape()
_DEVICE: Mapping[str, Shape] = {
    "device.driver": Shape(_DOMAIN),
    "device.allowMultipleAllocations": Shape(1),
    "device.attributes": Shape(_ENTRIES, Shape(_DOMAIN), Shape(_ENTRIES, Shape(_ID), Shape(_VALUE))),
    "device.capacity": Shape(_ENTRIES, Shape(_DOMAIN), Shape(_ENTRIES, Shape(_ID))),
}
_COMPARE = {"_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"}
_SCALARS = {"bool", "int", "uint", "double", "null", "timestamp", "duration", "message_type", "abstract_type"}
_SAME_SIZE = {"lowerAscii", "upperAscii", "trim", "substring"}
_PAIRS = {"matches", "contains", "indexOf", "lastIndexOf"}
_TEXTS = {
    "quantity",
    "isQuantity",
    "semver",
    "isSemver",
    "timestamp",
    "duration",
    "int",
    "uint",
    "double",
    "bool",
}
_CHEAP = {
    "_&&_", "_||_", "!_", "_?_:_", "-_", "_-_", "_*_", "_/_", "_%_", "_[_]", "_[?_]", "_?._", "size", "type", "dyn",
    "@not_strictly_false", "optional.of", "optional.none", "optional.ofNonZeroValue", "hasValue", "value", "or",
    "orValue", "compareTo", "isGreaterThan", "isLessThan", "add", "sub", "sign", "isInteger", "asInteger",
    "asApproximateFloat", "major", "minor", "patch", "charAt", "getHours", "getMinutes", "getSeconds", "cel.@mapInsert",
}  # fmt: skip


def upper_bound(checked: Checked) -> float:
    """The most that Kubernetes can estimate; infinite where a size is not known."""
    try:
        return _Bound(checked).of(checked.tree, _DEVICE)[0]
    except RecursionError:
        return _UNKNOWN


class _Bound:
    def __init__(self, checked: Checked) -> None:
        self._checked = checked

    def of(self, node: Any, names: Mapping[str, Shape]) -> tuple[float, Shape]:
        match node.WhichOneof("kind"):
            case "const_expr":
                constant = node.const_expr
                text = constant.string_value or constant.bytes_value
                return 1, Shape(len(text) if text else 1)
            case "ident_expr":
                return 1, names.get(node.ident_expr.name, _NOWHERE)
            case "select_expr":
                cost, shape = self.of(node.select_expr.operand, names)
                return cost + 2, shape.member or _NOWHERE
            case "list_expr":
                elements = node.list_expr.elements
                return _LIST + sum(self.of(part, names)[0] for part in elements) + 1, Shape(len(elements))
            case "struct_expr":
                entries = node.struct_expr.entries
                parts = (part for entry in entries for part in (entry.map_key, entry.value))
                return _STRUCT + _MAP + sum(self.of(part, names)[0] for part in parts), Shape(len(entries))
            case "comprehension_expr":
                return self._loop(node.comprehension_expr, names)
            case "call_expr":
                return self._call(node.call_expr, names)
        return 1, _NOWHERE

    def _loop(self, loop: Any, names: Mapping[str, Shape]) -> tuple[float, Shape]:
        over_cost, over = self.of(loop.iter_range, names)
        first_cost, first = self.of(loop.accu_init, names)
        collected = first if over.size == 0 else Shape(over.size)
        is_map = self._checked.kind(loop.iter_range) == "map"
        inner = dict(names) | {loop.accu_var: collected}
        if loop.iter_var2:
            inner[loop.iter_var] = (over.key if is_map else Shape(1)) or _NOWHERE
            inner[loop.iter_var2] = over.member or _NOWHERE
        else:
            inner[loop.iter_var] = (over.key if is_map else over.member) or _NOWHERE
        if loop.accu_var == loop.iter_var or over.size == 0:
            inner[loop.accu_var] = collected
        turn = self.of(loop.loop_condition, inner)[0] + self.of(loop.loop_step, inner)[0] + 1
        last_cost, last = self.of(loop.result, inner)
        return over_cost + first_cost + _times(over.size, turn) + last_cost + 1, last

    def _call(self, call: Any, names: Mapping[str, Shape]) -> tuple[float, Shape]:
        nodes = [*([call.target] if call.HasField("target") else []), *call.args]
        found = [self.of(part, names) for part in nodes]
        shapes = [shape for _, shape in found]
        cost, shape = self._own(call.function, nodes, shapes)
        return sum(part for part, _ in found) + cost + 1, shape

    def _own(self, function: str, nodes: list[Any], shapes: list[Shape]) -> tuple[float, Shape]:
        sizes = [shape.size for shape in shapes]
        kinds = [self._checked.kind(node) for node in nodes]
        if function in _COMPARE:
            # Kubernetes has a cost for == of two quantities or two versions; the size that != needs it does not know.
            objects = kinds == ["message_type"] * 2
            if (
                objects
                and function == "_==_"
                and self._checked.type(nodes[0]) == self._checked.type(nodes[1])
            ):
                return 1, _NOWHERE
            plain = set(kinds) & (_SCALARS - {"message_type", "abstract_type"})
            return (1 if plain else min(sizes)), _NOWHERE
        if function in _CHEAP or (function == "_+_" and set(kinds) & _SCALARS):
            return 1, self._through(function, shapes)
        if function == "_+_":
            return (1 if "list" in kinds else sum(sizes)), Shape(sum(sizes))
        if function == "@in":
            return (1 if kinds[1] == "map" else sizes[1] * 2), _NOWHERE
        if function in _SAME_SIZE:
            return 1 + sizes[0], Shape(sizes[0])
        if function == "replace":
            larger = _times(sizes[0] + 1, sizes[2] + 1)
            return larger + _times(sizes[0] + 1, sizes[1] + 1), Shape(larger + sizes[0])
        if function in ("split", "findAll", "find"):
            whole = Shape(sizes[0] + 1)
            return _times(sizes[0] + 1, sizes[1] + 1), whole
        if function in ("startsWith", "endsWith"):
            return 1 + sizes[1], _NOWHERE
        if function in _PAIRS or (function.startswith("sets.") and len(sizes) == 2):
            return _times(sizes[0] + 1, sizes[1] + 1), _NOWHERE
        if function in _TEXTS:
            scalar = kinds[0] in _SCALARS
            return (1 if scalar else 1 + sizes[0]), _NOWHERE
        return _UNKNOWN, _NOWHERE

    def _through(self, function: str, shapes: list[Shape]) -> Shape:
        if function in ("_[_]", "_[?_]", "_?._"):
            return shapes[0].member or _NOWHERE
        return shapes[0] if function in ("orValue", "or", "value") and len(shapes) == 1 else _NOWHERE


def _times(number: float, cost: float) -> float:
    return 0 if not number or not cost else number * cost
