"""The values of the label `error_type`."""

from __future__ import annotations

from dra_driver.errors import (
    ApiRejectedError,
    ApiUnavailableError,
    ClaimRefusedError,
    DeviceLostError,
    InvalidConfigError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (ApiUnavailableError, "api_unavailable"),
    (ApiRejectedError, "api_rejected"),
    (NvmlUnavailableError, "nvml_unavailable"),
    (DeviceLostError, "device_lost"),
    (ClaimRefusedError, "claim_refused"),
    (InvalidConfigError, "invalid_config"),
    (StateError, "state"),
    (RetryableError, "busy"),
)
_INTERNAL = "internal"

REASONS = (*(reason for _, reason in _REASONS), _INTERNAL)
"""Every value of the label."""


def reason_of(error: Exception) -> str:
    """The value of the label `error_type` for an error."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), _INTERNAL)
