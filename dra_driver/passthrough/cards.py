"""The node's PCI cards: the kernel's view, combined with this plugin's ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from dra_driver.errors import StateError
from dra_driver.host.vfio import VfioCards
from dra_driver.journal.ledger import Ledger
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import Card, Gpu, OwnedCard
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import bindings
from dra_driver.model.units import named

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class KnownCards:
    """The selected cards, and all cards that this plugin has bound.

    If the ledger of a card cannot be read, the claim records of this boot are used instead.
    """

    cards: VfioCards
    ledger: Ledger
    selected: Callable[[Gpu], bool] | None

    def read(self, gpus: Sequence[Gpu]) -> tuple[Card, ...]:
        """Return the cards in bus order; `gpus` are those that NVML lists. Raises: StateError."""
        ours = self.owned()
        names = {one.pci_bus_id: one.product_name for one in self.ledger.details(OwnedCard)} if ours else {}
        shown = {gpu.pci_bus_id: gpu for gpu in gpus}
        return tuple(
            card if card.by_us or not card.is_bound else self._of_an_administrator(card)
            for found in self.cards.cards()
            if (card := _known(found, ours, shown.get(found.bus_id), names.get(found.bus_id))).by_us
            or self._is_selected(card, shown)
        )

    def owned(self) -> dict[str, str]:
        """Return GPU UUIDs, by bus ID, of cards that this plugin bound in this boot or is about to bind. Raises:
        StateError.
        """
        ours = {one.pci_bus_id: one.gpu_uuid for one in self.ledger.details(OwnedCard)}
        if unreadable := self.ledger.unreadable():
            steps = bindings(self.ledger.known_records(), self.ledger.boot_id)
            ours = {step.pci_bus_id: step.gpu_uuid for step in steps if step.gpu_uuid in unreadable} | ours
        return ours

    def _of_an_administrator(self, card: Card) -> Card:
        return card if card.problem is not None else replace(card, problem=self.cards.closed_by(card))

    def _is_selected(self, card: Card, shown: dict[str | None, Gpu]) -> bool:
        gpu = shown.get(card.bus_id) or Gpu(
            card.gpu_uuid, pci_bus_id=card.bus_id, product_name=card.product_name
        )
        return self.selected is not None and self.selected(gpu)


class Passthrough:
    """The GPUs for virtual machines, as discovery, health and readiness see them.

    Also used while passthrough is off, because earlier claims may need cleanup. Then nothing is read on a node whose
    ledgers list no card.
    """

    def __init__(self, known: KnownCards) -> None:
        self._known = known
        self._is_wanted = known.selected is not None
        self._is_on = False
        self._cards: tuple[Card, ...] = ()

    def open(self) -> None:
        """Check whether there is any work. Call this after the ledger is open. Raises: StateError."""
        ledger = self._known.ledger
        self._is_on = self._is_wanted or bool(ledger.details(OwnedCard)) or bool(ledger.unreadable())

    def cards(self, gpus: Sequence[Gpu]) -> tuple[Card, ...]:
        """Return the node's cards; `gpus` are those that NVML lists. Raises: StateError.

        Logs which cards no virtual machine can get, after each change.
        """
        if not self._is_on:
            return ()
        before, self._cards = self._cards, self._known.read(gpus)
        reasons = refused(self._cards)
        if reasons and reasons != refused(before):
            _log.warning("vfio_unavailable", cards=reasons, offered=len(self._cards) - len(reasons))
        return self._cards

    def problems(self) -> Sequence[NodeProblem]:
        text = unavailable(self._cards) if self._is_wanted else None
        return [] if text is None else [NodeProblem("passthrough-unavailable", text)]

    def taken(self) -> frozenset[str]:
        """Return the UUIDs of owned cards, which NVML may not list; empty if the ledger cannot be read."""
        with suppress(StateError):
            return frozenset(self._known.owned().values()) if self._is_on else frozenset()
        return frozenset()


def _known(card: Card, ours: dict[str, str], gpu: Gpu | None, name: str | None) -> Card:
    """Complete the kernel's card with its UUID, its name and its owner.

    A card of ours without a driver is being rebound; treat it as bound.
    """
    uuid, is_ours = gpu.uuid if gpu is not None else ours.get(card.bus_id, card.gpu_uuid), card.bus_id in ours
    driver = card.vfio_driver if is_ours and card.driver is None else card.driver
    name = card.product_name or name
    return replace(card, gpu_uuid=uuid, by_us=is_ours, driver=driver, product_name=name)


def refused(cards: Sequence[Card]) -> Mapping[str, str]:
    return {card.bus_id: card.problem for card in cards if card.problem is not None}


def unavailable(cards: Sequence[Card]) -> str | None:
    reasons = refused(cards)
    if not cards or len(reasons) < len(cards):
        return None
    by_reason: dict[str, list[str]] = {}
    for bus_id, reason in reasons.items():
        by_reason.setdefault(reason, []).append(bus_id)
    found = "; ".join(f"{named(bus_ids)}: {reason}" for reason, bus_ids in by_reason.items())
    return f"no GPU of this node can be used by a virtual machine: {found}"
