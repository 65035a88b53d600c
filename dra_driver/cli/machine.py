"""The machine on which a command works, with or without a running plugin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from dra_driver.app.platforms import platform_of
from dra_driver.app.settings import Settings
from dra_driver.base.file_lock import UseMark
from dra_driver.base.threads import NotAnsweredError, bounded
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.state_on_disk import read_state
from dra_driver.errors import StateError
from dra_driver.host.sysfs import Sysfs
from dra_driver.host.vfio import VfioCards
from dra_driver.inventory.detachment import LOCK_FILE, Detachments
from dra_driver.inventory.rules.gpu_names import held_gpu_names
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.gpu import Card, Gpu, is_vfio
from dra_driver.model.inventory import Inventory
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.cards import KnownCards
from dra_driver.reporting.node_problems import read_problems

T = TypeVar("T")
_HANGS_S = 5.0
_WAKES_S = 40.0
SIMULATED_S = 60.0
"""On a busy host each call takes longer."""
_IS_SIMULATED = "NVML is simulated: this host is busy, or `gpu-dra-driver simulate fault` made a call hang"
_SHOWS_WHY = "`dmesg | grep -i nvrm` on the node shows why"


class CommandMachine:
    """The machine that the settings select. NVML stays closed while the node is detached.

    Raises: InvalidConfigError; StateError if a simulated machine cannot be created.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        platform = platform_of(settings)
        self.paths = platform.paths
        self.nodes = platform.nodes
        self.vfio = VfioCards(platform.paths, platform.nodes, platform.pci)
        self.sysfs = Sysfs(platform.paths.sys, platform.paths.proc)
        self.boot_id = self.sysfs.boot_id()
        self.detachments = Detachments(settings.plugin_directory, self.boot_id)
        self.load_nvml = self.detachments.guarded(platform.load_nvml)

    def is_on_demand(self, gpu: Gpu) -> bool:
        return self.settings.on_demand is not None and self.settings.on_demand(gpu)

    def state(self) -> NodeState:
        settings = self.settings
        specs = CdiDirectory(settings.cdi_root, settings.driver_name)
        return read_state(settings.plugin_directory, self.boot_id, specs)

    def ledger(self) -> Ledger:
        directory = self.settings.plugin_directory
        records = RecordStore(directory / "claims", self.boot_id, reader=lambda _unread: None)
        return Ledger(directory / LEDGER, records, self.boot_id, reader=lambda _unread: None)

    def cards(self, gpus: Sequence[Gpu], selected: Callable[[Gpu], bool] | None = None) -> tuple[Card, ...]:
        """Return the cards that the settings (or `selected`) select or the plugin has bound. Raises: StateError.

        `gpus` are those that NVML lists.
        """
        wanted = selected or self.settings.for_virtual_machines
        try:
            return KnownCards(self.vfio, self.ledger(), wanted).read(gpus)
        except StateError:
            if wanted is None:
                return ()  # `state` reports why the ledger cannot be read
            raise

    def cards_under_vfio(self, gpus: Sequence[Gpu]) -> tuple[Card, ...]:
        if not any(is_vfio(gpu.driver) for gpu in self.sysfs.gpus()):
            return ()
        return tuple(card for card in self.cards(gpus, lambda _gpu: True) if card.is_bound)

    def nvml_reader(self, on_demand: Callable[[Gpu], bool]) -> NvmlReader:
        """Return an NVML reader that is not open yet."""
        by_minor = self.settings.device_names == "minor"
        names = (lambda: held_gpu_names(self.state().known_records)) if by_minor else None
        lock = self.settings.plugin_directory / LOCK_FILE
        # Where no plugin has run, no process reads the lock.
        mark = UseMark(lock) if lock.exists() else None
        return NvmlReader(self.load_nvml, on_demand, mark=mark, kept_names=names)

    def open_nvml(self, session: ExitStack) -> NvmlReader:
        """Return NVML, open until `session` is closed. Raises: NvmlUnavailableError."""
        reader = self.nvml_reader(lambda gpu: gpu.mig_enabled or self.is_on_demand(gpu))
        reader.reopen()
        session.callback(reader.session.close)
        return reader


def answered(settings: Settings, read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads from NVML. Raises: the errors of `read`; NotAnsweredError.

    If the plugin is not running, NVML may take seconds to wake each GPU. This then prints the reason and waits
    longer.
    """
    is_simulated = settings.simulate is not None
    try:
        return bounded("NVML", read, SIMULATED_S if is_simulated else _HANGS_S)
    except NotAnsweredError as late:
        if is_simulated:
            raise NotAnsweredError(f"{late}; {_IS_SIMULATED}", late.answer) from None
        if read_problems(settings.plugin_directory)[0]:
            raise NotAnsweredError(f"{late}; {_SHOWS_WHY}", late.answer) from None
        print(
            f"gpu-dra-driver: {late}; idle GPUs take seconds to wake up; waiting up to {_WAKES_S:g} s more",
            file=sys.stderr,
        )
        try:
            return late.answer.result(_WAKES_S)  # type: ignore[no-any-return]
        except TimeoutError:
            text = f"NVML has not answered for more than {_HANGS_S + _WAKES_S:g} s"
            raise NotAnsweredError(f"{text}; {_SHOWS_WHY}", late.answer) from None


def unread(inventory: Inventory) -> list[str]:
    return [f"{fault.subject}: {fault.text}" for fault in inventory.faults]
