"""The process dies in a Prepare: what others get of its devices, and what another allocation or other settings
change. That the next call ends where an uninterrupted one would, `test_crash_matrix_kinds` shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base import atomic as files
from dra_driver.model.claim import Failed, Prepared
from tests.fakes.preparing import Crash, Node
from tests.fakes.samples import GPU_0, GPU_1, MIG_1G, MIXED, claim, result

WANTED = claim(GPU_0, MIG_1G)
Point = Callable[[Node, pytest.MonkeyPatch], None]


def nth(number: int, call: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
    """`call`, but its `number`-th use dies, before or after it did its work."""
    count = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and not after:
            raise Crash
        answer = call(*args, **options)
        if count == number:
            raise Crash
        return answer

    return wrapped


def at_rename(number: int, after: bool = False) -> Point:
    def install(_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "replace", nth(number, Path.replace, after))

    return install


def at_sync(number: int) -> Point:
    def install(_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", nth(number, os.fsync))

    return install


def die(*_args: object) -> None:
    raise Crash


def at_step(name: str) -> Point:
    return lambda node, _monkeypatch: setattr(node.steps, name, die)


PREPARE_POINTS = {
    "before the record is renamed": at_rename(1),
    "after the record is renamed": at_rename(1, after=True),
    "while the record is synced": at_sync(1),
    "while the directory is synced": at_sync(2),
    "before the step": at_step("on_do"),
    "before the spec is renamed": at_rename(2),
    "after the spec is renamed": at_rename(2, after=True),
    "after the step": at_step("after_do"),
    "before the last record": at_rename(3),
    "after the last record": at_rename(3, after=True),
}


def without_temporary(node: Node) -> dict[str, bytes]:
    return {
        name: content for name, content in node.files().items() if not name.endswith(files.TEMPORARY_SUFFIX)
    }


def die_in(node: Node, call: Callable[[], object], point: Point) -> Node:
    with pytest.MonkeyPatch.context() as monkeypatch:
        point(node, monkeypatch)
        with pytest.raises(Crash):
            call()
    return node.restarted()


@pytest.mark.parametrize("point", list(PREPARE_POINTS)[2:])
def test_devices_of_a_dead_prepare_are_not_given_away(node: Node, point: str) -> None:
    following = die_in(node, lambda: node.prepare(WANTED), PREPARE_POINTS[point])
    answer = following.prepare(claim(GPU_0, uid="uid-2"))
    if point == "while the record is synced":  # nothing was renamed yet
        assert isinstance(answer, Prepared)
    else:
        assert isinstance(answer, Failed)
        assert "is held by claim default/claim-uid-1 (UID uid-1)" in answer.error


@pytest.mark.parametrize("point", PREPARE_POINTS.values(), ids=PREPARE_POINTS)
def test_prepare_with_another_allocation_leaves_nothing_of_the_dead_one(node: Node, point: Point) -> None:
    following = die_in(node, lambda: node.prepare(WANTED), point)
    assert isinstance(following.prepare(claim(GPU_1)), Prepared)
    record = following.record_of()
    assert [held.device for held in record.devices] == [GPU_1]
    assert following.specs.list() == {"uid-1": (GPU_1,)}
    assert isinstance(following.prepare(claim(GPU_0, uid="uid-2")), Prepared)


RENAMES_WITH_METADATA = 7
"""Record, metadata and CDI spec of two requests, the claim's CDI spec, record."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, RENAMES_WITH_METADATA + 1))
def test_nothing_is_left_of_a_dead_prepare_when_metadata_is_switched_off_then(
    tmp_path: Path, number: int, after: bool
) -> None:
    wanted = claim(GPU_0, result(MIG_1G, "part"))
    node = Node(tmp_path, MIXED, metadata=("v1beta1", "v1alpha1"))
    following = die_in(node, lambda: node.prepare(wanted), at_rename(number, after))
    following = following.restarted(metadata=())
    assert (following.unprepare(wanted), without_temporary(following)) == (None, {})
    assert list((tmp_path / "plugin").glob("*/*")) == []
