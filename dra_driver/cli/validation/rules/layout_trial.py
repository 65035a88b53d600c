"""Tries MIG layouts before they are applied: would each GPU of a machine accept them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import yaml

from dra_driver.app.config_file import MIG_LAYOUTS, mig_layouts
from dra_driver.mig.rules.layouts import LayoutRefusedError, entry_for, generated_names, target_of
from dra_driver.model.mig import Layouts, PlacedProfile
from dra_driver.model.schema import faults
from dra_driver.model.units import named


@dataclass(frozen=True, slots=True)
class MigGpu:
    """A GPU of a machine. `index` counts in PCI order; `profiles` is empty without MIG."""

    index: int
    name: str
    pci_id: str | None
    profiles: Sequence[PlacedProfile]


def manager_layouts(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each file of NVIDIA's mig-manager in a ConfigMap with its key. A document that is itself such a file has
    the key "".
    """
    data = content.get("data")
    if "mig-configs" in content and "kind" not in content:
        yield "", content
    if content.get("kind") == "ConfigMap" and isinstance(data, dict):
        yield from (
            (str(key), text) for key, text in data.items() if isinstance(text, str) and "mig-configs" in text
        )


def read_layouts(text: Any) -> tuple[Layouts, list[str]]:
    """Return the layouts of a mig-manager file by name, and its faults; no layouts if it has faults."""
    try:
        content = yaml.safe_load(text) if isinstance(text, str) else text
    except yaml.YAMLError as error:
        return {}, [f"is not valid YAML: {' '.join(str(error).split())}"]
    found = faults({"fromLabel": True, "configuration": content}, MIG_LAYOUTS, "")
    if found:
        return {}, [str(fault).removeprefix("configuration.") for fault in found]
    return mig_layouts({"configuration": content}).named, []


@dataclass
class Trial:
    """Layouts on one machine. `hints` are probable mistakes; `fits` are the layouts that every GPU accepts."""

    machine: str
    gpus: Sequence[MigGpu]
    layouts: Layouts
    hints: list[str] = field(default_factory=list)
    fits: list[str] = field(default_factory=list)

    def problems(self, names: Sequence[str]) -> list[str]:
        """Return why GPUs would refuse the layouts of these names."""
        found = [text for name in names for text in self._problems_of(name)]
        made = {name for gpu in self.gpus if gpu.profiles for name in generated_names(gpu.profiles)}
        near = (
            get_close_matches(names[0], {*self.layouts, *made}, 1)
            if "unknown layout" in "".join(found)
            else []
        )
        return found + [f"did you mean {name}?" for name in near]

    def _problems_of(self, name: str) -> list[str]:
        refused: dict[str, list[str]] = {}
        for gpu in self.gpus:
            try:
                if not gpu.profiles and name not in self.layouts:
                    continue
                entry = entry_for(name, self.layouts, gpu.index, gpu.pci_id, gpu.profiles)
                if entry is not None and not (entry.devices is None and not gpu.profiles):
                    target_of(entry, gpu.profiles, (), ())
            except LayoutRefusedError as error:
                refused.setdefault(str(error), []).append(gpu.name)
        if not any(gpu.profiles for gpu in self.gpus) and name != "all-disabled":
            return [f"layout {name}: {self.machine} has no GPU with MIG"]
        there = {gpu.index for gpu in self.gpus}
        named_ones = {index for entry in self.layouts.get(name, ()) for index in entry.devices or ()}
        absent = ", ".join(map(str, sorted(named_ones - there)))
        without = [gpu.name for gpu in self.gpus if not gpu.profiles]
        if absent:
            self.hints.append(f"layout {name}: entries name GPUs that the machine does not have: {absent}")
        elif without:
            self.hints.append(f"layout {name}: GPUs without MIG stay unchanged: {named(without)}")
        if not refused:
            self.fits.append(f"layout {name} fits {self.machine}")
        return [f"layout {name}: {named(gpus)}: {text}" for text, gpus in refused.items()]
