"""The syntax of CEL: an expression becomes a tree whose nodes know where they stand in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]

_MOST_NESTED = 60
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n\f]+|//[^\n]*)+)
    |(?P<string>[rR]?(?:\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'))
    |(?P<float>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    |(?P<int>0[xX][0-9a-fA-F]+|\d+)(?P<unsigned>[uU])?
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<operator>&&|\|\||[<>=!]=|[-+*/%<>!?:.,()\[\]{}])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xX][0-9a-fA-F]{2}|[0-3][0-7]{2}|.)", re.DOTALL)
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_LEVELS = (("||",), ("&&",), ("==", "!=", "<=", ">=", "<", ">", "in"), ("+", "-"), ("*", "/", "%"))

_LONGEST_INTEGER = 24
_LAST_CHARACTER = 0x10FFFF


class CelSyntaxError(Exception):
    """The expression is no CEL; the text says where."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant."""

    span: Span
    value: Any


@dataclass(frozen=True, slots=True)
class Name:
    """A variable."""

    span: Span
    name: str


@dataclass(frozen=True, slots=True)
class Field:
    """`operand.name`, or `operand.?name`."""

    span: Span
    operand: Expression
    name: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """`operand[index]`, or `operand[?index]`."""

    span: Span
    operand: Expression
    index: Expression
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A function, or a method of `target`. Operators are calls too, under their sign: `&&`, `!`, `?:`, `in`."""

    span: Span
    function: str
    target: Expression | None
    arguments: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class ListOf:
    """`[a, b]`."""

    span: Span
    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class MapOf:
    """`{a: b}`."""

    span: Span
    entries: tuple[tuple[Expression, Expression], ...]


Expression = Literal | Name | Field | Index | Call | ListOf | MapOf


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    span: Span


def parse(text: str) -> Expression:
    """The tree of an expression. Raises: CelSyntaxError."""
    reader = _Reader(_tokens(text), len(text))
    tree = reader.expression(0)
    reader.end()
    return tree


def terms(tree: Expression) -> tuple[Expression, ...]:
    """The parts that `&&` joins at the top."""
    if isinstance(tree, Call) and tree.function == "&&":
        return tuple(term for argument in tree.arguments for term in terms(argument))
    return (tree,)


def children(tree: Expression) -> tuple[Expression, ...]:
    """The parts of a node, from left to right."""
    match tree:
        case Field(operand=operand):
            return (operand,)
        case Index(operand=operand, index=index):
            return (operand, index)
        case Call(target=target, arguments=arguments):
            return arguments if target is None else (target, *arguments)
        case ListOf(items=items):
            return items
        case MapOf(entries=entries):
            return tuple(part for entry in entries for part in entry)
        case _:
            return ()


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            note = "; equality is written ==" if text[position] == "=" else ""
            raise CelSyntaxError(f"unexpected {text[position]!r} at character {position + 1}{note}")
        kind = match.lastgroup or ""
        if kind == "unsigned":
            kind = "int"
        if kind != "space":
            found.append(_Token(kind, match[0], match.span()))
        position = match.end()
    return found


class _Reader:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[_Token], length: int) -> None:
        self._tokens = tokens
        self._at = 0
        self._length = length

    def end(self) -> None:
        """Raises: CelSyntaxError unless everything was read."""
        if self._at < len(self._tokens):
            raise self._unexpected()

    def expression(self, depth: int) -> Expression:
        if depth > _MOST_NESTED:
            raise CelSyntaxError(f"parts are nested more than {_MOST_NESTED} deep")
        condition = self._binary(0, depth)
        if not self._takes("?"):
            return condition
        yes = self._binary(0, depth + 1)
        self._expect(":")
        no = self.expression(depth + 1)
        return Call((condition.span[0], no.span[1]), "?:", None, (condition, yes, no))

    def _binary(self, level: int, depth: int) -> Expression:
        if level == len(_LEVELS):
            return self._unary(depth)
        left = self._binary(level + 1, depth)
        chain: Call | None = None
        while (token := self._peek()) is not None and token.text in _LEVELS[level] and token.kind != "string":
            self._at += 1
            right = self._binary(level + 1, depth)
            span = (left.span[0], right.span[1])
            # Long chains of && and || stay flat, for nothing that follows them may run out of stack.
            before = chain.arguments if chain is not None and level < 2 else (left,)
            left = chain = Call(span, token.text, None, (*before, right))
        return left

    def _unary(self, depth: int) -> Expression:
        token = self._peek()
        if token is None or token.kind != "operator" or token.text not in ("!", "-"):
            return self._member(depth)
        if depth > _MOST_NESTED:
            raise CelSyntaxError(f"parts are nested more than {_MOST_NESTED} deep")
        self._at += 1
        operand = self._unary(depth + 1)
        return Call((token.span[0], operand.span[1]), f"unary{token.text}", None, (operand,))

    def _member(self, depth: int) -> Expression:
        tree = self._primary(depth)
        while True:
            if self._takes("."):
                optional = self._takes("?")
                name = self._next()
                if name.kind != "name":
                    raise self._unexpected(name)
                if not optional and self._takes("("):
                    arguments = self._items(")", depth)
                    tree = Call((tree.span[0], self._last_end()), name.text, tree, arguments)
                else:
                    tree = Field((tree.span[0], name.span[1]), tree, name.text, optional)
            elif self._takes("["):
                optional = self._takes("?")
                index = self.expression(depth + 1)
                self._expect("]")
                tree = Index((tree.span[0], self._last_end()), tree, index, optional)
            else:
                return tree

    def _primary(self, depth: int) -> Expression:
        token = self._next()
        match token.kind:
            case "string":
                return Literal(token.span, _string(token.text))
            case "int":
                return Literal(token.span, _integer(token.text))
            case "float":
                return Literal(token.span, float(token.text))
            case "name" if token.text in _CONSTANTS:
                return Literal(token.span, _CONSTANTS[token.text])
            case "name" if token.text == "in":
                raise self._unexpected(token)
            case "name" if self._takes("("):
                arguments = self._items(")", depth)
                return Call((token.span[0], self._last_end()), token.text, None, arguments)
            case "name":
                return Name(token.span, token.text)
        if token.text == "(":
            tree = self.expression(depth + 1)
            self._expect(")")
            return tree
        if token.text == "[":
            items = self._items("]", depth)
            return ListOf((token.span[0], self._last_end()), items)
        if token.text == "{":
            return self._map(token, depth)
        raise self._unexpected(token)

    def _items(self, closing: str, depth: int) -> tuple[Expression, ...]:
        items: list[Expression] = []
        while not self._takes(closing):
            if items:
                self._expect(",")
                if closing != ")" and self._takes(closing):
                    break
            items.append(self.expression(depth + 1))
        return tuple(items)

    def _map(self, opening: _Token, depth: int) -> Expression:
        entries: list[tuple[Expression, Expression]] = []
        while not self._takes("}"):
            if entries:
                self._expect(",")
            key = self.expression(depth + 1)
            self._expect(":")
            entries.append((key, self.expression(depth + 1)))
        return MapOf((opening.span[0], self._last_end()), tuple(entries))

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> _Token:
        token = self._peek()
        if token is None:
            raise self._unexpected()
        self._at += 1
        return token

    def _takes(self, operator: str) -> bool:
        token = self._peek()
        if token is None or token.kind != "operator" or token.text != operator:
            return False
        self._at += 1
        return True

    def _expect(self, operator: str) -> None:
        if not self._takes(operator):
            raise CelSyntaxError(f"{self._unexpected()}, expected {operator!r}")

    def _last_end(self) -> int:
        return self._tokens[self._at - 1].span[1]

    def _unexpected(self, token: _Token | None = None) -> CelSyntaxError:
        token = token or self._peek()
        if token is None:
            return CelSyntaxError("the expression ends too early")
        return CelSyntaxError(f"unexpected {token.text!r} at character {token.span[0] + 1}")


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise CelSyntaxError(f"{text[:_LONGEST_INTEGER]}… is no 64-bit number")
    return int(text.rstrip("uU"), 0 if "x" in text.lower() else 10)


def _string(text: str) -> str:
    raw = text[0] in "rR"
    body = text[1:] if raw else text
    quotes = 3 if body[:3] in ('"""', "'''") and len(body) >= 6 else 1
    body = body[quotes:-quotes]
    return body if raw else _ESCAPE.sub(_unescaped, body)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "uUxX" and len(code) > 1:
        number = int(code[1:], 16)
        if number > _LAST_CHARACTER:
            raise CelSyntaxError(f"there is no character {code!r}")
        return chr(number)
    if len(code) == 3:
        return chr(int(code, 8))
    return _ESCAPES.get(code, code)
