"""The base of a simulated machine: its directory, its state, its host root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.units import counted
from dra_driver.simulator import mig
from dra_driver.simulator.faults import signal_names
from dra_driver.simulator.hostroot import HostRoot
from dra_driver.simulator.machine_files import Policies, Session, Sessions, Store
from dra_driver.simulator.machine_state import Gpu, Model, State, sysfs_bus_id

Selector = int | str


class MachineBase:
    """Identity, selection of GPUs, and the one way to change the state together with the host root."""

    def __init__(self, directory: Path) -> None:
        self._store = Store(directory)
        self._host = HostRoot(directory)
        self._policies = Policies(self._host.root)
        self._sessions = Sessions(directory / "sessions")
        self.current: Callable[[], State] = self._store.current

    # --- what it is ----------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        return self._store.directory

    @property
    def host_root(self) -> Path:
        """The directory that stands for `/` of the host."""
        return self._host.root

    @property
    def name(self) -> str:
        return self.current().machine

    @property
    def driver_version(self) -> str:
        return self.current().driver_version

    @property
    def driver_loaded(self) -> bool:
        return self.current().driver_loaded

    @property
    def boot_id(self) -> str:
        return self.current().boot_id

    def gpu(self, selector: Selector) -> Gpu:
        """The GPU that a selector names, also one that is lost."""
        return self._find(self.current(), selector)

    def called(self, selector: Selector) -> str:
        """What to call a GPU: `GPU 1 (gpu-cbe0e302)`. Indices move when a GPU before it goes, names stay."""
        state = self.current()
        gpu = self._find(state, selector)
        name = gpu_device_names(one.uuid for one in state.present)[gpu.uuid]
        return f"GPU {state.present.index(gpu)} ({name})"

    def _find(self, state: State, selector: Selector) -> Gpu:
        text = str(selector)
        present = state.present
        if text.isdigit() and int(text) < len(present):
            return present[int(text)]
        names = gpu_device_names(gpu.uuid for gpu in present)
        for gpu in present:
            if text in (gpu.uuid, names[gpu.uuid]) or (":" in text and sysfs_bus_id(text) == gpu.bus_id):
                return gpu
        known = ", ".join(f"{index} is {names[gpu.uuid]}" for index, gpu in enumerate(present)) or "none"
        raise InvalidConfigError(
            f"machine {state.machine} has no GPU {text!r}; give a device name, an index, a UUID or a PCI bus ID "
            f"(by index: {known})"
        )

    def describe(self) -> list[dict[str, str]]:
        """One row for each GPU, for people."""
        state = self.current()
        devices = gpu_device_names(gpu.uuid for gpu in state.present)
        rows = []
        for index, gpu in enumerate(state.present):
            model = state.model_of(gpu)
            condition = [
                *(["lost"] if gpu.lost else []),
                *([f"recovery action {gpu.recovery_action}"] if gpu.recovery_action else []),
                *signal_names(gpu),
                *([counted(len(gpu.holders), "process", "processes")] if gpu.holders else []),
            ]
            names = [mig.profile_by_id(model, gi.profile_id) for gi in gpu.instances]
            layout = [f"{row.name}@{gi.start}" for row, gi in zip(names, gpu.instances, strict=True) if row]
            rows.append(
                {
                    "device": devices[gpu.uuid],
                    "index": str(index),
                    "pci bus id": gpu.bus_id,
                    "minor": str(gpu.minor),
                    "uuid": gpu.uuid,
                    "model": model.name,
                    "mig": ("on " if gpu.mig_mode else "off ") + " ".join(layout) if model.mig else "-",
                    "state": ", ".join(condition) or "ok",
                }
            )
        return rows

    # --- who has it open -----------------------------------------------------------------------

    def open_session(self, name: str) -> Session:
        """A process initialises NVML, and is a client of every GPU from now on."""
        with self._store.locked():
            return self._sessions.open(name)

    def close_session(self, session: Session) -> None:
        """It shuts NVML down. When the last client of a GPU goes, the NVIDIA driver lets go of a GPU without
        persistence mode, and forgets its settings."""
        with self._store.locked():
            session.end()
            if self._sessions.of_all():
                return
            for gpu in self.current().present:
                if not gpu.persistence and not gpu.holders:
                    self._policies.forget(gpu.uuid)

    def clients(self) -> list[str]:
        """The open sessions of other processes, such as `dcgm (process 4711)`."""
        with self._store.locked():
            return self._sessions.of_others()

    def everybody(self) -> list[str]:
        """As `clients`, with the sessions of this process."""
        with self._store.locked():
            return self._sessions.of_all()

    # --- changing it ---------------------------------------------------------------------------

    def keep_elf_files(self, source: Path) -> None:
        """Have programs and libraries be the ELF files of `source`; before `setup`."""
        self._host.elf.keep(source)

    def setup(self, state: State) -> None:
        """Write a new machine, or accept the existing one if it is the same."""
        with self._store.locked():
            if self._store.exists():
                known = self._store.current()
                if known.machine != state.machine:
                    raise StateError(
                        f"the simulator directory {self.directory} holds the machine {known.machine}, not "
                        f"{state.machine}; choose another directory or remove this one"
                    )
                self.heal()
                return
            self._host.render(None, state)
            self._policies.prepare()
            self._store.write(state)

    def heal(self) -> None:
        """Write the tree again if a process died while it changed the tree."""
        if self._host.is_current(self.current()):
            return
        with self._store.locked():
            self._host.render(None, self.current())

    @contextmanager
    def _change(self) -> Iterator[State]:
        with self._store.change(self._host.render) as state:
            yield state

    def change_gpu(self, gpu_uuid: str, change: Callable[[Gpu, Model], int]) -> int:
        """Change one GPU under the lock; if `change` raises, the machine stays as it was."""
        with self._change() as state:
            gpu = state.by_uuid[gpu_uuid]
            return change(gpu, state.model_of(gpu))
