"""What an MPS host must know after a crash or restart: one JSON file for each daemon, written before the host acts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from dra_driver.base.atomic import sync_removals
from dra_driver.base.fields import Codec, NewerFormatError, parse_file
from dra_driver.base.json_store import JsonStore, log_unreadable
from dra_driver.errors import StateError
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps_host.daemon_processes import ProcessId
from dra_driver.mps_host.host_files import MpsLayout, is_device_name

FORMAT = 2


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """`process` is the last one that was started, in boot `boot_id`. `modes_before` has the compute modes that this
    daemon's start changes, by the UUID of the GPU: what to put back."""

    spec: MpsDaemonSpec
    boot_id: str
    process: ProcessId | None = None
    modes_before: Mapping[str, int] = field(default_factory=dict)


_RECORD = Codec(DaemonRecord)


class DaemonRecords(JsonStore[DaemonRecord]):
    """The record files of one layout, by device; only the host of the layout writes. A record of a newer release is set
    aside too: the daemon is found again by its claims."""

    def __init__(self, layout: MpsLayout) -> None:
        tell = log_unreadable(
            unreadable_event="mps_record_unreadable",
            name="device",
            remedy="the daemon is found again by its claims; look at the file, then remove it",
        )
        super().__init__(layout.root, "MPS record", _decode, tell, is_name=is_device_name)
        self._layout = layout

    def save(self, record: DaemonRecord) -> None:
        """Replace the record, synced to disk. Raises: StateError."""
        content = json.dumps({"format": FORMAT, **_RECORD.encode(record)}, indent=1).encode()
        self.write(record.spec.device, content, durable=True, whole=True)

    def forget(self, device: str) -> None:
        """Forget the daemon for good; nothing happens where nothing is. A record that could not be read stays aside.
        Raises: StateError."""
        self.remove(device, durable=False)
        # The directories that were removed before it must not come back without it.
        sync_removals(self.directory)


def _decode(device: str, content: bytes) -> DaemonRecord:
    try:
        record = parse_file(content, "MPS record", _RECORD.decode, known=FORMAT, field="format")
    except NewerFormatError as error:
        raise StateError(str(error)) from error  # so that the file is set aside
    if record.spec.device != device:
        raise StateError(f"it is the record of {record.spec.device}")
    return record
