"""Collects validation faults with their field paths."""

from __future__ import annotations

from typing import Any

from dra_driver.embedded.apiserver.failure import Cause


class FaultList:
    """All faults of one object, in the order in which they were found."""

    def __init__(self) -> None:
        self.causes: list[Cause] = []

    def invalid(self, field: str, value: Any, why: str) -> None:
        """A value that is there and wrong."""
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        self.causes.append(Cause(field, f"Invalid value: {shown}: {why}"))

    def required(self, field: str, why: str = "") -> None:
        """A value that is missing."""
        text = f"Required value: {why}" if why else "Required value"
        self.causes.append(Cause(field, text, "FieldValueRequired"))

    def too_many(self, field: str, number: int, most: int) -> None:
        """More entries than allowed; says so only then."""
        if number > most:
            text = f"Too many: {number}: must have at most {most} items"
            self.causes.append(Cause(field, text, "FieldValueTooMany"))

    def too_long(self, field: str, number: int, most: int) -> None:
        """More bytes than allowed; says so only then."""
        if number > most:
            text = f"Too long: may not be more than {most} bytes"
            self.causes.append(Cause(field, text, "FieldValueTooLong"))

    def duplicate(self, field: str, value: Any) -> None:
        """A value that must be unique and is not."""
        self.causes.append(Cause(field, f'Duplicate value: "{value}"', "FieldValueDuplicate"))
