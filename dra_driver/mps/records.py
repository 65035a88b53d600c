"""What an MPS host must know after a crash or restart: one JSON file for each daemon, written before the host acts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from dra_driver.errors import DraDriverError, StateError
from dra_driver.files.atomic import (
    QUARANTINE,
    UNREADABLE,
    read_plain,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.files.formats import JsonObject, parse
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps.daemon_processes import ProcessId
from dra_driver.mps.layout import SUFFIX, MpsLayout
from dra_driver.mps.protocol import decode_spec, encode_spec

FORMAT = 1

Wanted = Literal["running", "stopped"]


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """`wanted` is where the daemon is on its way to; `process` is the last one that was started, in boot `boot_id`.

    `compute_mode_before` is set if this daemon's start changes the GPU's compute mode: what to put back.
    `other_modes_before` has the same for the other GPUs of the daemon, by UUID.
    """

    spec: MpsDaemonSpec
    wanted: Wanted
    boot_id: str
    process: ProcessId | None = None
    compute_mode_before: int | None = None
    other_modes_before: Mapping[str, int] = field(default_factory=dict)

    @property
    def modes_before(self) -> Mapping[str, int]:
        """What to put back, by the UUID of the GPU."""
        first = {} if self.compute_mode_before is None else {self.spec.gpu_uuid: self.compute_mode_before}
        return {**first, **self.other_modes_before}

    def with_modes_before(self, modes: Mapping[str, int]) -> DaemonRecord:
        """The same with what to put back, by the UUID of the GPU."""
        others = {uuid: mode for uuid, mode in modes.items() if uuid != self.spec.gpu_uuid}
        return replace(self, compute_mode_before=modes.get(self.spec.gpu_uuid), other_modes_before=others)


class DaemonRecords:
    """The record files of one layout.

    Only the host of the layout writes, or a plugin that holds the host's lock. So nothing is cached or compared with a
    stamp, and the names of temporary files and of files set aside are fixed, so that `remove` finds them.
    """

    def __init__(self, layout: MpsLayout) -> None:
        self._layout = layout

    def load(self) -> tuple[dict[str, DaemonRecord], tuple[str, ...]]:
        """Records by device, and the files that could not be read; those are set aside until the
        device's daemon is stopped.

        Raises: StateError if the directory cannot be read, or a record cannot be now, as with too many open files.
        """
        found: dict[str, DaemonRecord] = {}
        faults: list[str] = []
        try:
            paths = sorted(self._layout.root.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise state_error("list the MPS records in", self._layout.root, error) from error
        for path in paths:
            try:
                record = _decode(read_plain(path))
                if self._layout.record(record.spec.device) != path:
                    raise StateError(f"it is the record of {record.spec.device}")
                found[record.spec.device] = record
            except FileNotFoundError:
                continue
            except (OSError, DraDriverError) as error:
                if isinstance(error, OSError) and error.errno not in UNREADABLE:
                    raise state_error("read the MPS record", path, error) from error
                faults.append(f"{path}: {error}")
                with suppress(OSError, StateError):
                    remove_file(_aside(path))
                    path.replace(_aside(path))
        return found, tuple(faults)

    def read(self, device: str) -> DaemonRecord | None:
        """The record of one device; None if there is none that can be read."""
        try:
            return _decode(read_plain(self._layout.record(device)))
        except (OSError, DraDriverError):
            return None

    def write(self, record: DaemonRecord) -> None:
        """Replace the record, synced to disk. Raises: StateError."""
        path = self._layout.record(record.spec.device)
        remove_file(_new(path))
        write_atomically(path, _encode(record), temporary=_new(path))

    def remove(self, device: str) -> None:
        """Forget the daemon for good, also what could not be read of it; nothing happens where nothing is. A directory
        that was in the place of a file has another name then.

        Raises: StateError.
        """
        path = self._layout.record(device)
        for each in (path, _aside(path), _new(path)):
            remove_file(each)
        # A record that came back after a power cut would start a daemon that no claim asked for.
        sync_removals(self._layout.root)

    def has_any(self, device: str) -> bool:
        """Whether there is a record, readable or not."""
        path = self._layout.record(device)
        return path.exists() or os.path.lexists(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}{QUARANTINE}")


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _encode(record: DaemonRecord) -> bytes:
    known = asdict(record) | {"spec": encode_spec(record.spec)}
    if not record.other_modes_before:
        del known["other_modes_before"]
    return json.dumps({"format": FORMAT, **known}, indent=1).encode()


def _decode(raw: bytes) -> DaemonRecord:
    """Raises: StateError, PermanentError."""
    return parse(raw, "MPS record", _decode_fields, known=FORMAT, field="format")


def _decode_fields(body: JsonObject) -> DaemonRecord:
    wanted, process, before = body.get("wanted"), body.get("process"), body.get("compute_mode_before")
    if wanted not in ("running", "stopped") or not isinstance(before, int | None):
        raise StateError("it has values that this version does not know")
    identity = None if process is None else ProcessId(int(process["pid"]), int(process["start_time"]))
    spec = decode_spec(body["spec"])
    others = body.get("other_modes_before", {})
    if not isinstance(others, dict) or not all(isinstance(mode, int) for mode in others.values()):
        raise StateError("it has values that this version does not know")
    return DaemonRecord(spec, wanted, str(body["boot_id"]), identity, before, others)
