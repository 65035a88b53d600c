"""What the parsers are given: good samples with some edits, JSON documents with other values, and any bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2

_SAMPLES = yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text())
_LARGEST = 1 << 14
_TEXTS = (
    "../", "/", "\\", "..", ".", "\0", "\n", "%2e%2e%2f", "\u202e", "\ud7ff", "{}", "[]", "[" * 200, '{"a":' * 500,
    "null", "true", "false", "-1", "0", "1e999", "-1e999", "NaN", "Infinity", "9" * 30, "9" * 5000, '""', '"', ":",
    ",", '"\\ud800"', "&a [*a]", "!!python/object:os.system", "!!binary x", "2024-13-45", "0x", "<<: *a", "- ",
    "a" * 300,
)  # fmt: skip
_BYTES = (b"\xff", b"\x80\x80", b"\xff" * 9 + b"\x01", b"\xed\xa0\x80")
_TOKENS = (*(text.encode() for text in _TEXTS), *_BYTES)
_PARTS = (
    "..", ".", "/", "a", "\0", "\n", "-", "_", "é", "%2f", "leads-out", "victim", "A", "0", "\u202e", "x" * 120,
)  # fmt: skip

names = st.lists(st.sampled_from(_PARTS), max_size=5).map("".join) | st.text(max_size=20)
"""Names that somebody wrote who wants a path to lead elsewhere."""
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def samples(target: str) -> list[bytes]:
    """The good inputs of a target."""
    if target == "kubelet-message":
        claims = [dra_v1_pb2.Claim(namespace="default", name=f"claim-{n}", uid=f"uid-{n}") for n in range(3)]
        request = dra_v1_pb2.NodePrepareResourcesRequest(claims=claims)
        return [
            request.SerializeToString(),
            registration_pb2.PluginInfo(type="DRAPlugin").SerializeToString(),
        ]
    return [(one if isinstance(one, str) else json.dumps(one)).encode() for one in _SAMPLES[target]]


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """What may come instead of the samples of a target."""
    good = samples(target)
    pieces = st.sampled_from(_TOKENS) | st.sampled_from(good) | st.binary(max_size=4)
    edits = st.tuples(
        st.integers(0, _LARGEST),
        st.sampled_from((0, 0, 1, 2, 4, 8, 32, 256)),
        pieces,
        st.sampled_from((1, 1, 1, 2, 8)),
        st.booleans(),
    )
    edited = st.builds(_edited, st.sampled_from(good), st.lists(edits, max_size=5))
    documents = [one for one in _SAMPLES.get(target, ()) if not isinstance(one, str)]
    anything = edited | st.binary(max_size=64)
    return anything | _with_other_values(documents) if documents else anything


def _edited(content: bytes, edits: Sequence[tuple[int, int, bytes, int, bool]]) -> bytes:
    """With pieces in other places; those that replace a value after a colon come deeper than others."""
    for place, length, piece, times, is_value in edits:
        start = place % (len(content) + 1)
        end = start + length
        if is_value and (colon := content.find(b":", start)) >= 0:
            start = colon + 1
            ends = (content.find(mark, start) for mark in b",}]\n")
            end = min((at for at in ends if at >= 0), default=len(content))
        content = (content[:start] + piece * times + content[end:])[:_LARGEST]
    return content


@st.composite
def _with_other_values(draw: st.DrawFn, documents: Sequence[Any]) -> bytes:
    """A JSON document in which up to three values are others."""
    document = draw(st.sampled_from(documents))
    for _ in range(draw(st.integers(1, 3))):
        document = _changed(document, draw(st.sampled_from(list(_places(document)))), draw(_values))
    return json.dumps(document).encode()


def _places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON document."""
    yield here
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _places(value, (*here, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from _places(value, (*here, index))


def _changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = _changed(document[place[0]], place[1:], value)
    return copy
