"""The ledger of the GPU instances that this driver makes: one file a device, shared with a second instance
of the plugin during a rolling update.

Nothing is synced. A power cut may lose an entry, tear it or bring one back, but it also destroys every GPU instance and
ends every MIG mode that we switched on, so the ledger describes nothing that still exists.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from dra_driver.base.fields import Shape
from dra_driver.base.json_store import JsonStore, UnreadableFile, open_directory
from dra_driver.mig.ledger_codec import ENTRY, MODE, OwnedMode, decode_entry, decode_mode, encode
from dra_driver.mig.rules.ownership import Slot, instances_to_withhold
from dra_driver.model.ids import is_dns_label
from dra_driver.model.mig import GpuInstance, OwnedInstance

_log = structlog.get_logger(__name__)

V = TypeVar("V")
Clock = Callable[[], float]

_WHAT = "MIG ledger file"
_MODE_PREFIX = "mode-"
_SAFE_GPU_UUID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}\Z")
_REMEMBERED_S = 30.0


class _Remembered(JsonStore[V]):
    """Files of one kind, and each value that went away in the last 30 s, by us or the other instance."""

    def __init__(
        self,
        directory: Path,
        shape: Shape[V],
        clock: Clock,
        reader: Callable[[UnreadableFile], None] | None,
        decode: Callable[[str, bytes], V],
        is_name: Callable[[str], bool],
    ) -> None:
        """A `reader` as that of the `MigLedger`."""
        super().__init__(
            directory, _WHAT, decode, reader or _tell, is_name=is_name, only_reads=reader is not None
        )
        self._shape = shape
        self._clock = clock
        self._there: dict[str, V] = {}
        self._gone: dict[V, float] = {}
        self._guard = threading.Lock()

    def get(self, name: str) -> V | None:
        """As `JsonStore.get`; what is not there any more is remembered."""
        value = super().get(name)
        self._note(name, value)
        return value

    def all(self) -> dict[str, V]:
        """As `JsonStore.all`; what is not there any more is remembered."""
        values = super().all()
        for name, value in values.items():
            self._note(name, value)
        with self._guard:
            missing = self._there.keys() - values.keys()
        for name in missing:
            self.get(name)  # which remembers it, unless it has come meanwhile
        return values

    def save(self, name: str, value: V) -> None:
        """Write the value. As nothing is synced, an error with which the disk takes it only later is not seen. Raises:
        StateError."""
        self.get(name)  # the file of a newer release is not written over
        self.write(name, encode(self._shape, value), durable=False, whole=False)
        self._note(name, value)

    def delete(self, name: str) -> None:
        """Remove the value; nothing happens if there is none. Raises: StateError."""
        self.get(name)  # so that it is remembered
        self.remove(name, durable=False)
        self._note(name, None)

    def gone(self) -> frozenset[V]:
        """What went away in the last 30 s."""
        limit = self._clock() - _REMEMBERED_S
        with self._guard:
            self._gone = {value: moment for value, moment in self._gone.items() if moment >= limit}
            return frozenset(self._gone)

    def _note(self, name: str, value: V | None) -> None:
        with self._guard:
            before = self._there.pop(name, None)
            if value is not None:
                self._there[name] = value
            elif before is not None:
                self._gone[before] = self._clock()


class MigLedger:
    """Entries in `directory`, named by device, and a file for each GPU whose MIG mode we switched on; see `JsonStore`.

    A GPU instance or mode whose file cannot be read counts as somebody else's from then on.
    """

    def __init__(
        self,
        directory: Path,
        boot_id: str | None,
        clock: Clock = time.monotonic,
        reader: Callable[[UnreadableFile], None] | None = None,
    ) -> None:
        """`boot_id` is that of the boot now; with None nothing is ours. A `reader` only looks: it is told of
        what cannot be read, and every file stays where it is."""
        self._directory = directory
        self.boot_id = boot_id or ""
        self._entries = _Remembered(directory, ENTRY, clock, reader, decode_entry, _is_device)
        self._modes = _Remembered(directory, MODE, clock, reader, decode_mode, _is_mode)

    def open(self) -> None:
        """Create the directory, and clear away what a killed writer left, and what a power cut tore. Raises:
        StateError."""
        open_directory(
            self._directory,
            self.boot_id,
            lambda subject: _log.info("mig_ledger_entry_torn", subject=subject),
            durable=False,
        )

    def get(self, device: str) -> OwnedInstance | None:
        """The entry of a device, None if there is none that can be read. Raises: StateError."""
        return self._entries.get(device)

    def all(self) -> Mapping[str, OwnedInstance]:
        """Every readable entry by device. Raises: StateError if the directory cannot be listed."""
        return self._entries.all()

    def save(self, entry: OwnedInstance) -> None:
        """Write the entry; an error with which the disk takes it only later is not seen. Raises: StateError."""
        self._entries.save(entry.device, entry)

    def delete(self, device: str) -> None:
        """Remove a device's entry; nothing happens if there is none. Raises: StateError."""
        self._entries.delete(device)

    def created_instance(self, device: str) -> OwnedInstance | None:
        """The device as it was made in this boot, with IDs and UUID; None if it was not. Raises: StateError."""
        entry = self.get(device)
        is_made = entry is not None and entry.boot_id == self.boot_id and entry.phase == "created"
        return entry if is_made else None

    def entries_of(self, gpu_uuid: str) -> Mapping[Slot, OwnedInstance]:
        """A GPU's entries of this boot by slot. Raises: StateError."""
        return {entry.slot: entry for entry in self.all().values() if self._is_here(entry, gpu_uuid)}

    def foreign_instances(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Those of a GPU's instances that are not to be given out: somebody else's, and orphans of ours, which are
        marked `leaving`. What was ours until 30 s ago is not somebody else's: `existing` may come from a look at the
        hardware that began before a removal. Needs no lock. Raises: StateError."""
        if not existing:
            return ()
        # In this order: what is removed between the two looks must not seem to be somebody else's.
        now = self.entries_of(gpu_uuid)
        lately = {entry.slot for entry in self._entries.gone() if self._is_here(entry, gpu_uuid)}
        orphans = {slot for slot, entry in self.entries_of(gpu_uuid).items() if entry.phase == "orphan"}
        return instances_to_withhold(existing, now.keys() | lately, orphans)

    def _is_here(self, entry: OwnedInstance, gpu_uuid: str) -> bool:
        return entry.gpu_uuid == gpu_uuid and entry.boot_id == self.boot_id

    # --- MIG mode ------------------------------------------------------------------------------

    def mode_owned(self, gpu_uuid: str) -> bool:
        """Whether we switched the GPU's MIG mode on in this boot. Raises: StateError."""
        mode = self._modes.get(_MODE_PREFIX + gpu_uuid)
        return mode is not None and mode.boot_id == self.boot_id

    def own_mode(self, gpu_uuid: str, pci_bus_id: str | None) -> None:
        """Remember that we switch the GPU's MIG mode on; an error with which the disk takes it only later is not seen.

        Raises: StateError.
        """
        self._modes.save(_MODE_PREFIX + gpu_uuid, OwnedMode(gpu_uuid, pci_bus_id, self.boot_id))

    def disown_mode(self, gpu_uuid: str) -> None:
        """Forget it; nothing happens if there is nothing. Raises: StateError."""
        self._modes.delete(_MODE_PREFIX + gpu_uuid)

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """As `mode_owned`; also where it was given up, or was seen to be gone through the other instance, less than
        30 s ago, for a look at the hardware that began before that. Needs no lock. Raises: StateError."""
        gone = {(mode.gpu_uuid, mode.boot_id) for mode in self._modes.gone()}
        return self.mode_owned(gpu_uuid) or (gpu_uuid, self.boot_id) in gone

    def owned_modes(self) -> Mapping[str, OwnedMode]:
        """The GPUs whose MIG mode we switched on, in any boot, by UUID. Raises: StateError."""
        return {name.removeprefix(_MODE_PREFIX): mode for name, mode in self._modes.all().items()}


def _is_device(name: str) -> bool:
    return is_dns_label(name) and not name.startswith(_MODE_PREFIX)


def _is_mode(name: str) -> bool:
    gpu_uuid = name.removeprefix(_MODE_PREFIX)
    return gpu_uuid != name and _SAFE_GPU_UUID.fullmatch(gpu_uuid) is not None


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
