"""Device selectors from a seeded grammar: right ones, nearly right ones, and a few that are out of the question."""

from __future__ import annotations

import random

_DOMAINS = ('"gpu.nvidia.com"', '"resource.kubernetes.io"', '"nobody.example.com"')
_NAMES = ("type", "index", "productName", "migCapable", "cudaComputeCapability", "nope")
_STRINGS = (
    '"gpu"',
    "'a'",
    '""',
    '"H100.*"',
    '"9.0.0"',
    '"10Gi"',
    'r"a\\d+"',
    '"(?=a)"',
    '"("',
    '"é"',
    '"1s"',
)
_NUMBERS = ("0", "1", "-2", "3u", "2.5", "0x1f", "9223372036854775807")
_PATTERNS = (
    '"^NVIDIA.*"',
    '"a|b"',
    '"(a)(b)"',
    '"(?i)h100"',
    '"["',
    '"a{2,3}"',
    r'"\\d+\\s"',
    r'"\\pN"',
    '"(?<n>a)"',
)
_TEXT_METHODS = (
    "lowerAscii()",
    "upperAscii()",
    "trim()",
    "substring(1)",
    "replace('a', 'bb')",
    "charAt(0)",
    "size()",
)
_LIST_METHODS = ("size()", "sort()", "distinct()", "reverse()", "slice(0, 1)", "flatten()", "first()", "join(',')",
                 "isSorted()", "sum()", "max()", "indexOf(1)")  # fmt: skip


class Grammar:
    """Expressions, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names: list[str] = []

    def expression(self) -> str:
        """The next one."""
        self._names = []
        return self._boolean(4)

    def _one(self, *choices: str) -> str:
        return self._random.choice(choices)

    def _boolean(self, depth: int) -> str:  # noqa: PLR0912  one branch a rule of the grammar
        if depth <= 0:
            return self._one("true", "false", "device.allowMultipleAllocations", f"has({self._attribute()})")
        one = depth - 1
        match self._random.randrange(17):
            case 0 | 1:
                return f"{self._boolean(one)} {self._one('&&', '||')} {self._boolean(one)}"
            case 2:
                return f"!({self._boolean(one)})"
            case 3:
                return f"({self._boolean(one)} ? {self._any(one)} : {self._any(one)})"
            case 4 | 5:
                sign = self._one("==", "!=", "<", "<=", ">", ">=")
                return f"{self._any(one)} {sign} {self._any(one)}"
            case 6:
                return f"{self._any(one)} in {self._one(self._list(one), self._domain())}"
            case 7:
                method = self._one("startsWith", "endsWith", "contains")
                return f"{self._text(one)}.{method}({self._text(one)})"
            case 8:
                return f"{self._text(one)}.matches({self._one(*_PATTERNS, *_STRINGS)})"
            case 9:
                sign = self._one("isGreaterThan", "isLessThan")
                return f"{self._amount(one)}.{sign}({self._amount(one)})"
            case 10:
                return f"{self._amount(one)}.compareTo({self._amount(one)}) {self._one('==', '>', '<')} 0"
            case 11 | 12:
                return self._macro(one)
            case 13:
                name = self._one("contains", "intersects", "equivalent")
                return f"sets.{name}({self._list(one)}, {self._list(one)})"
            case 14:
                return self._bind(one)
            case 15:
                return f"{self._one('isQuantity', 'isSemver')}({self._text(one)})"
            case _:
                return self._any(one)

    def _any(self, depth: int) -> str:
        match self._random.randrange(9):
            case 0 | 1:
                return self._attribute()
            case 2 | 3:
                return self._text(depth)
            case 4:
                return self._number(depth)
            case 5:
                return self._amount(depth)
            case 6:
                return self._one(f"type({self._attribute()})", "string", "int", "null", "b'a'", "device.nope")
            case 7:
                return self._one(*self._names, "name")
            case _:
                return self._boolean(depth - 1)

    def _text(self, depth: int) -> str:
        match self._random.randrange(9 if depth > 0 else 3):
            case 0:
                return self._one(*_STRINGS)
            case 1:
                return "device.driver"
            case 2:
                return self._attribute()
            case 3 | 4:
                return f"{self._text(depth - 1)}.{self._one(*_TEXT_METHODS)}"
            case 5:
                return f"{self._text(depth - 1)}.find({self._one(*_PATTERNS)})"
            case 6:
                return f"({self._text(depth - 1)} + {self._text(depth - 1)})"
            case 7:
                clauses = self._one('"%s"', '"%d"', '"%s-%d"', '"%q"', '"100%%"')
                return f"{clauses}.format({self._list(depth - 1)})"
            case _:
                return f"{self._list(depth - 1)}.join({self._one(*_STRINGS)})"

    def _number(self, depth: int) -> str:
        match self._random.randrange(8 if depth > 0 else 2):
            case 0 | 1:
                return self._one(*_NUMBERS)
            case 2:
                return f"size({self._one(self._text(depth - 1), self._list(depth - 1), self._domain())})"
            case 3:
                sign = self._one("+", "-", "*", "/", "%")
                return f"({self._number(depth - 1)} {sign} {self._number(depth - 1)})"
            case 4:
                return (
                    f"{self._text(depth - 1)}.{self._one('indexOf', 'lastIndexOf')}({self._text(depth - 1)})"
                )
            case 5:
                return (
                    f"{self._amount(depth - 1)}.{self._one('major', 'minor', 'sign', 'asInteger', 'nope')}()"
                )
            case 6:
                return f"int({self._any(depth - 1)})"
            case _:
                return f"dyn({self._any(depth - 1)})"

    def _amount(self, depth: int) -> str:
        match self._random.randrange(8 if depth > 0 else 3):
            case 0 | 1:
                return f"device.capacity[{self._one(*_DOMAINS)}].{self._one('memory', 'multiprocessors')}"
            case 2:
                return self._attribute()
            case 3 | 4:
                return f"quantity({self._text(depth - 1)})"
            case 5:
                return f"semver({self._text(depth - 1)})"
            case 6:
                return f"{self._amount(depth - 1)}.{self._one('add', 'sub')}({self._amount(depth - 1)})"
            case _:
                return self._one(
                    "duration('1s')", "duration('x')", "timestamp('2020-01-01T00:00:00Z')", "ip('::1')"
                )

    def _list(self, depth: int) -> str:
        match self._random.randrange(8 if depth > 0 else 4):
            case 0:
                return f"[{', '.join(self._one(*_NUMBERS) for _ in range(self._random.randrange(4)))}]"
            case 1:
                return f"[{', '.join(self._one(*_STRINGS) for _ in range(self._random.randrange(4)))}]"
            case 2:
                return "[1, 2, 3]"
            case 3:
                return self._one(
                    "[]",
                    "[[1], [2, 3]]",
                    "{'a': 1, 'b': 2}",
                    "[1, 'a']",
                    "lists.range(3)",
                    "{1: 'a', 'b': 2}",
                )
            case 4:
                return f"{self._text(depth - 1)}.split({self._one(*_STRINGS)})"
            case 5:
                return f"{self._text(depth - 1)}.findAll({self._one(*_PATTERNS)})"
            case 6:
                return f"{self._list(depth - 1)}.{self._one(*_LIST_METHODS)}"
            case _:
                return f"[{', '.join(self._any(depth - 1) for _ in range(2))}]"

    def _macro(self, depth: int) -> str:
        over = self._one(self._list(depth), self._domain(), "device.attributes", self._attribute())
        name = f"v{len(self._names)}"
        names = [name] if self._random.randrange(4) else [name, f"{name}b"]
        self._names += names
        macro = self._one("all", "exists", "exists_one", "existsOne", "map", "filter", "transformList")
        body = f"{over}.{macro}({', '.join(names)}, {self._boolean(depth - 1)})"
        del self._names[-len(names) :]
        return body if macro in ("all", "exists", "exists_one", "existsOne") else f"{body}.size() > 0"

    def _bind(self, depth: int) -> str:
        name, value = f"b{len(self._names)}", self._one(self._domain(), self._any(depth), self._list(depth))
        self._names.append(name)
        body = f"cel.bind({name}, {value}, {self._boolean(depth - 1)})"
        self._names.pop()
        return body

    def _domain(self) -> str:
        return f"device.{self._one('attributes', 'capacity')}[{self._one(*_DOMAINS)}]"

    def _attribute(self) -> str:
        match self._random.randrange(8):
            case 0:
                return f"{self._domain()}.{self._one(*_NAMES)}"
            case 1:
                found = f"device.attributes[?{self._one(*_DOMAINS)}].?{self._one(*_NAMES)}"
                return f"{found}.orValue({self._one(*_STRINGS)})"
            case _:
                return f"device.attributes[{self._one(*_DOMAINS)}].{self._one(*_NAMES)}"
