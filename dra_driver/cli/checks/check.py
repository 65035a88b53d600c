"""What a check of `doctor` is. Checks run side by side, each with a time limit, so that none spoils another."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from dra_driver.base.installation import from_outside, logs
from dra_driver.base.threads import run_in_parallel
from dra_driver.cli.rules.findings import Finding, fail, skip, warn
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
        self._answer: Future[T] = Future()

    def get(self) -> T:
        """Raises: what the reading raised."""
        with self._lock:
            if not self._answer.done():
                try:
                    self._answer.set_result(self._read())
                except Exception as error:  # noqa: BLE001  raised below, each time the value is asked for
                    self._answer.set_exception(error)
        return self._answer.result()

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
    answers = run_in_parallel([partial(_looked, check) for check in checks], len(checks), bound_s)
    late = warn(
        f"not checked: it took longer than {bound_s:g} s",
        "run doctor again; if it stays, `dmesg --level=err,warn` on the node shows what hangs",
    )
    return [
        Outcome(check.name, replace(finding, remedy=finding.remedy and from_outside(finding.remedy)))
        for check, answer in zip(checks, answers, strict=True)
        for finding in (_listed(answer.result()) if answer.done() and not answer.cancelled() else (late,))
    ]


def _listed(found: Finding | Sequence[Finding]) -> Sequence[Finding]:
    return (found,) if isinstance(found, Finding) else found


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
        return of_text(str(error), fails=True)
    except OSError as error:
        return fail(
            f"{error.filename or check.name}: {error.strerror or error}",
            "run doctor in the plugin's pod (`kubectl exec`), or as root on the node",
        )
    except Exception as error:  # noqa: BLE001  one surprise must not hide what the other checks see
        text = " ".join(str(error).split())
        return fail(
            f"the check itself failed: {type(error).__name__}: {text}", "please report this with the output"
        )


def of_text(text: str, *, fails: bool) -> Finding:
    """From a sentence with `; ` before what to do."""
    seen, _, remedy = text.rpartition("; ")
    seen, remedy = (seen, remedy) if seen else (text, logs())
    return fail(seen, remedy) if fails else warn(seen, remedy)


def not_written(directory: Path) -> Finding | None:
    """Why no file can be written to a directory and synced; None if one could. The file is removed again. Its name
    begins with a dot, so that neither the kubelet nor a runtime reads it."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=directory) as file:
            file.write(b"doctor" * 1000)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return fail(f"{directory}: {why}", f"`df -h {directory}` on the node: free some space")
        return fail(
            f"{directory} cannot be written: {why}",
            "mount it writable into the plugin's pod, and run doctor there or as root on the node",
        )
    return None
