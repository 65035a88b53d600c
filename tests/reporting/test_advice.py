"""Advice from receipts: idle claims, and claims that need only a smaller MIG device or a share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dra_driver.cli.claims import advice_lines
from dra_driver.reporting.rules.advice import Advice, Size, advice_of, sizes_of
from dra_driver.reporting.rules.receipts import Part, Receipt
from tests.fakes.samples import DRIVER, MIXED, ONE_G, h100, inventory, mig, partitioned, ref
from tests.fakes.tables import tabled

GIB, HOUR = 1 << 30, 3600.0
MIG = MIXED.gpus[2].product_name or ""
"""The product of MIXED."""
SIZES = {
    "H100": [
        Size(9984 << 20, 16 / 132, "1g.10gb"),
        Size(20096 << 20, 32 / 132, "2g.20gb"),
        Size(40448 << 20, 60 / 132, "3g.40gb"),
        Size(81152 << 20, 1.0, "7g.80gb"),
    ]
}


def part(
    kind: str = "gpu",
    profile: str | None = None,
    count: int = 1,
    busy: float | None = 0.5,
    known: float = 1.0,
    estimated: float = 0.0,
    peak: float | None = 1,
    memory: float | None = 80,
) -> Part:
    """A part of a claim that had its devices for an hour."""
    return Part(
        "H100", kind, count, profile,
        gpu_s=HOUR,
        busy_s=HOUR * (busy or 0) * known,
        busy_known_s=0.0 if busy is None else HOUR * known,
        busy_estimated_s=HOUR * estimated,
        peak_bytes=None if peak is None else int(peak * GIB),
        memory_bytes=None if memory is None else int(memory * GIB),
    )  # fmt: skip


def receipt(*parts: Part, name: str = "train", lasted: float = HOUR, end: Any = "ended") -> Receipt:
    return Receipt(ref(f"uid-{name}", name), 1000.0, 1000.0 + lasted, parts, end)


@tabled("fields", "mig", "advice", "text", "change")
def test_advice_for_a_device(
    fields: dict[str, Any], mig: bool, advice: str | None, text: str | None, change: list[str] | None
) -> None:
    found = advice_of([receipt(part(**fields))], SIZES if mig else {}, DRIVER)
    assert [one.advice for one in found] == ([] if advice is None else [advice])
    assert all(one.text.startswith(text or "") or (text or "") in one.text for one in found)
    assert change is None or [[*one.change] for one in found] == [change]


@pytest.mark.parametrize(("lasted", "count"), [(599.0, 0), (600.0, 1)])
def test_claim_of_less_than_ten_minutes_has_no_advice(lasted: float, count: int) -> None:
    assert len(advice_of([receipt(part(busy=0), lasted=lasted)], SIZES, DRIVER)) == count


def test_sizes_are_the_profiles_that_the_node_offers_smallest_first() -> None:
    known = [replace(gpu, multiprocessors=132) for gpu in MIXED.gpus]
    assert sizes_of(inventory(*known)) == {
        MIG: [Size(9984 << 20, 16 / 132, "1g.10gb"), Size(40448 << 20, 60 / 132, "3g.40gb")]
    }
    assert sizes_of(inventory(h100(0))) == {}
    unknown = replace(partitioned(0, mig(0, ONE_G, 0, 1, 7)), multiprocessors=None)
    assert sizes_of(inventory(unknown)) == {}


def test_lines_show_what_to_change_and_then_why_there_is_no_advice() -> None:
    receipts = [
        receipt(part(busy=0.04, peak=6), name="serve", end="running"),
        receipt(part(busy=None), part(busy=None), name="old"),
        receipt(part(busy=None), name="older"),
        receipt(part(peak=None), name="shared"),
    ]
    found: list[tuple[str, Advice]] = [("node-a", one) for one in advice_of(receipts, SIZES, DRIVER)]
    lines = [*advice_lines(found, None)]
    assert lines == [
        "node-a  default/serve  running for 1h00m",
        "    1g.10gb is enough instead of H100: it has 9.8 GiB, for a peak of 6.0 GiB and 20 % more, and 12 % of the "
        "GPU's multiprocessors, for kernels that need 4 % at most",
        "        deviceClassName: mig.nvidia.com",
        '        expression: device.attributes["gpu.nvidia.com"].profile == "1g.10gb"',
        "no advice for 2 claims: the busy time is unknown",
        "no advice for 1 claim: the peak of memory is unknown",
    ]
    folded = "\n".join(advice_lines(found, 80)).splitlines()
    assert max(map(len, folded)) <= 80
    assert [*advice_lines([], 80)] == [
        "no receipt shows a claim of ten minutes or more that was idle or too large"
    ]
