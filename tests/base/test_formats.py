"""Files as JSON: their fields, and one format number. Files of a newer release are not changed but reported,
and their claims can still be unprepared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from dra_driver.base.fields import Codec, NewerFormatError, parse_file
from dra_driver.errors import StateError
from dra_driver.health.store import HealthStore
from dra_driver.model.claim import Failed, Prepared
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.mps_host.host_files import DaemonRecords, mps_layout
from tests.fakes.preparing import Node
from tests.fakes.samples import GPU_0, GPU_1, MIXED, claim

WANTED, OTHER = claim(GPU_0), claim(GPU_1, uid="uid-2")
GPU = "GPU-1"
MADE = OwnedInstance("gpu-1-mig-1g10gb-19-0", GPU, None, 19, "1g.10gb", Placement(0, 1), "boot-1")


def read(document: Any) -> Any:
    return parse_file(json.dumps(document).encode(), "note", lambda body: body["text"], known=2)


def refusal(answer: Any) -> str:
    assert isinstance(answer, Failed), answer
    return answer.error


def as_newer(path: Path) -> str:
    """Have the file as a newer release may write it; its content."""
    content = json.dumps({"version": 2, "of a newer release": [1]})
    path.write_text(content)
    return content


def test_file_with_the_number_of_its_kind_is_read() -> None:
    assert read({"version": 2, "text": "a", "more": 1}) == "a"


@pytest.mark.parametrize("number", [0, 1, -1, None, True, "2", 2.0, [2]])
def test_any_other_number_is_unknown(number: object) -> None:
    with pytest.raises(StateError, match="is unknown") as caught:
        read({"version": number, "text": "a"})
    assert not isinstance(caught.value, NewerFormatError)


def test_higher_number_is_that_of_a_newer_release_whatever_else_is_in_the_file() -> None:
    for document in ({"version": 3, "text": "a"}, {"version": 3}):
        with pytest.raises(NewerFormatError) as caught:
            read(document)
        assert str(caught.value) == (
            "a newer release of gpu-dra-driver wrote the note (format version 3); this release reads only version 2; "
            "install the newer release again"
        )


@pytest.fixture
def node(memory_path: Path) -> Node:
    """Two claims are prepared, and a newer release has written the record of the first."""
    made = Node(memory_path, MIXED, metadata=("v1beta1",))
    made.prepare(WANTED)
    made.prepare(OTHER)
    as_newer(made.records.directory / "uid-1.json")
    return made


def test_claim_of_a_newer_release_is_refused_and_its_record_left_alone(node: Node, logs: list) -> None:
    before = node.files()
    for _ in range(2):
        assert "a newer release of gpu-dra-driver wrote the claim record (format version 2)" in refusal(
            node.prepare(WANTED)
        )
    assert node.files() == before
    [reported] = [line for line in logs if line["event"] == "record_unreadable"]
    assert (reported["claim_uid"], reported["kept_as"]) == (
        "uid-1",
        str(node.records.directory / "uid-1.json"),
    )
    assert isinstance(node.prepare(OTHER), Prepared)


def test_devices_of_a_claim_of_a_newer_release_are_given_to_no_other_claim(node: Node) -> None:
    assert "is held by" in refusal(node.prepare(claim(GPU_0, uid="uid-3")))


def test_claim_of_a_newer_release_ends_and_is_reported(node: Node, logs: list) -> None:
    assert node.unprepare(WANTED) is None
    assert not [name for name in node.files() if "uid-1" in name]
    assert [line["claim_uid"] for line in logs if line["event"] == "newer_record_removed"] == ["uid-1"]
    assert node.unprepare(OTHER) is None
    assert node.files() == {}
    assert isinstance(node.prepare(WANTED), Prepared)


def test_ending_a_claim_without_a_record_mentions_none(node: Node, logs: list) -> None:
    assert node.unprepare(claim(GPU_0, uid="uid-9")) is None
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == []


def test_daemons_and_health_of_a_newer_release_are_set_aside(tmp_path: Path, logs: list) -> None:
    """Both are found again without the file: daemons by their claims, health by looking."""
    layout = mps_layout(tmp_path)
    layout.root.mkdir()
    (layout.root / "gpu-1.json").write_text('{"format": 3, "daemons": []}')
    as_newer(tmp_path / "health.json")
    assert DaemonRecords(layout).all() == {}
    [line] = logs
    assert line["kept_as"].startswith(f"{layout.root}/gpu-1.json.unreadable-")
    assert line["reason"] == (
        "a newer release of gpu-dra-driver wrote the MPS record (format version 3); this release reads only version "
        "2; install the newer release again"
    )
    assert HealthStore(tmp_path / "health.json").load() is None
    assert [line["event"] for line in logs] == ["mps_record_unreadable", "health_unreadable"]
    assert len(list(tmp_path.rglob("*.unreadable*"))) == 2


@dataclass(frozen=True)
class Kept:
    name: str
    places: tuple[int, ...]
    state: Literal["good", "bad"]
    gpu_uuid: str | None
    counts: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None


def test_codec_of_a_dataclass_leaves_out_defaults_and_checks_types() -> None:
    codec = Codec(Kept)
    least, full = Kept("a", (1,), "good", None), Kept("a", (), "bad", "GPU-1", {"x": 2}, "text")
    assert codec.encode(least) == {"name": "a", "places": [1], "state": "good", "gpuUUID": None}
    assert [codec.decode(codec.encode(one)) for one in (least, full)] == [least, full]
    for wrong, said in (
        ({"places": ["1"]}, "field 'places' is '1', which is not a whole number"),
        ({"state": "odd"}, "state 'odd' is unknown"),
        ({"counts": {"x": "2"}}, "field 'x' is '2', which is not a whole number"),
    ):
        with pytest.raises(StateError, match=re.escape(said)):
            codec.decode(codec.encode(full) | wrong)


def test_codec_of_a_type_that_it_does_not_know_is_refused() -> None:
    @dataclass
    class Odd:
        either: int | str

    with pytest.raises(TypeError, match=r"either: cannot encode .*; pass a Field to the codec"):
        Codec(Odd)
