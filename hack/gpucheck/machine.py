"""The machine as the daemon sees it, through an NVML that has getters alone; and what is found on it, as lines."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dra_driver.app.platforms import Platform, platform_of
from dra_driver.app.settings import Settings
from dra_driver.errors import DraDriverError
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import discover_once
from dra_driver.model.inventory import Inventory
from dra_driver.model.units import counted
from dra_driver.nvml.reader import NvmlReader

NO_PERMISSION = 4
"""NVML's return code for a caller without permission."""
_GETTER = re.compile(r"nvml(InitWithFlags|Shutdown|(System|Device|(Gpu|Compute)Instance)(Get|Is)[A-Z]\w*)\Z")


class ReadOnlyLibrary:
    """Stands between the binding and the NVML library, and passes on getters alone; `refused` has the others."""

    def __init__(self, library: object) -> None:
        self.refused: set[str] = set()
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Raises: AttributeError for a getter that the library lacks."""
        # The binding sets the type of the result of nvmlErrorString, which returns no code.
        if _GETTER.match(name) or not name.startswith("nvml") or name == "nvmlErrorString":
            function: Callable[..., int] = getattr(self._library, name)
            return function

        def refuse(*_arguments: Any) -> int:
            self.refused.add(name)
            return NO_PERMISSION

        return refuse


@dataclass(frozen=True, slots=True)
class View:
    """A machine with what discovery found; NVML is open as long as the view is."""

    settings: Settings
    platform: Platform
    nvml: ReadOnlyLibrary
    inventory: Inventory


@contextmanager
def opened(settings: Settings) -> Iterator[View]:
    """Discover the devices of the machine that the settings name; a simulated one lives as long as the view.

    Raises: DraDriverError if there is no NVML.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        if settings.simulate is not None and settings.simulator_dir is None:
            settings = replace(settings, simulator_dir=f"{scratch}/machine")
        platform = platform_of(settings)
        library: list[ReadOnlyLibrary] = []

        def load() -> object:
            library.append(ReadOnlyLibrary(platform.load_nvml()))
            return library[-1]

        reader = NvmlReader(load)
        try:
            reader.session.reopen()
            inventory = discover_once(reader, Sysfs(platform.paths.sys, platform.paths.proc), None)
            yield View(settings, platform, library[-1], inventory)
        finally:
            reader.session.close()


@dataclass(slots=True)
class Report:
    """What was compared, by topic, and what was found."""

    checked: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    """(`DIFFERS` or `not checked`; the topic; what)"""

    def same(self, topic: str, what: str, ours: object, theirs: object) -> None:
        """Unequal values are a difference."""
        self.good(topic, ours == theirs, f"{what}: {_shown(ours)} here, {_shown(theirs)} there")

    def good(self, topic: str, condition: object, otherwise: str) -> None:
        """A condition that does not hold is a difference."""
        self.checked[topic] += 1
        if not condition:
            self.findings.append(("DIFFERS", topic, otherwise))

    @contextmanager
    def trying(self, topic: str) -> Iterator[None]:
        """What cannot be compared, because a program answers nothing that is understood, is no difference."""
        try:
            yield
        except (OSError, ValueError, SyntaxError, subprocess.SubprocessError, DraDriverError) as error:
            self.findings.append(("not checked", topic, " ".join(str(error).split())[:300]))

    @property
    def differences(self) -> list[str]:
        """Each difference as a line without its mark."""
        return [f"{topic}: {text}" for level, topic, text in self.findings if level == "DIFFERS"]

    def lines(self) -> list[str]:
        """The findings, a line for each topic, and the verdict."""
        found = [f"  {level:<11} {topic}: {text}" for level, topic, text in sorted(self.findings)]
        checks = [f"{topic:<12} {counted(number, 'check')}" for topic, number in self.checked.items()]
        verdict = counted(len(self.differences), "difference") if self.differences else "nothing differs"
        return [*checks, *found, "", f"gpu-check: {verdict}"]


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
