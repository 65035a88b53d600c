"""Health in files on the node: what the plugin knew before a restart, and which GPUs an administrator has
serviced.

`gpu-dra-driver serviced` writes a file with the GPUs that were reset or replaced, because the NVIDIA driver cannot
always report this. Every instance of the plugin on the node reads the file. A reason with no event after the
recorded time ends with the next poll that finds the GPU healthy, as after an observed reset, so the file can be read
repeatedly. It is valid only until the next boot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dra_driver.base.atomic import read_or_none, write_atomically
from dra_driver.base.fields import (
    Codec,
    Kind,
    NewerFormatError,
    encode_file,
    list_of,
    omittable,
    parse_file,
    required,
)
from dra_driver.base.json_store import JsonStore, log_unreadable
from dra_driver.errors import StateError
from dra_driver.health.rules.state import merged
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from dra_driver.model.schema import JsonObject

FORMAT_VERSION = 1
_FILE = "serviced.json"


@dataclass(frozen=True, slots=True)
class KeptHealth:
    """The content of the health file. `boot_id` and `driver_version` are from the time of writing."""

    boot_id: str
    driver_version: str | None = None
    states: tuple[HealthState, ...] = ()


class HealthStore:
    """One JSON file, written when its content changes. Not thread-safe.

    A power cut may restore the previous content, but it also ends the boot, which invalidates most of the content.
    An unreadable file is set aside even if a newer release wrote it, because health is observed again. Of two
    instances of the plugin, only the leader writes the file, and it reads the file when it begins to lead.
    """

    def __init__(self, path: Path, is_ours: Callable[[], bool] = lambda: True) -> None:
        """`path` ends with `.json`. `is_ours` returns whether this instance leads."""
        self._is_ours = is_ours
        self._was_ours = True
        self._mine: KeptHealth | None = None
        self._name = path.stem
        self._store = JsonStore(
            path.parent,
            "health file",
            lambda _, content: (content, decode(content)),
            log_unreadable(
                unreadable_event="health_unreadable",
                name="file",
                remedy="the plugin reads the health from the GPUs again; inspect the file, then remove it",
            ),
            is_name=lambda name: name == path.stem,
        )
        self._written: bytes | None = None

    def is_outdated(self) -> bool:
        """Whether another instance may have changed the file: true once each time this instance begins to lead."""
        was_ours, self._was_ours = self._was_ours, self._is_ours()
        return self._was_ours and not was_ours

    def load(self) -> KeptHealth | None:
        """Return the health in the file; None if the file is missing. If this instance has saved states before,
        they are merged into the result, and the result is saved.

        An unreadable file is set aside and reported. Raises: StateError if the disk fails.
        """
        found = self._store.get(self._name)
        self._written, kept = (None, None) if found is None else found
        mine = self._mine
        if mine is None:
            return kept
        if kept is not None and kept.boot_id == mine.boot_id:
            states = merged(mine.states, kept.states)
            mine = KeptHealth(mine.boot_id, mine.driver_version or kept.driver_version, states)
        self.save(mine)
        return mine

    def save(self, kept: KeptHealth) -> None:
        """Write the file if its content would change and this instance leads. Raises: StateError."""
        self._mine = kept
        content = encode(kept)
        if self._is_ours() and content != self._written:
            self._store.write(self._name, content, durable=False, whole=True)
            self._written = content


def encode(kept: KeptHealth) -> bytes:
    """Encode the file. States with nothing to remember are left out."""
    ordered = replace(kept, states=tuple(_ordered(kept.states)))
    return encode_file(_KEPT.encode(ordered), FORMAT_VERSION)


def decode(content: bytes) -> KeptHealth:
    """Parse the file. Raises: StateError that says what is wrong."""
    try:
        return parse_file(content, "health file", _KEPT.decode, known=FORMAT_VERSION)
    except NewerFormatError as error:
        raise StateError(str(error)) from error  # so that the file is set aside


def _ordered(states: Iterable[HealthState]) -> list[HealthState]:
    lasting = [
        # Informational reasons from polls, such as a slowdown, come and go too often to be worth a write.
        replace(
            state,
            reasons=tuple(reason for reason in state.reasons if not _is_fleeting(reason)),
            silent_polls=0,
            nvlink_errors=None,
        )
        for state in states
    ]
    kept = [state for state in lasting if state != _without_memory(state)]
    return sorted(kept, key=lambda state: state.target.order)


def _without_memory(state: HealthState) -> HealthState:
    return HealthState(state.target, identity=state.identity, pci_bus_id=state.pci_bus_id)


def _is_fleeting(reason: Reason) -> bool:
    return reason.source == "poll" and reason.severity == Severity.INFORMATION


def _severity(_name: str, value: Any) -> Severity:
    try:
        return Severity[value.upper()]
    except KeyError as error:
        raise StateError(f"severity {value!r} is unknown") from error


def _encode_state(state: HealthState) -> JsonObject:
    return _TARGET.encode(state.target) | _STATE.encode(state)


def _decode_state(_name: str, entry: JsonObject) -> HealthState:
    return _STATE.decode(entry, target=_TARGET.decode(entry))


_REASON = Codec(Reason, severity=required(Kind(_severity, lambda severity: severity.name.lower())))
_TARGET = Codec(HealthTarget)
_STATE = Codec(HealthState, target=None, reasons=omittable(list_of(_REASON.kind), ()))
_KEPT = Codec(KeptHealth, states=required(list_of(Kind(_decode_state, _encode_state))))


class ServicedGpus:
    """The file of serviced GPUs in the plugin directory. `boot_id` identifies the current boot."""

    def __init__(self, plugin_directory: Path, boot_id: str) -> None:
        self._path = plugin_directory / _FILE
        self._boot_id = boot_id

    def times(self) -> Mapping[str, int]:
        """Return when each GPU was last serviced in this boot, in seconds since 1970, by UUID.

        Raises: StateError if the file cannot be read.
        """
        content = read_or_none(self._path)
        if content is None:
            return {}
        boot_id, gpus = parse_file(content, "file of serviced GPUs", _decoded, known=FORMAT_VERSION)
        return gpus if boot_id == self._boot_id else {}

    def add(self, gpu_uuid: str, at: int) -> None:
        """Record that the GPU was serviced before `at`. Raises: StateError."""
        try:
            known = self.times()
        except StateError:
            known = {}  # a damaged file is replaced
        document = {"bootID": self._boot_id, "gpus": {**known, gpu_uuid: at}}
        write_atomically(self._path, encode_file(document, FORMAT_VERSION), durable=False)


def _decoded(fields: JsonObject) -> tuple[str, Mapping[str, int]]:
    """Return the boot ID, and the times by GPU UUID."""
    return str(fields["bootID"]), {str(uuid): int(at) for uuid, at in fields["gpus"].items()}
