"""What Kubernetes' compiler refuses beyond types, and where nobody here can say whether it does."""

from __future__ import annotations

import re
from typing import Any

from dra_driver.validation.rules.cel.checked import Checked, string_of
from dra_driver.validation.rules.cel.cost import LIMIT, upper_bound
from dra_driver.validation.rules.cel.libraries import evaluated
from dra_driver.validation.rules.cel.values import NotJudgedError

_NAMES = (
    "url isURL getScheme getHost getHostname getPort getEscapedPath getQuery ip isIP family isCanonical isUnspecified "
    "isLoopback isLinkLocalMulticast isLinkLocalUnicast isGlobalUnicast cidr isCIDR containsIP containsCIDR "
    "prefixLength masked validate named isSorted sum min max indexOf lastIndexOf includes authorizer kubernetes net "
    "google"
)
_NOT_HERE = frozenset(_NAMES.split())
"""What Kubernetes declares and nothing here does, or not for lists; `includes` depends on the server."""
_TYPES = ("bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint")
_CONVERSIONS = ("int", "uint", "double", "bool", "string")
_SERVER_DECIDES = frozenset({"includes"})
_PLAIN_CLAUSES = re.compile(r"(?:[^%]|%[%sd])*\Z", re.DOTALL)
_FAULT = re.compile(r"ERROR: <input>:(\d+):(\d+): (.*)$", re.MULTILINE)
_TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_CODE = re.compile(r"^[A-Z_]+: ")


class CompileError(Exception):
    """Kubernetes refuses the expression. `faults` are (text, line, column), both from 1 and 0 if not known."""

    def __init__(self, faults: tuple[tuple[str, int, int], ...]) -> None:
        super().__init__("; ".join(text for text, _, _ in faults))
        self.faults = faults


def refusal(text: str, message: str) -> Exception:
    for word in sorted(_words(text) & _NOT_HERE):
        return NotJudgedError(f"it uses {word}, which is not known here")
    if re.search(r"recursion|[Ee]xceed", message):
        return NotJudgedError("it is nested deeper, or is longer, than can be looked at here")
    if "undeclared reference to 'exists_one'" in message:
        return NotJudgedError("it uses exists_one with two variables, which is not known here")
    faults = tuple(
        (found[3].removesuffix(" (in container '')"), int(found[1]), int(found[2]))
        for found in _FAULT.finditer(message)
    )
    return CompileError(faults or ((_CODE.sub("", message).partition("\n")[0], 0, 0),))


def _words(text: str) -> set[str]:
    """The names in an expression, and rather some of its texts than one too few."""
    unusual = "'''" in text or '"""' in text or "//" in text or re.search(r"[rR][bB]?['\"]", text)
    return set(re.findall(r"\w+", text if unusual else _TEXTS.sub(" ", text)))


def _refuse_node(checked: Checked, node: Any) -> None:
    """Raises: CompileError, NotJudgedError."""
    match node.WhichOneof("kind"):
        case "ident_expr" if node.ident_expr.name.partition(".")[0] in ("google", "kubernetes", "net"):
            raise NotJudgedError(f"it names the type {node.ident_expr.name}")
        case "ident_expr" if checked.kind(node) == "type" and node.ident_expr.name not in _TYPES:
            raise NotJudgedError("it gives a type a name")
        case "struct_expr" if node.struct_expr.message_name:
            raise NotJudgedError(f"it makes an object {node.struct_expr.message_name}")
        case "struct_expr":
            entries = node.struct_expr.entries
            _alike(checked, [entry.map_key for entry in entries], "keys of a map")
            _alike(checked, [entry.value for entry in entries], "values of a map")
            if any(entry.optional_entry for entry in entries):
                raise NotJudgedError("it makes a map of optional entries")
        case "list_expr":
            _alike(checked, list(node.list_expr.elements), "members of a list")
            if node.list_expr.optional_indices:
                raise NotJudgedError("it makes a list of optional members")
        case "comprehension_expr":
            loop = node.comprehension_expr
            if "device" in (loop.iter_var, loop.iter_var2, loop.accu_var):
                raise NotJudgedError("it has another variable `device`")
            if checked.kind(loop.accu_init) == "type":
                raise NotJudgedError("it gives a type a name")
        case "call_expr":
            _refuse_call(checked, node.call_expr)


def _refuse_call(checked: Checked, call: Any) -> None:
    literal = string_of(call.args[0]) if call.args else None
    if call.function in ("matches", "find", "findAll") and literal is not None and call.HasField("target"):
        _pattern(literal)
    elif call.function == "matches" and len(call.args) == 2:
        pattern = string_of(call.args[1])
        if pattern is not None:
            _pattern(pattern)
    elif call.function in ("duration", "timestamp") and literal is not None:
        if _fails(call.function, literal):
            raise CompileError(((f"invalid {call.function} argument {literal!r}", 0, 0),))
    elif call.function in _CONVERSIONS and call.args and call.args[0].HasField("const_expr"):
        # Kubernetes converts literals before anything runs, and refuses those that it cannot convert.
        constant = call.args[0].const_expr
        kind = constant.WhichOneof("kind")
        easy = kind == "uint64_value" or (kind == "int64_value" and constant.int64_value >= 0)
        if _fails(call.function, literal) if literal is not None else not easy:
            raise NotJudgedError("it converts a literal that may not be converted")
    elif call.function == "flatten":
        of = checked.type(call.target)
        if call.args or of.list_type.elem_type.WhichOneof("kind") != "list_type":
            raise NotJudgedError("it flattens what is not a list of lists")
    elif call.function == "format":
        _format(checked, call)


def _fails(function: str, literal: str) -> bool:
    """Whether a function of one text ends in an error."""
    return bool(evaluated(f"{function}(text)", literal).type().name() == "ERROR")


def _pattern(pattern: str) -> None:
    if "\\C" in pattern:
        raise NotJudgedError("its pattern has \\C")
    result = evaluated("''.matches(text)", pattern)
    if result.type().name() == "ERROR":
        reason = str(result.value()).partition("invalid regular expression: ")[2]
        raise CompileError(((f"the pattern {pattern!r} is not one of RE2: {reason}", 0, 0),))


def _format(checked: Checked, call: Any) -> None:
    """Kubernetes looks into a literal format; only plain ones are followed here."""
    text = string_of(call.target)
    values: Any = call.args[0].list_expr.elements if call.args[0].HasField("list_expr") else ()
    clauses = re.findall(r"%[sd]", (text or "").replace("%%", ""))
    plain = text is not None and call.args[0].HasField("list_expr") and _PLAIN_CLAUSES.match(text) is not None
    if not plain or len(clauses) != len(values):
        raise NotJudgedError("it uses format() in a way that is not followed here")
    for clause, value in zip(clauses, values, strict=True):
        if checked.kind(value) not in (
            ("int", "uint") if clause == "%d" else ("string", "int", "uint", "bool")
        ):
            raise NotJudgedError("it uses format() in a way that is not followed here")


def _alike(checked: Checked, nodes: list[Any], what: str) -> None:
    types = [checked.type(node) for node in nodes]
    if all(found == types[0] for found in types[1:]):
        return
    if all(found.WhichOneof("kind") == "primitive" for found in types):
        kinds = ", ".join(dict.fromkeys(checked.kind(node) for node in nodes))
        raise CompileError(((f"the {what} are not of one type: {kinds}", 0, 0),))
    raise NotJudgedError(f"the {what} may be of several types")


def refuse(text: str, checked: Checked) -> None:
    """For a whole selector whose types are right. Raises: CompileError, NotJudgedError."""
    kind = checked.kind(checked.tree)
    formatted = {
        node.call_expr.args[0].id
        for node in checked.nodes()
        if node.call_expr.function == "format" and node.call_expr.args
    }
    for node in checked.nodes():
        if node.id not in formatted:
            _refuse_node(checked, node)
    if kind not in ("bool", "any"):
        raise CompileError(((f"must evaluate to bool, not {kind}", 0, 0),))
    if words := sorted(_SERVER_DECIDES & _words(text)):
        raise NotJudgedError(f"whether there is {words[0]}() depends on the API server's feature gates")
    if "`" in text:
        raise NotJudgedError("it has a name in backquotes")
    if upper_bound(checked) > LIMIT:
        raise NotJudgedError("it may be more expensive than the API server allows")
