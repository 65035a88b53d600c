"""The ledger of the cards that this plugin gives to a vfio driver: one file a card, shared with a second instance of
the plugin during a rolling update.

    (nothing) ──written, before anything is changed──▶ ours ──drivers and persistence mode as they were──▶ (nothing)

Nothing is synced: a power cut ends the boot, and with it every binding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from dra_driver.base.fields import (
    FLAG,
    TEXT,
    Shape,
    encode_file,
    left_out,
    list_of,
    needed,
    nullable,
    or_null,
    parse_file,
)
from dra_driver.base.json_store import JsonStore, UnreadableFile, open_directory
from dra_driver.errors import StateError
from dra_driver.model.ids import is_dns_label

_log = structlog.get_logger(__name__)

DIRECTORY = "passthrough"
"""Below the plugin directory."""
_FORMAT_VERSION = 1
_WHAT = "passthrough ledger file"


@dataclass(frozen=True, slots=True)
class FunctionBefore:
    """A PCI function of a card with the kernel driver and the `driver_override` that it had, None for none."""

    bus_id: str
    driver: str | None
    override: str | None = None


@dataclass(frozen=True, slots=True)
class OwnedCard:
    """A card that this plugin bound to a vfio driver in boot `boot_id`, or is about to.

    `device` is the name of its vfio device. `functions` are those of its IOMMU group in bus order. `persistence` is the
    persistence mode that the GPU had, None where it has none. `product_name` is what only the NVIDIA driver knows.
    """

    device: str
    gpu_uuid: str
    pci_bus_id: str
    boot_id: str
    claim_uid: str
    functions: tuple[FunctionBefore, ...]
    persistence: bool | None
    product_name: str | None = None


_FUNCTION = Shape(FunctionBefore, bus_id=needed(TEXT), driver=nullable(TEXT), override=left_out(TEXT))
_SHAPE = Shape(
    OwnedCard,
    device=needed(TEXT),
    gpu_uuid=needed(TEXT),
    pci_bus_id=needed(TEXT),
    boot_id=needed(TEXT),
    claim_uid=needed(TEXT, "claimUID"),
    functions=needed(list_of(_FUNCTION.kind)),
    persistence=needed(or_null(FLAG)),
    product_name=nullable(TEXT),
)


class PassthroughLedger:
    """Entries in `directory`, named by device; see `JsonStore`. Entries of another boot are void and not shown."""

    def __init__(
        self, directory: Path, boot_id: str | None, reader: Callable[[UnreadableFile], None] | None = None
    ) -> None:
        """A `reader` only looks: it is told of what cannot be read, and every file stays where it is."""
        self._directory = directory
        self.boot_id = boot_id or ""
        self._store = JsonStore(
            directory,
            _WHAT,
            self._decode,
            reader or _tell,
            is_name=is_dns_label,
            only_reads=reader is not None,
        )

    def open(self) -> None:
        """Create the directory, and clear away what a killed writer left, and what is of an older boot. Raises:
        StateError."""
        open_directory(
            self._directory,
            self.boot_id,
            lambda device: _log.info("passthrough_entry_torn", device=device),
            durable=False,
        )
        for device, entry in self._store.all().items():
            if entry.boot_id != self.boot_id:
                self._store.remove(device, durable=False)

    def exists(self) -> bool:
        """Whether there is a directory, so that there may be entries."""
        return self._directory.is_dir()

    def get(self, device: str) -> OwnedCard | None:
        """The entry of a device in this boot, None if there is none that can be read. Raises: StateError."""
        entry = self._store.get(device)
        return entry if entry is not None and entry.boot_id == self.boot_id else None

    def all(self) -> Mapping[str, OwnedCard]:
        """Every readable entry of this boot by device. Raises: StateError if the directory cannot be listed."""
        return {device: entry for device, entry in self._store.all().items() if entry.boot_id == self.boot_id}

    def has_unreadable(self) -> bool:
        """Whether a file could not be read when the entries were read last."""
        return bool(self._store.quarantined())

    def is_unreadable(self, device: str) -> bool:
        """Whether a file of the device could not be read when it was read last: then the card of a claim is ours though
        it has no entry."""
        return any(path.name.startswith(f"{device}.json") for path in self._store.quarantined())

    def save(self, entry: OwnedCard) -> None:
        """Write the entry. Raises: StateError."""
        content = encode_file(_SHAPE.encode(entry), _FORMAT_VERSION)
        self._store.write(entry.device, content, durable=False, whole=False)

    def delete(self, device: str) -> None:
        """Remove a device's entry, also one that cannot be read; nothing happens if there is none. Raises:
        StateError."""
        self._store.remove(device, durable=False)

    def _decode(self, device: str, content: bytes) -> OwnedCard:
        path = self._directory / f"{device}.json"
        entry = parse_file(content, f"{_WHAT} {path}", _SHAPE.decode, known=_FORMAT_VERSION)
        if entry.device != device:
            raise StateError(f"it is the entry of device {entry.device}")
        return entry


def _tell(found: UnreadableFile) -> None:
    _log.error(
        "passthrough_ledger_unreadable",
        device=found.name,
        reason=found.reason,
        kept_as=str(found.kept_as),
        remedy="the card goes back to the drivers that the kernel chooses when its claim ends; then remove the file",
    )
