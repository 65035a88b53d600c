"""Which devices serve a request, and what is said where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.validation.rules.allocator import Candidate, Wanted
from dra_driver.cli.validation.rules.cel import SelectorError, view
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.cli.validation.rules.explain import funnel, near_misses
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.slices.rules.build import build_pool
from tests.fakes.samples import DRIVER, MIXED, NODE, h100, inventory
from tests.fakes.tables import tabled

ROOT = Path(__file__).parents[3]
A, C = f'device.attributes["{DRIVER}"]', f'device.capacity["{DRIVER}"]'
CLASSES = standard_classes(DRIVER, ["1g.10gb"])


def devices() -> list[dict[str, Any]]:
    """Two whole H100 and a partitioned one with two MIG devices."""
    return list(
        build_pool(inventory(h100(0), h100(1, memory_bytes=40960 << 20), MIXED.gpus[2]), NODE)
        .slices[0]
        .devices
    )


def candidates(found: list[dict[str, Any]]) -> list[Candidate]:
    return [Candidate((DRIVER, NODE, device["name"]), device, view(DRIVER, device)) for device in found]


MACHINE = candidates(devices())
GPU_0, GPU_1 = (candidate.name for candidate in MACHINE[:2])


def wanted(*selectors: str, class_name: str = "gpu.nvidia.com", **more: Any) -> Wanted:
    of_class = CLASSES[class_name]["spec"]["selectors"]
    return Wanted(
        "gpu",
        class_name,
        tuple(compiled(entry["cel"]["expression"]) for entry in of_class),
        tuple(compiled(text) for text in selectors),
        **more,
    )


def test_each_condition_reports_what_it_leaves() -> None:
    found = funnel(wanted(f"{C}.memory.compareTo(quantity('60Gi')) >= 0", f"{A}.index >= 0"), MACHINE)
    assert [step.left for step in found.steps] == [4, 2, 1, 1]
    assert found.matching == (GPU_0,)
    assert found.sentence().startswith("4 devices, 2 of class gpu.nvidia.com, 1 match selector 1")


def test_a_class_without_devices() -> None:
    found = funnel(wanted(class_name="mig.nvidia.com"), MACHINE[:2])
    assert [step.text for step in found.steps][-1] == "of class mig.nvidia.com"
    assert funnel(wanted(), []).sentence() == "0 devices of class gpu.nvidia.com"


def test_a_missing_key_is_an_error_with_the_guard_that_avoids_it() -> None:
    found = funnel(wanted(f"{A}.profile == '1g.10gb'"), MACHINE)
    assert found.matching == ()
    assert found.error is not None
    assert found.error.endswith("no device of the class has profile: only MIG devices have it")
    machine = [
        *MACHINE,
        *candidates([devices()[0] | {"name": "other", "attributes": {"type": {"string": "gpu"}}}]),
    ]
    some = funnel(wanted(f"{A}.productName == 'x'"), machine)
    assert some.error is not None
    assert 'which has no productName; test `"productName" in' in some.error
    guarded = funnel(wanted(f"'profile' in {A} && {A}.profile == '1g.10gb'"), MACHINE)
    assert guarded.error is None


@tabled("selector", "is_hinted")
def test_a_near_miss_is_a_device_that_only_an_amount_excludes(selector: str, is_hinted: bool) -> None:
    found = [*near_misses(wanted(selector), MACHINE)]
    assert [hint.partition(", so")[0].partition("memory ")[2] for hint in found] == (
        ["40Gi, a little less than 41Gi"] if is_hinted else []
    )


def test_the_class_guards_the_selectors_of_a_request() -> None:
    found = funnel(wanted(f"{A}.profile == '1g.10gb'", class_name="mig.nvidia.com"), MACHINE)
    assert found.error is None
    assert len(found.matching) == 1


@tabled("capacity", "left")
def test_capacity(capacity: dict[str, str], left: int) -> None:
    found = funnel(wanted(capacity=capacity), MACHINE)
    assert len(found.matching) == left
    [(name, amount)] = capacity.items()
    assert f"{left} have {name} {amount}" in found.sentence()
    assert ("is not a capacity; known names: memory" in found.sentence()) == (name != "memory")


@tabled("effect", "tolerations", "is_left")
def test_taints(effect: str, tolerations: list[dict[str, str]], is_left: bool) -> None:
    taint = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": effect}
    (tainted,) = candidates([devices()[0] | {"taints": [taint]}])
    found = funnel(wanted(tolerations=tuple(tolerations)), [tainted])
    assert found.matching == ((GPU_0,) if is_left else ())
    if not is_left:
        assert found.sentence().endswith(
            "0 without untolerated taints, such as gpu.nvidia.com/xid=79:NoSchedule"
        )


@given(
    st.lists(
        st.sampled_from([f"{A}.type == 'gpu'", f"{A}.index == 0", f"'profile' in {A}", "true"]), max_size=4
    )
)
def test_a_funnel_never_widens_and_ends_with_what_matches_everything(expressions: list[str]) -> None:
    found = funnel(wanted(*expressions), MACHINE)
    counts = [step.left for step in found.steps]
    assert counts == sorted(counts, reverse=True)
    assert (counts[-1] if found.matching else 0) == len(found.matching)
    for candidate in MACHINE:
        holds = [compiled(text) for text in (*expressions, f"{A}.type == 'gpu'")]
        try:
            expected = all(selector.matches(candidate.view) for selector in holds)
        except SelectorError:
            expected = False
        assert (candidate.name in found.matching) == expected


SHARED = {"attributes": {"shareable": {"bool": True}}, "allowMultipleAllocations": True}


@tabled("device", "expected")
def test_class_of_shares_selects_by_the_attribute_or_the_field(device: dict, expected: bool) -> None:
    (selector,) = CLASSES["shares.gpu.nvidia.com"]["spec"]["selectors"]
    matches = compiled(selector["cel"]["expression"]).matches
    assert matches(view(DRIVER, {"name": "gpu-1", **device})) is expected
    assert not matches(view("gpu.example.com", {"name": "gpu-1", **SHARED}))
