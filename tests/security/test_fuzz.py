"""The fuzzer finds what it is for, every parser stands a short run of it, and what it once found stays mended."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fuzz.loop import LINES, MEMORY, Report, Target, fuzz, smaller
from fuzz.parsers import targets

from dra_driver.model.units import parse_quantity

FOUND = {
    "claim": [b'{"results":[{"request":[],"driver":"","pool":"","device":""}]}', b'{"config":[{"opaque":1}]}'],
    "lock-file": [b"[" * 5000, b'[["uid", 1e999]]'],
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


@pytest.fixture(scope="module")
def known(scratch: Path) -> dict[str, Target]:
    return {target.name: target for target in targets(scratch)}


def short_run(target: Target, runs: int, *more: bytes) -> Report:
    return fuzz(target, random.Random(target.name), lambda done: done < runs, more)


def test_no_parser_fails_on_inputs_near_its_own(known: dict[str, Target]) -> None:
    reports = [short_run(target, 80) for target in known.values()]
    assert [finding for report in reports for finding in report.findings] == []
    # A target that reaches nothing would pass for ever.
    assert {report.target: report.places for report in reports if report.places < 5} == {}
    assert len(reports) > 20


def test_no_parser_fails_on_what_was_found_before(known: dict[str, Target]) -> None:
    for name, inputs in FOUND.items():
        assert short_run(known[name], 0, *inputs).findings == [], name


def _planted(content: bytes) -> None:
    """Without guidance all three bytes would have to come right at once."""
    if content[:1] != b"1":
        return
    if content[1:2] != b"k":
        return
    if content[2:3] == b"!":
        raise KeyError("planted")


def test_a_fault_behind_several_checks_is_found_and_made_small() -> None:
    target = Target("planted", (b"0j ",), _planted)
    report = fuzz(target, random.Random(7), lambda runs: runs < 20_000, code=__file__)
    [finding] = report.findings
    assert finding.fault == "KeyError: 'planted'"
    assert [content[:2] for content in report.corpus if content.startswith(b"1")][-1] == b"1k", "step by step"

    def fails(content: bytes) -> bool:
        try:
            _planted(content)
        except KeyError:
            return True
        return False

    assert smaller(finding, fails) == b"1k!"


def test_too_much_work_and_too_much_memory_are_findings() -> None:
    def work(content: bytes) -> None:
        for number in range(LINES if content == b"bad" else 1):
            parse_quantity(str(number))  # no two are the same: it knows the answers that it gave

    def memory(content: bytes) -> None:
        bytearray(2 * MEMORY if content == b"bad" else 1)

    for run, fault in ((work, "TooMuchWork"), (memory, "MemoryError")):
        assert fuzz(Target("ok", (b"good",), run), random.Random(1), lambda _runs: False).findings == []
        [finding] = fuzz(Target("bad", (b"bad",), run), random.Random(1), lambda _runs: False).findings
        assert finding.fault.startswith(fault)


def test_the_same_seed_repeats_a_run(known: dict[str, Target]) -> None:
    first, second = (short_run(known["record"], 200) for _ in range(2))
    assert first.corpus == second.corpus
    assert json.loads(first.corpus[0])["version"] == 1
