"""Receipts: how long a claim had GPUs, how long kernels ran on them, their energy, and the peak of memory.

Quantities are GPU-seconds: a MIG device counts as its fraction of the GPU's memory, and claims that share a device
divide it evenly.

| Quantity | Source | Estimated |
|---|---|---|
| busy | NVML's samples of the utilisation; for MIG devices GPM | if claims share the device |
| energy | the GPU's energy counter | of MIG devices and shared devices; of a claim's first and last seconds |
| peak of memory | each reading | never; unknown if claims share the device |

Nothing is known while the GPU did not answer or belonged to a virtual machine, no utilisation in MIG mode before
Hopper, and no energy if the counter started over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from dra_driver.model.claim import ClaimRef, HeldDevice
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import GpuMeasure
from dra_driver.model.inventory import Inventory
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.rules.claim_usage import gpu_fraction, mig_profile

_LONGEST_SAMPLE_S = 1.5
"""NVML samples the utilisation every 1/6 to 1 s, depending on the product."""
_BETWEEN_SAMPLES_S = 2.0
"""A reading does not begin and end with a sample."""


@dataclass(frozen=True, slots=True)
class Part:
    """The devices of a claim with one product, kind and MIG profile.

    The fields `…_s` are GPU-seconds: `gpu_s` is how long the claim had them, `busy_s` how long kernels ran. `busy_s`
    and `energy_j` cover only `…_known_s` of `gpu_s`, of which `…_estimated_s` are estimated.
    """

    product: str
    kind: str
    count: int
    profile: str | None = None
    gpu_s: float = 0.0
    busy_s: float = 0.0
    busy_known_s: float = 0.0
    busy_estimated_s: float = 0.0
    energy_j: float = 0.0
    energy_known_s: float = 0.0
    energy_estimated_s: float = 0.0
    peak_bytes: int | None = None
    memory_bytes: int | None = None

    def plus(self, gain: Part) -> Part:
        peaks = [one for one in (self, gain) if one.peak_bytes is not None]
        most = max(peaks, key=lambda one: one.peak_bytes or 0, default=self)
        return replace(
            self,
            gpu_s=self.gpu_s + gain.gpu_s,
            busy_s=self.busy_s + gain.busy_s,
            busy_known_s=self.busy_known_s + gain.busy_known_s,
            busy_estimated_s=self.busy_estimated_s + gain.busy_estimated_s,
            energy_j=self.energy_j + gain.energy_j,
            energy_known_s=self.energy_known_s + gain.energy_known_s,
            energy_estimated_s=self.energy_estimated_s + gain.energy_estimated_s,
            peak_bytes=most.peak_bytes,
            memory_bytes=most.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """Times are in seconds since 1970.

    `end` is `cut` if the claim ended while no process of the plugin ran: `until` is then the plugin's last write.
    """

    claim: ClaimRef
    began: float
    until: float
    parts: tuple[Part, ...]
    end: Literal["running", "ended", "cut"] = "running"


@dataclass(frozen=True, slots=True)
class Hold:
    """A device that a claim holds. `part` is its part's index in the receipt, `fraction` what it has of its GPU."""

    uid: str
    device: HeldDevice
    part: int
    fraction: float
    began: float
    ended: float | None = None


def opened(record: ClaimRecord, inventory: Inventory, at: float) -> tuple[Receipt, list[Hold]]:
    """Return an empty receipt and its holds; devices with adminAccess are omitted."""
    products = {gpu.uuid: gpu.product_name or "unknown" for gpu in inventory.gpus}
    kinds = {
        held.device: (products.get(held.gpu_uuid, "unknown"), held.kind, mig_profile(held, inventory))
        for held in record.devices
        if not held.admin_access
    }
    counts = Counter(kinds.values())
    order = list(counts)
    holds = {
        held.device: Hold(
            record.ref.uid,
            held,
            order.index(kinds[held.device]),
            gpu_fraction(held, inventory) or 1.0,
            at,
        )
        for held in record.devices
        if held.device in kinds
    }
    parts = tuple(Part(product, kind, counts[product, kind, mig], mig) for product, kind, mig in order)
    return Receipt(record.ref, at, at, parts), list(holds.values())


def gains(
    holds: Sequence[Hold],
    since: float,
    until: float,
    before: GpuMeasure | None,
    after: GpuMeasure | None,
    mig_uuids: Mapping[str, str],
) -> Iterator[tuple[Hold, Part]]:
    """Yield what each hold on one GPU gained between two readings, which are None if the GPU did not answer.

    `mig_uuids` is by device name.
    """
    times = {time for hold in holds for time in (hold.began, hold.ended) if time is not None}
    edges = sorted({since, until, *(time for time in times if since < time < until)})
    energies = [None if one is None else one.energy_j for one in (before, after)]
    watts = None
    if energies[0] is not None and energies[1] is not None and energies[1] >= energies[0] and until > since:
        watts = (energies[1] - energies[0]) / (until - since)
    for start, end in pairwise(edges):
        present = [
            hold for hold in holds if hold.began <= start and (hold.ended is None or hold.ended >= end)
        ]
        sharing = Counter(hold.device.device for hold in present)
        for hold in present:
            is_shared, length = sharing[hold.device.device] > 1, end - start
            weight = hold.fraction / sharing[hold.device.device]
            busy_s, known_s = _busy(hold, after, start, end, mig_uuids)
            watts_known_s = 0.0 if watts is None or hold.device.kind == "vfio" else length * weight
            is_split = is_shared or hold.fraction < 1 or len(edges) > 2
            used, total = _memory(hold, after, mig_uuids) if end == until and not is_shared else (None, None)
            part = Part(
                "",
                "",
                0,
                gpu_s=length * weight,
                busy_s=busy_s * weight,
                busy_known_s=known_s * weight,
                busy_estimated_s=known_s * weight * is_shared,
                energy_j=(watts or 0.0) * watts_known_s,
                energy_known_s=watts_known_s,
                energy_estimated_s=watts_known_s * is_split,
                peak_bytes=used,
                memory_bytes=total,
            )
            yield hold, part


def _busy(
    hold: Hold, after: GpuMeasure | None, start: float, end: float, mig_uuids: Mapping[str, str]
) -> tuple[float, float]:
    """Return busy seconds, and for how many seconds that is known."""
    if after is None or hold.device.kind == "vfio":
        return 0.0, 0.0
    if hold.device.kind == "gpu":
        return busy_between(after.busy or (), start, end)
    load = after.mig.get(mig_uuids.get(hold.device.device, ""))
    percent = None if load is None else load.utilisation_percent
    return (0.0, 0.0) if percent is None else ((end - start) * percent / 100, end - start)


def _memory(
    hold: Hold, after: GpuMeasure | None, mig_uuids: Mapping[str, str]
) -> tuple[int | None, int | None]:
    if after is None or hold.device.kind == "vfio":
        return None, None
    if hold.device.kind == "gpu":
        return after.memory_used_bytes, after.memory_total_bytes
    load = after.mig.get(mig_uuids.get(hold.device.device, ""))
    return (None, None) if load is None else (load.memory_used_bytes, load.memory_total_bytes)


def busy_between(samples: Sequence[tuple[float, float]], start: float, end: float) -> tuple[float, float]:
    """Return the busy seconds, and the seconds that the samples cover. A sample is the average since the one before.

    >>> busy_between([(10.0, 0), (11.0, 50), (12.0, 100)], 10.0, 12.0)
    (1.5, 2.0)
    """
    busy = known = 0.0
    is_idle = all(percent == 0 for _, percent in samples)
    for (before, _), (at, percent) in pairwise(
        [(samples[0][0] - _LONGEST_SAMPLE_S, 0.0), *samples] if samples else ()
    ):
        begin = before if is_idle else max(before, at - _LONGEST_SAMPLE_S)
        covered = max(0.0, min(at, end) - max(begin, start))
        busy += covered * percent / 100
        known += covered
    if known and end - start - known <= _BETWEEN_SAMPLES_S:
        return busy * (end - start) / known, end - start
    return busy, known


_MEASURED = 0.95
"""A quantity is estimated if it was measured for less than this part of the claim's time."""
Confidence = Literal["measured", "estimated", "unknown"]


def judged(value: float, known_s: float, estimated_s: float, gpu_s: float) -> tuple[float | None, Confidence]:
    """Return a quantity for the whole time of a claim; None if nothing is known.

    >>> judged(30.0, 50.0, 0.0, 100.0)
    (60.0, 'estimated')
    """
    if known_s <= 0:
        return None, "unknown"
    is_measured = known_s - estimated_s >= _MEASURED * gpu_s
    return value * max(1.0, gpu_s / known_s), "measured" if is_measured else "estimated"


def busy_of(part: Part) -> tuple[float | None, Confidence]:
    return judged(part.busy_s, part.busy_known_s, part.busy_estimated_s, part.gpu_s)


def energy_of(part: Part) -> tuple[float | None, Confidence]:
    return judged(part.energy_j, part.energy_known_s, part.energy_estimated_s, part.gpu_s)


@dataclass(frozen=True, slots=True)
class EndedPart:
    """For other programs. `busy` and `energy` are the confidence in the value before."""

    product: str
    kind: str
    profile: str | None
    count: int
    gpu_seconds: float
    busy_gpu_seconds: float | None
    busy: Confidence
    energy_joules: float | None
    energy: Confidence
    peak_memory_bytes: int | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class EndedClaim:
    """For other programs; times are in seconds since 1970."""

    namespace: str
    name: str
    uid: str
    began: float
    ended: float
    end: str
    parts: tuple[EndedPart, ...]


def ended(receipt: Receipt) -> EndedClaim:
    parts = tuple(
        EndedPart(
            part.product, part.kind, part.profile, part.count, part.gpu_s, *busy_of(part), *energy_of(part),
            part.peak_bytes, part.memory_bytes,
        )
        for part in receipt.parts
    )  # fmt: skip
    ref = receipt.claim
    return EndedClaim(ref.namespace, ref.name, ref.uid, receipt.began, receipt.until, receipt.end, parts)


def line(part: Part) -> str:
    """Return for example `2 x NVIDIA H100 80GB HBM3, 3.2 GPU-hours, busy 41 %, peak 31 of 80 GiB, 1.9 kWh`."""
    busy, busy_is = busy_of(part)
    energy, energy_is = energy_of(part)
    device = part.product if part.profile is None else f"{part.profile} of {part.product}"
    percent = "unknown" if busy is None else f"{_about(busy_is)}{100 * busy / max(part.gpu_s, 1e-9):.0f} %"
    peak = "unknown"
    if part.peak_bytes is not None and part.memory_bytes is not None:
        peak = f"{part.peak_bytes / 2**30:.1f} of {part.memory_bytes / 2**30:.0f} GiB"
    spent = "energy unknown" if energy is None else f"{_about(energy_is)}{energy / 3.6e6:.3g} kWh"
    held = f"{part.gpu_s / 3600:.1f} GPU-hours" if part.gpu_s >= 3600 else f"{part.gpu_s:.0f} GPU-seconds"
    return f"{part.count} x {device}, {held}, busy {percent}, peak {peak}, {spent}"


def _about(confidence: Confidence) -> str:
    return "about " if confidence == "estimated" else ""


def totals(
    sums: Mapping[tuple[str, str, str], Part], value: Literal["gpu_s", "busy_s", "energy_j"]
) -> Iterable[tuple[tuple[str, str, str], float]]:
    """Yield a quantity by namespace, product and kind, if known."""
    known: Mapping[str, str] = {"gpu_s": "gpu_s", "busy_s": "busy_known_s", "energy_j": "energy_known_s"}
    for key, part in sums.items():
        if getattr(part, known[value]) > 0:
            yield key, getattr(part, value)
