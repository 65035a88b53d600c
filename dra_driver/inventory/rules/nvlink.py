"""NVLink domains: a deterministic partition of a node's GPUs into fully connected groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from dra_driver.model.gpu import Gpu
from dra_driver.model.ids import gpu_device_names
from dra_driver.model.inventory import Inventory

Pair = frozenset[str]


def with_nvlink_domains(found: Inventory) -> Inventory:
    """The inventory with the domains of the pairs that NVML found reachable, besides those that it has already."""
    domains = nvlink_domains(found.gpus, found.reachable_pairs)
    return replace(found, nvlink_domains={**domains, **found.nvlink_domains})


def nvlink_domains(gpus: Sequence[Gpu], reachable: Mapping[Pair, int]) -> dict[str, str]:
    """The NVLink domain of each GPU UUID that has one.

    `reachable` maps pairs of UUIDs that reach each other over NVLink to a weight (links between
    them, or any positive number behind a switch). GPUs with an equal value reach each other
    pairwise, so that a claim can use the value as `matchAttribute`. A multi-node fabric names its
    own domains; of several the one counts that most of the GPUs are in.

    A GPU in MIG mode has none: MIG switches peer access off. One that leaves
    the mode for a claim that wants it whole counts as if it were out of it. A group of one is none.
    """
    whole = [gpu for gpu in gpus if gpu.can_be_whole]
    domains = _fabric_domains({gpu.uuid: gpu.fabric.domains for gpu in whole if gpu.fabric is not None})
    remaining = [gpu.uuid for gpu in whole if gpu.uuid not in domains]
    names = gpu_device_names(gpu.uuid for gpu in gpus)
    while remaining:
        group = _heaviest_clique(remaining, reachable)
        if len(group) < 2:
            break
        label = names[min(group)].removeprefix("gpu-")
        domains.update(dict.fromkeys(group, f"nvlink-{label}"))
        remaining = [uuid for uuid in remaining if uuid not in group]
    return domains


def _fabric_domains(choices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """One domain for each GPU UUID that has any. Of domains with as many GPUs the one counts that its first GPU names
    first, so that nodes with equal GPUs choose the same."""
    chosen: dict[str, str] = {}
    remaining = {uuid: names for uuid, names in choices.items() if names}
    while remaining:
        sizes = Counter(name for names in remaining.values() for name in names)
        ((largest, _),) = sizes.most_common(1)
        members = [uuid for uuid, names in remaining.items() if largest in names]
        chosen.update(dict.fromkeys(members, largest))
        remaining = {uuid: names for uuid, names in remaining.items() if uuid not in members}
    return chosen


def _heaviest_clique(uuids: Sequence[str], reachable: Mapping[Pair, int]) -> tuple[str, ...]:
    """The largest fully connected group; among equals the one with most links, then the first in order."""
    neighbours = {
        uuid: {other for other in uuids if other != uuid and reachable.get(frozenset((uuid, other)), 0) > 0}
        for uuid in uuids
    }
    order = {uuid: position for position, uuid in enumerate(uuids)}

    def rank(clique: frozenset[str]) -> tuple[int, int, list[int]]:
        weight = sum(reachable[frozenset(pair)] for pair in combinations(sorted(clique), 2))
        return (-len(clique), -weight, sorted(order[uuid] for uuid in clique))

    cliques = _maximal_cliques(neighbours)
    best = min(cliques, key=rank, default=frozenset())
    return tuple(sorted(best, key=order.__getitem__))


def _maximal_cliques(neighbours: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """All maximal cliques (Bron and Kerbosch with a pivot); a node has sixteen GPUs at most."""
    found: list[frozenset[str]] = []

    def expand(chosen: frozenset[str], candidates: set[str], excluded: set[str]) -> None:
        if not candidates and not excluded:
            found.append(chosen)
            return
        pivot = max(sorted(candidates | excluded), key=lambda uuid: len(neighbours[uuid] & candidates))
        for uuid in sorted(candidates - neighbours[pivot]):
            expand(chosen | {uuid}, candidates & neighbours[uuid], excluded & neighbours[uuid])
            candidates = candidates - {uuid}
            excluded = excluded | {uuid}

    if neighbours:
        expand(frozenset(), set(neighbours), set())
    return found
