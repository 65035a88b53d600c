"""The files, links and device nodes that represent a host's GPUs: a directory tree that follows the machine's state."""

from __future__ import annotations

from pathlib import Path

from dra_driver.simulator.hostroot.entries import Entries, Tree
from dra_driver.simulator.hostroot.installation import ElfFiles, driver_files, imex, nvidia_smi
from dra_driver.simulator.hostroot.kernel import devices, host_device_nodes, procfs, sysfs
from dra_driver.simulator.machine_state import State

__all__ = ["HostRoot"]
_MARKER = "rendered"
_PATHS = "rendered.paths"


class HostRoot:
    """`<directory>/root`. The caller of `render` holds the machine's lock.

    The marker file contains the version of the state that the tree shows. A process that dies during a change leaves no
    marker; the next process then writes the whole tree again.
    """

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.elf = ElfFiles(directory)
        self._marker = directory / _MARKER
        self._paths = directory / _PATHS
        self._last: tuple[str, int, Entries] | None = None

    def entries(self, state: State) -> Entries:
        entries = {
            **procfs(state),
            **sysfs(state),
            **devices(state),
            **driver_files(state),
            **nvidia_smi(state),
            **imex(state),
            **host_device_nodes(state),
        }
        self.elf.replace_in(entries, state)
        return entries

    def is_current(self, state: State) -> bool:
        try:
            return self._marker.read_text() == str(state.version)
        except OSError:
            return False

    def render(self, old: State | None, new: State) -> None:
        wanted = self.entries(new)
        known = self._shown(old) if old is not None and self.is_current(old) else None
        stale: list[str] = []
        if known is None and self._paths.exists():
            stale = self._paths.read_text().splitlines()
        self._marker.unlink(missing_ok=True)
        if old is not None and old.boot_id != new.boot_id:
            self._forget_made_nodes(wanted)
        if known is None or known.keys() != wanted.keys():
            self._write(self._paths, "\n".join({**dict.fromkeys(known or stale), **dict.fromkeys(wanted)}))
        tree = Tree(self.root, real_nodes=new.device_nodes == "real")
        tree.sync(known, wanted, stale)
        self._write(self._marker, str(new.version))
        self._last = (new.boot_id, new.version, wanted)

    def _forget_made_nodes(self, wanted: Entries) -> None:
        """Remove nodes that someone created, because /dev is empty after a boot."""
        for path in (self.root / "dev/nvidia-caps").glob("nvidia-cap*"):
            if str(path.relative_to(self.root)) not in wanted:
                path.unlink()
        for path in (self.root / "dev/char").glob("*:*"):
            path.unlink()

    def _shown(self, state: State) -> Entries:
        if self._last is not None and self._last[:2] == (state.boot_id, state.version):
            return self._last[2]
        return self.entries(state)

    def _write(self, path: Path, text: str) -> None:
        temporary = path.with_suffix(f"{path.suffix}.new")
        temporary.write_text(text)
        temporary.replace(path)
