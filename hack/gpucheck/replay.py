"""Is a recorded machine the machine it was recorded from?"""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from dra_driver.errors import DraDriverError
from dra_driver.model.inventory import Inventory
from gpucheck.findings import Section
from gpucheck.recording import CannotRecordError, anonymise, record, write
from gpucheck.view import CannotRunError, View, opened, simulated_machine

JsonObject = dict[str, Any]


class Recording:
    """A machine's recording between reading and writing; made while NVML is open, saved when it is closed."""

    def __init__(self, view: View) -> None:
        self._section = Section("recording")
        self._inventory = view.inventory
        self._document: JsonObject | None = None
        try:
            self._document = record(view)
        except CannotRecordError as error:
            self._section.differs("", str(error))

    def save(self, path: Path, *, anonymous: bool) -> Section:
        """Play the recording back once, with the true UUIDs, and write the file."""
        document = self._document
        if document is None:
            return self._section
        try:
            with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
                trial = Path(scratch) / "recording.yaml"
                write(document, trial)
                self._section = check_recording(trial, self._inventory)
            write(anonymise(document) if anonymous else document, path)
        except CannotRecordError as error:
            self._section.differs("", str(error))
        return self._section


def check_recording(path: Path, original: Inventory) -> Section:
    """Discover the recorded machine and compare. NVML of the real one must be closed."""
    section = Section("recording")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        try:
            machine = simulated_machine(str(path), Path(scratch) / "machine")
            with opened(machine) as view:
                compare_inventories(section, original, view.inventory)
        except (CannotRunError, DraDriverError) as error:
            section.differs(path.name, f"cannot be loaded: {error}")
    return section


def compare_inventories(section: Section, original: Inventory, recorded: Inventory) -> None:
    """Every value of every GPU, the NVLink domains and the versions."""
    source = "the recording"
    section.same("", "versions", original.versions, recorded.versions, source)
    section.same("", "GPUs", [gpu.uuid for gpu in original.gpus], [gpu.uuid for gpu in recorded.gpus], source)
    again = {gpu.uuid: gpu for gpu in recorded.gpus}
    for gpu in original.gpus:
        copy = again.get(gpu.uuid)
        for entry in fields(gpu) if copy is not None else ():
            section.same(gpu.uuid, entry.name, getattr(gpu, entry.name), getattr(copy, entry.name), source)
        ours, theirs = original.nvlink_domains.get(gpu.uuid), recorded.nvlink_domains.get(gpu.uuid)
        section.same(gpu.uuid, "nvlinkDomain", ours, theirs, source)
