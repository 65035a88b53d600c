"""The ledger of the GPU instances that this driver makes: one file a device, shared with a second instance
of the plugin during a rolling update.

Nothing is synced. A power cut may lose an entry, tear it or bring one back, but it also destroys every GPU instance and
ends every MIG mode that we switched on, so the ledger describes nothing that still exists.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from dra_driver.errors import StateError
from dra_driver.files.json_store import JsonStore, UnreadableFile, open_directory
from dra_driver.mig.ledger_codec import ENTRY, MODE, OwnedMode, decode, decode_entry, encode
from dra_driver.model.ids import is_dns_label
from dra_driver.model.mig import OwnedInstance

_log = structlog.get_logger(__name__)

V = TypeVar("V")
Slot = tuple[str, int, int]
"""GPU UUID, profile ID and start: where a GPU instance is or was."""

_WHAT = "MIG ledger file"
_MODE_PREFIX = "mode-"
_SAFE_GPU_UUID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}\Z")
_REMEMBERED_S = 30.0


class _LastSeen(Generic[V]):
    """The last seen value of each key, and the values that went away in the last 30 s, by us or the other instance."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._there: dict[str, V] = {}
        self._gone: dict[V, float] = {}
        self._lock = threading.Lock()

    def note(self, key: str, value: V | None) -> None:
        """The key has this value now; None means that it is gone, and the moment is remembered."""
        with self._lock:
            before = self._there.pop(key, None)
            if value is not None:
                self._there[key] = value
            elif before is not None:
                self._gone[before] = self._clock()

    def keys(self) -> set[str]:
        """The keys that had a value when last looked at."""
        with self._lock:
            return set(self._there)

    def gone(self) -> frozenset[V]:
        """The values that went away in the last 30 s."""
        limit = self._clock() - _REMEMBERED_S
        with self._lock:
            self._gone = {value: moment for value, moment in self._gone.items() if moment >= limit}
            return frozenset(self._gone)


class MigLedger:
    """Entries in `directory`, named by device, and a file for each GPU whose MIG mode we switched on; see `JsonStore`.

    A GPU instance or mode whose file cannot be read counts as somebody else's from then on.
    """

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
        reader: Callable[[UnreadableFile], None] | None = None,
    ) -> None:
        """A `reader` only looks: it is told of what cannot be read, and every file stays where it is."""
        self._directory = directory
        tell, only_reads = reader or _tell, reader is not None
        self._entries = JsonStore(
            directory, _WHAT, self._decode_entry, tell, is_name=_is_device, only_reads=only_reads
        )
        self._modes = JsonStore(
            directory, _WHAT, self._decode_mode, tell, is_name=_is_mode, only_reads=only_reads
        )
        self._seen_slots: _LastSeen[tuple[str, Slot]] = _LastSeen(clock)
        self._seen_modes: _LastSeen[tuple[str, str]] = _LastSeen(clock)

    def open(self, boot_id: str) -> None:
        """Create the directory, and clear away what a killed writer left, and what a power cut tore. Raises:
        StateError."""
        open_directory(
            self._directory,
            boot_id,
            lambda subject: _log.info("mig_ledger_entry_torn", subject=subject),
            durable=False,
        )

    def get(self, device: str) -> OwnedInstance | None:
        """The entry of a device, None if there is none that can be read. Raises: StateError."""
        entry = self._entries.get(_checked_device(device))
        if entry is None:
            self._seen_slots.note(device, None)
        else:
            self._note(entry)
        return entry

    def all(self) -> Mapping[str, OwnedInstance]:
        """Every readable entry by device. Raises: StateError if the directory cannot be listed."""
        entries = self._entries.all()
        for entry in entries.values():
            self._note(entry)
        for device in self._seen_slots.keys() - entries.keys():
            self.get(device)  # which remembers where it was, unless it has come meanwhile
        return entries

    def save(self, entry: OwnedInstance) -> None:
        """Write the entry. As nothing is synced, an error with which the disk takes it only later is not seen. Raises:
        StateError."""
        self.get(entry.device)  # the file of a newer release is not written over
        self._entries.save(entry.device, encode(ENTRY, entry), durable=False, whole=False)
        self._note(entry)

    def delete(self, device: str) -> None:
        """Remove a device's entry; nothing happens if there is none. Raises: StateError."""
        self.get(device)  # so that it is remembered where it was
        self._entries.delete(device, durable=False)
        self._seen_slots.note(device, None)

    def owned_lately(self, boot_id: str) -> frozenset[Slot]:
        """Where instances of ours of this boot are, or were until 30 s ago: a look at the hardware that began
        before a removal must not take our own instance for somebody else's.

        Raises: StateError.
        """
        now = {(entry.gpu_uuid, *entry.slot) for entry in self.all().values() if entry.boot_id == boot_id}
        return frozenset(now | {slot for boot, slot in self._seen_slots.gone() if boot == boot_id})

    # --- MIG mode ------------------------------------------------------------------------------

    def mode_owned(self, gpu_uuid: str, boot_id: str) -> bool:
        """Whether we switched the GPU's MIG mode on in this boot. Raises: StateError."""
        mode = self._mode(gpu_uuid)
        return mode is not None and mode.boot_id == boot_id

    def own_mode(self, gpu_uuid: str, pci_bus_id: str | None, boot_id: str) -> None:
        """Remember that we switch the GPU's MIG mode on; an error with which the disk takes it only later is not seen.

        Raises: StateError.
        """
        self._mode(gpu_uuid)  # the file of a newer release is not written over
        content = encode(MODE, OwnedMode(gpu_uuid, pci_bus_id, boot_id))
        self._modes.save(_mode_name(gpu_uuid), content, durable=False, whole=False)
        self._seen_modes.note(gpu_uuid, (gpu_uuid, boot_id))

    def disown_mode(self, gpu_uuid: str) -> None:
        """Forget it; nothing happens if there is nothing. Raises: StateError."""
        self._mode(gpu_uuid)  # so that it is remembered whose it was
        self._modes.delete(_mode_name(gpu_uuid), durable=False)
        self._seen_modes.note(gpu_uuid, None)

    def mode_owned_lately(self, gpu_uuid: str, boot_id: str) -> bool:
        """As `mode_owned`; also where it was given up, or was seen to be gone through the other instance, less than
        30 s ago, for a look at the hardware that began before that. Raises: StateError."""
        return self.mode_owned(gpu_uuid, boot_id) or (gpu_uuid, boot_id) in self._seen_modes.gone()

    def owned_modes(self) -> Mapping[str, OwnedMode]:
        """The GPUs whose MIG mode we switched on, in any boot, by UUID. Raises: StateError."""
        found = {name.removeprefix(_MODE_PREFIX): mode for name, mode in self._modes.all().items()}
        for gpu_uuid, mode in found.items():
            self._seen_modes.note(gpu_uuid, (gpu_uuid, mode.boot_id))
        for gpu_uuid in self._seen_modes.keys() - found.keys():
            self._mode(gpu_uuid)  # which remembers whose it was, unless it has come meanwhile
        return found

    def _mode(self, gpu_uuid: str) -> OwnedMode | None:
        mode = self._modes.get(_mode_name(gpu_uuid))
        self._seen_modes.note(gpu_uuid, None if mode is None else (gpu_uuid, mode.boot_id))
        return mode

    # --- files ---------------------------------------------------------------------------------

    def _note(self, entry: OwnedInstance) -> None:
        self._seen_slots.note(entry.device, (entry.boot_id, (entry.gpu_uuid, *entry.slot)))

    def _decode_entry(self, device: str, content: bytes) -> OwnedInstance:
        return decode_entry(content, device, self._entries.path(device))

    def _decode_mode(self, name: str, content: bytes) -> OwnedMode:
        return decode(MODE, content, self._modes.path(name))


def _is_device(name: str) -> bool:
    return is_dns_label(name) and not name.startswith(_MODE_PREFIX)


def _is_mode(name: str) -> bool:
    gpu_uuid = name.removeprefix(_MODE_PREFIX)
    return gpu_uuid != name and _SAFE_GPU_UUID.fullmatch(gpu_uuid) is not None


def _checked_device(device: str) -> str:
    """Raises: StateError for a name that could lead elsewhere."""
    if not _is_device(device):
        raise StateError(f"device name {device!r} is not usable as a file name; the device is refused")
    return device


def _mode_name(gpu_uuid: str) -> str:
    """Raises: StateError for a UUID that could lead elsewhere."""
    name = f"{_MODE_PREFIX}{gpu_uuid}"
    if not _is_mode(name):
        raise StateError(f"GPU UUID {gpu_uuid!r} is not usable as a file name; the GPU is refused")
    return name


def _tell(found: UnreadableFile) -> None:
    remedy = (
        "the GPU instance or MIG mode that it spoke of is left alone from now on; undo it by hand (nvidia-smi mig) if "
        "nobody needs it, then remove the file"
    )
    if found.is_newer:
        remedy = (
            "the GPU instance or MIG mode that it speaks of is left alone until that release is installed again; to "
            "give it up for good, undo it by hand (nvidia-smi mig) and remove the file"
        )
    _log.error(
        "mig_ledger_unreadable",
        subject=found.name,
        reason=found.reason,
        kept_as=str(found.kept_as),
        remedy=remedy,
    )
