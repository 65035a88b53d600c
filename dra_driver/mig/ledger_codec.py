"""The files of the MIG ledger as JSON with a format number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from dra_driver.base.fields import (
    FLAG,
    NUMBER,
    TEXT,
    Shape,
    encode_file,
    left_out,
    needed,
    nullable,
    one_of,
    parse_file,
)
from dra_driver.errors import StateError
from dra_driver.journal.record_codec import PLACEMENT
from dra_driver.model.mig import OwnedInstance

T = TypeVar("T")

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class OwnedMode:
    """MIG mode of a GPU that this driver switched on in boot `boot_id`."""

    gpu_uuid: str
    pci_bus_id: str | None
    boot_id: str


ENTRY = Shape(
    OwnedInstance,
    device=needed(TEXT),
    gpu_uuid=needed(TEXT),
    pci_bus_id=nullable(TEXT),
    profile_id=needed(NUMBER),
    profile_name=needed(TEXT, "profile"),
    placement=needed(PLACEMENT.kind),
    boot_id=needed(TEXT),
    phase=needed(one_of("phase", "creating", "created", "orphan")),
    gpu_instance_id=nullable(NUMBER),
    compute_instance_id=nullable(NUMBER),
    uuid=nullable(TEXT),
    gpu_minor=nullable(NUMBER),
    is_of_layout=left_out(FLAG, default=False),
)
MODE = Shape(OwnedMode, gpu_uuid=needed(TEXT), pci_bus_id=nullable(TEXT), boot_id=needed(TEXT))


def encode(shape: Shape[T], value: T) -> bytes:
    """An entry, or the note of a mode, as its file has it."""
    return encode_file(shape.encode(value), FORMAT_VERSION)


def decode_mode(_name: str, content: bytes) -> OwnedMode:
    """The note of a mode. Raises: NewerFormatError, StateError."""
    return parse_file(content, "MIG ledger file", MODE.decode, known=FORMAT_VERSION)


def decode_entry(device: str, content: bytes) -> OwnedInstance:
    """The entry of a device in its file. Raises: NewerFormatError, StateError."""
    entry = parse_file(content, "MIG ledger file", ENTRY.decode, known=FORMAT_VERSION)
    if entry.device != device:
        raise StateError(f"it is the entry of device {entry.device}")
    return entry
