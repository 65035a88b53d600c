"""Advice from receipts: which claims were idle, and which need only a smaller MIG device or a share.

A claim that ran for at least ten minutes gets, for its device, the first of these that applies:

| Advice | If |
|---|---|
| unknown | the busy time is unknown or estimated, or the peak is unknown |
| idle | kernels ran for less than 1 % of the time |
| profile | a smaller MIG profile of the node has enough memory for the peak, and enough multiprocessors |
| share | the node offers no MIG devices of the product, and several such claims fit by memory and by time |

The busy percentage is the most that a claim needs of the multiprocessors. Claims with several devices get no advice on
their size: MIG devices have no NVLink.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from dra_driver.model.dataclass import dataclass
from dra_driver.model.inventory import DynamicMigDevice, Inventory, StaticMigDevice
from dra_driver.reporting.rules.receipts import Part, Receipt, busy_of

_LASTED_S = 600.0
_IDLE = 0.01
_SPARE = 1.2
"""The plugin reads the memory every ten seconds, so the peak may be higher."""
_SMALLER = 0.8
"""The largest profile has almost all memory, and leaves no room for another claim."""
_MIB, _GIB = 1 << 20, 1 << 30

Kind = Literal["idle", "profile", "share", "unknown"]


@dataclass(frozen=True, slots=True, order=True)
class Size:
    memory_bytes: int
    fraction: float
    profile: str


Sizes = Mapping[str, Sequence[Size]]
"""By product, the smallest first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """`change` are lines for the claim's manifest. `end` is as in `Receipt`."""

    namespace: str
    name: str
    uid: str
    end: str
    seconds: float
    advice: Kind
    text: str
    change: tuple[str, ...]


def sizes_of(inventory: Inventory) -> Sizes:
    found: dict[str, set[Size]] = {}
    for device in inventory.devices():
        product, total = device.gpu.product_name, device.gpu.multiprocessors
        if isinstance(device, (StaticMigDevice, DynamicMigDevice)) and product and total:
            profile = device.profile
            size = Size(profile.memory_mib * _MIB, profile.multiprocessors / total, profile.name)
            found.setdefault(product, set()).add(size)
    return {product: sorted(sizes) for product, sizes in found.items()}


def advice_of(receipts: Iterable[Receipt], sizes: Sizes, driver: str) -> list[Advice]:
    found = []
    for receipt in receipts:
        ref, lasted = receipt.claim, receipt.until - receipt.began
        for part in receipt.parts if lasted >= _LASTED_S else ():
            advice = _of_part(part, sizes.get(part.product, ()), driver)
            if advice is not None:
                found.append(Advice(ref.namespace, ref.name, ref.uid, receipt.end, lasted, *advice))
    return found


def _of_part(part: Part, sizes: Sequence[Size], driver: str) -> tuple[Kind, str, tuple[str, ...]] | None:
    busy_s, confidence = busy_of(part)
    if busy_s is None or confidence != "measured":
        return "unknown", f"the busy time is {confidence}", ()
    busy = busy_s / part.gpu_s
    if busy < _IDLE:
        text = (
            f"idle: kernels ran for {busy_s:.0f} of {part.gpu_s:.0f} GPU-seconds ({100 * busy:.1f} %); delete the pods "
            "when they have nothing to do, for example with activeDeadlineSeconds in a Job"
        )
        return "idle", text, ()
    if part.count > 1:
        return None
    if part.peak_bytes is None or part.memory_bytes is None:
        return "unknown", "the peak of memory is unknown", ()
    need = part.peak_bytes * _SPARE
    used = f"a peak of {part.peak_bytes / _GIB:.1f} GiB and 20 % more"
    if part.kind == "gpu" and not sizes:
        return _share(part, busy, need, used)
    whole = 1.0 if part.kind == "gpu" else None
    own = next((size.fraction for size in sizes if size.profile == part.profile), whole)
    if own is None:
        return "unknown", f"the node does not offer the profile {part.profile} any more", ()
    for size in sizes:
        is_enough = size.memory_bytes >= need and size.fraction >= busy * own
        if is_enough and size.memory_bytes <= _SMALLER * part.memory_bytes:
            text = (
                f"{size.profile} is enough instead of {part.profile or part.product}: it has "
                f"{size.memory_bytes / _GIB:.1f} GiB, for {used}, and {100 * size.fraction:.0f} % of the GPU's "
                f"multiprocessors, for kernels that need {100 * busy * own:.0f} % at most"
            )
            of_class = () if part.kind == "mig" else ("deviceClassName: mig.nvidia.com",)
            selector = f'expression: device.attributes["{driver}"].profile == "{size.profile}"'
            return "profile", text, (*of_class, selector)
    return None


def _share(part: Part, busy: float, need: float, used: str) -> tuple[Kind, str, tuple[str, ...]] | None:
    memory = part.memory_bytes or 0
    fit = int(min(memory / need if need else math.inf, 1 / busy))
    if fit < 2:
        return None
    text = (
        f"a share is enough instead of {part.product}: {fit} such claims fit on its {memory / _GIB:.0f} GiB, because "
        f"each needs {used}, and its kernels run for {100 * busy:.0f} % of the time; shares need the section sharing "
        "of the configuration"
    )
    amount = max(1, math.ceil(need / _GIB))
    change = "deviceClassName: shares.gpu.nvidia.com", f"capacity: {{requests: {{memory: {amount}Gi}}}}"
    return "share", text, change
