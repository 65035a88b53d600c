"""From the raw parameters in an allocation to a checked value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dra_driver.api.config import GROUP_VERSION, KINDS, OpaqueConfig
from dra_driver.api.schema import read_fields
from dra_driver.errors import InvalidConfigError

MAX_BYTES = 10 * 1024

_PARTS = {"TimeSlicing": "timeSlicingConfig", "MPS": "mpsConfig"}


def decode(parameters: Any) -> OpaqueConfig:
    """The parameters with defaults filled in.

    Raises: InvalidConfigError, one line that lists every fault with the path of its field.
    """
    kind = _checked_kind(parameters)
    faults = _unfitting_parts(parameters)
    config = read_fields(kind, parameters, faults)
    if config is None or faults:
        raise InvalidConfigError(f"{kind} is not valid: {'; '.join(faults)}", faults=tuple(faults))
    return config


def _unfitting_parts(parameters: Mapping[str, Any]) -> list[str]:
    """Parts of `sharing` that do not fit its strategy: a mistake even when they are empty or null."""
    sharing = parameters.get("sharing")
    strategy = sharing.get("strategy") if isinstance(sharing, Mapping) else None
    if not isinstance(sharing, Mapping) or not isinstance(strategy, str) or strategy not in _PARTS:
        return []
    return [
        f"sharing.{part}: does not fit strategy {strategy}; remove it or use strategy {other}"
        for other, part in _PARTS.items()
        if part in sharing and other != strategy
    ]


def _checked_kind(parameters: Any) -> str:
    if not isinstance(parameters, Mapping):
        raise _invalid(
            f"the parameters must be an object with apiVersion and kind, not {_type_name(parameters)}"
        )
    try:
        size = len(json.dumps(parameters, separators=(",", ":"), ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"the parameters are not valid JSON: {error}") from error
    if size > MAX_BYTES:
        raise _invalid(f"the parameters have {size} bytes; at most {MAX_BYTES} are allowed")
    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if version != GROUP_VERSION:
        raise _invalid(f"apiVersion: {version!r} is not supported; use {GROUP_VERSION}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _invalid(f"kind: {kind!r} is not supported; use one of {', '.join(KINDS)}")
    return kind


def _invalid(fault: str) -> InvalidConfigError:
    return InvalidConfigError(fault, faults=(fault,))


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
