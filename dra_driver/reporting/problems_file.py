"""The problems of the node and its failing claims as JSON: the file `problems.json`, which lies there while there are
any, and the page `/problems`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from dra_driver.base.atomic import read_or_none
from dra_driver.base.fields import NUMBER, TEXT, Shape, encode_file, needed, one_of, parse_file
from dra_driver.base.file_lock import UseMark
from dra_driver.model.claim import ClaimRef
from dra_driver.model.problems import FailingClaim, NodeProblem, ShownProblem
from dra_driver.model.schema import JsonObject

PROBLEMS_FILE: Final = "problems.json"
RUNNING_LOCK: Final = "running.lock"
_FORMAT = 1


class Reported(NamedTuple):
    """What the plugin reports of its node."""

    problems: tuple[ShownProblem, ...] = ()
    failing: tuple[FailingClaim, ...] = ()


def encode(reported: Reported, at: int) -> bytes:
    """The report as of `at`, in seconds since 1970."""
    listed = [
        {
            "problem": one.problem.code,
            "subject": one.problem.subject,
            "text": one.problem.text,
            "since": one.since,
        }
        for one in reported.problems
    ]
    failing = [_FAILING.encode(one) for one in reported.failing]
    return encode_file({"at": at, "problems": listed, "failingClaims": failing}, _FORMAT)


def decode(content: bytes) -> Reported:
    """What `encode` wrote. Raises: StateError that says what is wrong with it."""
    return parse_file(content, "list of problems", _decoded, known=_FORMAT)


def read_problems(directory: Path) -> tuple[bool, Reported]:
    """Whether an instance of the plugin runs, and what the last one wrote down.

    Raises: StateError if either cannot be read.
    """
    runs = UseMark(directory / RUNNING_LOCK).is_held()
    content = read_or_none(directory / PROBLEMS_FILE)
    return runs, Reported() if content is None else decode(content)


def _decoded(fields: JsonObject) -> Reported:
    problems = (
        ShownProblem(NodeProblem(one["problem"], one["text"], one["subject"]), int(one["since"]))
        for one in fields["problems"]
    )
    return Reported(tuple(problems), tuple(map(_FAILING.decode, fields["failingClaims"])))


_REF = Shape(ClaimRef, namespace=needed(TEXT), name=needed(TEXT), uid=needed(TEXT, "uid"))
_FAILING = Shape(
    FailingClaim,
    ref=needed(_REF.kind, "claim"),
    operation=needed(one_of("operation", "prepare", "unprepare")),
    since=needed(NUMBER),
    last_at=needed(NUMBER),
    count=needed(NUMBER),
    error=needed(TEXT),
)
