"""Checks whether virtual machines can get GPUs, and return them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dra_driver.cli.checks.check import Check
from dra_driver.cli.rules.findings import Finding, fail, ok, warn
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.host.vfio import VfioCards
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import Card
from dra_driver.model.record import bindings
from dra_driver.model.steps import BindVfio
from dra_driver.model.units import counted, named


@dataclass(frozen=True, slots=True)
class PassthroughChecks:
    """`cards` returns the selected cards, and those that gpu-dra-driver has bound."""

    host: VfioCards
    cards: Callable[[], Sequence[Card]]
    state: Callable[[], NodeState]
    is_on: bool

    def passthrough(self) -> list[Finding]:
        """Return a finding for each card that virtual machines cannot use, for cards left in vfio, and a summary."""
        cards = self.cards()
        if not cards:
            return [
                warn("no GPU is selected for virtual machines", "see `passthrough.gpus` in the configuration")
            ]
        found = [_problem(card) for card in cards if card.problem is not None]
        fit = [card for card in cards if card.problem is None]
        if fit and self.host.vm_users(fit[0]) is None:
            found.append(
                fail(
                    "GPUs cannot be bound to vfio, because the programs that use them are not visible here",
                    "set hostPID: true for the pods of gpu-dra-driver, or run doctor on the node",
                )
            )
        known = {step.pci_bus_id for step in self._steps()}
        forgotten = [card.bus_id for card in fit if card.by_us and card.bus_id not in known]
        if forgotten:
            found.append(
                fail(
                    f"bound to vfio for a claim that has no record: {named(forgotten)}",
                    "delete the claim's pod; if the claim has no pod, reboot the node",
                )
            )
        bound = [card for card in fit if card.is_bound]
        theirs = [card.bus_id for card in bound if not card.by_us]
        kept = f" ({len(theirs)} by an administrator, left unchanged by gpu-dra-driver)" if theirs else ""
        summary = f"{counted(len(fit), 'card')} for virtual machines, {len(bound)} bound to vfio now{kept}"
        return [*found, ok(summary)] if fit else found

    def all(self) -> list[Check]:
        is_needed = self.is_on or bool(self._steps())
        return [Check("passthrough", self.passthrough)] if is_needed else []

    def _steps(self) -> Sequence[BindVfio]:
        state = self.state()
        return bindings(state.known_records, state.boot_id)


def _problem(card: Card) -> Finding:
    seen, _, remedy = (card.problem or "").rpartition("; ")
    return warn(f"{card.bus_id} cannot be used by virtual machines: {seen or remedy}", remedy)
