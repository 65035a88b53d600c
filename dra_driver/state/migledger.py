"""The ledger of the GPU instances that this driver makes: one file a device, shared with a second instance
of the plugin during a rolling update.

Nothing is synced: a power cut may lose an entry, tear it or bring one back, but it destroys every GPU instance and ends
every MIG mode that we switched on, and with them what the ledger speaks of.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from dra_driver.errors import StateError
from dra_driver.model.ids import is_dns_label
from dra_driver.model.mig import OwnedInstance
from dra_driver.state.boots import begin_boot
from dra_driver.state.files import (
    NO_STAMP,
    UNREADABLE,
    Stamp,
    clear_abandoned,
    make_directory,
    read_plain,
    remove_file,
    set_aside,
    stamp_at,
    state_error,
    write_atomically,
)
from dra_driver.state.formats import NewerFormatError, check_version, is_newer, of_newer_release
from dra_driver.state.migcodec import (
    FORMAT_VERSION,
    KeptEntry,
    OwnedMode,
    as_json,
    decode_entry,
    decode_mode,
    encode_entry,
    encode_mode,
)

_log = structlog.get_logger(__name__)

T = TypeVar("T")
JsonObject = dict[str, Any]
Slot = tuple[str, int, int]
"""GPU UUID, profile ID and start: where a GPU instance is or was."""

_SUFFIX = ".json"
_MODE_PREFIX = "mode-"
_SAFE_GPU_UUID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]{0,99}\Z")
_REMEMBERED_S = 30.0


class MigLedger:
    """Entries in `directory`, named by device, and a file for each GPU whose MIG mode we switched on.

    The disk is the truth, since a second instance may write it. A file that cannot be read is set aside under
    another name and reported once; what it spoke of is from then on somebody else's. One that only a newer release
    can read stays, and so does what it speaks of.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._cache: dict[str, tuple[Stamp, KeptEntry]] = {}
        self._removed: dict[tuple[str, Slot], float] = {}
        self._modes: dict[str, str] = {}
        self._disowned: dict[tuple[str, str], float] = {}
        self._newer: dict[Path, Stamp | None] = {}
        self._immovable: dict[Path, Stamp | None] = {}
        self._lock = threading.Lock()

    def open(self, boot_id: str) -> None:
        """Create the directory, and clear away what a killed writer left, and what a power cut tore. Raises:
        StateError."""
        make_directory(self._directory, 0o700)
        clear_abandoned(self._directory)
        begin_boot(
            self._directory, boot_id, lambda subject: _log.info("mig_ledger_entry_torn", subject=subject)
        )

    def get(self, device: str) -> OwnedInstance | None:
        """The entry of a device, None if there is none that can be read.

        Raises: NewerFormatError if only a newer release can read it; StateError.
        """
        kept = self._kept(device)
        return None if kept is None else kept.entry

    def all(self) -> Mapping[str, OwnedInstance]:
        """Every readable entry by device. Raises: StateError if the directory cannot be listed."""
        entries: dict[str, OwnedInstance] = {}
        for name in self._names():
            if not name.startswith(_MODE_PREFIX) and is_dns_label(name):
                with suppress(NewerFormatError):
                    entry = self.get(name)
                    if entry is not None:
                        entries[name] = entry
        with self._lock:
            known = list(self._cache)
        for device in known:
            if device not in entries:
                with suppress(NewerFormatError):
                    self._kept(device)  # which remembers where it was, unless it has come meanwhile
        return entries

    def save(self, entry: OwnedInstance, *, leaving: bool = False) -> None:
        """Write the entry. `leaving` says that the last claim wants to be rid of the device, although its
        record is still there. As nothing is synced, an error with which the disk takes it only later is not seen.

        Raises: StateError.
        """
        path = self._entry_path(entry.device)
        before = self._kept(entry.device)
        kept = KeptEntry(entry, leaving, {} if before is None else before.extra)
        write_atomically(path, as_json(encode_entry(kept), kept.extra), durable=False, whole=False)
        with self._lock:
            # Read again: two writes of one size within a tick of the clock may end with the same stamp.
            self._cache[entry.device] = (NO_STAMP, kept)

    def is_leaving(self, device: str) -> bool:
        """Whether the device was saved as leaving. Raises: StateError."""
        kept = self._kept(device)
        return kept is not None and kept.leaving

    def delete(self, device: str) -> None:
        """Remove a device's entry; nothing happens if there is none. Raises: StateError."""
        self._kept(device)  # so that it is remembered where it was
        self._unlink(self._entry_path(device))
        self._forget(device)

    def owned_lately(self, boot_id: str) -> frozenset[Slot]:
        """Where instances of ours of this boot are, or were until 30 s ago: a look at the hardware that began
        before a removal must not take our own instance for somebody else's.

        Raises: StateError.
        """
        now = {(entry.gpu_uuid, *entry.slot) for entry in self.all().values() if entry.boot_id == boot_id}
        limit = self._clock() - _REMEMBERED_S
        with self._lock:
            self._removed = {key: moment for key, moment in self._removed.items() if moment >= limit}
            lately = {slot for boot, slot in self._removed if boot == boot_id}
        return frozenset(now | lately)

    # --- MIG mode ------------------------------------------------------------------------------

    def mode_owned(self, gpu_uuid: str, boot_id: str) -> bool:
        """Whether we switched the GPU's MIG mode on in this boot. Raises: StateError."""
        mode = self._mode(gpu_uuid)
        return mode is not None and mode.boot_id == boot_id

    def own_mode(self, gpu_uuid: str, pci_bus_id: str | None, boot_id: str) -> None:
        """Remember that we switch the GPU's MIG mode on; an error with which the disk takes it only later is not seen.

        Raises: StateError.
        """
        before = self._mode(gpu_uuid)
        extra = before.extra if before is not None and before.boot_id == boot_id else {}
        mode = OwnedMode(gpu_uuid, pci_bus_id, boot_id, extra)
        content = as_json(encode_mode(mode), extra)
        write_atomically(self._mode_path(gpu_uuid), content, durable=False, whole=False)
        self._mode_seen(gpu_uuid, boot_id)

    def disown_mode(self, gpu_uuid: str) -> None:
        """Forget it; nothing happens if there is nothing. Raises: StateError."""
        self._mode(gpu_uuid)  # so that it is remembered whose it was
        self._unlink(self._mode_path(gpu_uuid))
        self._mode_seen(gpu_uuid, None)

    def mode_owned_lately(self, gpu_uuid: str, boot_id: str) -> bool:
        """As `mode_owned`; also where it was given up, or was seen to be gone through the other instance, less than
        30 s ago, for a look at the hardware that began before that. Raises: StateError."""
        with suppress(NewerFormatError):
            if self.mode_owned(gpu_uuid, boot_id):
                return True
        limit = self._clock() - _REMEMBERED_S
        with self._lock:
            self._disowned = {key: moment for key, moment in self._disowned.items() if moment > limit}
            return (gpu_uuid, boot_id) in self._disowned

    def owned_modes(self) -> Mapping[str, OwnedMode]:
        """The GPUs whose MIG mode we switched on, in any boot, by UUID. Raises: StateError."""
        found: dict[str, OwnedMode] = {}
        for name in self._names():
            gpu_uuid = name.removeprefix(_MODE_PREFIX)
            if gpu_uuid != name and _SAFE_GPU_UUID.fullmatch(gpu_uuid):
                with suppress(NewerFormatError):
                    mode = self._mode(gpu_uuid)
                    if mode is not None:
                        found[gpu_uuid] = mode
        with self._lock:
            gone = self._modes.keys() - found.keys()
        for gpu_uuid in gone:
            with suppress(NewerFormatError):
                self._mode(gpu_uuid)  # which remembers whose it was, unless it has come meanwhile
        return found

    def _mode(self, gpu_uuid: str) -> OwnedMode | None:
        mode = self._load(self._mode_path(gpu_uuid), decode_mode)
        self._mode_seen(gpu_uuid, None if mode is None else mode.boot_id)
        return mode

    def _mode_seen(self, gpu_uuid: str, boot_id: str | None) -> None:
        """The GPU's mode is that boot's now, or with None nobody's: remember when that was seen."""
        with self._lock:
            before = self._modes.pop(gpu_uuid, None)
            if boot_id is not None:
                self._modes[gpu_uuid] = boot_id
            elif before is not None:
                self._disowned[gpu_uuid, before] = self._clock()

    # --- files ---------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._directory) as found:
                return sorted(
                    item.name.removesuffix(_SUFFIX) for item in found if item.name.endswith(_SUFFIX)
                )
        except OSError as error:
            raise state_error("list the MIG ledger in", self._directory, error) from error

    def _entry_path(self, device: str) -> Path:
        """Raises: StateError for a name that could lead elsewhere."""
        if not is_dns_label(device) or device.startswith(_MODE_PREFIX):
            raise StateError(f"device name {device!r} is not usable as a file name; the device is refused")
        return self._directory / f"{device}{_SUFFIX}"

    def _mode_path(self, gpu_uuid: str) -> Path:
        """Raises: StateError for a UUID that could lead elsewhere."""
        if not _SAFE_GPU_UUID.fullmatch(gpu_uuid):
            raise StateError(f"GPU UUID {gpu_uuid!r} is not usable as a file name; the GPU is refused")
        return self._directory / f"{_MODE_PREFIX}{gpu_uuid}{_SUFFIX}"

    def _kept(self, device: str) -> KeptEntry | None:
        path = self._entry_path(device)
        try:
            stamp = stamp_at(path)
        except FileNotFoundError:
            self._forget(device)
            return None
        except OSError as error:
            raise state_error("read the MIG ledger's entry", path, error) from error
        with self._lock:
            cached = self._cache.get(device)
        if cached is not None and cached[0] == stamp != NO_STAMP:
            return cached[1]
        kept = self._load(path, lambda document: decode_entry(document, device))
        if kept is None:
            self._forget(device)
            return None
        with self._lock:
            self._cache[device] = (stamp, kept)
        return kept

    def _forget(self, device: str) -> None:
        """The device's entry is gone, through us or the other instance: remember when that was seen."""
        with self._lock:
            cached = self._cache.pop(device, None)
            if cached is not None:
                entry = cached[1].entry
                self._removed[(entry.boot_id, (entry.gpu_uuid, *entry.slot))] = self._clock()

    def _load(self, path: Path, decode: Callable[[JsonObject], T]) -> T | None:
        """What a file holds, None if it is not there or had to be set aside."""
        stamp: Stamp | None = None
        document: Any = None
        try:
            stamp = stamp_at(path)
            document = json.loads(read_plain(path))
            if not isinstance(document, dict):
                raise StateError("not a JSON object")
            check_version(document)
            return decode(document)
        except FileNotFoundError:
            return None
        except OSError as error:
            if stamp is None or error.errno not in UNREADABLE:
                raise state_error("read", path, error) from error
            reason = error.strerror or str(error)
        except KeyError as error:
            reason = f"field {error.args[0]!r} is missing"
        except (StateError, ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error)
        if is_newer(document, FORMAT_VERSION):
            newer = of_newer_release(f"the MIG ledger's file {path}", document["version"], reason)
            with self._lock:
                is_news, self._newer[path] = self._newer.get(path) != stamp, stamp
            if is_news:
                self._tell_newer(path, str(newer))
            raise newer
        self._set_aside(path, stamp, reason)
        return None

    def _tell_newer(self, path: Path, reason: str) -> None:
        _log.error(
            "mig_ledger_unreadable",
            subject=path.name.removesuffix(_SUFFIX),
            reason=reason,
            kept_as=str(path),
            remedy="the GPU instance or MIG mode that it speaks of is left alone until that release is installed "
            "again; to give it up for good, undo it by hand (nvidia-smi mig) and remove the file",
        )

    def _set_aside(self, path: Path, stamp: Stamp | None, reason: str) -> None:
        with self._lock:
            try:
                aside = set_aside(path, "file", stamp)
                self._immovable.pop(path, None)
            except StateError as error:
                is_news, self._immovable[path] = self._immovable.get(path) != stamp, stamp
                aside, reason = path if is_news else None, f"{reason}; {error}"
        if aside is None:
            return
        _log.error(
            "mig_ledger_unreadable",
            subject=path.name.removesuffix(_SUFFIX),
            reason=reason,
            kept_as=str(aside),
            remedy="the GPU instance or MIG mode that it spoke of is left alone from now on; undo it by hand "
            "(nvidia-smi mig) if nobody needs it, then remove the file",
        )

    def _unlink(self, path: Path) -> None:
        try:
            remove_file(path)
        except OSError as error:
            raise state_error("remove", path, error) from error
