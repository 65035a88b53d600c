"""Health in files on the node: what the plugin knew before a restart, and which GPUs an administrator has serviced.

The NVIDIA driver cannot always report that a GPU was reset or replaced, so `gpu-dra-driver serviced` does. A reason
with no event after the recorded time ends with the next poll that finds the GPU healthy. The file is valid only until
the next boot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dra_driver.base.atomic import read_or_none, write_atomically
from dra_driver.base.fields import (
    Codec,
    FileFormat,
    Kind,
    NewerFormatError,
    list_of,
    omittable,
    one_of,
    required,
)
from dra_driver.base.json_store import JsonStore, log_unreadable
from dra_driver.errors import StateError
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.health import HEALTH_FILE, HealthState, HealthTarget, Reason, Severity
from dra_driver.model.problems import NodeProblem
from dra_driver.model.schema import JsonObject

_FILE = "serviced.json"


@dataclass(frozen=True, slots=True)
class KeptHealth:
    """The health file. `known` has the UUIDs of the GPUs that had answered recently."""

    boot_id: str
    driver_version: str | None = None
    states: tuple[HealthState, ...] = ()
    known: tuple[str, ...] = ()


class HealthStore:
    """One JSON file, written when its content changes. Not thread-safe.

    A power cut may restore the previous content, but it also ends the boot, which invalidates most of it.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.stem
        self._store = JsonStore(
            path.parent,
            _HEALTH_FILE.what,
            lambda _, content: decode(content),
            encode,
            log_unreadable(
                unreadable_event="health_unreadable",
                name="file",
                remedy="the plugin reads the health from the GPUs again; inspect the file, then remove it",
                newer="the plugin reads the health from the GPUs again, and cannot save it; install the newer release "
                "again, or remove the file",
            ),
            is_name=lambda name: name == path.stem,
        )
        self._written: bytes | None = None

    def problems(self) -> Sequence[NodeProblem]:
        return self._store.problems()

    def load(self) -> KeptHealth | None:
        self._store.load()
        kept = self._store.get(self._name)
        self._written = None if kept is None else encode(kept)
        return kept

    def save(self, kept: KeptHealth) -> None:
        content = encode(kept)
        if content != self._written:
            self._store.write(self._name, kept, durable=False, whole=True)
        self._written = content


def encode(kept: KeptHealth) -> bytes:
    return _HEALTH_FILE.write(kept)


def decode(content: bytes) -> KeptHealth:
    return _HEALTH_FILE.read(content)


def _encoded(kept: KeptHealth) -> JsonObject:
    return _KEPT.encode(replace(kept, states=tuple(_ordered(kept.states))))


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


_WORDS = one_of("severity", *(one.name.lower() for one in Severity))
_SEVERITY = Kind(
    lambda name, value: Severity[_WORDS.read(name, value).upper()], lambda severity: severity.name.lower()
)


def _encode_state(state: HealthState) -> JsonObject:
    return _TARGET.encode(state.target) | _STATE.encode(state)


def _decode_state(_name: str, entry: JsonObject) -> HealthState:
    return _STATE.decode(entry, target=_TARGET.decode(entry))


_REASON = Codec(Reason, severity=required(_SEVERITY))
_TARGET = Codec(HealthTarget)
_STATE = Codec(HealthState, target=None, reasons=omittable(list_of(_REASON.kind), ()))
_KEPT = Codec(KeptHealth, states=required(list_of(Kind(_decode_state, _encode_state))))
_HEALTH_FILE = FileFormat(HEALTH_FILE, _KEPT.decode, _encoded)


class ServicedGpus:
    def __init__(self, plugin_directory: Path, boot_id: str) -> None:
        self._path = plugin_directory / _FILE
        self._boot_id = boot_id

    def times(self) -> Mapping[str, int]:
        """Return when each GPU was last serviced in this boot, in seconds since 1970, by UUID. Raises: StateError."""
        content = read_or_none(self._path)
        if content is None:
            return {}
        boot_id, gpus = _SERVICED_FILE.read(content)
        return gpus if boot_id == self._boot_id else {}

    def add(self, gpu_uuid: str, at: int) -> None:
        """Record that the GPU was serviced before `at`. Raises: StateError, also if a newer release wrote the file."""
        try:
            known = self.times()
        except NewerFormatError as error:
            raise StateError(f"cannot write {self._path}: {error}, or remove the file") from error
        except StateError:
            known = {}  # a damaged file is replaced
        content = _SERVICED_FILE.write((self._boot_id, {**known, gpu_uuid: at}))
        write_atomically(self._path, content, durable=False)


def _decoded(fields: JsonObject) -> tuple[str, Mapping[str, int]]:
    return str(fields["bootID"]), {str(uuid): int(at) for uuid, at in fields["gpus"].items()}


_SERVICED_FILE = FileFormat(
    "file of serviced GPUs", _decoded, lambda content: {"bootID": content[0], "gpus": dict(content[1])}
)
