"""The checked form of an expression, as the compiler of CEL hands it out: tree, types and references.

The messages are those of cel/expr/checked.proto as far as they are read here. They are described again because no
package of a reasonable size brings them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

_FIELDS: Mapping[str, str] = {
    # name of the field, its number, its type; * is repeated
    "Constant": "null_value 1 int64, bool_value 2 bool, int64_value 3 int64, uint64_value 4 uint64, "
    "double_value 5 double, string_value 6 string, bytes_value 7 bytes",
    "Ident": "name 1 string",
    "Select": "operand 1 Expr, field 2 string, test_only 3 bool",
    "Call": "target 1 Expr, function 2 string, args 3 Expr*",
    "CreateList": "elements 1 Expr*, optional_indices 2 int32*",
    "Entry": "id 1 int64, field_key 2 string, map_key 3 Expr, value 4 Expr, optional_entry 5 bool",
    "CreateStruct": "message_name 1 string, entries 2 Entry*",
    "Comprehension": "iter_var 1 string, iter_range 2 Expr, accu_var 3 string, accu_init 4 Expr, "
    "loop_condition 5 Expr, loop_step 6 Expr, result 7 Expr, iter_var2 8 string",
    "Expr": "id 2 int64, const_expr 3 Constant, ident_expr 4 Ident, select_expr 5 Select, call_expr 6 Call, "
    "list_expr 7 CreateList, struct_expr 8 CreateStruct, comprehension_expr 9 Comprehension",
    "Nothing": "",
    "ListType": "elem_type 1 Type",
    "MapType": "key_type 1 Type, value_type 2 Type",
    "AbstractType": "name 1 string, parameter_types 2 Type*",
    "Type": "dyn 1 Nothing, null 2 int64, primitive 3 int64, wrapper 4 int64, well_known 5 int64, "
    "list_type 6 ListType, map_type 7 MapType, message_type 9 string, type_param 10 string, type 11 Type, "
    "error 12 Nothing, abstract_type 14 AbstractType",
    "TypeEntry": "key 1 int64, value 2 Type",
    "CheckedExpr": "type_map 3 TypeEntry*, expr 4 Expr",
    "Packed": "type_url 1 string, value 2 CheckedExpr",
}
_SCALARS = {"double": 1, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

INT, UINT, DOUBLE, STRING, BYTES, BOOL = 2, 3, 4, 5, 6, 1
"""Values of `primitive`."""
ANY = 1
"""Value of `well_known`."""


class Checked:
    """A checked expression."""

    def __init__(self, serialized: bytes) -> None:
        packed = _message_class("Packed")()
        packed.ParseFromString(serialized)
        message = packed.value
        self.tree: Any = message.expr
        self._types = {entry.key: entry.value for entry in message.type_map}

    def type(self, node: Any) -> Any:
        """The type of a node; of an unnamed kind if the compiler says nothing."""
        return self._types.get(node.id) or _message_class("Type")()

    def kind(self, node: Any) -> str:
        """The name of a node's type: string, int, list, map, any, dyn, …"""
        found = self.type(node)
        which: str | None = found.WhichOneof("kind")
        if which == "primitive":
            return ("none", "bool", "int", "uint", "double", "string", "bytes")[found.primitive]
        if which == "well_known":
            return ("none", "any", "timestamp", "duration")[found.well_known]
        return {"list_type": "list", "map_type": "map", None: "dyn"}.get(which, str(which))

    def nodes(self) -> Iterator[Any]:
        """Every node, a parent before what is in it."""
        waiting = [self.tree]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += children(node)


def children(node: Any) -> list[Any]:
    """The nodes directly under a node."""
    match node.WhichOneof("kind"):
        case "select_expr":
            return [node.select_expr.operand]
        case "call_expr":
            call = node.call_expr
            return [*([call.target] if call.HasField("target") else []), *call.args]
        case "list_expr":
            return list(node.list_expr.elements)
        case "struct_expr":
            entries = node.struct_expr.entries
            return [part for entry in entries for part in (entry.map_key, entry.value)]
        case "comprehension_expr":
            loop = node.comprehension_expr
            return [loop.iter_range, loop.accu_init, loop.loop_condition, loop.loop_step, loop.result]
    return []


def string_of(node: Any) -> str | None:
    """The text of a literal string; None for anything else."""
    if node.WhichOneof("kind") == "const_expr" and node.const_expr.WhichOneof("kind") == "string_value":
        return str(node.const_expr.string_value)
    return None


@cache
def _message_class(name: str) -> Any:
    from google.protobuf import message_factory

    pool = _pool()
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"checked.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="checked.proto", package="checked", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        one_of = name in ("Constant", "Expr", "Type")
        if one_of:
            message.oneof_decl.add(name="kind")
        for entry in filter(None, fields.split(", ")):
            field_name, number, kind = entry.split(" ")
            field: Any = message.field.add(name=field_name, number=int(number))
            field.label = _REPEATED if kind.endswith("*") else _OPTIONAL
            kind = kind.rstrip("*")
            field.type = _SCALARS.get(kind, _MESSAGE)
            if kind not in _SCALARS:
                field.type_name = f".checked.{kind}"
            if one_of and field_name != "id":
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
