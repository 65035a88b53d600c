"""The directory with the CDI specs of prepared claims, which the container runtime watches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dra_driver.core.cdi import COMMON, encode, encoded, file_stem
from dra_driver.core.cdi_rules import faults
from dra_driver.errors import StateError
from dra_driver.state.files import (
    TEMPORARY_SUFFIX,
    UNREADABLE,
    make_directory,
    read_plain,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)

_SUFFIX = ".json"
# Drivers of the same name before this one wrote YAML. Both are found and removed.
_SUFFIXES = (_SUFFIX, ".yaml")
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755
# A younger temporary file may belong to the other instance of a rolling update.
_OLD_S = 60


class CdiDirectory:
    """One spec file per claim. Writing is a rename inside the directory, which runtimes notice."""

    def __init__(self, path: str | Path, driver_name: str, *, durable: bool = False) -> None:
        """`durable` has what is written survive a power cut; not needed as every Prepare looks whether the file is
        right."""
        self._path = Path(path)
        self._driver_name = driver_name
        self._durable = durable
        # The driver's part of the last spec, looked at, and its bytes: most of a spec, and the same in all.
        self._good: tuple[Any, bytes] | None = None

    def create(self) -> None:
        """Create the directory where it is missing and clear up after writers that were killed.

        Raises: StateError.
        """
        make_directory(self._path, _DIRECTORY_MODE)
        prefix = f".{self._prefix}"
        for file in self._files():
            if file.name.startswith(prefix) and file.suffix == TEMPORARY_SUFFIX and _is_old(file):
                with suppress(StateError):  # a disk that is read-only must not keep the driver from serving
                    self._remove(file)

    def file(self, claim_uid: str) -> Path:
        """The claim's spec file. Raises: ClaimRefusedError if the UID cannot be part of a file name."""
        return self._path / f"{file_stem(self._driver_name, claim_uid)}{_SUFFIX}"

    def write(self, claim_uid: str, spec: dict[str, Any]) -> bool:
        """Make the claim's file hold the spec; returns whether it had to be written.

        Raises: StateError if it cannot be written, or if runtimes would refuse the spec.
        """
        file = self.file(claim_uid)
        good = self._good
        known = good if good is not None and good[0] == spec.get(COMMON) else None
        content = encode(spec, None if known is None else known[1])
        if self._read(file, unreadable=b"") == content:
            return False
        wrong = faults(spec if known is None else {key: spec[key] for key in spec.keys() - {COMMON}})
        if wrong:
            raise StateError(
                f"container runtimes would refuse the CDI spec of claim {claim_uid}: {'; '.join(wrong)}; "
                "this is a fault of the driver, please report it"
            )
        if known is None and COMMON in spec:
            self._good = (spec[COMMON], encoded(spec[COMMON]))
        make_directory(self._path, _DIRECTORY_MODE)
        write_atomically(file, content, mode=_FILE_MODE, durable=self._durable)
        return True

    def read(self, claim_uid: str) -> dict[str, Any] | None:
        """The claim's spec; None if there is none or it is not readable as one. Raises: StateError."""
        return _decoded(self._read(self.file(claim_uid), unreadable=b""))

    def verify(self, claim_uid: str, spec: dict[str, Any]) -> bool:
        """Whether the claim's file holds exactly this spec. Raises: StateError."""
        return self._read(self.file(claim_uid), unreadable=b"") == encode(spec)

    def remove(self, claim_uid: str) -> bool:
        """Remove the claim's spec for good; returns whether there was one. Raises: StateError."""
        stem = file_stem(self._driver_name, claim_uid)
        was_there = any([self._remove(self._path / f"{stem}{suffix}") for suffix in _SUFFIXES])
        if was_there:
            # One that came back after a power cut, without a record, would stay for ever, and look like a claim's.
            sync_removals(self._path)
        return was_there

    def list(self) -> dict[str, tuple[str, ...]]:
        """Claim UIDs with the device names in their specs; no names where a file is not readable.

        Raises: StateError.
        """
        found: dict[str, tuple[str, ...]] = {}
        for file in self._files():
            if file.name.startswith(self._prefix) and file.suffix in _SUFFIXES:
                uid = file.stem.removeprefix(self._prefix)
                content = self._read(file, unreadable=b"")
                found[uid] = (*found.get(uid, ()), *_device_names(uid, content, file.suffix))
        return found

    @property
    def _prefix(self) -> str:
        return file_stem(self._driver_name, "0").removesuffix("0")

    def _files(self) -> Iterator[Path]:
        try:
            yield from sorted(self._path.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise state_error("list", self._path, error) from error

    def _read(self, file: Path, unreadable: bytes | None = None) -> bytes | None:
        """The file's content, None if it is not there; `unreadable` for what no later try would read either."""
        try:
            return read_plain(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            if unreadable is not None and error.errno in UNREADABLE:
                return unreadable
            raise state_error("read", file, error) from error

    def _remove(self, file: Path) -> bool:
        try:
            return remove_file(file)
        except NotADirectoryError:
            return False
        except OSError as error:
            raise state_error("remove", file, error) from error


def _is_old(file: Path) -> bool:
    try:
        return time.time() - file.lstat().st_mtime > _OLD_S
    except OSError:
        return False


def _decoded(content: bytes | None) -> dict[str, Any] | None:
    try:
        spec = json.loads(content) if content is not None else None
    except (ValueError, RecursionError):
        return None
    return spec if isinstance(spec, dict) else None


def _decoded_yaml(content: bytes | None) -> Any:
    import yaml

    try:
        return yaml.safe_load(content or b"")
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that cannot be is a ValueError
        return None


def _device_names(claim_uid: str, content: bytes | None, suffix: str) -> tuple[str, ...]:
    spec = _decoded(content) if suffix == _SUFFIX else _decoded_yaml(content)
    devices = spec.get("devices") if isinstance(spec, dict) else None
    if not isinstance(devices, list):
        return ()
    names = (device.get("name") for device in devices if isinstance(device, dict))
    return tuple(name.removeprefix(f"{claim_uid}-") for name in names if isinstance(name, str))
