"""ResourceSlices of thousands of nodes in little memory: packed as they come, unpacked pool by pool.

A node with MIG devices on demand has 208 devices, half a MiB as Python objects; packed it has 10 KiB.
"""

from __future__ import annotations

import gc
import marshal
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

JsonObject = dict[str, Any]

_PACKED = "packed"
_LARGE = ("devices", "sharedCounters")
_METADATA = ("name", "resourceVersion")


def packed(entry: JsonObject) -> JsonObject:
    """A slice of which name, driver, node and pool can be read; the rest is packed."""
    spec = entry["spec"]
    # marshal reads and writes what JSON has, in a tenth of JSON's time; this process alone reads it.
    content = marshal.dumps({name: spec[name] for name in _LARGE if name in spec})
    return {
        "metadata": {name: entry["metadata"][name] for name in _METADATA if name in entry["metadata"]},
        "spec": {name: value for name, value in spec.items() if name not in _LARGE},
        _PACKED: zlib.compress(content, 1),
    }


class UnpackedPools(Mapping[str, Sequence[JsonObject]]):
    """The slices of each pool, whole. Each look at a pool unpacks it anew: whoever goes through all keeps none."""

    def __init__(self, pools: Mapping[str, Sequence[JsonObject]]) -> None:
        self._pools = pools

    def __getitem__(self, pool: str) -> list[JsonObject]:
        return [_unpacked(entry) for entry in self._pools[pool]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)


def _unpacked(entry: JsonObject) -> JsonObject:
    content = marshal.loads(zlib.decompress(entry[_PACKED]))  # noqa: S302 - `packed` wrote it
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
