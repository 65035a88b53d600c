"""Claim records as versioned JSON. Unknown fields are kept, so that a downgrade loses nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dra_driver.errors import StateError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.steps import Step, WriteCdiSpec

JsonObject = dict[str, Any]

FORMAT_VERSION = 1
_KNOWN = frozenset({"version", "claim", "phase", "bootID", "devices", "steps", "preparedAt"})


def encode(record: ClaimRecord) -> bytes:
    """The record as one JSON document."""
    document = {
        **record.extra,
        "version": FORMAT_VERSION,
        "claim": _encode_claim(record.claim),
        "phase": record.phase,
        "bootID": record.boot_id,
        "devices": [_encode_held(held) for held in record.devices],
        "steps": [{"kind": step.kind} for step in record.steps],
    }
    if record.prepared_at is not None:
        document["preparedAt"] = record.prepared_at
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def decode(content: bytes) -> ClaimRecord:
    """The record in a JSON document. Raises: StateError that says what is wrong with it."""
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            raise StateError("not a JSON object")
        version = document.get("version")
        if not isinstance(version, int) or version < 1:
            raise StateError(f"format version {version!r} is unknown")
        if document["phase"] not in ("preparing", "prepared"):
            raise StateError(f"phase {document['phase']!r} is unknown")
        return ClaimRecord(
            claim=_decode_claim(document["claim"]),
            phase=document["phase"],
            boot_id=_text(document, "bootID"),
            devices=tuple(_decode_held(entry) for entry in document["devices"]),
            steps=tuple(_decode_step(entry) for entry in document["steps"]),
            prepared_at=_optional_text(document, "preparedAt"),
            extra={key: value for key, value in document.items() if key not in _KNOWN},
        )
    except KeyError as error:
        raise StateError(f"field {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"not a claim record: {error}") from error


def _text(entry: JsonObject, name: str) -> str:
    value = entry[name]
    if not isinstance(value, str):
        raise StateError(f"field {name!r} is {value!r}, which is no text")
    return value


def _optional_text(entry: JsonObject, name: str) -> str | None:
    return None if entry.get(name) is None else _text(entry, name)


def _encode_claim(claim: AllocatedClaim) -> JsonObject:
    ref = claim.ref
    return {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "results": [_encode_result(result) for result in claim.results],
        "configs": [_encode_config(config) for config in claim.configs],
    }


def _encode_result(result: DeviceResult) -> JsonObject:
    entry: JsonObject = {
        "request": result.request,
        "driver": result.driver,
        "pool": result.pool,
        "device": result.device,
    }
    if result.admin_access:
        entry["adminAccess"] = True
    if result.share_id is not None:
        entry["shareID"] = result.share_id
    if result.consumed_capacity:
        entry["consumedCapacity"] = dict(result.consumed_capacity)
    return entry


def _encode_config(config: DeviceConfig) -> JsonObject:
    return {
        "source": config.source,
        "requests": list(config.requests),
        "driver": config.driver,
        "parameters": config.parameters,
    }


def _encode_held(held: HeldDevice) -> JsonObject:
    entry: JsonObject = {
        "device": held.device,
        "kind": held.kind,
        "uuid": held.uuid,
        "gpuUUID": held.gpu_uuid,
    }
    if held.admin_access:
        entry["adminAccess"] = True
    if held.share_id is not None:
        entry["shareID"] = held.share_id
    return entry


def _decode_claim(entry: JsonObject) -> AllocatedClaim:
    return AllocatedClaim(
        ref=ClaimRef(_text(entry, "namespace"), _text(entry, "name"), _text(entry, "uid")),
        results=tuple(_decode_result(item) for item in entry["results"]),
        configs=tuple(_decode_config(item) for item in entry.get("configs", [])),
    )


def _decode_result(entry: JsonObject) -> DeviceResult:
    consumed: Mapping[str, str] = entry.get("consumedCapacity") or {}
    return DeviceResult(
        request=_text(entry, "request"),
        driver=_text(entry, "driver"),
        pool=_text(entry, "pool"),
        device=_text(entry, "device"),
        admin_access=bool(entry.get("adminAccess", False)),
        share_id=_optional_text(entry, "shareID"),
        consumed_capacity=dict(consumed),
    )


def _decode_config(entry: JsonObject) -> DeviceConfig:
    return DeviceConfig(
        source=entry["source"],
        requests=tuple(entry["requests"]),
        driver=_optional_text(entry, "driver"),
        parameters=entry["parameters"],
    )


def _decode_held(entry: JsonObject) -> HeldDevice:
    if entry["kind"] not in ("gpu", "mig"):
        raise StateError(
            f"device kind {entry['kind']!r} is of a newer release, which alone can undo it; run that release again"
        )
    return HeldDevice(
        device=_text(entry, "device"),
        kind=entry["kind"],
        uuid=_text(entry, "uuid"),
        gpu_uuid=_text(entry, "gpuUUID"),
        admin_access=bool(entry.get("adminAccess", False)),
        share_id=_optional_text(entry, "shareID"),
    )


def _decode_step(entry: JsonObject) -> Step:
    if entry["kind"] != "write_cdi_spec":
        raise StateError(
            f"step {entry['kind']!r} is of a newer release, which alone can undo it; run that release again"
        )
    return WriteCdiSpec()
