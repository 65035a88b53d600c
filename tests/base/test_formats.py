"""Files as JSON: their fields, and their format number."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from dra_driver import __version__
from dra_driver.base.fields import Codec, FileFormat, NewerFormatError
from dra_driver.errors import StateError

NOTE: FileFormat[str] = FileFormat(
    "note", lambda body: body["text"], lambda text: {"text": text}, 3, oldest=2
)


def read(document: Any) -> Any:
    return NOTE.read(json.dumps(document).encode())


@pytest.mark.parametrize("number", [2, 3])
def test_file_with_a_number_of_the_range_is_read(number: int) -> None:
    assert read({"version": number, "text": "a", "more": 1}) == "a"


def test_file_is_written_with_the_highest_number_and_the_release() -> None:
    assert json.loads(NOTE.write("a")) == {"version": 3, "release": __version__, "text": "a"}


@pytest.mark.parametrize("number", [0, 1, -1, None, True, "2", 2.0, [2]])
def test_any_other_number_is_unknown(number: object) -> None:
    with pytest.raises(StateError, match="is unknown") as caught:
        read({"version": number, "text": "a"})
    assert not isinstance(caught.value, NewerFormatError)


@pytest.mark.parametrize(
    ("release", "writer", "wanted"),
    [
        ("9.0.0-rc.1", "gpu-dra-driver 9.0.0-rc.1", "gpu-dra-driver 9.0.0-rc.1 or newer"),
        *(
            (odd, "a newer release of gpu-dra-driver", "the newer release again")
            for odd in (None, __version__, "", "a b", "9" * 41, 9, ["9.0.0"])
        ),
    ],
)
def test_higher_number_is_newer_and_names_the_release_whatever_else_is_in_the_file(
    release: object, writer: str, wanted: str
) -> None:
    for document in ({"version": 4, "text": "a"}, {"version": 4}):
        with pytest.raises(NewerFormatError) as caught:
            read(document | {"release": release})
        assert str(caught.value) == (
            f"{writer} wrote the note, which release {__version__} cannot read: its format version is 4, and this "
            f"release reads 2 to 3; install {wanted}"
        )


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
        ({"state": 5}, "field 'state' is 5, which is not a string"),
        ({"counts": {"x": "2"}}, "field 'x' is '2', which is not a whole number"),
    ):
        with pytest.raises(StateError, match=re.escape(said)):
            codec.decode(codec.encode(full) | wrong)
    with pytest.raises(NewerFormatError, match="state 'odd' is unknown"):
        codec.decode(codec.encode(full) | {"state": "odd"})


def test_codec_of_a_type_that_it_does_not_know_is_refused() -> None:
    @dataclass
    class Odd:
        either: int | str

    with pytest.raises(TypeError, match=r"either: cannot encode .*; pass a Field to the codec"):
        Codec(Odd)
