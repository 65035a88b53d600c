from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.inventory.rules.assembly import nvlink_domains
from dra_driver.model.gpu import Fabric, Gpu
from tests.fakes.samples import h100, uuid

Links = Mapping[frozenset[str], int]

# NVLink layouts of real systems.
DGX_1V = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1,
    (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
CLUSTER = "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11"


def links(pairs: Mapping[tuple[int, int], int]) -> dict[frozenset[str], int]:
    return {frozenset((uuid(one), uuid(other))): count for (one, other), count in pairs.items()}


def mesh(numbers: range, count: int = 1) -> dict[tuple[int, int], int]:
    return dict.fromkeys(combinations(numbers, 2), count)


def groups(count: int, pairs: Mapping[tuple[int, int], int]) -> list[list[int]]:
    domains = nvlink_domains([h100(number) for number in range(count)], links(pairs))
    by_domain: dict[str, list[int]] = {}
    for number in range(count):
        if uuid(number) in domains:
            by_domain.setdefault(domains[uuid(number)], []).append(number)
    return sorted(by_domain.values())


@pytest.mark.parametrize(
    ("count", "pairs", "expected"),
    [
        pytest.param(8, DGX_1V, [[0, 1, 2, 3], [4, 5, 6, 7]], id="DGX-1V is two quads"),
        pytest.param(16, mesh(range(16)), [list(range(16))], id="DGX-2 is one"),
        pytest.param(8, mesh(range(8)), [list(range(8))], id="DGX A100, H100, B200 are one"),
        pytest.param(4, mesh(range(4), 6), [[0, 1, 2, 3]], id="HGX of four without a switch is one"),
        pytest.param(4, {(0, 1): 12, (2, 3): 12}, [[0, 1], [2, 3]], id="bridged pairs"),
        pytest.param(8, {}, [], id="L40S has none"),
        pytest.param(1, {}, [], id="one GPU has none"),
        pytest.param(0, {}, [], id="no GPU"),
        pytest.param(3, {(0, 1): 4, (1, 2): 4}, [[0, 1]], id="a chain is no group of three"),
        pytest.param(3, {(0, 1): 1, (1, 2): 2}, [[1, 2]], id="the pair with more links wins"),
        pytest.param(4, {(0, 1): 0, (2, 3): 1}, [[2, 3]], id="a pair without links is none"),
    ],
)
def test_groups_are_those_of_the_system(
    count: int, pairs: Mapping[tuple[int, int], int], expected: list[list[int]]
) -> None:
    assert groups(count, pairs) == expected


def test_domain_is_named_after_its_smallest_uuid() -> None:
    gpus = [h100(3), h100(1), h100(2)]
    assert nvlink_domains(gpus, links({(2, 3): 1})) == dict.fromkeys((uuid(2), uuid(3)), "nvlink-00000002")


def test_gpu_in_mig_mode_is_in_no_domain_and_the_others_stay_together() -> None:
    gpus = [h100(number, mig_enabled=number == 0) for number in range(4)]
    expected = dict.fromkeys(map(uuid, (1, 2, 3)), "nvlink-00000001")
    assert nvlink_domains(gpus, links(mesh(range(4)))) == expected


def test_fabric_names_the_domain_when_there_is_one() -> None:
    gpus = [h100(number, fabric=Fabric(CLUSTER, (32766,))) for number in range(4)]
    assert nvlink_domains(gpus, {}) == dict.fromkeys(map(uuid, range(4)), f"{CLUSTER}.32766")


def test_cliques_of_one_fabric_are_apart() -> None:
    gpus = [h100(number, fabric=Fabric(CLUSTER, (number // 2,))) for number in range(4)]
    assert nvlink_domains(gpus, links(mesh(range(4)))) == {
        uuid(number): f"{CLUSTER}.{number // 2}" for number in range(4)
    }


@pytest.mark.parametrize(
    ("fabrics", "expected"),
    [
        ([((1, 2), ()), ((1, 2), ())], ["1", "1"]),
        ([((1, 2), ()), ((2, 3), ())], ["2", "2"]),
        ([((1, 2), ()), ((1, 3), ()), ((2, 3), ()), ((2, 3), ())], ["2", "1", "2", "2"]),
        ([((), (4,)), ((), (4, 5)), ((4,), (4,))], ["endpoint-4", "endpoint-4", "4"]),
    ],
)
def test_gpus_with_one_domain_have_a_clique_in_common(
    fabrics: list[tuple[tuple[int, ...], tuple[int, ...]]], expected: list[str]
) -> None:
    gpus = [h100(number, fabric=Fabric(CLUSTER, *cliques)) for number, cliques in enumerate(fabrics)]
    domains = nvlink_domains(gpus, {})
    assert [domains[gpu.uuid] for gpu in gpus] == [f"{CLUSTER}.{name}" for name in expected]


def test_gpu_with_cliques_for_multicast_alone_is_grouped_by_its_links() -> None:
    gpus = [h100(number, fabric=Fabric(CLUSTER, ())) for number in range(2)]
    assert nvlink_domains(gpus, links({(0, 1): 1})) == dict.fromkeys(map(uuid, range(2)), "nvlink-00000000")


def test_gpus_without_the_fabric_are_grouped_by_their_links() -> None:
    gpus = [h100(number, fabric=Fabric(CLUSTER, (1,)) if number < 2 else None) for number in range(4)]
    assert nvlink_domains(gpus, links(mesh(range(4)))) == {
        uuid(0): f"{CLUSTER}.1",
        uuid(1): f"{CLUSTER}.1",
        uuid(2): "nvlink-00000002",
        uuid(3): "nvlink-00000002",
    }


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[Gpu], Links]:
    count = draw(st.integers(0, 9))
    edges = draw(
        st.dictionaries(st.sampled_from(list(combinations(range(max(count, 2)), 2))), st.integers(0, 4))
    )
    mig = draw(st.sets(st.integers(0, 8)))
    return [h100(number, mig_enabled=number in mig) for number in range(count)], links(edges)


@given(machines())
def test_gpus_of_one_domain_reach_each_other_pairwise(machine: tuple[list[Gpu], Links]) -> None:
    gpus, reachable = machine
    domains = nvlink_domains(gpus, reachable)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for one, other in combinations(sorted(domains), 2):
        if domains[one] == domains[other]:
            assert reachable.get(frozenset((one, other)), 0) > 0
    assert not any(by_uuid[found].mig_enabled for found in domains)
    assert all(list(domains.values()).count(value) > 1 for value in domains.values())


@given(machines())
def test_no_two_linked_gpus_are_left_alone(machine: tuple[list[Gpu], Links]) -> None:
    gpus, reachable = machine
    domains = nvlink_domains(gpus, reachable)
    alone = [gpu.uuid for gpu in gpus if gpu.uuid not in domains and not gpu.mig_enabled]
    assert not any(reachable.get(frozenset(pair), 0) for pair in combinations(alone, 2))


@given(machines(), st.randoms())
def test_partition_does_not_depend_on_the_order_of_the_pairs(
    machine: tuple[list[Gpu], Links], random: object
) -> None:
    gpus, reachable = machine
    shuffled = list(reachable.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert nvlink_domains(gpus, dict(shuffled)) == nvlink_domains(gpus, reachable)


def test_partition_is_quick_when_sixteen_gpus_are_linked_at_random() -> None:
    pairs = {pair: 1 for number, pair in enumerate(combinations(range(16), 2)) if number % 3}
    found = groups(16, pairs)
    assert sum(map(len, found)) >= 14
    assert nvlink_domains([replace(h100(number)) for number in range(16)], links(pairs))
