"""Claim records as JSON with a format number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dra_driver.errors import StateError
from dra_driver.files.formats import JsonObject, parse
from dra_driver.journal.step_codec import (
    decode_held,
    decode_step,
    encode_held,
    encode_step,
    optional_text,
    text,
)
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceConfig, DeviceResult, Pods, pods_from
from dra_driver.model.record import ClaimRecord

FORMAT_VERSION = 1


def encode(record: ClaimRecord) -> bytes:
    """The record as one JSON document."""
    return json.dumps(_encode(record), separators=(",", ":"), sort_keys=True).encode()


def decode(content: bytes) -> ClaimRecord:
    """The record in a JSON document.

    Raises: NewerFormatError, and StateError that says what is wrong with it.
    """
    return parse(content, "claim record", _decode, known=FORMAT_VERSION)


def _decode(document: JsonObject) -> ClaimRecord:
    """Raises: StateError, KeyError, ValueError, TypeError, AttributeError."""
    if document["phase"] not in ("preparing", "prepared"):
        raise StateError(f"phase {document['phase']!r} is unknown")
    return ClaimRecord(
        claim=_decode_claim(document["claim"]),
        phase=document["phase"],
        boot_id=text(document, "bootID"),
        devices=tuple(decode_held(entry) for entry in document["devices"]),
        steps=tuple(decode_step(entry) for entry in document["steps"]),
        prepared_at=optional_text(document, "preparedAt"),
    )


def _encode(record: ClaimRecord) -> JsonObject:
    document = {
        "version": FORMAT_VERSION,
        "claim": _encode_claim(record.claim),
        "phase": record.phase,
        "bootID": record.boot_id,
        "devices": [encode_held(held) for held in record.devices],
        "steps": [encode_step(step) for step in record.steps],
    }
    if record.prepared_at is not None:
        document["preparedAt"] = record.prepared_at
    return document


def _encode_claim(claim: AllocatedClaim) -> JsonObject:
    ref = claim.ref
    entry: JsonObject = {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "results": [_encode_result(result) for result in claim.results],
        "configs": [_encode_config(config) for config in claim.configs],
    }
    if claim.pod_claim_name is not None:
        entry["podClaimName"] = claim.pod_claim_name
    if claim.pods is not None:
        entry["pods"] = [{"name": pod.name, "uid": pod.uid} for pod in claim.pods]
    return entry


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


def _decode_claim(entry: JsonObject) -> AllocatedClaim:
    return AllocatedClaim(
        ref=ClaimRef(text(entry, "namespace"), text(entry, "name"), text(entry, "uid")),
        results=tuple(_decode_result(item) for item in entry["results"]),
        configs=tuple(_decode_config(item) for item in entry.get("configs", [])),
        pod_claim_name=optional_text(entry, "podClaimName"),
        pods=_decode_pods(entry.get("pods")),
    )


def _decode_pods(entries: Any) -> Pods:
    """The pods; None if the field is not readable: they are information for people."""
    return pods_from(entries) if isinstance(entries, list) else None


def _decode_result(entry: JsonObject) -> DeviceResult:
    consumed: Mapping[str, str] = entry.get("consumedCapacity") or {}
    return DeviceResult(
        request=text(entry, "request"),
        driver=text(entry, "driver"),
        pool=text(entry, "pool"),
        device=text(entry, "device"),
        admin_access=bool(entry.get("adminAccess", False)),
        share_id=optional_text(entry, "shareID"),
        consumed_capacity=dict(consumed),
    )


def _decode_config(entry: JsonObject) -> DeviceConfig:
    return DeviceConfig(
        source=entry["source"],
        requests=tuple(entry["requests"]),
        driver=optional_text(entry, "driver"),
        parameters=entry["parameters"],
    )
