"""A GPU's memory slices as a drawing for people: its GPU instances, who holds them, and what is free.

      0           1           2           3
    +-----------+-----------+-----------------------+
    | 1g.6gb    | free      | 2g.12gb               |
    | GI 3 CI 0 |           | GI 1 CI 0             |
    +-----------+-----------+-----------------------+

ASCII only, at most `WIDTH` columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dra_driver.model.mig import Placement

WIDTH = 100
_WIDEST_CELL = 18
_MOST_SLICES = 16


@dataclass(frozen=True, slots=True)
class DrawnInstance:
    """A GPU instance with its profile's name; `owner` says in words who holds it.

    `gpu_instance_id` is None for one that is held but does not exist at the moment.
    """

    placement: Placement
    profile: str
    owner: str
    gpu_instance_id: int | None = None
    compute_instance_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuMap:
    """What is drawn of one GPU.

    `mode` and `whole_owner` are words: the MIG mode, and who holds the whole GPU, None if it is free. `room` is how
    many instances of each profile name fit now, one profile at a time.
    """

    name: str
    product: str | None
    mode: str
    memory_slices: int
    instances: tuple[DrawnInstance, ...] = ()
    room: tuple[tuple[str, int], ...] = ()
    whole_owner: str | None = None


def draw_gpus(maps: Iterable[GpuMap], width: int | None = None) -> str:
    """The drawings of several GPUs with empty lines between them, for a terminal of so many columns; empty without
    GPUs."""
    return "\n".join(draw_gpu(entry, width) for entry in maps)


def draw_gpu(entry: GpuMap, width: int | None = None) -> str:
    """A headline, the memory slices, a line for each instance, and what there is room for."""
    width = min(WIDTH, width or WIDTH)
    lines = _folded(
        f"{entry.name}  {_ascii(entry.product or 'unknown product')}  MIG mode {entry.mode}", "", width
    )
    lines += _boxes(entry, width)
    for drawn in _in_order(entry.instances):
        lines += _folded(f"{_title(drawn)}: {_ascii(drawn.owner)}", "  ", width)
    if entry.whole_owner is not None:
        lines += _folded(f"whole GPU: {_ascii(entry.whole_owner)}", "  ", width)
    room = ", ".join(f"{_ascii(name)} x{count}" for name, count in entry.room if count > 0)
    lines += _folded(f"room for: {room or 'nothing'}", "  ", width)
    return "\n".join(lines) + "\n"


def _end(placement: Placement) -> int:
    return placement.start + placement.size


def _in_order(instances: Iterable[DrawnInstance]) -> list[DrawnInstance]:
    return sorted(instances, key=lambda drawn: (drawn.placement, drawn.gpu_instance_id or 0))


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
        start = max(drawn.placement.start, at)
        end = min(_end(drawn.placement), entry.memory_slices)
        if start < end:
            yield from (_Box(1, "free") for _ in range(at, start))
            yield _Box(end - start, _ascii(drawn.profile), _ids(drawn))
            at = end
    yield from (_Box(1, "free") for _ in range(at, entry.memory_slices))


def _ids(drawn: DrawnInstance) -> str:
    if drawn.gpu_instance_id is None:
        return "not there"
    compute = ",".join(str(number) for number in sorted(drawn.compute_instance_ids))
    return f"GI {drawn.gpu_instance_id}" + (f" CI {compute}" if compute else "")


def _title(drawn: DrawnInstance) -> str:
    place = drawn.placement
    where = f"slice {place.start}" if place.size == 1 else f"slices {place.start}-{_end(place) - 1}"
    ids = _ids(drawn)
    if drawn.gpu_instance_id is not None and not drawn.compute_instance_ids:
        ids += " without compute instance"
    return f"{where}, {_ascii(drawn.profile)}, {ids}"


def _ascii(text: str) -> str:
    """Names come from the driver and from files: nothing in them may move a terminal's cursor."""
    return "".join(sign if " " <= sign <= "~" else "?" for sign in text)


def _folded(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
