"""The claim records: one JSON file for each claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from dra_driver.base.fields import (
    NUMBER,
    Codec,
    FileFormat,
    Kind,
    Tagged,
    list_of,
    omittable,
    one_of,
    required,
)
from dra_driver.base.json_store import JsonStore, UnreadableFile, log_unreadable, open_directory
from dra_driver.errors import StateError
from dra_driver.model.claim import (
    AllocatedClaim,
)
from dra_driver.model.host import ImexChannels
from dra_driver.model.ids import is_uid
from dra_driver.model.mps import MpsShared, SharingMode, TimeSliced
from dra_driver.model.record import (
    BindVfio,
    ClaimRecord,
    CreateMig,
    HeldDevice,
    LeaveMigMode,
    RunMps,
    SetTimeSlice,
    StartMaintenance,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
)

_log = structlog.get_logger(__name__)


def step_kind(step: Step) -> str:
    """Return the kind of a step, as it is written in records."""
    return str(STEP.encode(step)["kind"])


def _imex(name: str, value: Any) -> ImexChannels:
    """Return `all`, or the number of a channel."""
    if isinstance(value, str):
        every: ImexChannels = one_of("IMEX channel", "all").read(name, value)
        return every
    return int(NUMBER.read(name, value))


STEP: Tagged[Step] = Tagged(
    "step",
    write_cdi_spec=Codec(WriteCdiSpec),
    write_device_metadata=Codec(WriteDeviceMetadata),
    set_time_slice=Codec(SetTimeSlice),
    run_mps=Codec(RunMps),
    create_mig=Codec(CreateMig),
    bind_vfio=Codec(BindVfio),
    leave_mig_mode=Codec(LeaveMigMode),
    start_maintenance=Codec(StartMaintenance),
)
_USAGE: Tagged[SharingMode] = Tagged("sharing mode", time_sliced=Codec(TimeSliced), mps=Codec(MpsShared))
_HELD = Codec(HeldDevice, usage=omittable(_USAGE.kind), imex=omittable(Kind(_imex), name="imexChannel"))
_RECORD = Codec(
    ClaimRecord,
    claim=required(Codec(AllocatedClaim, reported=None).kind),
    devices=required(list_of(_HELD.kind)),
    steps=required(list_of(STEP.kind)),
)
RECORD_FILE = FileFormat("claim record", _RECORD.decode, _RECORD.encode)


class RecordStore(JsonStore[ClaimRecord]):
    """Records in `directory`, named by claim UID, each as of this boot (`ClaimRecord.as_of`). Their keys are the UUIDs
    of their GPUs.
    """

    def __init__(
        self,
        directory: Path,
        boot_id: str | None = None,
        reader: Callable[[UnreadableFile], None] | None = None,
    ) -> None:
        """`reader` receives the files that cannot be read, instead of the log.

        Until the boot is known, records are returned as they were written.
        """
        self._boot_id = boot_id
        super().__init__(
            directory,
            RECORD_FILE.what,
            self._decode,
            RECORD_FILE.write,
            reader
            or log_unreadable(
                unreadable_event="record_unreadable",
                name="claim_uid",
                remedy="the claim can still be prepared and unprepared; inspect the file, then remove it",
                newer="the claim keeps its devices until it is unprepared; to prepare it again, install the newer "
                "release again",
            ),
            is_name=is_uid,
            keys=lambda record: record.gpu_uuids,
        )

    def open(self, boot_id: str) -> None:
        """Create the directory, remove unsynced records that a power cut damaged, and load the others.

        Raises: StateError.
        """
        self._boot_id = boot_id
        open_directory(
            self.directory, boot_id, lambda uid: _log.info("record_torn", claim_uid=uid), durable=True
        )
        self.load()

    def prepared_kinds(self) -> Iterator[str]:
        """Yield the kind of each device of each prepared claim."""
        for record in self.all().values():
            if record.phase == "prepared":
                yield from (held.kind for held in record.devices)

    def save(self, record: ClaimRecord, *, durable: bool = True, whole: bool = True) -> None:
        """Write the record.

        With `durable` it survives a power cut. With `whole`, a power cut leaves this version or the previous
        one. With neither, a power cut may leave a damaged file, which the first `open` of the next boot removes.
        Raises: StateError.
        """
        self.write(record.ref.uid, record, durable=durable, whole=whole)

    def delete(self, uid: str) -> bool:
        """Remove a claim's record durably; returns whether it existed. Raises: StateError."""
        # Synced: a record that reappeared after a power cut would hold its devices forever.
        return self.remove(uid, durable=True)

    def _decode(self, uid: str, content: bytes) -> ClaimRecord:
        record = RECORD_FILE.read(content)
        if record.ref.uid != uid:
            raise StateError(f"the file contains the record of claim UID {record.ref.uid}")
        return record if self._boot_id is None else record.as_of(self._boot_id)
