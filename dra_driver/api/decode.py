"""From the raw parameters in an allocation to a checked value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dra_driver.api.config import GROUP_VERSION, KINDS, OpaqueConfig
from dra_driver.api.schema import config_of, field_faults
from dra_driver.errors import InvalidConfigError

MAX_BYTES = 10 * 1024

STRATEGY_PARTS: Mapping[str, str] = {"TimeSlicing": "timeSlicingConfig", "MPS": "mpsConfig"}


def decode(parameters: Any) -> OpaqueConfig:
    """The parameters with defaults filled in.

    Raises: InvalidConfigError, one line that lists every fault with the path of its field.
    """
    kind = _checked_kind(parameters)
    fields = {name: value for name, value in parameters.items() if name not in ("apiVersion", "kind")}
    faults = (*_unfitting_parts(parameters), *field_faults(kind, fields))
    if faults:
        raise InvalidConfigError(f"{kind} is not valid: {'; '.join(faults)}", faults=faults)
    return config_of(kind, fields)


def _unfitting_parts(parameters: Mapping[str, Any]) -> list[str]:
    """Parts of `sharing` that do not fit its strategy: a mistake even when they are empty or null."""
    sharing = parameters.get("sharing")
    strategy = sharing.get("strategy") if isinstance(sharing, Mapping) else None
    if not isinstance(sharing, Mapping) or not isinstance(strategy, str) or strategy not in STRATEGY_PARTS:
        return []
    return [
        f"sharing.{part}: does not fit strategy {strategy}; remove it or use strategy {other}"
        for other, part in STRATEGY_PARTS.items()
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
    _check_word(parameters, "apiVersion", (GROUP_VERSION,), f"use {GROUP_VERSION}")
    return _check_word(parameters, "kind", tuple(KINDS), f"use one of {', '.join(KINDS)}")


def _check_word(parameters: Mapping[str, Any], name: str, known: tuple[str, ...], remedy: str) -> str:
    value = parameters.get(name)
    if value is None:
        raise _invalid(f"{name}: is required; {remedy}")
    if not isinstance(value, str):
        raise _invalid(f"{name}: must be a string; {remedy}")
    if value not in known:
        raise _invalid(f"{name}: {value!r} is not supported; {remedy}")
    return value


def _invalid(fault: str) -> InvalidConfigError:
    return InvalidConfigError(fault, faults=(fault,))


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
