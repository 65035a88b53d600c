"""How many pods get their claims at the same time on a number of nodes.

As the scheduler goes: pod after pod, each on the first node that has all its claims. Devices alone count, not CPU,
memory, or where else a pod may not go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra_driver.validation.rules.manifests import bodies

JsonObject = dict[str, Any]

MOST_PODS_OF_A_CLAIM = 256
"""ResourceClaimReservedForMaxSize of resource.k8s.io: as many entries `status.reservedFor` can have."""

Allocates = Callable[[int, Sequence[JsonObject], JsonObject], JsonObject | None]
"""The number of a kind of node, what claims on the node got already, and a claim spec: what the claim gets, None if the
node has not enough left."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal pods. Each has a claim of every spec in `own`; those in `named`, by their names, belong to all together.

    `count` None is one pod on each node.
    """

    own: tuple[JsonObject, ...] = ()
    named: Mapping[str, JsonObject] = field(default_factory=dict)
    count: int | None = 1


@dataclass(frozen=True, slots=True)
class Shortage:
    """The first claim that no node had enough left for. `kinds` are the kinds of nodes with what claims got there
    already; `full` is a named claim that has as many pods as it can have, `pinned` one that other pods hold elsewhere.
    """

    demand: int
    spec: JsonObject | None = None
    kinds: tuple[tuple[int, tuple[JsonObject, ...]], ...] = ()
    full: str | None = None
    pinned: str | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """Of `wanted` pods `fitting` have their claims at one time, `each` tells of which demand, on `nodes` nodes."""

    wanted: int
    fitting: int
    each: tuple[int, ...]
    nodes: int
    shortage: Shortage | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """What a node of a kind has on it: nodes that are alike share one. `got` is what its claims got."""

    kind: int
    there: frozenset[str] = frozenset()
    got: tuple[JsonObject, ...] = ()
    pods: int = 0


@dataclass(frozen=True, slots=True)
class _Lack:
    """A claim for which there is not enough, and what the claims before it got."""

    spec: JsonObject
    got: tuple[JsonObject, ...]


@dataclass(slots=True)
class _Node:
    state: _State


def count_pods(demands: Sequence[Demand], kinds: Sequence[int], allocates: Allocates) -> Count:
    """`kinds` is the kind of each node. Of two orders, as given and the largest pods first, the better one counts."""
    first = _Counter(demands, kinds, allocates).count(range(len(demands)))
    if first.shortage is None or len(demands) < 2:
        return first
    by_size = sorted(range(len(demands)), key=lambda index: -_devices(demands[index]))
    second = _Counter(demands, kinds, allocates).count(by_size)
    return max(first, second, key=lambda found: found.fitting)


class _Counter:
    def __init__(self, demands: Sequence[Demand], kinds: Sequence[int], allocates: Allocates) -> None:
        self._demands = demands
        self._allocates = allocates
        empty = {kind: _State(kind) for kind in set(kinds)}
        self._nodes = [_Node(empty[kind]) for kind in kinds]
        self._kept: list[_State] = [*empty.values()]  # so that no two have one id
        self._next: dict[tuple[int, int], _State | _Lack] = {}
        self._home: dict[str, _Node] = {}
        self._users: dict[str, int] = {}
        self._shortage: Shortage | None = None

    def count(self, order: Sequence[int]) -> Count:
        each = {index: self._place(index) for index in order}
        return Count(
            sum(self._wanted(demand) for demand in self._demands),
            sum(each.values()),
            tuple(each[index] for index in range(len(self._demands))),
            sum(bool(node.state.pods) for node in self._nodes),
            self._shortage,
        )

    def _wanted(self, demand: Demand) -> int:
        return len(self._nodes) if demand.count is None else demand.count

    def _place(self, index: int) -> int:
        demand, placed = self._demands[index], 0
        for node in self._nodes:
            most = 1 if demand.count is None else demand.count - placed
            while most > 0 and self._takes(index, node):
                placed, most = placed + 1, most - 1
        if placed < self._wanted(demand):
            self._shortage = self._shortage or self._told(index)
        return placed

    def _takes(self, index: int, node: _Node) -> bool:
        """Put a pod of the demand on the node, if there is room."""
        named = self._demands[index].named
        if any(self._users.get(name, 0) >= MOST_PODS_OF_A_CLAIM for name in named):
            return False
        if any(self._home.get(name, node) is not node for name in named):
            return False
        after = self._after(node.state, index)
        if not isinstance(after, _State):
            return False
        node.state = after
        for name in named:
            self._home[name] = node
            self._users[name] = self._users.get(name, 0) + 1
        return True

    def _after(self, state: _State, index: int) -> _State | _Lack:
        """The state with a pod of the demand more, or what there is not enough for."""
        key = (id(state), index)
        if key not in self._next:
            after = self._next[key] = self._allocated(state, index)
            if isinstance(after, _State):
                self._kept.append(after)
        return self._next[key]

    def _allocated(self, state: _State, index: int) -> _State | _Lack:
        demand, got = self._demands[index], list(state.got)
        missing = [spec for name, spec in demand.named.items() if name not in state.there]
        for spec in [*missing, *demand.own]:
            claim = self._allocates(state.kind, got, spec)
            if claim is None:
                return _Lack(spec, tuple(got))
            got.append(claim)
        return _State(state.kind, state.there | demand.named.keys(), tuple(got), state.pods + 1)

    def _told(self, index: int) -> Shortage:
        named = self._demands[index].named
        full = next((name for name in named if self._users.get(name, 0) >= MOST_PODS_OF_A_CLAIM), None)
        if full is not None:
            return Shortage(index, full=full)
        pinned = [name for name in named if name in self._home]
        homes = [self._home[name] for name in pinned]
        found: dict[int, tuple[int, _Lack]] = {}
        for node in self._nodes:
            if all(home is node for home in homes):
                lacking = self._after(node.state, index)
                if isinstance(lacking, _Lack):
                    found[id(node.state)] = (node.state.kind, lacking)
        if not found:
            return Shortage(index, pinned=next(iter(pinned), None))
        spec = next(lack.spec for _, lack in found.values())
        places = tuple((kind, lack.got) for kind, lack in found.values() if lack.spec is spec)
        return Shortage(index, spec, places)


def _devices(demand: Demand) -> int:
    """About how many devices a pod takes, as far as its claims say it."""
    return sum(
        max(map(_amount, bodies(request)), default=1)
        for spec in (*demand.own, *demand.named.values())
        for request in (spec.get("devices") or {}).get("requests") or ()
    )


def _amount(body: JsonObject) -> int:
    return 1 << 20 if body.get("allocationMode") == "All" else int(body.get("count") or 1)
