"""Every parser of external bytes returns or raises only documented errors, for any input.

`make fuzz` gives each of them ten times as many inputs as `make test`. Inputs that once failed are kept.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2
from tests.fakes.tables import read_yaml
from tests.security import targets
from tests.security.targets import TARGETS, bounded

FOUND = {
    "claim": [b'{"results":[{"request":[],"driver":"","pool":"","device":""}]}', b'{"config":[{"opaque":1}]}'],
    "cdi-file": [b"[" * 5000],
    "mps-record": [b"[" * 5000, b'{"version":1,"wanted":"running","process":{"pid":1e999,"start_time":1}}'],
    "mps-answer": [b"9" * 5000],
    "proc": [b"DeviceFileMinor: 1\nDeviceFileMode: " + b"9" * 5000, b"9" * 5000 + b" nvidia-caps\n"],
    "config-file": [b"[" * 600, b"nodeName: 2024-13-45"],
    "selector": [b"9" * 5000, b"0x" + b"f" * 5000, rb'"\UFFFFFFFF"', b"(" * 5000, b"!" * 5000, b"a." * 5000,
                 b"'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!'.matches('(a+)+$')",
                 b"cel.bind(a, 'xxxxxxxx', " + b"cel.bind(a, a+a+a+a+a+a+a+a, " * 9 + b"a" + b")" * 10],
    "record": [b"[" * 5000, b'{"version": 1, "phase": []}'],
    "api-refusal": [b"503 " + b"9" * 400, b'429 \n{"details": {"retryAfterSeconds": 1' + b"0" * 400 + b"}}",
                    b'503 \n{"details": [1]}', b"500 \n" + b"[" * 5000],
    "api-watch": [b'""\n', b'{"type":"ERROR","object":[1]}\n', b'{"type":"ERROR","object":{"code":[]}}\n'],
    "api-claim": [b'{"a":' * 2000],
    "log-text": [b" " * 60_000 + b"x", b"a." * 30_000, b"eyJ-" * 15_000],
    "documents": [b"\0", b"a: &x0 [1]\n" + b"".join(b"b%d: &x%d [%s]\n" % (n, n, b", ".join([b"*x%d" % (n - 1)] * 9))
                                            for n in range(1, 9))],
}  # fmt: skip
_SAMPLES = read_yaml(Path(__file__).with_name("samples.yaml"))
_LARGEST = 1 << 14
_TOKENS = (
    "../", "/", "..", "\0", "\n", "%2e%2e%2f", "\u202e", "{}", "[]", "[" * 200, '{"a":' * 500, "null", "true", "-1",
    "1e999", "-1e999", "NaN", "9" * 30, "9" * 5000, '"', ":", ",", '"\\ud800"', "&a [*a]", "!!python/object:os.system",
    "2024-13-45", "0x", "<<: *a", "- ", "a" * 300,
)  # fmt: skip
_BYTES = (b"\xff", b"\x80\x80", b"\xff" * 9 + b"\x01", b"\xed\xa0\x80")
_PARTS = ("..", ".", "/", "a", "\0", "\n", "-", "é", "%2f", "leads-out", "victim", "0", "\u202e", "x" * 120)
names = st.lists(st.sampled_from(_PARTS), max_size=5).map("".join) | st.text(max_size=20)
"""Names designed to make a path lead elsewhere."""
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def good_samples(target: str) -> list[bytes]:
    """Inputs that the parser of a target reads."""
    if target == "kubelet-message":
        claims = [dra_v1_pb2.Claim(namespace="default", name=f"claim-{n}", uid=f"uid-{n}") for n in range(3)]
        request = dra_v1_pb2.NodePrepareResourcesRequest(claims=claims)
        return [
            request.SerializeToString(),
            registration_pb2.PluginInfo(type="DRAPlugin").SerializeToString(),
        ]
    return _as_bytes(_SAMPLES[target])


def refused_samples(target: str) -> list[bytes]:
    """Inputs from which the fuzzer starts too, although the parser refuses them."""
    return _as_bytes(_SAMPLES["refused"].get(target, ()))


def _as_bytes(inputs: Sequence[Any]) -> list[bytes]:
    return [(one if isinstance(one, str) else json.dumps(one)).encode() for one in inputs]


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """Samples of a target with some edits, JSON documents with other values, and any bytes."""
    good = [*good_samples(target), *refused_samples(target)]
    pieces = st.sampled_from([token.encode() for token in _TOKENS] + [*_BYTES, *good])
    edit = st.tuples(st.integers(0, _LARGEST), st.sampled_from((0, 0, 1, 2, 8, 32, 256)), pieces)
    anything = st.builds(edited, st.sampled_from(good), st.lists(edit, max_size=5)) | st.binary(max_size=64)
    documents = [one for one in _SAMPLES.get(target, ()) if not isinstance(one, str)]
    return anything | with_other_values(documents) if documents else anything


def edited(content: bytes, edits: Sequence[tuple[int, int, bytes]]) -> bytes:
    for place, length, piece in edits:
        start = place % (len(content) + 1)
        content = (content[:start] + piece + content[start + length :])[:_LARGEST]
    return content


@st.composite
def with_other_values(draw: st.DrawFn, documents: Sequence[Any]) -> bytes:
    """A JSON document in which up to three values are others."""
    document = draw(st.sampled_from(documents))
    for _ in range(draw(st.integers(1, 3))):
        document = changed(document, draw(st.sampled_from(list(places(document)))), draw(_VALUES))
    return json.dumps(document).encode()


def places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON document."""
    yield here
    entries = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in entries:
        yield from places(value, (*here, key))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = changed(document[place[0]], place[1:], value)
    return copy


@pytest.mark.parametrize("target", TARGETS)
def test_parser_returns_or_raises_what_it_announces(target: str, tmp_path: Path) -> None:
    @settings(suppress_health_check=list(HealthCheck))
    @given(inputs(target))
    def some(content: bytes) -> None:
        check(target, content, tmp_path)

    some()


@pytest.mark.parametrize("target", TARGETS)
def test_parser_reads_each_sample_that_is_good_and_refuses_the_others(target: str, tmp_path: Path) -> None:
    for content in good_samples(target):
        assert check(target, content, tmp_path), content
    for content in refused_samples(target):
        assert not check(target, content, tmp_path), content


@pytest.mark.parametrize("target", FOUND)
def test_parser_is_what_was_found_before(target: str, tmp_path: Path) -> None:
    for content in FOUND[target]:
        check(target, content, tmp_path)


def check(target: str, content: bytes, tmp_path: Path) -> object:
    """Give a parser some bytes, and return what it read.

    Raises: whatever it must not raise; AssertionError for what it must not do.
    """
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory, bounded(len(content)):
        return TARGETS[target](content, Path(directory))


def _spin() -> None:
    while True:
        with suppress(Exception):
            sum(range(100))


def test_too_much_work_and_too_much_memory_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "CPU_S", 0.05)
    with bounded(1):
        pass
    with pytest.raises(AssertionError, match="too much work"), bounded(1):
        _spin()
    with pytest.raises(AssertionError, match="bytes of memory"), bounded(1):
        assert b"x" * (2 * targets.MEMORY)
