"""Every parser stands a short run, what was found once stays mended, and what is a finding is found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fuzz import targets
from fuzz.inputs import inputs, samples
from fuzz.targets import OF_BYTES, OF_FILES, bounded, check
from hypothesis import find, given, settings

PACKAGE = str(Path(__file__).parents[2] / "dra_driver") + "/"

FOUND = {
    "claim": [b'{"results":[{"request":[],"driver":"","pool":"","device":""}]}', b'{"config":[{"opaque":1}]}'],
    "lock-file": [b"[" * 5000, b'{"gpu_uuid": "GPU-0", "what": 1, "began": 1e999, "since": []}'],
    "cdi-file": [b"[" * 5000],
    "mps-record": [b"[" * 5000, b'{"format":1,"wanted":"running","process":{"pid":1e999,"start_time":1}}'],
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
DOCUMENTS = (
    "claim", "parameters", "record", "lock-file", "cdi-file", "mps-record",
)  # fmt: skip


def steps_of(run: Callable[[], object]) -> set[tuple[str, int, int]]:
    """The pairs of lines of the package that run one after the other in a function."""
    seen: set[tuple[str, int, int]] = set()

    def enter(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        last = 0

        def line(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any]:
            nonlocal last
            seen.add((frame.f_code.co_filename, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("target", [*OF_BYTES, *OF_FILES])
def test_parser_returns_or_raises_what_it_announces(target: str) -> None:
    @settings(max_examples=60)
    @given(inputs(target))
    def some(content: bytes) -> None:
        check(target, content)

    # A target that reaches nothing would pass for ever.
    good = steps_of(lambda: [check(target, content) for content in samples(target)])
    assert len(good) > 5
    if target not in DOCUMENTS:
        some()
        return
    assert steps_of(some) - good, "refusals are reached, which good documents do not do"


@pytest.mark.parametrize("target", FOUND)
def test_parser_stands_what_was_found_before(target: str) -> None:
    for content in FOUND[target]:
        check(target, content)


def test_values_deep_in_a_document_are_replaced() -> None:
    def is_bad(content: bytes) -> bool:
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            return json.loads(content)["containerEdits"]["env"] is None
        return False

    found = find(inputs("cdi-file"), is_bad, settings=settings(max_examples=3000))
    assert json.loads(found)["cdiVersion"] == "0.5.0"


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
