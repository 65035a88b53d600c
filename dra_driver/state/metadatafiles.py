"""The files that tell containers of their devices, on the host, and the CDI specs that mount them.

    <plugin directory>/dra-device-metadata/<namespace>_<claim>/<request>/metadata.json
    <CDI directory>/<driver>_metadata_<claim UID>_<request>.json

A directory bears the claim's name. A claim that was deleted and made anew under its name finds the files of the
one before, so each file's own word decides whose it is.

What lies in the place of a file or directory and is none, as some runtimes make a directory where a file to mount is
missing, gets out of the way when the claim is prepared, and goes with the claim.
"""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from dra_driver.core.cdi import checked_claim_uid
from dra_driver.core.cdi import encode as encode_spec
from dra_driver.core.cdi_rules import faults
from dra_driver.core.devicemetadata import (
    cdi_file,
    cdi_file_prefix,
    cdi_spec,
    check_names,
    directory_name,
    owner_and_generation,
    requests_of,
)
from dra_driver.errors import StateError
from dra_driver.model.claim import AllocatedClaim
from dra_driver.state.files import (
    UNREADABLE,
    clear_abandoned,
    is_abandoned,
    make_directory,
    read_plain,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)

_log = structlog.get_logger(__name__)

DIRECTORY = "dra-device-metadata"
_FILE = "metadata.json"
_SPEC_SUFFIX = ".json"
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755


class MetadataFiles:
    """Metadata files and their CDI specs. Writing either is a rename. A power cut may take both away, since every
    Prepare looks whether they are right; what is removed stays removed, since nobody would look for it."""

    def __init__(self, plugin_directory: str | Path, cdi_root: str | Path, driver_name: str) -> None:
        self._directory = Path(plugin_directory) / DIRECTORY
        self._cdi = Path(cdi_root)
        self._driver_name = driver_name

    def create(self) -> None:
        """Clear up after writers that were killed, and after a power cut that took files but not their directories;
        directories are made with the first file. Raises: StateError."""
        for claim in _entries(self._directory):
            # Before the first is removed, which makes the claim's own young.
            abandoned = {path: _is_abandoned(path) for path in (*_readable_entries(claim), claim)}
            for directory, is_old in abandoned.items():
                if stat.S_ISDIR(_mode(directory)):
                    with suppress(StateError):
                        clear_abandoned(directory)
                if is_old:
                    with suppress(OSError):  # most are not empty
                        directory.rmdir()
        clear_abandoned(self._cdi, f".{cdi_file_prefix(self._driver_name)}")

    def file(self, claim: AllocatedClaim, request: str) -> Path:
        """The file of a top-level request. Raises: ClaimRefusedError if a name cannot be part of a path."""
        check_names(claim)
        return self._directory / directory_name(claim.ref) / request / _FILE

    def write(self, claim: AllocatedClaim, request: str, encode: Callable[[int], bytes]) -> None:
        """Make the request's file hold what `encode` gives for its generation, and have the CDI spec mount it.

        The generation is 1 at first and one more with each change. Raises: StateError, ClaimRefusedError.
        """
        file = self.file(claim, request)
        content = _read(file)
        owned = None if content is None else owner_and_generation(content)
        generation = owned[1] if owned is not None and owned[0] == claim.ref.uid else 0
        if not generation or content != encode(generation):
            self._make_directory(file.parent)
            write_atomically(file, encode(generation + 1), mode=_FILE_MODE, durable=False)
        self._write_spec(claim, request, file)

    def in_place(self, claim: AllocatedClaim) -> bool:
        """Whether each request has its file and its CDI spec. Raises: StateError, ClaimRefusedError."""
        return all(
            _read(self.file(claim, request)) is not None
            and _read(self._spec(claim.ref.uid, request)) is not None
            for request in requests_of(claim)
        )

    def remove(self, claim: AllocatedClaim) -> None:
        """Remove the claim's files and CDI specs, whatever part of them is there.

        Raises: StateError, ClaimRefusedError.
        """
        check_names(claim)
        self._remove_specs(claim.ref.uid)
        directory = self._directory / directory_name(claim.ref)
        for request in _entries_of_claim(directory):
            if _owner(request) in (None, claim.ref.uid):
                _remove_request(request)
        _remove_if_empty(directory)

    def forget(self, claim_uid: str) -> None:
        """Remove the files and CDI specs of a claim of which only the UID is known.

        Raises: StateError, ClaimRefusedError.
        """
        checked_claim_uid(claim_uid)
        self._remove_specs(claim_uid)
        for request in list(self._request_directories()):
            if _owner(request) == claim_uid:
                _remove_request(request)
                _remove_if_empty(request.parent)

    def _make_directory(self, request: Path) -> None:
        """Make a request's directory. Raises: StateError."""
        for place in (request.parent, request):  # a link in the place of the first is a person's
            if stat.S_ISLNK(_mode(place)):
                _remove_stray(place)
        try:
            make_directory(request, _DIRECTORY_MODE)
        except StateError:
            places = (self._directory, request.parent, request)
            if not any([_remove_stray(place) for place in places if not place.is_dir()]):
                raise
            make_directory(request, _DIRECTORY_MODE)

    def _write_spec(self, claim: AllocatedClaim, request: str, file: Path) -> None:
        spec = cdi_spec(self._driver_name, claim, request, str(file))
        path = self._spec(claim.ref.uid, request)
        content = encode_spec(spec)
        if _read(path) == content:
            return
        wrong = faults(spec)
        if wrong:
            raise StateError(
                f"container runtimes would refuse the CDI spec {path}: {'; '.join(wrong)}; "
                "this is a fault of the driver, please report it"
            )
        make_directory(self._cdi, _DIRECTORY_MODE)
        write_atomically(path, content, mode=_FILE_MODE, durable=False)

    def _spec(self, claim_uid: str, request: str) -> Path:
        return self._cdi / cdi_file(self._driver_name, checked_claim_uid(claim_uid), request)

    def _remove_specs(self, claim_uid: str) -> None:
        """The claim's requests are in the names of the files, and in no name of a request is an underscore."""
        prefix = f"{cdi_file_prefix(self._driver_name)}{claim_uid}"
        found = [
            path
            for path in _entries(self._cdi)
            if path.name.startswith(prefix)
            and path.suffix == _SPEC_SUFFIX
            and path.stem.rpartition("_")[0] == prefix
        ]
        for path in found:
            _unlink(path)
        if found:
            sync_removals(self._cdi)

    def _request_directories(self) -> Iterator[Path]:
        for claim in _entries(self._directory):
            yield from _readable_entries(claim)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno == errno.ELOOP:
            return []
        raise state_error("list", directory, error) from error


def _entries_of_claim(directory: Path) -> list[Path]:
    """None of what a link leads to, which is somebody else's."""
    return [] if stat.S_ISLNK(_mode(directory)) else _entries(directory)


def _readable_entries(directory: Path) -> list[Path]:
    """The same; none where the disk does not tell, which must not keep other claims from coming and going."""
    try:
        return _entries_of_claim(directory)
    except StateError:
        return []


def _mode(path: Path) -> int:
    """The kind of what is there itself, not of what a link leads to; 0 if that cannot be told."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _read(file: Path) -> bytes | None:
    """What is in the file; None if there is none, or none that any later try would read."""
    try:
        return read_plain(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in UNREADABLE:
            return None
        raise state_error("read", file, error) from error


def _unlink(path: Path) -> None:
    try:
        remove_file(path)
    except OSError as error:
        raise state_error("remove", path, error) from error


def _owner(request: Path) -> str | None:
    """The UID of the claim that the file in a request's directory is of; None if nothing says so."""
    content = _read(request / _FILE)
    owned = None if content is None else owner_and_generation(content)
    return None if owned is None else owned[0]


def _remove_request(directory: Path) -> None:
    """Remove a request's directory, whatever is in it or in its place."""
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            _remove_stray(directory)
            return
        file = directory / _FILE
        has_stray = file.exists() and not file.is_file()
        shutil.rmtree(directory)
        if has_stray:
            _log.warning("stray_removed", path=str(file))
    except FileNotFoundError:
        return
    except OSError as error:
        raise state_error("remove", directory, error) from error


def _remove_stray(path: Path) -> bool:
    """Remove what is in the place of a directory; whether there was anything but one. Raises: StateError."""
    try:
        path.unlink()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    except OSError as error:
        raise state_error("remove", path, error) from error
    _log.warning("stray_removed", path=str(path))
    return True


def _remove_if_empty(directory: Path) -> None:
    """Remove the directory if nothing is in it (any more), or what is in its place, for good."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return
    except NotADirectoryError:
        _remove_stray(directory)
    except OSError as error:
        if error.errno == errno.ELOOP:  # what the directory would be in is a link to itself
            return
        if error.errno != errno.ENOTEMPTY:
            raise state_error("remove", directory, error) from error
        sync_removals(directory)
    else:
        sync_removals(directory.parent)


def _is_abandoned(directory: Path) -> bool:
    try:
        return is_abandoned(directory)
    except OSError:
        return False
