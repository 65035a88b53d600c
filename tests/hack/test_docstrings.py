"""Docstrings are short enough to be read, and none only repeats the name of its function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 45_000
LONG_LINES = 25
SAYS_NOTHING = re.compile(
    r"(a|an|and|are|as|be|by|does|for|from|get|has|have|if|in|is|it|its|new|of|on|or|return|returned|set|so|that|the|them|"
    r"then|there|these|this|those|to|true|value|was|were|what|when|whether|which|with)"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Described(NamedTuple):
    """A module, class or function and its docstring, which is empty if it has none."""

    place: str
    node: ast.AST
    name: str
    owner: ast.AST | None
    text: str


@cache
def described() -> Sequence[Described]:
    return [*_described()]


def _described() -> Iterator[Described]:
    for path in sorted((ROOT / "dra_driver").rglob("*.py")):
        if "pb" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        owners = {
            child: parent
            for parent in ast.walk(tree)
            if isinstance(parent, ast.ClassDef | Function)
            for child in parent.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                name, owner = getattr(node, "name", path.stem), owners.get(node)
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}"
                yield Described(place, node, name, owner, ast.get_docstring(node) or "")


def stems(text: str) -> set[str]:
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {
        re.sub(r"(ies|ied|ing|ed|es|e|s|y)$", "", word) for word in words if not SAYS_NOTHING.fullmatch(word)
    }


def test_docstrings_have_no_more_words_than_anyone_reads() -> None:
    words = sum(len(one.text.split()) for one in described())
    assert words <= MOST_WORDS, (
        f"the docstrings of dra_driver have {words} words, at most {MOST_WORDS} are wanted: say what the signature and "
        "the code do not say, once"
    )


def test_no_docstring_only_repeats_the_names_of_the_signature() -> None:
    repeats = []
    for one in described():
        arguments = [argument.arg for argument in ast.walk(one.node) if isinstance(argument, ast.arg)]
        known = stems(
            " ".join((one.name.replace("_", " "), getattr(one.owner, "name", ""), *arguments)).replace(
                "_", " "
            )
        )
        if one.text and isinstance(one.node, Function) and stems(one.text) <= known:
            repeats.append(f"{one.place}: {one.text}")
    assert not repeats, "remove these docstrings:\n" + "\n".join(repeats)


def test_long_public_functions_say_what_their_callers_must_know() -> None:
    silent = [
        one.place
        for one in described()
        if isinstance(one.node, Function) and not isinstance(one.owner, Function)
        if not one.name.startswith("_") and not one.text
        if (one.node.end_lineno or 0) - one.node.lineno > LONG_LINES
    ]
    assert not silent, f"write a docstring: {', '.join(silent)}"
