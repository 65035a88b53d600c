"""The API server's error responses: HTTP codes and Status objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cause:
    """A validation error: the field's path, a text, and the API's name for the reason."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ApiFailure(Exception):  # noqa: N818  a response, not an error of this program
    """An error response with a Status object."""

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
        """Return the Status object."""
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
    """Return a 404 response for an object."""
    text = f'{_qualified(group, plural)} "{name}" not found'
    return ApiFailure(404, "NotFound", text, details=_details(group, plural, name))


def path_not_found() -> ApiFailure:
    """Return a 404 response for a path; its `details` are empty."""
    return ApiFailure(404, "NotFound", "the server could not find the requested resource", details={})


def already_exists(group: str, plural: str, name: str) -> ApiFailure:
    """Return a 409 response to a create request."""
    text = f'{_qualified(group, plural)} "{name}" already exists'
    return ApiFailure(409, "AlreadyExists", text, details=_details(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str) -> ApiFailure:
    """Return a 409 response for a stale resource version or a failed precondition."""
    text = f'Operation cannot be fulfilled on {_qualified(group, plural)} "{name}": {why}'
    return ApiFailure(409, "Conflict", text, details=_details(group, plural, name))


def expired(wanted: int, oldest: int) -> ApiFailure:
    """Return a 410 response for a watch from a version that is older than the history."""
    return ApiFailure(410, "Expired", f"too old resource version: {wanted} ({oldest})")


def bad_request(message: str) -> ApiFailure:
    """Return a 400 response."""
    return ApiFailure(400, "BadRequest", message)


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiFailure:
    """Return a 422 response with all causes."""
    listed = str(causes[0]) if len(causes) == 1 else f"[{', '.join(str(cause) for cause in causes)}]"
    qualified = f"{kind}.{group}" if group else kind
    details = {"name": name, "kind": kind} | ({"group": group} if group else {})
    details["causes"] = [  # type: ignore[assignment]
        {"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes
    ]
    return ApiFailure(422, "Invalid", f'{qualified} "{name}" is invalid: {listed}', details=details)
