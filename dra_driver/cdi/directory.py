"""The directory of the CDI specs of prepared claims."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dra_driver.base.atomic import (
    TEMPORARY_SUFFIX,
    make_directory,
    read_or_none,
    remove_file,
    state_error,
    sync_removals,
    write_atomically,
)
from dra_driver.cdi.metadata_files import DIRECTORY as METADATA
from dra_driver.cdi.rules.metadata import cdi_file_prefix
from dra_driver.cdi.rules.spec import COMMON, encode, encoded, file_stem
from dra_driver.model.ids import is_uid
from dra_driver.model.schema import YAML_ERRORS

_SUFFIX = ".yaml"
"""As in NVIDIA's DRA driver: monitoring agents open the file by its full name. The content is JSON."""
_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755


class CdiDirectory:
    """One spec file per claim. The methods raise StateError.

    Container runtimes notice each write, because it is a rename inside the directory.
    """

    def __init__(self, path: str | Path, driver_name: str) -> None:
        self._path = Path(path)
        self._driver_name = driver_name
        # The last common edits and their encoding: most of a spec, and usually equal in all specs.
        self._common: tuple[Any, bytes] | None = None

    def create(self) -> None:
        make_directory(self._path, _DIRECTORY_MODE)

    def file(self, claim_uid: str) -> Path:
        """Return the claim's file. Raises: ClaimRefusedError if the UID cannot be part of a file name."""
        return self._path / f"{file_stem(self._driver_name, claim_uid)}{_SUFFIX}"

    def write(self, claim_uid: str, spec: dict[str, Any]) -> None:
        """Write the claim's spec file, unless it already has this content."""
        file = self.file(claim_uid)
        common = self._common
        if COMMON in spec and (common is None or common[0] != spec[COMMON]):
            common = self._common = (spec[COMMON], encoded(spec[COMMON]))
        content = encode(spec, None if common is None else common[1])
        if read_or_none(file) == content:
            return
        make_directory(self._path, _DIRECTORY_MODE)
        # The directory is not synced: a power cut may take the file, and every Prepare checks it.
        write_atomically(file, content, mode=_FILE_MODE, durable=False)

    def read(self, claim_uid: str) -> dict[str, Any] | None:
        """Return the claim's spec; None if it is missing or not a JSON object."""
        return _decoded(read_or_none(self.file(claim_uid)))

    def remove(self, claim_uid: str) -> None:
        if remove_file(self.file(claim_uid)):
            # Synced: a spec that reappeared after a power cut would have no record, and would stay forever.
            sync_removals(self._path)

    def uids(self) -> frozenset[str]:
        """Return the UIDs of all specs, valid or not."""
        try:
            files = os.listdir(self._path)  # noqa: PTH208  a thousand Path objects cost milliseconds
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise state_error("list", self._path, error) from error
        prefix = _prefix(self._driver_name)
        named = (file.removeprefix(prefix) for file in files if file.startswith(prefix))
        uids = (name.removesuffix(_SUFFIX) for name in named if name.endswith(_SUFFIX))
        return frozenset(filter(is_uid, uids))

    def list(self) -> dict[str, tuple[str, ...]]:
        return {uid: _device_names(uid, read_or_none(self.file(uid))) for uid in sorted(self.uids())}


def temporary_files(plugin_dir: Path, cdi_root: Path, driver_name: str) -> Sequence[tuple[Path, str]]:
    """Return directories where a killed plugin may leave temporary files, each with a glob pattern."""
    ours, specs = (
        ("", "*/", "mps/*/", f"{METADATA}/*/*/"),
        (_prefix(driver_name), cdi_file_prefix(driver_name)),
    )
    return (
        *((plugin_dir, f"{place}.*{TEMPORARY_SUFFIX}") for place in ours),
        *((cdi_root, f".{prefix}*{TEMPORARY_SUFFIX}") for prefix in specs),
    )


def _prefix(driver_name: str) -> str:
    return file_stem(driver_name, "0").removesuffix("0")


def _decoded(content: bytes | None) -> dict[str, Any] | None:
    try:
        spec = json.loads(content) if content is not None else None
    except (ValueError, RecursionError):
        return None
    return spec if isinstance(spec, dict) else None


def _decoded_yaml(content: bytes) -> Any:
    import yaml

    # The loader in Python would take seconds for a damaged file of a few kilobytes.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(content, loader)  # noqa: S506  both loaders are safe
    except (yaml.YAMLError, *YAML_ERRORS):
        return None


def _device_names(claim_uid: str, content: bytes | None) -> tuple[str, ...]:
    """Read also specs of NVIDIA's DRA driver, which uses the same file names but writes YAML."""
    if content is None:
        return ()
    spec = _decoded(content) or _decoded_yaml(content)
    devices = spec.get("devices") if isinstance(spec, dict) else None
    if not isinstance(devices, list):
        return ()
    names = (device.get("name") for device in devices if isinstance(device, dict))
    return tuple(name.removeprefix(f"{claim_uid}-") for name in names if isinstance(name, str))
