"""Tries MIG layouts before they are applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import yaml

from dra_driver.app.config_file import MIG_LAYOUTS, mig_layouts
from dra_driver.mig.rules.layouts import (
    LayoutRefusedError,
    NoMigError,
    absent_indices,
    entry_for,
    generated_names,
    target_of,
)
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.mig import Layouts, PlacedProfile
from dra_driver.model.schema import YAML_ERRORS, faults
from dra_driver.model.units import named


@dataclass(frozen=True, slots=True)
class MigGpu:
    """`index` counts in PCI order; `profiles` is empty without MIG. A GPU with MIG devices on demand gets no layout."""

    index: int
    name: str
    pci_id: str | None
    profiles: Sequence[PlacedProfile]
    is_on_demand: bool = False


def manager_layouts(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each file of NVIDIA's mig-manager in a ConfigMap with its key. A document that is such a file has the
    key "".
    """
    data = content.get("data")
    if "mig-configs" in content and "kind" not in content:
        yield "", content
    if content.get("kind") == "ConfigMap" and isinstance(data, dict):
        yield from (
            (str(key), text) for key, text in data.items() if isinstance(text, str) and "mig-configs" in text
        )


def read_layouts(text: Any) -> tuple[Layouts, list[str]]:
    """Return the layouts of a mig-manager file by name, or its faults."""
    try:
        content = yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, *YAML_ERRORS) as error:
        return {}, [f"is not valid YAML: {' '.join(str(error).split())}"]
    found = faults({"fromLabel": True, "configuration": content}, MIG_LAYOUTS, "")
    if found:
        return {}, [str(fault).removeprefix("configuration.") for fault in found]
    return mig_layouts({"configuration": content}).named, []


@dataclass
class Trial:
    """Layouts on a machine with `count` GPUs, of which `gpus` could be read. Every GPU accepts the layouts in
    `fits`.
    """

    machine: str
    count: int
    gpus: Sequence[MigGpu]
    layouts: Layouts
    hints: list[str] = field(default_factory=list)
    fits: list[str] = field(default_factory=list)

    def problems(self, names: Sequence[str]) -> list[str]:
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
        without: list[str] = []
        on_demand = [gpu.name for gpu in self.gpus if gpu.is_on_demand]
        for gpu in self.gpus:
            if gpu.is_on_demand:
                continue
            try:
                entry = entry_for(name, self.layouts, gpu.index, gpu.pci_id, gpu.profiles)
                if entry is not None:
                    target_of(entry, gpu.profiles, (), ())
            except NoMigError:
                without.append(gpu.name)
            except LayoutRefusedError as error:
                refused.setdefault(str(error), []).append(gpu.name)
        if len(without) == len(self.gpus):
            return [f"layout {name}: {self.machine} has no GPU with MIG"]
        absent = absent_indices(name, self.layouts, self.count)
        if absent:
            listed = ", ".join(map(str, absent))
            self.hints.append(f"layout {name}: entries name GPUs that the machine does not have: {listed}")
        if on_demand:
            self.hints.append(f"layout {name}: GPUs with dynamicMig get no layout: {named(on_demand)}")
        if without:
            self.hints.append(f"layout {name}: GPUs without MIG stay unchanged: {named(without)}")
        if not refused:
            self.fits.append(f"layout {name} fits {self.machine}")
        return [f"layout {name}: {named(gpus)}: {text}" for text, gpus in refused.items()]
