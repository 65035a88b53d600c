"""What was checked and what was found, as values, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dra_driver.model.units import counted

JsonObject = dict[str, Any]
Level = Literal["difference", "note"]

_TITLE_WIDTH = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """A `difference` is a fault of the machine or the driver; a `note` is information only."""

    level: Level
    subject: str
    text: str


@dataclass(slots=True)
class Section:
    """One topic: how many values were compared, what was found, and what could not be compared and why."""

    title: str
    checked: int = 0
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def differences(self) -> int:
        """The number of differences."""
        return sum(finding.level == "difference" for finding in self.findings)

    def same(self, subject: str, what: str, ours: object, theirs: object, source: str) -> None:
        """Count a comparison; unequal values are a difference."""
        self.checked += 1
        if ours != theirs:
            self.differs(subject, f"{what}: {_shown(ours)} here, {_shown(theirs)} in {source}")

    def good(self, condition: object, subject: str, text: str) -> None:
        """Count a check; `text` says what is wrong if it fails."""
        self.checked += 1
        if not condition:
            self.differs(subject, text)

    def differs(self, subject: str, text: str) -> None:
        """Add a difference."""
        self.findings.append(Finding("difference", subject, text))

    def note(self, subject: str, text: str) -> None:
        """Add a note."""
        self.findings.append(Finding("note", subject, text))

    def skip(self, text: str) -> None:
        """Say what was not compared, and why."""
        self.skipped.append(text)

    def as_json(self) -> JsonObject:
        """The section for machines."""
        return {
            "title": self.title,
            "checked": self.checked,
            "differences": self.differences,
            "findings": [
                {"level": item.level, "subject": item.subject, "text": item.text} for item in self.findings
            ],
            "notChecked": list(self.skipped),
        }

    def as_lines(self) -> list[str]:
        """The section for people; a line for each finding."""
        if self.differences:
            verdict = counted(self.differences, "difference")
        else:
            verdict = "ok" if self.checked else "not checked"
        checks = f", {counted(self.checked, 'check')}" if self.checked else ""
        lines = [f"{self.title:<{_TITLE_WIDTH}} {verdict}{checks}"]
        marks = {"difference": "DIFFERS", "note": "note"}
        for item in sorted(self.findings, key=lambda finding: finding.level):
            subject = f"{item.subject}: " if item.subject else ""
            lines.append(f"  {marks[item.level]:<11} {subject}{item.text}")
        lines += [f"  {'not checked':<11} {text}" for text in self.skipped]
        return lines


def count_differences(sections: Iterable[Section]) -> int:
    """The number of differences in all sections."""
    return sum(section.differences for section in sections)


def verdict(sections: Iterable[Section]) -> str:
    """The verdict: `OK` or `3 differences`."""
    found = count_differences(sections)
    return counted(found, "difference") if found else "OK"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(str, value))) or "nothing"
    return str(value)
