"""Whose a GPU instance is, as values."""

from __future__ import annotations

from dataclasses import replace

from dra_driver.mig.rules.offered_devices import instances_to_withhold, is_ours
from dra_driver.model.mig import GpuInstance, OwnedInstance, Placement
from tests.fakes.tables import tabled

ENTRY = OwnedInstance("gpu-0-mig-19-3", "GPU-0", None, 19, "1g.10gb", Placement(3, 1), "boot-1")
AT_3, AT_4, AT_5 = (GpuInstance(number, 19, Placement(number, 1)) for number in (3, 4, 5))


@tabled("known", "inside", "ours")
def test_instance_is_ours_while_all_that_is_known_of_it_fits(
    known: dict, inside: tuple[tuple[int, str], ...], ours: bool
) -> None:
    assert is_ours(replace(ENTRY, **known), AT_3, inside) == ours


def test_others_instances_and_ours_that_are_leaving_are_withheld() -> None:
    withheld = instances_to_withhold((AT_3, AT_4, AT_5), {AT_3.slot, AT_4.slot}, {AT_4.slot})
    assert withheld == (replace(AT_4, leaving=True), AT_5)
