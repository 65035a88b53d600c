"""A coverage-guided fuzzer in plain Python: inputs that reach new lines are kept and mutated further.

What counts as a finding: an exception that the parser does not announce, more executed lines or more memory than its
input's size allows, and a call that does not come back. Lines are counted, not seconds, so a finding is one on every
machine.
"""

from __future__ import annotations

import random
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "dra_driver") + "/"

LINES, LINES_PER_BYTE = 20_000, 400
MEMORY, MEMORY_PER_BYTE = 4 << 20, 2_000
LARGEST_INPUT = 1 << 16
HANG_S = 20
_MEMORY_EVERY = 100
_MOST_TRIES = 300

_TEXTS = (
    "../", "/", "\\", "..", ".", "\0", "\n", "%2e%2e%2f", "\u202e", "\ud7ff", "{}", "[]", "[" * 2000, '{"a":' * 500,
    "null", "true", "false", "-1", "0", "1e999", "-1e999", "NaN", "Infinity", "9" * 30, "9" * 5000, '""', '"', ":",
    ",", '"\\ud800"', "&a [*a]", "!!python/object:os.system", "!!binary x", "2024-13-45", "0x", "<<: *a", "- ",
    "a" * 300,
)  # fmt: skip
_BYTES = (b"\xff", b"\x80\x80", b"\xff" * 9 + b"\x01", b"\xed\xa0\x80")
_TOKENS = (*(text.encode() for text in _TEXTS), *_BYTES)


@dataclass(frozen=True, slots=True)
class Target:
    """A parser. `run` returns for whatever the parser announces and raises for what it must not do."""

    name: str
    seeds: tuple[bytes, ...]
    run: Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that should have been harmless, and its effect."""

    target: str
    content: bytes
    fault: str


@dataclass(slots=True)
class Report:
    """The result of one target."""

    target: str
    runs: int = 0
    corpus: list[bytes] = field(default_factory=list)
    places: int = 0
    findings: list[Finding] = field(default_factory=list)


class TooMuchWork(BaseException):
    """More lines than the input's size allows. No Exception, so that no parser takes it for one of its own."""


class Hang(BaseException):
    """A call that does not come back, as in a regular expression that backtracks."""


class Trace:
    """The pairs of lines that follow one another in the files below `code`, over all runs."""

    def __init__(self, code: str = PACKAGE) -> None:
        self._code = code
        self.seen: set[tuple[CodeType, int, int]] = set()
        self._new = 0
        self._left = 0

    def run(self, call: Callable[[bytes], object], content: bytes) -> int:
        """The number of pairs that are new. Raises: whatever the call raises, TooMuchWork."""
        self._new, self._left = 0, LINES + LINES_PER_BYTE * len(content)
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call(content)
        finally:
            sys.settrace(before)
        return self._new

    def _enter(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any] | None:
        if event != "call" or not frame.f_code.co_filename.startswith(self._code):
            return None
        code, last = frame.f_code, 0

        def line(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                self._left -= 1
                if self._left < 0:
                    raise TooMuchWork
                pair = (code, last, frame.f_lineno)
                last = frame.f_lineno
                if pair not in self.seen:
                    self.seen.add(pair)
                    self._new += 1
            return line

        return line


def fuzz(
    target: Target,
    rng: random.Random,
    goes_on: Callable[[int], bool],
    kept: Sequence[bytes] = (),
    *,
    code: str = PACKAGE,
) -> Report:
    """Mutate the target's seeds and the `kept` inputs of earlier runs while `goes_on(runs)`; a finding ends it."""
    report, trace = Report(target.name), Trace(code)
    for content in [*target.seeds, *kept]:
        _try(target, content, trace, report, keep=True)
    while not report.findings and goes_on(report.runs):
        _try(target, mutated(rng, report.corpus), trace, report)
    report.places = len(trace.seen)
    return report


def _try(target: Target, content: bytes, trace: Trace, report: Report, *, keep: bool = False) -> None:
    report.runs += 1
    try:
        with _bounded_time():
            is_new = trace.run(target.run, content) > 0
            if is_new or keep or report.runs % _MEMORY_EVERY == 0:
                _check_memory(target, content)
    except (Exception, TooMuchWork, Hang) as error:
        report.findings.append(Finding(target.name, content, f"{type(error).__name__}: {error}"[:500]))
        return
    if is_new or keep:
        report.corpus.append(content)


def _check_memory(target: Target, content: bytes) -> None:
    tracemalloc.start()
    try:
        target.run(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MEMORY + MEMORY_PER_BYTE * len(content):
        raise MemoryError(f"{peak} bytes for an input of {len(content)}")


@contextmanager
def _bounded_time() -> Iterator[None]:
    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise Hang(f"no answer within {HANG_S} s")

    # Time of this process: a busy machine makes no finding.
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def mutated(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A child of an input of the corpus; late ones are chosen more often, as they lie deeper."""
    content = bytearray(corpus[max(rng.randrange(len(corpus)), rng.randrange(len(corpus)))])
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        rng.choice(_MUTATIONS)(rng, content, corpus)
    return bytes(content[:LARGEST_INPUT])


def _place(rng: random.Random, content: bytearray) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 1, 2, 4, 8, 32, 256)))


def _flip(rng: random.Random, content: bytearray, _corpus: Sequence[bytes]) -> None:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _replace(rng: random.Random, content: bytearray, _corpus: Sequence[bytes]) -> None:
    if content:
        content[rng.randrange(len(content))] = rng.randrange(256)


def _remove(rng: random.Random, content: bytearray, _corpus: Sequence[bytes]) -> None:
    start, end = _place(rng, content)
    del content[start:end]


def _repeat(rng: random.Random, content: bytearray, _corpus: Sequence[bytes]) -> None:
    start, end = _place(rng, content)
    content[start:start] = content[start:end] * rng.choice((1, 2, 16, 128))


def _insert(rng: random.Random, content: bytearray, _corpus: Sequence[bytes]) -> None:
    start, end = _place(rng, content)
    content[start : end if rng.random() < 0.5 else start] = rng.choice(_TOKENS)


def _splice(rng: random.Random, content: bytearray, corpus: Sequence[bytes]) -> None:
    other = bytearray(rng.choice(corpus))
    start, end = _place(rng, other)
    at, until = _place(rng, content)
    content[at:until] = other[start:end] if rng.random() < 0.5 else other[start:]


def _value(rng: random.Random, content: bytearray, _corpus: Sequence[bytes]) -> None:
    """Another value after a colon of a JSON or YAML document: deeper than random bytes come."""
    colons = [place for place, byte in enumerate(content) if byte == ord(":")]
    if colons:
        start = rng.choice(colons) + 1
        ends = [end for end in (content.find(mark, start) for mark in b",}]\n") if end >= 0]
        content[start : min(ends, default=len(content))] = rng.choice(_TOKENS)


_MUTATIONS = (_flip, _replace, _remove, _repeat, _insert, _splice, _value, _value)


def smaller(finding: Finding, fails: Callable[[bytes], bool]) -> bytes:
    """The input with every part taken out that it does without, as far as some hundred tries get."""
    content, size, tries = finding.content, max(1, len(finding.content) // 2), 0
    while True:
        start = 0
        while start < len(content):
            tries += 1
            if tries > _MOST_TRIES:
                return content
            shorter = content[:start] + content[start + size :]
            if fails(shorter):
                content = shorter
            else:
                start += size
        if size == 1:
            return content
        size //= 2
