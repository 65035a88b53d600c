"""What an administrator said: a GPU was reset or replaced, though the NVIDIA driver cannot report it.

`gpu-dra-driver serviced` writes a file, and every instance of the plugin on the node reads it. A reason that began
before the time in the file ends with the next poll that finds the GPU well, as after an observed reset. So the file has
no state: it can be read any number of times, and counts in its boot only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.base.atomic import read_or_none, write_atomically
from dra_driver.base.fields import encode_file, parse_file
from dra_driver.errors import StateError
from dra_driver.model.schema import JsonObject

FORMAT_VERSION = 1
_FILE = "serviced.json"


@dataclass(frozen=True, slots=True)
class _Serviced:
    boot_id: str
    gpus: Mapping[str, int] = field(default_factory=dict)


class ServicedGpus:
    """The file in the plugin directory. `boot_id` is that of this boot."""

    def __init__(self, plugin_directory: Path, boot_id: str) -> None:
        self._path = plugin_directory / _FILE
        self._boot_id = boot_id

    def times(self) -> Mapping[str, int]:
        """When each GPU was serviced last in this boot, in seconds since 1970 by UUID. Raises: StateError if the file
        cannot be read."""
        content = read_or_none(self._path)
        if content is None:
            return {}
        found = parse_file(content, "file of serviced GPUs", _decoded, known=FORMAT_VERSION)
        return found.gpus if found.boot_id == self._boot_id else {}

    def add(self, gpu_uuid: str, at: int) -> None:
        """The GPU was serviced before `at`. Raises: StateError."""
        try:
            known = self.times()
        except StateError:
            known = {}  # a damaged file is replaced
        document = {"bootID": self._boot_id, "gpus": {**known, gpu_uuid: at}}
        write_atomically(self._path, encode_file(document, FORMAT_VERSION), durable=False)


def _decoded(fields: JsonObject) -> _Serviced:
    return _Serviced(str(fields["bootID"]), {str(uuid): int(at) for uuid, at in fields["gpus"].items()})
