"""MIG layouts before they are applied: would each GPU of a machine take them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.mig.rules.layouts import LayoutRefusedError, entry_for, generated_names, target_of
from dra_driver.model.mig import Layouts, PlacedProfile
from dra_driver.model.units import named


@dataclass(frozen=True, slots=True)
class MigGpu:
    """A GPU of a machine. `index` counts in the order of PCI addresses, `profiles` is empty without MIG."""

    index: int
    name: str
    pci_id: str | None
    profiles: Sequence[PlacedProfile]


def manager_layouts(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and text of each file of NVIDIA's mig-manager in a ConfigMap."""
    data = content.get("data")
    if content.get("kind") == "ConfigMap" and isinstance(data, dict):
        yield from (
            (str(key), text) for key, text in data.items() if isinstance(text, str) and "mig-configs" in text
        )


def layout_problems(name: str, layouts: Layouts, gpus: Sequence[MigGpu]) -> tuple[list[str], list[str]]:
    """Why GPUs would refuse the layout of this name, and what is probably not meant by it."""
    refused: dict[str, list[str]] = {}
    hints: list[str] = []
    for gpu in gpus:
        try:
            if not gpu.profiles and name not in layouts:
                continue
            entry = entry_for(name, layouts, gpu.index, gpu.pci_id, gpu.profiles)
            if entry is not None and not (entry.devices is None and not gpu.profiles):
                target_of(entry, gpu.profiles, (), ())
        except LayoutRefusedError as error:
            refused.setdefault(str(error), []).append(gpu.name)
    capable = [gpu for gpu in gpus if gpu.profiles]
    if not capable:
        return [f"layout {name}: the machine has no GPU with MIG"] if name != "all-disabled" else [], []
    there = {gpu.index for gpu in gpus}
    absent = sorted(
        {index for entry in layouts.get(name, ()) for index in entry.devices or () if index not in there}
    )
    if absent:
        listed = ", ".join(map(str, absent))
        hints.append(f"layout {name}: entries name GPUs that the machine lacks: {listed}")
    without = [gpu.name for gpu in gpus if not gpu.profiles]
    if without and not absent:
        hints.append(f"layout {name}: {named(without)} has no MIG and is left as it is")
    return [f"layout {name}: {named(gpus)}: {text}" for text, gpus in refused.items()], hints


def known_names(layouts: Layouts, gpus: Sequence[MigGpu]) -> list[str]:
    """The layouts that a machine can have by name."""
    made = {name for gpu in gpus if gpu.profiles for name in generated_names(gpu.profiles)}
    return sorted({*layouts, *made})
