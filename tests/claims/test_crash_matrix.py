"""The process dies at every write; the next instance ends where an uninterrupted one would."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dra_driver.files import atomic as files
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


def at_unlink(number: int, after: bool = False) -> Point:
    def install(_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "unlink", nth(number, Path.unlink, after))

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
UNPREPARE_POINTS = {
    "before the undo": at_step("on_undo"),
    "before the spec is removed": at_unlink(1),
    "after the spec is removed": at_unlink(1, after=True),
    "after the undo": at_step("after_undo"),
    "while the record is removed": at_unlink(3),
    "after the record is removed": at_unlink(3, after=True),
}


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, dict[str, bytes]]:
    node = Node(tmp_path_factory.mktemp("uninterrupted"), MIXED)
    answer = node.prepare(WANTED)
    assert isinstance(answer, Prepared)
    return answer, node.files()


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


@pytest.mark.parametrize("point", PREPARE_POINTS.values(), ids=PREPARE_POINTS)
def test_prepare_ends_the_same_when_the_one_before_died(
    node: Node, point: Point, uninterrupted: tuple[Prepared, dict[str, bytes]]
) -> None:
    following = die_in(node, lambda: node.prepare(WANTED), point)
    assert (following.prepare(WANTED), without_temporary(following)) == uninterrupted


@pytest.mark.parametrize("point", PREPARE_POINTS.values(), ids=PREPARE_POINTS)
def test_unprepare_ends_empty_when_the_prepare_before_died(node: Node, point: Point) -> None:
    following = die_in(node, lambda: node.prepare(WANTED), point)
    assert (following.unprepare(WANTED), without_temporary(following)) == (None, {})


@pytest.mark.parametrize("point", PREPARE_POINTS.values(), ids=PREPARE_POINTS)
def test_devices_are_free_for_others_after_the_unprepare_of_a_dead_prepare(node: Node, point: Point) -> None:
    following = die_in(node, lambda: node.prepare(WANTED), point)
    following.unprepare(WANTED)
    assert isinstance(following.prepare(claim(GPU_0, MIG_1G, uid="uid-2")), Prepared)


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
    record = following.records.get("uid-1")
    assert record is not None
    assert [held.device for held in record.devices] == [GPU_1]
    assert following.specs.list() == {"uid-1": (GPU_1,)}
    assert isinstance(following.prepare(claim(GPU_0, uid="uid-2")), Prepared)


@pytest.mark.parametrize("point", UNPREPARE_POINTS.values(), ids=UNPREPARE_POINTS)
def test_unprepare_ends_empty_when_the_one_before_died(node: Node, point: Point) -> None:
    node.prepare(WANTED)
    following = die_in(node, lambda: node.unprepare(WANTED), point)
    assert (following.unprepare(WANTED), without_temporary(following)) == (None, {})


@pytest.mark.parametrize("point", UNPREPARE_POINTS.values(), ids=UNPREPARE_POINTS)
def test_prepare_after_a_dead_unprepare_ends_as_if_it_never_was(
    node: Node, point: Point, uninterrupted: tuple[Prepared, dict[str, bytes]]
) -> None:
    node.prepare(WANTED)
    following = die_in(node, lambda: node.unprepare(WANTED), point)
    assert (following.prepare(WANTED), without_temporary(following)) == uninterrupted


@pytest.mark.parametrize("point", PREPARE_POINTS.values(), ids=PREPARE_POINTS)
def test_second_prepare_may_die_as_well(
    node: Node,
    point: Point,
    uninterrupted: tuple[Prepared, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = die_in(node, lambda: node.prepare(WANTED), point)
    with monkeypatch.context() as patch:
        point(second, patch)
        with suppress(Crash):
            second.prepare(WANTED)
    third = second.restarted()
    assert (third.prepare(WANTED), without_temporary(third)) == uninterrupted


# Record, metadata and CDI spec of two requests, the claim's CDI spec, record.
RENAMES_WITH_METADATA = 7
DESCRIBED = claim(GPU_0, result(MIG_1G, "part"))


def described_node(directory: Path) -> Node:
    return Node(directory, MIXED, metadata=("v1beta1", "v1alpha1"))


def contents(node: Node) -> dict[str, bytes]:
    """As `without_temporary`, wherever the node's directory lies."""
    return {
        name: content.replace(str(node.directory).encode(), b"")
        for name, content in without_temporary(node).items()
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, RENAMES_WITH_METADATA + 1))
def test_prepare_with_metadata_ends_the_same_when_the_one_before_died(
    tmp_path: Path, number: int, after: bool
) -> None:
    whole = described_node(tmp_path / "whole")
    answer = whole.prepare(DESCRIBED)
    assert isinstance(answer, Prepared)
    dying = described_node(tmp_path / "dying")
    following = die_in(dying, lambda: dying.prepare(DESCRIBED), at_rename(number, after))
    assert (following.prepare(DESCRIBED), contents(following)) == (answer, contents(whole))
    assert (following.unprepare(DESCRIBED), without_temporary(following)) == (None, {})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, RENAMES_WITH_METADATA + 1))
def test_nothing_is_left_of_a_dead_prepare_with_metadata(tmp_path: Path, number: int, after: bool) -> None:
    node = described_node(tmp_path)
    following = die_in(node, lambda: node.prepare(DESCRIBED), at_rename(number, after))
    # The setting may have been switched off in between.
    following = following.restarted(metadata=())
    assert (following.unprepare(DESCRIBED), without_temporary(following)) == (None, {})
    assert list((tmp_path / "plugin").glob("*/*")) == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 3, 4, 5])
def test_unprepare_with_metadata_ends_empty_when_the_one_before_died(
    tmp_path: Path, number: int, after: bool
) -> None:
    """The claim's CDI spec (2 is one in YAML, which is not there), one of metadata for each request, the record."""
    node = described_node(tmp_path)
    node.prepare(DESCRIBED)
    following = die_in(node, lambda: node.unprepare(DESCRIBED), at_unlink(number, after))
    assert (following.unprepare(DESCRIBED), without_temporary(following)) == (None, {})
    assert list((tmp_path / "plugin").glob("*/*")) == []
