"""What is known of the GPUs' health, kept over restarts of the plugin in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from dra_driver.core.unknownfields import unknown_fields, with_unknown_fields
from dra_driver.errors import StateError
from dra_driver.model.health import HealthState, Reason, Severity, Subject
from dra_driver.state.files import (
    UNREADABLE,
    Stamp,
    read_plain,
    set_aside,
    stamp_at,
    state_error,
    write_atomically,
)
from dra_driver.state.formats import check_version
from dra_driver.state.stepcodec import number, optional_number, optional_text, text

_log = structlog.get_logger(__name__)

JsonObject = dict[str, Any]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class KeptHealth:
    """The content of the file. `boot_id` and `driver_version` are those of the moment of writing."""

    boot_id: str
    driver_version: str | None = None
    states: tuple[HealthState, ...] = ()


class HealthStore:
    """One JSON file, written when its content differs. A power cut may bring the content before back: it ends the
    boot, and with it most of what there is to remember.

    Fields that a newer release wrote are kept as long as what they belong to is there. What cannot be read is set
    aside even if it is of a newer release: health is observed anew, and must be kept from now on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: bytes | None = None
        self._unknown: Mapping[str, Any] = {}

    def load(self) -> KeptHealth | None:
        """What was kept, None if nothing was. A file that cannot be read is set aside and told.

        Raises: StateError if the disk does not answer.
        """
        stamp: Stamp | None = None
        try:
            stamp = stamp_at(self._path)
            content = read_plain(self._path)
            kept = decode(content)
        except FileNotFoundError:
            self._written, self._unknown = None, {}
            return None
        except OSError as error:
            if stamp is None or error.errno not in UNREADABLE:
                raise state_error("read the kept health", self._path, error) from error
            self._set_aside(error.strerror or str(error), stamp)
        except StateError as error:
            self._set_aside(str(error), stamp)
        else:
            self._written, self._unknown = content, _unknown_in(content, kept)
            return kept
        self._written, self._unknown = None, {}
        return None

    def save(self, kept: KeptHealth) -> None:
        """Write the file if it would be another. Raises: StateError."""
        content = encode(kept, self._unknown)
        if content != self._written:
            write_atomically(self._path, content, durable=False)
            self._written = content

    def _set_aside(self, reason: str, stamp: Stamp | None) -> None:
        try:
            aside = set_aside(self._path, "health file", stamp)
        except StateError as error:
            aside, reason = self._path, f"{reason}; {error}"
        if aside is None:
            return
        _log.error(
            "health_unreadable",
            reason=reason,
            kept_as=str(aside),
            remedy="health is observed anew; remove the file when it was looked at",
        )


def encode(kept: KeptHealth, unknown: Mapping[str, Any] | None = None) -> bytes:
    """The file's content, with the fields that only a newer release knows. States in which nothing is remembered
    are left out."""
    document = with_unknown_fields(_encode(kept, _ordered(kept.states)), unknown or {})
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def _encode(kept: KeptHealth, states: Iterable[HealthState]) -> JsonObject:
    document: JsonObject = {
        "version": FORMAT_VERSION,
        "bootID": kept.boot_id,
        "states": [_encode_state(state) for state in states],
    }
    if kept.driver_version is not None:
        document["driverVersion"] = kept.driver_version
    return document


def decode(content: bytes) -> KeptHealth:
    """The kept health in a JSON document. Raises: StateError that says what is wrong with it."""
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            raise StateError("not a JSON object")
        check_version(document)
        return KeptHealth(
            text(document, "bootID"),
            optional_text(document, "driverVersion"),
            tuple(_decode_state(entry) for entry in document["states"]),
        )
    except KeyError as error:
        raise StateError(f"field {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"not the health of GPUs: {error}") from error


def _unknown_in(content: bytes, kept: KeptHealth) -> JsonObject:
    """What else is in the document that `kept` was read from."""
    return unknown_fields(json.loads(content), _encode(kept, kept.states))


def _ordered(states: Iterable[HealthState]) -> list[HealthState]:
    lasting = [
        # What comes and goes with the temperature is not worth a write.
        replace(state, reasons=tuple(reason for reason in state.reasons if not _is_fleeting(reason)))
        for state in states
    ]
    kept = [state for state in lasting if state != HealthState(state.subject, identity=state.identity)]
    return sorted(kept, key=lambda state: state.subject.order)


def _encode_state(state: HealthState) -> JsonObject:
    subject = state.subject
    entry: JsonObject = {
        "gpuUUID": subject.gpu_uuid,
        "gpuInstance": subject.gpu_instance_id,
        "computeInstance": subject.compute_instance_id,
        "reasons": [_encode_reason(reason) for reason in state.reasons],
        "eccUncorrected": state.ecc_uncorrected,
        "identity": state.identity,
        "setbacks": list(state.setbacks),
        "heldUntil": state.held_until,
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
        subject=Subject(
            text(entry, "gpuUUID"),
            optional_number(entry, "gpuInstance"),
            optional_number(entry, "computeInstance"),
        ),
        reasons=tuple(_decode_reason(item) for item in entry.get("reasons", [])),
        ecc_uncorrected=optional_number(entry, "eccUncorrected"),
        identity=optional_text(entry, "identity"),
        setbacks=tuple(number({"setbacks": at}, "setbacks") for at in entry.get("setbacks", [])),
        held_until=optional_number(entry, "heldUntil"),
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
