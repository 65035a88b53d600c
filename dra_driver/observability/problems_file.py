"""The problems of the node as JSON: the file `problems.json`, which lies there while there are any, and the page
`/problems`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dra_driver.files import formats
from dra_driver.files.atomic import read_or_none
from dra_driver.files.file_lock import UseMark
from dra_driver.model.json_object import JsonObject
from dra_driver.model.problems import NodeProblem, ShownProblem

PROBLEMS_FILE: Final = "problems.json"
RUNNING_LOCK: Final = "running.lock"
_FORMAT = 1


def encode(shown: Iterable[ShownProblem], at: int) -> bytes:
    """The problems as of `at`, in seconds since 1970."""
    listed = [
        {
            "problem": one.problem.code,
            "subject": one.problem.subject,
            "text": one.problem.text,
            "since": one.since,
        }
        for one in shown
    ]
    return formats.encode({"at": at, "problems": listed}, _FORMAT)


def decode(content: bytes) -> Sequence[ShownProblem]:
    """What `encode` wrote. Raises: StateError that says what is wrong with it."""
    return formats.parse(content, "list of problems", _decoded, known=_FORMAT)


def read_problems(directory: Path) -> tuple[bool, Sequence[ShownProblem]]:
    """Whether an instance of the plugin runs, and the problems that the last one wrote down.

    Raises: StateError if either cannot be read.
    """
    runs = UseMark(directory / RUNNING_LOCK).is_held()
    content = read_or_none(directory / PROBLEMS_FILE)
    return runs, () if content is None else decode(content)


def _decoded(fields: JsonObject) -> Sequence[ShownProblem]:
    return [
        ShownProblem(NodeProblem(one["problem"], one["text"], one["subject"]), int(one["since"]))
        for one in fields["problems"]
    ]
