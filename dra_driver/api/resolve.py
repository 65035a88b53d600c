"""Decodes the opaque parameters of an allocation, and selects those that apply to a device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dra_driver.api.config import (
    DEFAULTS,
    GROUP_VERSION,
    KINDS,
    WORDS,
    DeviceType,
    GpuConfig,
    MaintenanceConfig,
    MigDeviceConfig,
    OpaqueConfig,
    config_of,
    field_faults,
    fits,
)
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import AllocatedClaim, DeviceConfig, DeviceResult
from dra_driver.model.dataclass import dataclass
from dra_driver.model.schema import Words

MAX_BYTES = 10 * 1024

STRATEGY_PARTS: Mapping[str, str] = {"TimeSlicing": "timeSlicingConfig", "MPS": "mpsConfig"}


def decode(parameters: Any, words: Words = WORDS) -> OpaqueConfig:
    """Fill in defaults.

    Raises: InvalidConfigError with a fault of the object as a whole, or all faults of its fields.
    """
    kind = _checked_kind(parameters)
    fields = {name: value for name, value in parameters.items() if name not in ("apiVersion", "kind")}
    faults = (*_unfitting_parts(parameters), *field_faults(kind, fields, words))
    if faults:
        raise InvalidConfigError(f"{kind} is not valid: {'; '.join(faults)}", faults=faults)
    return config_of(kind, fields)


def _unfitting_parts(parameters: Mapping[str, Any]) -> list[str]:
    """Return a fault for each part of `sharing` that does not fit its strategy, even if it is empty or null."""
    sharing = parameters.get("sharing")
    strategy = sharing.get("strategy") if isinstance(sharing, Mapping) else None
    if not isinstance(sharing, Mapping) or not isinstance(strategy, str) or strategy not in STRATEGY_PARTS:
        return []
    return [
        f"sharing.{part}: is not allowed with strategy {strategy}; remove it or use strategy {other}"
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
        raise _invalid(f"the parameters are {size} bytes long; at most {MAX_BYTES} bytes are allowed")
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


_TYPE_NAMES: dict[DeviceType, str] = {"gpu": "a whole GPU", "mig": "a MIG device", "vfio": "a VFIO device"}


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """`entry` describes the allocation entry; None for the defaults."""

    config: OpaqueConfig
    entry: str | None = None


def config_for_result(
    result: DeviceResult, configs: Sequence[DeviceConfig], driver: str, device_type: DeviceType
) -> ResolvedConfig:
    """Return the parameters of one allocated device. Entries are not merged: the last one that applies wins.

    Precedence, lowest first: the defaults, entries of the class in order, entries of the claim in order. An entry
    applies if it names the result's request, in full or by its base name, or if it names no request and its kind fits
    the device.

    Raises: InvalidConfigError if an entry that may apply is invalid or not opaque, names the request but does not fit
    the device, or requires adminAccess that the request lacks (even if a later entry replaces it).
    """
    resolved = ResolvedConfig(DEFAULTS[device_type])
    for index, entry in _by_precedence(configs):
        named = result.request in entry.requests or result.base_request in entry.requests
        if entry.requests and not named:
            continue
        text = _describe(index, entry)
        if entry.driver is None:
            raise _refused(text, "gpu-dra-driver supports only opaque parameters, but the entry has none")
        if entry.driver != driver:
            continue
        try:
            config = decode(entry.parameters)
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{text}: {error}", faults=error.faults) from error
        if fits(config, device_type):
            what = type(config).__name__ if isinstance(config, MaintenanceConfig) else "management"
            if (manages(config) or what != "management") and not result.admin_access:
                raise _refused(text, needs_admin_access(what, result.base_request))
            resolved = ResolvedConfig(config, text)
        elif named:
            raise _refused(
                text,
                f"{type(config).__name__} does not apply to device {result.device} of request {result.request}, "
                f"because the device is {_TYPE_NAMES[device_type]}",
            )
    return resolved


def manages(config: OpaqueConfig) -> bool:
    return isinstance(config, GpuConfig | MigDeviceConfig) and config.management


def asks_for_maintenance(claim: AllocatedClaim) -> bool:
    """Return whether a claim has a MaintenanceConfig, even if a later entry replaces it."""
    given = (entry.parameters for entry in claim.configs)
    return any(isinstance(one, Mapping) and one.get("kind") == MaintenanceConfig.__name__ for one in given)


def needs_admin_access(what: str, request: str) -> str:
    return f"{what} requires adminAccess: true on request {request!r}"


def _by_precedence(configs: Sequence[DeviceConfig]) -> Iterator[tuple[int, DeviceConfig]]:
    for source in ("FromClass", "FromClaim"):
        yield from ((index, entry) for index, entry in enumerate(configs) if entry.source == source)


def _describe(index: int, entry: DeviceConfig) -> str:
    origin = "device class" if entry.source == "FromClass" else "claim"
    requests = f", requests {', '.join(entry.requests)}" if entry.requests else ""
    return f"allocation config {index} from the {origin}{requests}"


def _refused(entry: str, fault: str) -> InvalidConfigError:
    return InvalidConfigError(f"{entry}: {fault}", faults=(fault,))
