"""Cards that no virtual machine can get, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dra_driver.model.gpu import Card
from dra_driver.model.units import named


def refused(cards: Sequence[Card]) -> Mapping[str, str]:
    """The reason of each card that is not offered, by bus ID."""
    return {card.bus_id: card.problem for card in cards if card.problem is not None}


def unavailable(cards: Sequence[Card]) -> str | None:
    """One sentence if there are cards and none is offered; equal reasons are named once.

    For example `no GPU of this node can be given to a virtual machine: 0000:1b:00.0, 0000:1c:00.0: <reason>; <remedy>`.
    """
    reasons = refused(cards)
    if not cards or len(reasons) < len(cards):
        return None
    by_reason: dict[str, list[str]] = {}
    for bus_id, reason in reasons.items():
        by_reason.setdefault(reason, []).append(bus_id)
    found = "; ".join(f"{named(bus_ids)}: {reason}" for reason, bus_ids in by_reason.items())
    return f"no GPU of this node can be given to a virtual machine: {found}"
