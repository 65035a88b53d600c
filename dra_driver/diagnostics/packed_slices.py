"""ResourceSlices of thousands of nodes in little memory: packed as they come, unpacked pool by pool.

A node with MIG devices on demand has 208 devices, half a MiB as Python objects; packed it has 10 KiB.
"""

from __future__ import annotations

import gc
import marshal
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dra_driver.diagnostics.rules.cluster_view import is_on_demand

JsonObject = dict[str, Any]

_PACKED = "packed"
_WITHOUT = "without"
_LARGE = ("devices", "sharedCounters")
_METADATA = ("name", "resourceVersion")


def packed(entry: JsonObject) -> JsonObject:
    """A slice of which name, driver, node and pool can be read; the rest is packed. If it has MIG devices that could be
    made on demand, it is packed once more without them."""
    spec = entry["spec"]
    content = {name: spec[name] for name in _LARGE if name in spec}
    header = {
        "metadata": {name: entry["metadata"][name] for name in _METADATA if name in entry["metadata"]},
        "spec": {name: value for name, value in spec.items() if name not in _LARGE},
        _PACKED: _pack(content),
    }
    devices = content.get("devices") or ()
    others = [device for device in devices if not is_on_demand(device, spec["driver"])]
    if len(others) < len(devices):
        header[_WITHOUT] = _pack(content | {"devices": others})
    return header


class UnpackedPools(Mapping[str, Sequence[JsonObject]]):
    """The slices of each pool, whole. Each look at a pool unpacks it anew: whoever goes through all keeps none.

    With `held`, pool and name of devices, MIG devices on demand are there only in pools where one of them is held.
    """

    def __init__(
        self, pools: Mapping[str, Sequence[JsonObject]], held: Iterable[tuple[str, str]] | None = None
    ) -> None:
        self._pools = pools
        self._held: dict[str, set[str]] | None = None
        if held is not None:
            self._held = {}
            for pool, name in held:
                self._held.setdefault(pool, set()).add(name)

    def __getitem__(self, pool: str) -> list[JsonObject]:
        if self._held is not None:
            found = [_unpacked(entry, _WITHOUT) for entry in self._pools[pool]]
            names = {device["name"] for entry in found for device in entry["spec"].get("devices") or ()}
            if self._held.get(pool, set()) <= names:
                return found
        return [_unpacked(entry, _PACKED) for entry in self._pools[pool]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)


def _pack(content: JsonObject) -> bytes:
    # marshal reads and writes what JSON has, in a tenth of JSON's time; this process alone reads it.
    return zlib.compress(marshal.dumps(content), 1)


def _unpacked(entry: JsonObject, form: str) -> JsonObject:
    content = marshal.loads(zlib.decompress(entry.get(form) or entry[_PACKED]))  # noqa: S302 - `packed` wrote it
    return {"metadata": entry["metadata"], "spec": entry["spec"] | content}


@contextmanager
def uncollected() -> Iterator[None]:
    """JSON has no cycles; looking for some while a lot of it is made takes longer than making it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
