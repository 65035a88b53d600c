"""Collects validation faults with their field paths."""

from __future__ import annotations

from typing import Any

from playground.apiserver.failure import Cause


class FaultList:
    """All faults of one object, in the order in which they were found."""

    def __init__(self) -> None:
        self.causes: list[Cause] = []

    def invalid(self, field: str, value: Any, why: str) -> None:
        """A value that is wrong."""
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        self.causes.append(Cause(field, f"Invalid value: {shown}: {why}"))

    def required(self, field: str, why: str = "") -> None:
        """A value that is missing."""
        text = f"Required value: {why}" if why else "Required value"
        self.causes.append(Cause(field, text, "FieldValueRequired"))

    def too_many(self, field: str, number: int, most: int) -> None:
        """Adds a fault if there are more entries than allowed."""
        if number > most:
            text = f"Too many: {number}: must have at most {most} items"
            self.causes.append(Cause(field, text, "FieldValueTooMany"))

    def too_long(self, field: str, number: int, most: int) -> None:
        """Adds a fault if there are more bytes than allowed."""
        if number > most:
            text = f"Too long: may not be more than {most} bytes"
            self.causes.append(Cause(field, text, "FieldValueTooLong"))

    def duplicate(self, field: str, value: Any) -> None:
        """A value that occurs twice and must be unique."""
        self.causes.append(Cause(field, f'Duplicate value: "{value}"', "FieldValueDuplicate"))
