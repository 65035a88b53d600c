"""What the API server's answers to dry runs mean, in its own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dra_driver.model.schema import JsonObject

Outcome = Literal["accepted", "refused", "waits", "not asked"]

_NO_RIGHT = re.compile(r"cannot \w+ resource ")
_ABSENT = (
    re.compile(r'(?P<kind>[A-Za-z]+)(?:\.[\w.-]+)? "(?P<name>[^"]+)" not found'),
    re.compile(r"no (?P<kind>PriorityClass) with name (?P<name>\S+) was found"),
)
_HTTP = re.compile(r" \(HTTP \d+\)\Z")
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server makes of one document.

    `outcome` is "waits" where it can only say it once another document of the files is there, and "not asked" where it
    could not be asked; `text` says why, and of what it refused. `warnings` are the server's own.
    """

    outcome: Outcome
    text: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """An object that one of the files has; `place` is `claims.yaml:12`."""

    kind: str
    name: str
    place: str
    content: JsonObject

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.place})"


def refused(message: str, status: int, made: Sequence[Made]) -> Answer:
    """The answer to a document that the server did not take; `made` are the other documents."""
    message = _HTTP.sub("", message)
    if status == _UNAUTHORIZED or (status == _FORBIDDEN and _NO_RIGHT.search(message)):
        return Answer("not asked", message)
    absent = next((found for pattern in _ABSENT for found in pattern.finditer(message)), None)
    needed = None if absent is None else _among(made, absent["kind"], absent["name"])
    if needed is not None:
        return Answer("waits", f"needs {needed}, which is not in the cluster yet")
    return Answer("refused", message)


def unknown_kind(kind: str, version: str, served: Sequence[str], made: Sequence[Made]) -> Answer:
    """The answer to a document of a kind that the server does not serve in this version. `served` are versions of its
    group."""
    group = version.rpartition("/")[0]
    for one in made:
        spec = one.content.get("spec")
        if one.kind == "CustomResourceDefinition" and isinstance(spec, dict) and spec.get("group") == group:
            names = spec.get("names")
            if isinstance(names, dict) and names.get("kind") == kind:
                return Answer("waits", f"needs {one}, which is not in the cluster yet")
    if served and version not in served:
        return Answer("refused", f"it has no {version}; of this group it has {', '.join(served)}")
    return Answer("refused", f"it has no kind {kind} of {version}; install what brings it, or correct both")


def _among(made: Sequence[Made], kind: str, name: str) -> Made | None:
    """The document that makes what an answer says is absent; there a kind may be written as a resource."""
    for one in made:
        lower = one.kind.lower()
        if one.name == name and kind.lower() in (lower, f"{lower}s", f"{lower}es"):
            return one
    return None
