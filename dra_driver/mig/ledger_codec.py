"""The files of the MIG ledger as JSON with a format number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

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
from dra_driver.model.mig import MigPhase, OwnedInstance

FORMAT_VERSION = 1
_PHASES: Mapping[str, MigPhase] = {"creating": "creating", "created": "created", "orphan": "orphan"}


@dataclass(frozen=True, slots=True)
class OwnedMode:
    """MIG mode of a GPU that this driver switched on in boot `boot_id`."""

    gpu_uuid: str
    pci_bus_id: str | None
    boot_id: str


def encode_entry(entry: OwnedInstance) -> bytes:
    """An entry as its file has it."""
    return _as_json(
        {
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
    )


def encode_mode(mode: OwnedMode) -> bytes:
    """The note of a mode as its file has it."""
    return _as_json(
        {
            "version": FORMAT_VERSION,
            "gpuUUID": mode.gpu_uuid,
            "pciBusID": mode.pci_bus_id,
            "bootID": mode.boot_id,
        }
    )


def decode_entry(content: bytes, device: str, path: object) -> OwnedInstance:
    """The entry of a device in the file at `path`. Raises: NewerFormatError, StateError."""
    return parse(
        content, f"MIG ledger file {path}", lambda document: _entry(document, device), known=FORMAT_VERSION
    )


def decode_mode(content: bytes, path: object) -> OwnedMode:
    """The note of a mode in the file at `path`. Raises: NewerFormatError, StateError."""
    return parse(content, f"MIG ledger file {path}", _mode, known=FORMAT_VERSION)


def _as_json(document: JsonObject) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def _entry(document: JsonObject, device: str) -> OwnedInstance:
    """Raises: KeyError, TypeError, StateError."""
    if text(document, "device") != device:
        raise StateError(f"it is the entry of device {document['device']}")
    return OwnedInstance(
        device=device,
        gpu_uuid=text(document, "gpuUUID"),
        pci_bus_id=optional_text(document, "pciBusID"),
        profile_id=number(document, "profileID"),
        profile_name=text(document, "profile"),
        placement=decode_placement(document["placement"]),
        boot_id=text(document, "bootID"),
        phase=_phase(text(document, "phase")),
        gpu_instance_id=optional_number(document, "gpuInstanceID"),
        compute_instance_id=optional_number(document, "computeInstanceID"),
        uuid=optional_text(document, "uuid"),
        gpu_minor=optional_number(document, "gpuMinor"),
    )


def _phase(name: str) -> MigPhase:
    if name not in _PHASES:
        raise StateError(f"phase {name!r} is unknown")
    return _PHASES[name]


def _mode(document: JsonObject) -> OwnedMode:
    """Raises: KeyError, StateError."""
    return OwnedMode(text(document, "gpuUUID"), optional_text(document, "pciBusID"), text(document, "bootID"))
