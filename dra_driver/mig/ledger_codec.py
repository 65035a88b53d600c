"""The files of the MIG ledger as versioned JSON. Unknown fields are kept at every level."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dra_driver.errors import StateError
from dra_driver.files.formats import JsonObject, parse
from dra_driver.journal.step_codec import (
    decode_placement,
    encode_placement,
    number,
    optional_number,
    optional_text,
    text,
)
from dra_driver.model.json_fields import unknown_fields, with_unknown_fields
from dra_driver.model.mig import MigPhase, OwnedInstance

FORMAT_VERSION = 1
_PHASES: Mapping[str, MigPhase] = {"creating": "creating", "created": "created", "orphan": "orphan"}


@dataclass(frozen=True, slots=True)
class OwnedMode:
    """MIG mode of a GPU that this driver switched on in boot `boot_id`."""

    gpu_uuid: str
    pci_bus_id: str | None
    boot_id: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeptEntry:
    """An entry as its file has it; `extra` are the fields that a newer release wrote, at whatever level."""

    entry: OwnedInstance
    extra: Mapping[str, Any] = field(default_factory=dict)


def encode_entry(kept: KeptEntry) -> bytes:
    """An entry as its file has it."""
    return _as_json(_known_of_entry(kept), kept.extra)


def encode_mode(mode: OwnedMode) -> bytes:
    """The note of a mode as its file has it."""
    return _as_json(_known_of_mode(mode), mode.extra)


def decode_entry(content: bytes, device: str, path: object) -> KeptEntry:
    """The entry of a device in the file at `path`. Raises: NewerFormatError, StateError."""
    return parse(
        content, f"MIG ledger file {path}", lambda document: _entry(document, device), known=FORMAT_VERSION
    )


def decode_mode(content: bytes, path: object) -> OwnedMode:
    """The note of a mode in the file at `path`. Raises: NewerFormatError, StateError."""
    return parse(content, f"MIG ledger file {path}", _mode, known=FORMAT_VERSION)


def _as_json(known: JsonObject, extra: Mapping[str, Any]) -> bytes:
    return json.dumps(with_unknown_fields(known, extra), separators=(",", ":"), sort_keys=True).encode()


def _known_of_entry(kept: KeptEntry) -> JsonObject:
    """An entry without the fields of a newer release."""
    entry = kept.entry
    return {
        "version": FORMAT_VERSION,
        "device": entry.device,
        "gpuUUID": entry.gpu_uuid,
        "pciBusID": entry.pci_bus_id,
        "profileID": entry.profile_id,
        "profile": entry.profile_name,
        "placement": encode_placement(entry.placement),
        "bootID": entry.boot_id,
        "phase": entry.phase,
        "gpuInstanceID": entry.gpu_instance_id,
        "computeInstanceID": entry.compute_instance_id,
        "uuid": entry.uuid,
        "gpuMinor": entry.gpu_minor,
    }


def _entry(document: JsonObject, device: str) -> KeptEntry:
    """Raises: KeyError, TypeError, StateError."""
    # An older release marked so what it could not destroy; that is an orphan now.
    is_leaving = bool(document.get("leaving", False))
    document = {name: value for name, value in document.items() if name != "leaving"}
    if text(document, "device") != device:
        raise StateError(f"it is the entry of device {document['device']}")
    entry = OwnedInstance(
        device=device,
        gpu_uuid=text(document, "gpuUUID"),
        pci_bus_id=optional_text(document, "pciBusID"),
        profile_id=number(document, "profileID"),
        profile_name=text(document, "profile"),
        placement=decode_placement(document["placement"]),
        boot_id=text(document, "bootID"),
        # A phase of a newer release says as little as a creation that was cut off: the hardware is looked at.
        phase="orphan" if is_leaving else _PHASES.get(text(document, "phase"), "creating"),
        gpu_instance_id=optional_number(document, "gpuInstanceID"),
        compute_instance_id=optional_number(document, "computeInstanceID"),
        uuid=optional_text(document, "uuid"),
        gpu_minor=optional_number(document, "gpuMinor"),
    )
    return KeptEntry(entry, unknown_fields(document, _known_of_entry(KeptEntry(entry))))


def _known_of_mode(mode: OwnedMode) -> JsonObject:
    """The note of a mode without the fields of a newer release."""
    return {
        "version": FORMAT_VERSION,
        "gpuUUID": mode.gpu_uuid,
        "pciBusID": mode.pci_bus_id,
        "bootID": mode.boot_id,
    }


def _mode(document: JsonObject) -> OwnedMode:
    """Raises: KeyError, StateError."""
    mode = OwnedMode(text(document, "gpuUUID"), optional_text(document, "pciBusID"), text(document, "bootID"))
    return replace(mode, extra=unknown_fields(document, _known_of_mode(mode)))
