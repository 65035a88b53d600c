"""The machine as the daemon sees it, through an NVML that has getters alone; and what is found on it, as lines."""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dra_driver.app.platforms import Platform, platform_of
from dra_driver.errors import DraDriverError
from dra_driver.host.rooted_tree import join_root
from dra_driver.inventory.discovery import discover_once
from dra_driver.inventory.host_facts import HostView
from dra_driver.model.host import DeviceNode
from dra_driver.model.inventory import Inventory
from dra_driver.model.units import counted
from dra_driver.nvml.reader import NvmlReader
from dra_driver.settings import Settings

NO_PERMISSION = 4
"""NVML's return code for a caller without permission."""
_GETTER = re.compile(r"nvml(InitWithFlags|Shutdown|(System|Device|(Gpu|Compute)Instance)(Get|Is)[A-Z]\w*)\Z")


class ReadOnlyLibrary:
    """Stands between the binding and the NVML library, and passes on getters alone.

    `answered` has the return codes of each function that was called, `missing` the functions that this library lacks.
    """

    def __init__(self, library: object) -> None:
        self.answered: dict[str, set[int]] = defaultdict(set)
        self.missing: set[str] = set()
        self.refused: set[str] = set()
        self._library = library
        # The binding sets the type of its result, so it gets the function itself.
        self.nvmlErrorString = getattr(library, "nvmlErrorString", None)

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Raises: AttributeError for a getter that the library lacks."""
        is_getter = _GETTER.match(name) is not None
        function = getattr(self._library, name, None) if is_getter else None
        if function is None and (is_getter or not name.startswith("nvml")):
            self.missing.add(name)
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if function is None:
                self.refused.add(name)
                return NO_PERMISSION
            code = int(function(*arguments))
            self.answered[name].add(code)
            return code

        return call


@dataclass(frozen=True, slots=True)
class View:
    """A machine with what discovery found; NVML is open as long as the view is."""

    settings: Settings
    platform: Platform
    nvml: ReadOnlyLibrary
    inventory: Inventory

    def places(self, host_path: str) -> list[str]:
        """Where this process may find a path of the host, the likeliest place first."""
        paths = self.platform.paths
        root = paths.host_driver_root.rstrip("/")
        inside = (
            [join_root(paths.driver_root, host_path[len(root) :])] if host_path.startswith(f"{root}/") else []
        )
        return [*inside, host_path if paths.dev_root is None else join_root(paths.dev_root, host_path)]

    def node(self, host_path: str) -> DeviceNode | None:
        """The device node at a path of the host; None where there is none."""
        return next(filter(None, map(self.platform.nodes.read, self.places(host_path))), None)


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
            reader.session.open()
            inventory = discover_once(reader, HostView(platform.paths), None)
            yield View(settings, platform, library[-1], inventory)
        finally:
            reader.session.close()


@dataclass(slots=True)
class Report:
    """What was compared, by topic, and what was found."""

    checked: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    """(`DIFFERS`, `note` or `not checked`; the topic; what)"""

    def same(self, topic: str, what: str, ours: object, theirs: object) -> None:
        """Unequal values are a difference."""
        self.good(topic, ours == theirs, f"{what}: {_shown(ours)} here, {_shown(theirs)} there")

    def good(self, topic: str, condition: object, otherwise: str) -> None:
        """A condition that does not hold is a difference."""
        self.checked[topic] += 1
        if not condition:
            self.findings.append(("DIFFERS", topic, otherwise))

    def note(self, topic: str, text: str) -> None:
        """Information only."""
        self.findings.append(("note", topic, text))

    @contextmanager
    def trying(self, topic: str) -> Iterator[None]:
        """What cannot be compared, because somebody does not answer, is no difference."""
        try:
            yield
        except (OSError, ValueError, DraDriverError) as error:
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
