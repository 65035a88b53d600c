"""What a host process must know after a crash or restart: one JSON file a daemon, written before it acts."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from dra_driver.core.unknownfields import unknown_fields, with_unknown_fields
from dra_driver.errors import DraDriverError, StateError
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.mps.layout import SUFFIX, MpsLayout
from dra_driver.mps.processes import ProcessId
from dra_driver.mps.protocol import decode_spec

FORMAT = 1
UNREADABLE = ".unreadable"
# What no later try would read either; other errors pass.
_UNREADABLE = frozenset({errno.EIO, errno.EISDIR, errno.ELOOP})

_SPEC_FIELDS = frozenset(entry.name for entry in fields(MpsDaemonSpec))

Wanted = Literal["running", "stopped"]


@dataclass(frozen=True, slots=True)
class DaemonRecord:
    """`wanted` is where the daemon is on its way to; `process` is the last one that was started, in boot `boot_id`.

    `compute_mode_before` is set if this daemon's start changes the GPU's compute mode: what to put back. `extra` keeps
    the fields that a newer release wrote, at whatever level.
    """

    spec: MpsDaemonSpec
    wanted: Wanted
    boot_id: str
    process: ProcessId | None = None
    compute_mode_before: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class DaemonRecords:
    """The record files of one layout."""

    def __init__(self, layout: MpsLayout) -> None:
        self._layout = layout

    def load(self) -> tuple[dict[str, DaemonRecord], tuple[str, ...]]:
        """Records by device, and the files that could not be read; those are set aside until the
        device's daemon is stopped.

        Raises: StateError if the directory cannot be read, or a record cannot be now, as with too many open files.
        """
        found: dict[str, DaemonRecord] = {}
        faults: list[str] = []
        try:
            paths = sorted(self._layout.root.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise _failed("read", self._layout.root, error) from error
        for path in paths:
            try:
                record = _decode(_read_plain(path))
                if self._layout.record(record.spec.device) != path:
                    raise StateError(f"it is the record of {record.spec.device}")
                found[record.spec.device] = record
            except FileNotFoundError:
                continue
            except (OSError, ValueError, OverflowError, RecursionError, DraDriverError) as error:
                if isinstance(error, OSError) and error.errno not in _UNREADABLE:
                    raise _failed("read", path, error) from error
                faults.append(f"{path}: {error}")
                with suppress(OSError):
                    _make_way(_aside(path))
                    path.replace(_aside(path))
        return found, tuple(faults)

    def write(self, record: DaemonRecord) -> None:
        """Replace the record, synced to disk. Raises: StateError."""
        path = self._layout.record(record.spec.device)
        new = _new(path)
        try:
            _make_way(new)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encode(record))
                file.flush()
                os.fsync(file.fileno())
            try:
                new.replace(path)
            except IsADirectoryError:
                _make_way(path)
                new.replace(path)
            self._sync()
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise _failed("write", path, error) from error

    def remove(self, device: str) -> None:
        """Forget the daemon for good, also what could not be read of it; nothing happens where nothing is. A directory
        that was in the place of a file has another name then.

        Raises: StateError.
        """
        path = self._layout.record(device)
        try:
            for each in (path, _aside(path), _new(path)):
                _make_way(each)
            # A record that came back after a power cut would start a daemon that no claim asked for.
            with suppress(FileNotFoundError):
                self._sync()
        except OSError as error:
            raise _failed("remove", path, error) from error

    def _sync(self) -> None:
        """Make the directory's own entries durable."""
        descriptor = os.open(self._layout.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def has_any(self, device: str) -> bool:
        """Whether there is a record, readable or not."""
        path = self._layout.record(device)
        return path.exists() or os.path.lexists(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}{UNREADABLE}")


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _read_plain(path: Path) -> bytes:
    """Raises: OSError; that is EISDIR for whatever is no plain file, as it would last for ever to read a pipe."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is no plain file")
    return path.read_bytes()


def _make_way(path: Path) -> None:
    """Remove the file, or give the directory in its place, in which may be somebody's work, another name. Raises:
    OSError."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        stem = path.name.removesuffix(UNREADABLE)
        path.rename(path.with_name(f"{stem}{UNREADABLE}-{time.time_ns()}"))


def _failed(action: str, path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot {action} {path}: {error.strerror or error}; check the disk and its permissions"
    )


def _encode(record: DaemonRecord) -> bytes:
    return json.dumps(with_unknown_fields(_encode_known(record), record.extra), indent=1).encode()


def _encode_known(record: DaemonRecord) -> dict[str, Any]:
    known = asdict(record)
    del known["extra"]
    return {"format": FORMAT, **known}


def _decode(raw: bytes) -> DaemonRecord:
    body: Any = json.loads(raw)
    # One of a newer release is read as far as it can be.
    version = body.get("format") if isinstance(body, dict) else None
    if not isinstance(version, int) or version < FORMAT:
        raise StateError(f"it is no record of format {FORMAT}")
    wanted, process, before = body.get("wanted"), body.get("process"), body.get("compute_mode_before")
    if wanted not in ("running", "stopped") or not isinstance(before, int | None):
        raise StateError("it has values that this version does not know")
    try:
        identity = None if process is None else ProcessId(int(process["pid"]), int(process["start_time"]))
        spec = decode_spec({key: value for key, value in body["spec"].items() if key in _SPEC_FIELDS})
        record = DaemonRecord(spec, wanted, str(body["boot_id"]), identity, before)
        return replace(record, extra=unknown_fields(body, _encode_known(record)))
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(f"it is not complete: {error}") from error
