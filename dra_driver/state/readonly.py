"""The driver's records and ledger as somebody else reads them: nothing is created, renamed or locked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dra_driver.errors import StateError
from dra_driver.model.mig import GpuInstance, OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.state.files import QUARANTINE, Stamp, state_error
from dra_driver.state.metadatafiles import DIRECTORY as METADATA
from dra_driver.state.migledger import MigLedger
from dra_driver.state.records import RecordStore

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StateOnDisk:
    """What lies below a driver's plugin directory, and a sentence for each part that could not be read."""

    records: tuple[ClaimRecord, ...]
    owned: tuple[OwnedInstance, ...]
    faults: tuple[str, ...]


def read_state(plugin_directory: Path) -> StateOnDisk:
    """All that can be read; a directory that is not there holds nothing."""
    faults: list[str] = []
    records = _read(_Records(plugin_directory / "claims", faults).all, plugin_directory / "claims", faults)
    owned = _read(_Ledger(plugin_directory / "mig", faults).all, plugin_directory / "mig", faults)
    return StateOnDisk(tuple(records.values()), tuple(owned.values()), tuple(faults))


def set_aside_files(plugin_directory: Path, cdi_root: Path | None, driver: str) -> list[Path]:
    """What the driver gave another name because it could not be read, or was in the place of a file of its own; as far
    as that can be told."""
    found: list[Path] = []
    places = ["", "claims", "mig", "locks", "mps", f"{METADATA}/*/*"]
    globs = [(plugin_directory, f"{place}/*{QUARANTINE}*".lstrip("/")) for place in places]
    if cdi_root is not None:
        globs.append((cdi_root, f"*{driver}*{QUARANTINE}-*"))  # others have files there
    for directory, pattern in globs:
        with suppress(OSError):
            found += sorted(directory.glob(pattern))
    return found


class OwnershipOnDisk:
    """Which GPU instances and MIG modes are of the making of the driver that runs, or ran, with a directory.

    What cannot be read is somebody else's.
    """

    def __init__(self, plugin_directory: Path, boot_id: str) -> None:
        self._ledger = _Ledger(plugin_directory / "mig", [])
        self._boot_id = boot_id

    def sort_out(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Those of the instances on a GPU that the driver does not give out."""
        ours: set[tuple[int, int]] = set()
        with suppress(StateError):
            ours = {
                entry.slot
                for entry in self._ledger.all().values()
                if (entry.gpu_uuid, entry.boot_id) == (gpu_uuid, self._boot_id) and entry.phase != "orphan"
            }
        return tuple(instance for instance in existing if instance.slot not in ours)

    def mode_is_ours(self, gpu_uuid: str) -> bool:
        """Whether the driver switched MIG mode on."""
        with suppress(StateError):
            return self._ledger.mode_owned(gpu_uuid, self._boot_id)
        return False


class _Records(RecordStore):
    """Leaves an unreadable file where it is, for the driver to set aside."""

    def __init__(self, directory: Path, faults: list[str]) -> None:
        super().__init__(directory)
        self._faults = faults

    def _set_aside(self, path: Path, uid: str, stamp: Stamp, reason: str) -> None:
        self._tell_newer(path, uid, reason)

    def _tell_newer(self, path: Path, uid: str, reason: str) -> None:
        self._faults.append(f"the claim record {path} cannot be read: {reason}")


class _Ledger(MigLedger):
    """The same for the ledger."""

    def __init__(self, directory: Path, faults: list[str]) -> None:
        super().__init__(directory)
        self._faults = faults

    def _set_aside(self, path: Path, stamp: Stamp | None, reason: str) -> None:
        self._tell_newer(path, reason)

    def _tell_newer(self, path: Path, reason: str) -> None:
        self._faults.append(f"the MIG ledger's file {path} cannot be read: {reason}")


def _read(
    everything: Callable[[], Mapping[str, Value]], directory: Path, faults: list[str]
) -> Mapping[str, Value]:
    try:
        directory.stat()
        return everything()
    except FileNotFoundError:
        return {}
    except OSError as error:
        faults.append(str(state_error("read", directory, error)))
    except StateError as error:
        faults.append(str(error))
    return {}
