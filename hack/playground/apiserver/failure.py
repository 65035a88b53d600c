"""Refusals in the words of the API server: an HTTP code and a Status object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cause:
    """One validation fault: field path, text, and the API's name for its kind."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ApiFailure(Exception):  # noqa: N818  it is an answer, not a fault of this program
    """Ends a request with a Status object."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details = details
        self.headers = headers or {}

    def status(self) -> dict[str, Any]:
        """The Status object."""
        status: dict[str, Any] = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": self.message,
            "reason": self.reason, "code": self.code,
        }  # fmt: skip
        if self.details is not None:
            status["details"] = self.details
        return status


def _details(group: str, plural: str, name: str) -> dict[str, Any]:
    return {"name": name, "kind": plural} | ({"group": group} if group else {})


def _qualified(group: str, plural: str) -> str:
    return f"{plural}.{group}" if group else plural


def not_found(group: str, plural: str, name: str) -> ApiFailure:
    """404 for an object."""
    text = f'{_qualified(group, plural)} "{name}" not found'
    return ApiFailure(404, "NotFound", text, details=_details(group, plural, name))


def path_not_found() -> ApiFailure:
    """404 for a path: details without a name."""
    return ApiFailure(404, "NotFound", "the server could not find the requested resource", details={})


def already_exists(group: str, plural: str, name: str) -> ApiFailure:
    """409 for a create."""
    text = f'{_qualified(group, plural)} "{name}" already exists'
    return ApiFailure(409, "AlreadyExists", text, details=_details(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str) -> ApiFailure:
    """409 for a stale resource version or a failed precondition."""
    text = f'Operation cannot be fulfilled on {_qualified(group, plural)} "{name}": {why}'
    return ApiFailure(409, "Conflict", text, details=_details(group, plural, name))


def expired(wanted: int, oldest: int) -> ApiFailure:
    """410 for a watch from before the history."""
    return ApiFailure(410, "Expired", f"too old resource version: {wanted} ({oldest})")


def bad_request(message: str) -> ApiFailure:
    """400."""
    return ApiFailure(400, "BadRequest", message)


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiFailure:
    """422 with every fault."""
    listed = str(causes[0]) if len(causes) == 1 else f"[{', '.join(str(cause) for cause in causes)}]"
    qualified = f"{kind}.{group}" if group else kind
    details = {"name": name, "kind": kind} | ({"group": group} if group else {})
    details["causes"] = [  # type: ignore[assignment]
        {"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes
    ]
    return ApiFailure(422, "Invalid", f'{qualified} "{name}" is invalid: {listed}', details=details)
