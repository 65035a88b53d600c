"""What two instances of the plugin know of the same GPUs, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dra_driver.health.rules.nvlinks import seen_nvlinks
from dra_driver.model.health import HealthState


def merged(mine: Iterable[HealthState], kept: Iterable[HealthState]) -> tuple[HealthState, ...]:
    """The states that this instance knows, with what another one knew besides: events that it alone heard.

    What a poll found is not taken over for a device that this instance polled itself.
    """
    known = {state.target: state for state in mine}
    for state in kept:
        own = known.get(state.target)
        known[state.target] = state if own is None else _with_events_of(own, state)
    return tuple(known.values())


def _with_events_of(own: HealthState, other: HealthState) -> HealthState:
    if own.identity is not None and other.identity is not None and own.identity != other.identity:
        return own  # another instance under the same IDs
    names = {reason.name for reason in own.reasons}
    heard = [reason for reason in other.reasons if reason.source == "event" and reason.name not in names]
    held = [moment for moment in (own.held_until, other.held_until) if moment is not None]
    return replace(
        own,
        reasons=tuple(sorted((*own.reasons, *heard), key=lambda reason: reason.name)),
        setbacks=tuple(sorted({*own.setbacks, *other.setbacks})),
        held_until=max(held, default=None),
        identity=own.identity or other.identity,
        pci_bus_id=own.pci_bus_id or other.pci_bus_id,
        nvlinks=seen_nvlinks(other.nvlinks, own.nvlinks) if own.nvlinks else other.nvlinks,
    )
