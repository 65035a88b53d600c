"""The parts that give GPUs to virtual machines, put together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from dra_driver.app.platforms import Platform
from dra_driver.errors import StateError
from dra_driver.host.vfio import VfioCards
from dra_driver.inventory.detachment import Detachments, nvml_pause
from dra_driver.journal.cleaner import StepRunner
from dra_driver.model.gpu import Gpu
from dra_driver.model.passthrough import Card, OwnedCard
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import bindings
from dra_driver.model.steps import BindVfio
from dra_driver.nvml.gpu_users import PersistenceModes
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.cards import KnownCards
from dra_driver.passthrough.rules.unavailable_cards import refused, unavailable
from dra_driver.passthrough.steps import VfioSteps, waits_for_nvml

if TYPE_CHECKING:
    from dra_driver.app.daemon import Driver

_log = structlog.get_logger(__name__)


class PassthroughParts:
    """Cards and the step. They exist also if passthrough is switched off, because earlier claims may still have
    to be taken back; then nothing of it runs on a node whose ledgers have no card."""

    def __init__(
        self, driver: Driver, platform: Platform, nvml: NvmlReader, detachments: Detachments
    ) -> None:
        """Discovery is made later."""
        settings, boot_id = driver.settings, driver.boot_id

        def rescan(wait_s: float | None) -> None:
            if wait_s is None:
                driver.discovery.request_rescan()
            else:
                driver.discovery.scan_now(wait_s)

        self._is_wanted = settings.for_virtual_machines is not None
        self._is_on = False
        self._cards: tuple[Card, ...] = ()
        self._ledger = driver.ledger
        cards = self.host = VfioCards(platform.paths, platform.nodes, platform.pci)
        self._known = KnownCards(
            cards,
            driver.ledger,
            settings.for_virtual_machines,
            lambda: bindings(driver.known_records(), boot_id),
        )
        persistence = PersistenceModes(lambda: nvml.session.operation(waits_for_nvml))
        self.steps = VfioSteps(
            cards,
            driver.ledger,
            nvml,
            nvml_pause(nvml.session, detachments),
            persistence,
            rescan,
            detachments.detached,
            driver.lanes.refuse_beside_hang,
        )

    def open(self) -> None:
        """Look in the ledger, after it was opened, whether there is anything to do. Raises: StateError."""
        has_cards = bool(self._ledger.details(OwnedCard)) or bool(self._ledger.unreadable())
        self._is_on = self._is_wanted or has_cards

    def runners(self) -> dict[type, StepRunner]:
        """The runner of the step."""
        return {BindVfio: self.steps}

    def cards(self, gpus: Sequence[Gpu]) -> tuple[Card, ...]:
        """The node's cards; `gpus` are those that NVML shows. Logs which of them no virtual machine can get, once and
        after each change. Raises: StateError."""
        if not self._is_on:
            return ()
        before, self._cards = self._cards, self._known.read(gpus)
        reasons = refused(self._cards)
        if reasons and reasons != refused(before):
            _log.warning("cards_not_offered", cards=reasons, offered=len(self._cards) - len(reasons))
        return self._cards

    def problems(self) -> Sequence[NodeProblem]:
        """That no virtual machine can get any of the node's GPUs, although passthrough is on."""
        text = unavailable(self._cards) if self._is_wanted else None
        return [] if text is None else [NodeProblem("passthrough-unavailable", text)]

    def taken(self) -> frozenset[str]:
        """The UUIDs of the GPUs that this plugin has bound to vfio, or is about to: NVML need not have them. Empty
        while the ledger cannot be read."""
        with suppress(StateError):
            return frozenset(self._known.owned().values()) if self._is_on else frozenset()
        return frozenset()
