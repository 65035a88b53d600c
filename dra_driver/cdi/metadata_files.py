"""Files that describe a container's devices, the CDI specs that mount them, and the step that writes them.

    <plugin directory>/dra-device-metadata/<namespace>_<claim>/<request>/metadata.json
    <CDI directory>/<driver>_metadata_<claim UID>_<request>.json

A claim may be deleted and created again with the same name, so the claim UID in a file decides which claim owns it.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from dra_driver.base.atomic import (
    clear_abandoned,
    make_directory,
    read_or_none,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.cdi.rules.metadata import (
    DescribedDevice,
    cdi_file,
    cdi_file_prefix,
    cdi_spec,
    check_names,
    check_ref,
    described,
    directory_name,
    encode,
    owner_and_generation,
    requests_of,
)
from dra_driver.cdi.rules.spec import checked_claim_uid
from dra_driver.cdi.rules.spec import encode as encode_spec
from dra_driver.errors import NvmlUnavailableError, StateError
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.ledger import Ledger
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import WriteDeviceMetadata

DIRECTORY = "dra-device-metadata"
_FILE = "metadata.json"
_SPEC_SUFFIX = ".json"
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755
_ABANDONED_AFTER_S = 60.0


class MetadataFiles:
    """The methods raise StateError, and ClaimRefusedError if a name cannot be part of a path.

    Writes are not synced, because every Prepare checks the files. Removals are synced, because a file that reappeared
    after a power cut would stay forever.
    """

    def __init__(self, plugin_directory: str | Path, cdi_root: str | Path, driver_name: str) -> None:
        self._directory = Path(plugin_directory) / DIRECTORY
        self._cdi = Path(cdi_root)
        self._driver_name = driver_name

    def create(self) -> None:
        """Remove directories that a power cut left empty."""
        for claim in _entries(self._directory):
            # Check all directories first: removing a request's directory changes the time of the claim's directory.
            abandoned = [path for path in (*_readable_entries(claim), claim) if _is_abandoned(path)]
            for directory in abandoned:
                clear_abandoned(directory)
                with suppress(OSError):  # most are not empty
                    directory.rmdir()

    def file(self, claim: AllocatedClaim, request: str) -> Path:
        check_names(claim)
        return self._directory / directory_name(claim.ref) / request / _FILE

    def write(self, claim: AllocatedClaim, request: str, encode: Callable[[int], bytes]) -> None:
        """Write the request's file, and the CDI spec that mounts it.

        `encode` returns the content for a generation, which starts at 1 and grows with each change.
        """
        file = self.file(claim, request)
        content = read_or_none(file)
        owned = None if content is None else owner_and_generation(content)
        generation = owned[1] if owned is not None and owned[0] == claim.ref.uid else 0
        if not generation or content != encode(generation):
            make_directory(file.parent, _DIRECTORY_MODE)
            write_atomically(file, encode(generation + 1), mode=_FILE_MODE, durable=False)
        self._write_spec(claim, request, file)

    def in_place(self, claim: AllocatedClaim) -> bool:
        return all(
            read_or_none(self.file(claim, request)) is not None
            and read_or_none(self._spec(claim.ref.uid, request)) is not None
            for request in requests_of(claim)
        )

    def remove(self, ref: ClaimRef) -> None:
        check_ref(ref)
        self._remove_specs(ref.uid)
        directory = self._directory / directory_name(ref)
        for request in _entries(directory):
            if _owner(request) in (None, ref.uid):
                _remove_request(request)
        _remove_if_empty(directory)

    def _write_spec(self, claim: AllocatedClaim, request: str, file: Path) -> None:
        spec = cdi_spec(self._driver_name, claim, request, str(file))
        path = self._spec(claim.ref.uid, request)
        content = encode_spec(spec)
        if read_or_none(path) == content:
            return
        make_directory(self._cdi, _DIRECTORY_MODE)
        write_atomically(path, content, mode=_FILE_MODE, durable=False)

    def _spec(self, claim_uid: str, request: str) -> Path:
        return self._cdi / cdi_file(self._driver_name, checked_claim_uid(claim_uid), request)

    def _remove_specs(self, claim_uid: str) -> None:
        """Remove specs, whose names end with the request, which contains no underscore."""
        prefix = f"{cdi_file_prefix(self._driver_name)}{claim_uid}"
        found = [
            path
            for path in _entries(self._cdi, prefix)
            if path.suffix == _SPEC_SUFFIX and path.stem.rpartition("_")[0] == prefix
        ]
        for path in found:
            remove_file(path)
        if found:
            sync_removals(self._cdi)


def _entries(directory: Path, prefix: str = "") -> list[Path]:
    try:
        names = os.listdir(directory)  # noqa: PTH208  a thousand Path objects cost milliseconds
        return [directory / name for name in sorted(names) if name.startswith(prefix)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise state_error("list", directory, error) from error


def _readable_entries(directory: Path) -> list[Path]:
    """Return no entries if the disk fails, so that the plugin can still serve other claims."""
    try:
        return _entries(directory)
    except StateError:
        return []


def _owner(request: Path) -> str | None:
    content = read_or_none(request / _FILE)
    owned = None if content is None else owner_and_generation(content)
    return None if owned is None else owned[0]


def _remove_request(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise state_error("remove", directory, error) from error


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise state_error("remove", directory, error) from error
        sync_removals(directory)
    else:
        sync_removals(directory.parent)


def _is_abandoned(directory: Path) -> bool:
    """Whether the directory, if it is empty, is so old that its creator must have died."""
    try:
        return directory.lstat().st_mtime < time.time() - _ABANDONED_AFTER_S
    except OSError:
        return False


@dataclass(eq=False)
class MetadataSteps:
    """This step runs after those that create devices, because the metadata contains UUIDs."""

    files: MetadataFiles
    discovery: Discovery
    ledger: Ledger | None

    def do(self, step: WriteDeviceMetadata, plan: Plan) -> None:
        """Write a file for each request. Raises: NvmlUnavailableError if the node's devices are unknown."""
        claim, by_request = plan.claim, self._described(plan)
        for request in requests_of(claim):
            self.files.write(claim, request, partial(encode, claim, by_request[request], step.versions))

    def _described(self, plan: Plan) -> dict[str, list[DescribedDevice]]:
        inventory = self.discovery.latest()
        if inventory is None:
            raise NvmlUnavailableError(
                "the devices of this node are unknown, so their metadata cannot be written; see NVML's error in the "
                "log of gpu-dra-driver"
            )
        by_request: dict[str, list[DescribedDevice]] = {}
        for planned in plan.devices:
            offered = planned.offered
            made = None if self.ledger is None else self.ledger.created_instance(offered.name)
            device = described(planned.result, offered, planned.usage, inventory, made)
            by_request.setdefault(planned.result.base_request, []).append(device)
        return by_request

    def undo(self, step: WriteDeviceMetadata, ref: ClaimRef) -> None:
        self.files.remove(ref)

    def in_place(self, step: WriteDeviceMetadata, record: ClaimRecord) -> bool:
        return self.files.in_place(record.claim)
