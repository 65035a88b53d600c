"""A GPU's memory slices as a drawing for people: its GPU instances, who holds them, and what is free.

      0           1           2           3
    +-----------+-----------+-----------------------+
    | 1g.6gb    | free      | 2g.12gb               |
    | GI 3 CI 0 |           | GI 1 CI 0             |
    +-----------+-----------+-----------------------+

ASCII only, at most `WIDTH` columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dra_driver.cli.rules.node_view import SeenInstance
from dra_driver.cli.rules.tables import ascii_only, folded

WIDTH = 100
_WIDEST_CELL = 18
_MOST_SLICES = 16


@dataclass(frozen=True, slots=True)
class GpuMap:
    """What is drawn of one GPU.

    `mode` and `whole_owner` are words: the MIG mode, and who holds the whole GPU, None if it is free. `room` is how
    many instances of each profile name fit now, one profile at a time. `called` are all names that people give the GPU.
    """

    name: str
    product: str | None
    mode: str
    memory_slices: int
    instances: tuple[SeenInstance, ...] = ()
    room: tuple[tuple[str, int], ...] = ()
    whole_owner: str | None = None
    called: frozenset[str] = frozenset()


def draw_gpus(maps: Iterable[GpuMap], width: int | None = None) -> str:
    """The drawings of several GPUs with empty lines between them, for a terminal of so many columns; empty without
    GPUs. GPUs that nobody uses have one drawing together if they are equal."""
    alike: dict[GpuMap, list[str]] = {}
    for entry in maps:
        is_free = not entry.instances and entry.whole_owner is None
        alike.setdefault(replace(entry, name="" if is_free else entry.name, called=frozenset()), []).append(
            entry.name
        )
    return "\n".join(draw_gpu(replace(entry, name=", ".join(names)), width) for entry, names in alike.items())


def draw_gpu(entry: GpuMap, width: int | None = None) -> str:
    """A headline, the memory slices, a line for each instance, and what there is room for."""
    width = min(WIDTH, width or WIDTH)
    lines = folded(f"{entry.name}  {entry.product or 'unknown product'}  MIG mode {entry.mode}", "", width)
    lines += _boxes(entry, width)
    for drawn in _in_order(entry.instances):
        lines += folded(f"{_title(drawn)}: {drawn.holder}", "  ", width)
    if entry.whole_owner is not None:
        lines += folded(f"whole GPU: {entry.whole_owner}", "  ", width)
    room = ", ".join(f"{name} x{count}" for name, count in entry.room if count > 0)
    lines += folded(f"room for: {room or 'nothing'}", "  ", width)
    return "\n".join(lines) + "\n"


def _in_order(instances: Iterable[SeenInstance]) -> list[SeenInstance]:
    return sorted(instances, key=lambda seen: (seen.start, seen.size, seen.gpu_instance_id or 0))


@dataclass(frozen=True, slots=True)
class _Box:
    """A frame over `size` memory slices with two lines of text."""

    size: int
    title: str
    ids: str = ""

    def line(self, text: str, pitch: int) -> str:
        inner = self.size * pitch - 1
        if len(text) >= inner:
            text = text.replace("I ", "I").replace("not there", "absent")
        return f" {text}"[:inner].ljust(inner) + "|"


def _boxes(entry: GpuMap, width: int) -> list[str]:
    """The slices' numbers and a row of boxes; none where that would be too wide."""
    if entry.memory_slices == 0 or entry.memory_slices > _MOST_SLICES:
        return []
    pitch = min(_WIDEST_CELL, (width - 1) // entry.memory_slices)
    boxes = [*_row(entry)]
    frame = "+" + "".join("-" * (box.size * pitch - 1) + "+" for box in boxes)
    numbers = "  " + "".join(str(number).ljust(pitch) for number in range(entry.memory_slices)).rstrip()
    titles = "|" + "".join(box.line(box.title, pitch) for box in boxes)
    ids = "|" + "".join(box.line(box.ids, pitch) for box in boxes)
    return [numbers, frame, titles, ids, frame]


def _row(entry: GpuMap) -> Iterator[_Box]:
    """Boxes from left to right; each slice that no instance covers is a box of its own."""
    if entry.whole_owner is not None and not entry.instances:
        yield _Box(entry.memory_slices, "whole GPU")
        return
    at = 0
    for drawn in _in_order(entry.instances):
        start = max(drawn.start, at)
        end = min(drawn.start + drawn.size, entry.memory_slices)
        if start < end:
            yield from (_Box(1, "free") for _ in range(at, start))
            yield _Box(end - start, ascii_only(drawn.profile), drawn.ids)
            at = end
    yield from (_Box(1, "free") for _ in range(at, entry.memory_slices))


def _title(seen: SeenInstance) -> str:
    lacks = seen.gpu_instance_id is not None and not seen.compute_instance_ids
    ids = seen.ids + (" without compute instance" if lacks else "")
    return f"{'slice' if seen.size == 1 else 'slices'} {seen.slices}, {seen.profile}, {ids}"
