"""The directory with the CDI specs of prepared claims. The container runtime watches it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dra_driver.cdi.rules.spec import COMMON, encode, encoded, file_stem
from dra_driver.files.atomic import (
    clear_abandoned,
    make_directory,
    read_or_none,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.files.directory_watch import DirectoryWatch

_SUFFIX = ".json"
# Earlier drivers of this name wrote YAML. This one finds and removes both.
_SUFFIXES = (_SUFFIX, ".yaml")
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755


class CdiDirectory:
    """One spec file for each claim. Each write ends with a rename inside the directory, which runtimes notice."""

    def __init__(self, path: str | Path, driver_name: str, *, durable: bool = False) -> None:
        """With `durable` a written spec survives a power cut. The driver does not need that: every Prepare checks the
        file."""
        self._path = Path(path)
        self._driver_name = driver_name
        self._durable = durable
        # The part of the last spec that is equal in all specs, and its bytes: it is most of a spec.
        self._common: tuple[Any, bytes] | None = None
        self._watch = DirectoryWatch(self._path)
        self._names: dict[str, tuple[str, tuple[str, ...]]] = {}  # UID and devices by file
        self._by_uid: dict[str, tuple[str, ...]] = {}
        self._pending: set[str] = set()
        self._index_lock = threading.Lock()

    def create(self) -> None:
        """Create the directory if it is missing, and remove what killed writers left.

        Raises: StateError.
        """
        make_directory(self._path, _DIRECTORY_MODE)
        clear_abandoned(self._path, f".{self._prefix}")

    def file(self, claim_uid: str) -> Path:
        """The claim's spec file. Raises: ClaimRefusedError if the UID cannot be part of a file name."""
        return self._path / f"{file_stem(self._driver_name, claim_uid)}{_SUFFIX}"

    def write(self, claim_uid: str, spec: dict[str, Any]) -> bool:
        """Write the spec into the claim's file unless it is there already; returns whether it was written.

        Raises: StateError.
        """
        file = self.file(claim_uid)
        common = self._common
        if common is None or common[0] != spec[COMMON]:
            common = self._common = (spec[COMMON], encoded(spec[COMMON]))
        content = encode(spec, common[1])
        if read_or_none(file) == content:
            return False
        make_directory(self._path, _DIRECTORY_MODE)
        write_atomically(file, content, mode=_FILE_MODE, durable=self._durable)
        return True

    def read(self, claim_uid: str) -> dict[str, Any] | None:
        """The claim's spec; None if there is none or the file is not a valid spec. Raises: StateError."""
        return _decoded(read_or_none(self.file(claim_uid)))

    def verify(self, claim_uid: str, spec: dict[str, Any]) -> bool:
        """Whether the claim's file holds exactly this spec. Raises: StateError."""
        return read_or_none(self.file(claim_uid)) == encode(spec)

    def remove(self, claim_uid: str) -> bool:
        """Remove the claim's spec so that it does not come back; returns whether there was one. Raises: StateError."""
        stem = file_stem(self._driver_name, claim_uid)
        was_there = any([remove_file(self._path / f"{stem}{suffix}") for suffix in _SUFFIXES])
        if was_there:
            # Synced: a spec that came back after a power cut would have no record and stay for ever.
            sync_removals(self._path)
        return was_there

    def list(self) -> dict[str, tuple[str, ...]]:
        """The device names in each spec, by claim UID; no names for a file that is not a valid spec.

        Raises: StateError.
        """
        with self._index_lock:
            pending = self._to_look_at()
            for file in pending:
                path = self._path / file
                content = read_or_none(path)
                if content is not None or os.path.lexists(path):
                    uid = path.stem.removeprefix(self._prefix)
                    self._names[file] = (uid, _device_names(uid, content, path.suffix))
                else:
                    self._names.pop(file, None)
                if content is not None or file not in self._names:  # no event tells that a disk is well again
                    self._pending.discard(file)
            if pending or not self._names:
                self._by_uid = {}
                for _, (uid, names) in sorted(self._names.items()):
                    self._by_uid[uid] = (*self._by_uid.get(uid, ()), *names)
            return self._by_uid.copy()

    @property
    def _prefix(self) -> str:
        return file_stem(self._driver_name, "0").removesuffix("0")

    def _to_look_at(self) -> Sequence[str]:
        """The specs of ours that may have changed since `list` last read them. Raises: StateError."""
        try:
            changed, are_all = self._watch.look()
            if are_all:
                self._names.clear()
        except FileNotFoundError:
            self._names.clear()
            self._pending.clear()
            return []
        except OSError as error:
            raise state_error("list", self._path, error) from error
        self._pending |= {
            file for file in changed if file.startswith(self._prefix) and file.endswith(_SUFFIXES)
        }
        return sorted(self._pending)


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
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ):  # YAML raises ValueError for a date that does not exist
        return None


def _device_names(claim_uid: str, content: bytes | None, suffix: str) -> tuple[str, ...]:
    spec = _decoded(content) if suffix == _SUFFIX else _decoded_yaml(content)
    devices = spec.get("devices") if isinstance(spec, dict) else None
    if not isinstance(devices, list):
        return ()
    names = (device.get("name") for device in devices if isinstance(device, dict))
    return tuple(name.removeprefix(f"{claim_uid}-") for name in names if isinstance(name, str))
