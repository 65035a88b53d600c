"""Checks run in parallel, each with a time limit."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from dra_driver.base.installation import from_outside, logs
from dra_driver.base.threads import run_in_parallel
from dra_driver.cli.rules.findings import Finding, Outcome, fail, warn
from dra_driver.errors import DraDriverError
from dra_driver.model.dataclass import dataclass, replace

T = TypeVar("T")

BOUND_S = 10.0
"""A check may wait for NVML twice: for the list of GPUs, and for what they report."""
Look = Callable[[], Finding | Sequence[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """`look` may raise any error. `slow` is the probable cause if the check does not end in time, and the remedy."""

    name: str
    look: Look
    slow: tuple[str, str] = ("this node is slow", "`dmesg --level=err,warn` on the node shows what hangs")


class Shared(Generic[T]):
    """A value that is read once; each check gets it or the error."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._answer: Future[T] = Future()

    def get(self) -> T:
        with self._lock:
            if not self._answer.done():
                try:
                    self._answer.set_result(self._read())
                except Exception as error:  # noqa: BLE001  raised below, for each caller
                    self._answer.set_exception(error)
        return self._answer.result()

    def or_none(self) -> T | None:
        """Return None after a DraDriverError."""
        try:
            return self.get()
        except DraDriverError:
            return None


def run_checks(checks: Sequence[Check], bound_s: float = BOUND_S) -> list[Outcome]:
    answers = run_in_parallel([partial(_looked, check) for check in checks], len(checks), bound_s)

    def findings(check: Check, answer: Future[Finding | Sequence[Finding]]) -> Sequence[Finding]:
        if answer.done() and not answer.cancelled():
            found = answer.result()
            return (found,) if isinstance(found, Finding) else found
        cause, remedy = check.slow
        again = f"run doctor again; if this happens again, {remedy}"
        return [warn(f"not checked within {bound_s:g} s, probably because {cause}", again)]

    return [
        Outcome(check.name, replace(finding, remedy=finding.remedy and from_outside(finding.remedy)))
        for check, answer in zip(checks, answers, strict=True)
        for finding in findings(check, answer)
    ]


def folded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Merge checks that did not run for the same reason."""
    names: dict[Finding, list[str]] = {}
    for outcome in outcomes:
        if outcome.finding.status in ("SKIP", "WARN"):
            names.setdefault(outcome.finding, []).append(outcome.check)
    lines: list[Outcome] = []
    for outcome in outcomes:
        same = names.get(outcome.finding, [])
        if len(same) < 2:
            lines.append(outcome)
        elif outcome.check == same[0]:
            seen = f"{outcome.finding.seen}: {', '.join(same)}"
            lines.append(Outcome(f"{len(same)} checks", replace(outcome.finding, seen=seen)))
    return lines


def _looked(check: Check) -> Finding | Sequence[Finding]:
    try:
        return check.look()
    except DraDriverError as error:
        return of_text(str(error), fails=True)
    except OSError as error:
        return warn(
            f"{error.filename or check.name}: {error.strerror or error}",
            "run doctor in the plugin's pod (`kubectl exec`), or as root on the node",
        )
    except Exception as error:  # noqa: BLE001  an unexpected error must not hide the other checks' results
        text = " ".join(str(error).split())
        return warn(
            f"the check crashed: {type(error).__name__}: {text}", "please report this with doctor's output"
        )


def of_text(text: str, *, fails: bool) -> Finding:
    seen, _, remedy = text.rpartition("; ")
    seen, remedy = (seen, remedy) if seen else (text, logs())
    return fail(seen, remedy) if fails else warn(seen, remedy)


def not_written(directory: Path) -> Finding | None:
    """Return a finding if no file can be written to a directory and synced.

    The test file's name begins with a dot, so neither the kubelet nor a runtime reads it.
    """
    try:
        with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=directory) as file:
            file.write(b"doctor" * 1000)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return fail(f"{directory}: {why}", f"free some space on the node (`df -h {directory}`)")
        return fail(
            f"cannot write to {directory}: {why}",
            "make it writable in the plugin's pod, and run doctor there or as root on the node",
        )
    return None
