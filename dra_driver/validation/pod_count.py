"""The pods of the documents against the machines: how many get their claims at the same time, and what is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.validation.machine_fit import Nodes, bounded_search
from dra_driver.validation.rules.allocator import AllocationError
from dra_driver.validation.rules.counting import MOST_PODS_OF_A_CLAIM, Count, Demand, Shortage, count_pods
from dra_driver.validation.rules.manifests import alternatives

JsonObject = dict[str, Any]

_BOUND_S = 10.0
_MORE_NODES = 3
"""So many numbers of nodes are tried from the least one that could do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`count` is None if it took too long; `short` says what is missing if not all pods fit, for pods of the demand
    `group`."""

    count: Count | None
    short: str = ""
    group: int = 0

    @property
    def fits(self) -> bool:
        return self.count is not None and self.count.fitting >= self.count.wanted


class PodCount:
    """Counts pods on the machines, which are empty."""

    def __init__(self, machines: Sequence[Nodes], classes: Mapping[str, JsonObject]) -> None:
        self._machines = machines
        self._classes = classes
        self._kinds = [number for number, nodes in enumerate(machines) for _ in range(nodes.count)]

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self._kinds)

    @property
    def where(self) -> str:
        """The machines, as the end of `fits on …`."""
        (first, *more) = self._machines
        if more:
            return f"these {len(self._kinds)} nodes"
        return first.machine.name if first.count == 1 else f"{first.count} nodes like {first.machine.name}"

    def verdict(self, demands: Sequence[Demand]) -> Verdict:
        """Raises: NotJudgedError."""
        try:
            return bounded_search(lambda: self._verdict(demands), _BOUND_S)
        except AllocationError:
            return Verdict(None)

    def _verdict(self, demands: Sequence[Demand]) -> Verdict:
        count = self._counted(demands, self._kinds)
        if count.shortage is None:
            return Verdict(count)
        short = self._short(count.shortage) + self._remedy(demands, count)
        return Verdict(count, short, count.shortage.demand)

    def _counted(self, demands: Sequence[Demand], kinds: Sequence[int]) -> Count:
        def allocates(kind: int, others: Sequence[JsonObject], spec: JsonObject) -> JsonObject | None:
            return self._machines[kind].machine.allocated(spec, self._classes, others)

        return count_pods(demands, kinds, allocates)

    def _short(self, shortage: Shortage) -> str:
        if shortage.full is not None:
            return f"at most {MOST_PODS_OF_A_CLAIM} pods can use one claim ({shortage.full})"
        if shortage.spec is None:
            return f"they share claim {shortage.pinned}, so all have to be on its node"
        best: tuple[int, str] | None = None
        for kind, others in shortage.kinds:
            slack, text = self._lack(shortage.spec, kind, others)
            if best is None or slack > best[0]:
                best = (slack, text)
        return best[1] if best is not None else "no node has enough left"

    def _lack(self, spec: JsonObject, kind: int, others: Sequence[JsonObject]) -> tuple[int, str]:
        """How many devices are missing for the request that lacks most, as a negative number, and the sentence."""
        machine = self._machines[kind].machine
        found: list[tuple[int, str]] = []
        for request in (spec.get("devices") or {}).get("requests") or ():
            parts: list[tuple[int, str]] = []
            for _, body in alternatives(request):
                room, matching = machine.with_room(body, self._classes, others)
                everything = body.get("allocationMode") == "All"
                wanted = matching if everything else int(body.get("count") or 1)
                number = "all" if everything else str(wanted)
                text = f"{number} of class {body['deviceClassName']} ({room} of {matching} matching devices have room)"
                parts.append((room - wanted, text))
            wish = " or else ".join(text for _, text in parts)
            found.append((max(slack for slack, _ in parts), f"request {request['name']} wants {wish}"))
        slack, text = min(found, default=(0, ""))
        where = f", at best on {machine.name}" if len(self._machines) > 1 else ""
        if slack < 0:
            return slack, f"{text}{where}"
        constraints = (spec.get("devices") or {}).get("constraints") or ()
        names = [str(one.get("matchAttribute") or one.get("distinctAttribute")) for one in constraints]
        why = f" with constraint {', '.join(names)}" if names else " together"
        return slack, f"{text}{where}, but no choice of devices serves the claim{why}"

    def _remedy(self, demands: Sequence[Demand], count: Count) -> str:
        """How many nodes would do, where they are all of one sort."""
        if len(self._machines) > 1 or not count.fitting or any(demand.count is None for demand in demands):
            return ""
        on_one = self._counted(demands, self._kinds[:1]).fitting
        least = max(-(-count.wanted // max(1, on_one)), len(self._kinds) + 1)
        for number in range(least, least + _MORE_NODES):
            if self._counted(demands, [0] * number).shortage is None:
                return f"; {number} such nodes would do"
        return ""
