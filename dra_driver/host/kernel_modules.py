"""Which kernel module drives a PCI function for virtual machines, and whether it is there."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from dra_driver.base.atomic import Stamp, stamp_or_none
from dra_driver.host.reading import names_in, text_of
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.passthrough import VFIO_PCI

_VFIO_MODULE = "vfio_pci"
_ALIAS = re.compile(r"^alias vfio_pci:(\S+) (\S+)$", re.MULTILINE)
_FILE = re.compile(r"([^/\s:]+)\.ko(?:\.\w+)?(?=:|$)", re.MULTILINE)


class VfioModules:
    """The modules of the kernel that runs, below the host's `/` as this process sees it."""

    def __init__(self, root: str, sys: str, proc: str) -> None:
        self._root = root
        self._sys = Path(sys)
        self._release = Path(proc, "sys/kernel/osrelease")

    def best_for(self, modalias: str) -> str:
        """The module for the function with this `modalias`: the most exact one that the kernel names for it."""
        function = modalias.removeprefix("pci:")
        fitting = [
            (-sum(map(pattern.count, "*?[")), module)
            for pattern, module in self._aliases()
            if fnmatchcase(function, pattern)
        ]
        return max(fitting, default=(0, _VFIO_MODULE))[1]

    def driver_of(self, module: str) -> str:
        """The name of the driver in the module, which need not be the module's. Before the module is loaded nothing
        tells it."""
        for name in names_in(self._sys / "module" / module / "drivers"):
            if name.startswith("pci:"):
                return name.removeprefix("pci:")
        return VFIO_PCI if module == _VFIO_MODULE else module

    def has_driver(self, driver: str) -> bool:
        """Whether the kernel has the driver now."""
        return (self._sys / "bus/pci/drivers" / driver).is_dir()

    def is_installed(self, module: str) -> bool:
        """Whether the module can be loaded, as far as the kernel's lists of modules tell."""
        return module in self._named("modules.dep") or module in self._named("modules.builtin")

    def is_there(self, module: str) -> bool:
        """Whether the module is loaded or can be loaded."""
        return (self._sys / "module" / module).is_dir() or self.is_installed(module)

    def _aliases(self) -> tuple[tuple[str, str], ...]:
        path = self._list("modules.alias")
        return () if path is None else _vfio_aliases(path, stamp_or_none(path))

    def _named(self, name: str) -> frozenset[str]:
        path = self._list(name)
        return frozenset() if path is None else _modules_in(path, stamp_or_none(path))

    def _list(self, name: str) -> str | None:
        tree = RootedTree(self._root)
        found = tree.file(f"/lib/modules/{text_of(self._release).strip()}/{name}")
        return None if found is None else tree.local(found)


# The lists have a megabyte, and change when a module is installed.
@lru_cache(maxsize=8)
def _vfio_aliases(path: str, _changed: Stamp | None) -> tuple[tuple[str, str], ...]:
    return tuple((found[1], found[2]) for found in _ALIAS.finditer(text_of(path)))


@lru_cache(maxsize=8)
def _modules_in(path: str, _changed: Stamp | None) -> frozenset[str]:
    return frozenset(name.replace("-", "_") for name in _FILE.findall(text_of(path)))
