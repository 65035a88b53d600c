"""What an MPS host must know after a crash or restart: one JSON file for each daemon, written before the host acts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.errors import DraDriverError, StateError
from dra_driver.files.atomic import (
    UNREADABLE,
    read_plain,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.files.fields import NUMBER, TEXT, Kind, Shape, needed, nullable
from dra_driver.files.formats import parse
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps.daemon_processes import ProcessId
from dra_driver.mps.host_files import SPEC, SUFFIX, MpsLayout

FORMAT = 2


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """`process` is the last one that was started, in boot `boot_id`. `modes_before` has the compute modes that this
    daemon's start changes, by the UUID of the GPU: what to put back."""

    spec: MpsDaemonSpec
    boot_id: str
    process: ProcessId | None = None
    modes_before: Mapping[str, int] = field(default_factory=dict)


_PROCESS = Shape(ProcessId, pid=needed(NUMBER), start_time=needed(NUMBER))
_MODES = Kind(lambda name, modes: {uuid: NUMBER.read(name, mode) for uuid, mode in modes.items()}, dict)
_RECORD = Shape(
    DaemonRecord,
    spec=needed(SPEC.kind),
    boot_id=needed(TEXT),
    process=nullable(_PROCESS.kind),
    modes_before=needed(_MODES),
)


class DaemonRecords:
    """The record files of one layout.

    Only the host of the layout writes. So nothing is cached or compared with a stamp, and the names of temporary files
    and of files set aside are fixed, so that `remove` finds them.
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
                record = parse(read_plain(path), "MPS record", _RECORD.decode, known=FORMAT, field="format")
                if self._layout.record(record.spec.device) != path:
                    raise StateError(f"it is the record of {record.spec.device}")
                found[record.spec.device] = record
            except FileNotFoundError:
                continue
            except (OSError, DraDriverError) as error:
                if isinstance(error, OSError) and error.errno not in UNREADABLE:
                    raise state_error("read the MPS record", path, error) from error
                faults.append(f"{path}: {error}")
                with suppress(OSError, DraDriverError):
                    aside = self._layout.record_aside(path.name.removesuffix(SUFFIX))
                    remove_file(aside)
                    path.replace(aside)
        return found, tuple(faults)

    def write(self, record: DaemonRecord) -> None:
        """Replace the record, synced to disk. Raises: StateError."""
        path = self._layout.record(record.spec.device)
        remove_file(_new(path))
        content = json.dumps({"format": FORMAT, **_RECORD.encode(record)}, indent=1).encode()
        write_atomically(path, content, temporary=_new(path))

    def remove(self, device: str) -> None:
        """Forget the daemon for good, also what could not be read of it; nothing happens where nothing is. A directory
        that was in the place of a file has another name then.

        Raises: StateError.
        """
        path = self._layout.record(device)
        for each in (path, self._layout.record_aside(device), _new(path)):
            remove_file(each)
        # A record that came back after a power cut would start a daemon that no claim asked for.
        sync_removals(self._layout.root)


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
