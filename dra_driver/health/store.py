"""What is known of the GPUs' health, kept over restarts of the plugin in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from dra_driver.errors import StateError
from dra_driver.files.formats import JsonObject, NewerFormatError, parse
from dra_driver.files.json_store import JsonStore, UnreadableFile
from dra_driver.journal.step_codec import number, optional_number, optional_text, text
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity

_log = structlog.get_logger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class KeptHealth:
    """The content of the file. `boot_id` and `driver_version` are those of the moment of writing."""

    boot_id: str
    driver_version: str | None = None
    states: tuple[HealthState, ...] = ()


class HealthStore:
    """One JSON file, written when its content changes. A power cut may bring the content before back, but it also ends
    the boot, and with it most of what there is to remember.

    An unreadable file is set aside even if it is of a newer release: health is observed anew, and must be kept from now
    on.
    """

    def __init__(self, path: Path) -> None:
        """`path` ends with `.json`."""
        self._name = path.stem
        self._store = JsonStore(
            path.parent,
            "health file",
            lambda _, content: (content, decode(content)),
            _tell,
            is_name=lambda name: name == path.stem,
        )
        self._written: bytes | None = None

    def load(self) -> KeptHealth | None:
        """What was kept, None if nothing was. A file that cannot be read is set aside and told.

        Raises: StateError if the disk does not answer.
        """
        found = self._store.get(self._name)
        self._written, kept = (None, None) if found is None else found
        return kept

    def save(self, kept: KeptHealth) -> None:
        """Write the file if it would be another. Raises: StateError."""
        content = encode(kept)
        if content != self._written:
            self._store.save(self._name, content, durable=False, whole=True)
            self._written = content


def _tell(found: UnreadableFile) -> None:
    _log.error(
        "health_unreadable",
        reason=found.reason,
        kept_as=str(found.kept_as),
        remedy="health is observed anew; remove the file when it was looked at",
    )


def encode(kept: KeptHealth) -> bytes:
    """The file's content. States in which nothing is remembered are left out."""
    document: JsonObject = {
        "version": FORMAT_VERSION,
        "bootID": kept.boot_id,
        "states": [_encode_state(state) for state in _ordered(kept.states)],
    }
    if kept.driver_version is not None:
        document["driverVersion"] = kept.driver_version
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def decode(content: bytes) -> KeptHealth:
    """The kept health in a JSON document. Raises: StateError that says what is wrong with it."""
    try:
        return parse(content, "health file", _decode, known=FORMAT_VERSION)
    except NewerFormatError as error:
        raise StateError(str(error)) from error  # so that the file is set aside


def _decode(document: JsonObject) -> KeptHealth:
    return KeptHealth(
        text(document, "bootID"),
        optional_text(document, "driverVersion"),
        tuple(_decode_state(entry) for entry in document["states"]),
    )


def _ordered(states: Iterable[HealthState]) -> list[HealthState]:
    lasting = [
        # What comes and goes with the temperature is not worth a write.
        replace(state, reasons=tuple(reason for reason in state.reasons if not _is_fleeting(reason)))
        for state in states
    ]
    kept = [state for state in lasting if state != _without_memory(state)]
    return sorted(kept, key=lambda state: state.target.order)


def _without_memory(state: HealthState) -> HealthState:
    return HealthState(state.target, identity=state.identity, pci_bus_id=state.pci_bus_id)


def _encode_state(state: HealthState) -> JsonObject:
    target = state.target
    entry: JsonObject = {
        "gpuUUID": target.gpu_uuid,
        "gpuInstance": target.gpu_instance_id,
        "computeInstance": target.compute_instance_id,
        "reasons": [_encode_reason(reason) for reason in state.reasons],
        "eccUncorrected": state.ecc_uncorrected,
        "identity": state.identity,
        "setbacks": list(state.setbacks),
        "heldUntil": state.held_until,
        "pciBusID": state.pci_bus_id,
    }
    return {key: value for key, value in entry.items() if value not in (None, [])}


def _is_fleeting(reason: Reason) -> bool:
    return reason.source == "poll" and reason.severity == Severity.INFORMATION


def _encode_reason(reason: Reason) -> JsonObject:
    entry: JsonObject = {
        "key": reason.key,
        "value": reason.value,
        "severity": reason.severity.name.lower(),
        "since": reason.since,
        "lastAt": reason.last_at,
        "text": reason.text,
        "source": reason.source,
    }
    return entry | ({"resetSeen": True} if reason.reset_seen else {})


def _decode_state(entry: JsonObject) -> HealthState:
    return HealthState(
        target=HealthTarget(
            text(entry, "gpuUUID"),
            optional_number(entry, "gpuInstance"),
            optional_number(entry, "computeInstance"),
        ),
        reasons=tuple(_decode_reason(item) for item in entry.get("reasons", [])),
        ecc_uncorrected=optional_number(entry, "eccUncorrected"),
        identity=optional_text(entry, "identity"),
        setbacks=tuple(number({"setbacks": at}, "setbacks") for at in entry.get("setbacks", [])),
        held_until=optional_number(entry, "heldUntil"),
        pci_bus_id=optional_text(entry, "pciBusID"),
    )


def _decode_reason(entry: JsonObject) -> Reason:
    return Reason(
        key=text(entry, "key"),
        value=text(entry, "value"),
        severity=_severity(text(entry, "severity")),
        since=number(entry, "since"),
        last_at=number(entry, "lastAt"),
        text=text(entry, "text"),
        source="poll" if entry["source"] == "poll" else "event",
        reset_seen=entry.get("resetSeen") is True,
    )


def _severity(name: str) -> Severity:
    try:
        return Severity[name.upper()]
    except KeyError as error:
        raise StateError(f"severity {name!r} is unknown") from error
