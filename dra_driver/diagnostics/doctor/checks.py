"""How checks are run: side by side, each with a time limit, so that none can spoil another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dra_driver.diagnostics.rules.findings import Finding, fail, skip
from dra_driver.errors import DraDriverError

T = TypeVar("T")

BOUND_S = 5.0
Look = Callable[[], Finding | Sequence[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check under its name. `look` may raise anything; what it checks one by one has a finding each."""

    name: str
    look: Look


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report."""

    check: str
    finding: Finding


class Shared(Generic[T]):
    """A value that several checks need. It is read once; if that fails, each of them gets the error."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._answer: tuple[T | None, Exception | None] | None = None

    def get(self) -> T:
        """Raises: what the reading raised."""
        with self._lock:
            if self._answer is None:
                try:
                    self._answer = (self._read(), None)
                except Exception as error:  # noqa: BLE001  raised again below, each time the value is asked for
                    self._answer = (None, error)
            value, failure = self._answer
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def or_none(self) -> T | None:
        """None if the reading failed as it may. Raises: a surprise."""
        try:
            return self.get()
        except DraDriverError:
            return None


def run_checks(checks: Sequence[Check], bound_s: float = BOUND_S) -> list[Outcome]:
    """All outcomes in the order of the checks, after `bound_s` seconds at the latest.

    A check that raises, or does not end in time, fails itself and no other.
    """
    found: dict[int, Sequence[Finding]] = {}
    done = threading.Condition()

    def look(number: int, check: Check) -> None:
        findings = _looked(check)
        with done:
            found[number] = (findings,) if isinstance(findings, Finding) else findings
            done.notify_all()

    for number, check in enumerate(checks):
        threading.Thread(target=look, args=(number, check), name=f"check-{number}", daemon=True).start()
    deadline = time.monotonic() + bound_s
    with done:
        while len(found) < len(checks) and (left := deadline - time.monotonic()) > 0:
            done.wait(left)
        answers = dict(found)
    late = fail(
        f"no answer within {bound_s:g} s", "look at the kernel log (`dmesg`) and the network for what hangs"
    )
    return [
        Outcome(check.name, finding)
        for number, check in enumerate(checks)
        for finding in answers.get(number, (late,))
    ]


def folded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """For people: one line, where the first was, for all checks that cannot run for the same cause."""
    names: dict[Finding, list[str]] = {}
    for outcome in outcomes:
        if outcome.finding.status == "SKIP":
            names.setdefault(outcome.finding, []).append(outcome.check)
    lines: list[Outcome] = []
    for outcome in outcomes:
        same = names.get(outcome.finding, [])
        if len(same) < 2:
            lines.append(outcome)
        elif outcome.check == same[0]:
            lines.append(Outcome(f"{len(same)} checks", skip(f"{outcome.finding.seen}: {', '.join(same)}")))
    return lines


def _looked(check: Check) -> Finding | Sequence[Finding]:
    try:
        return check.look()
    except DraDriverError as error:
        seen, _, remedy = str(error).rpartition("; ")
        return (
            fail(seen, remedy) if seen else fail(remedy, "do what the sentence says, then run doctor again")
        )
    except OSError as error:
        return fail(
            f"{error.filename or check.name}: {error.strerror or error}", "run doctor as root on the node"
        )
    except Exception as error:  # noqa: BLE001  one surprise must not hide what the other checks see
        text = " ".join(str(error).split())
        return fail(
            f"the check itself failed: {type(error).__name__}: {text}", "please report this with the output"
        )
