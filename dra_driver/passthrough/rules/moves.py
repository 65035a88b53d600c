"""In which order the functions of a card change drivers. No I/O.

A group of the IOMMU is usable for a virtual machine only while no other driver has one of its functions. So all are
taken from their drivers first, then given to vfio. Back, each goes to the driver that it had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dra_driver.model.gpu import VFIO_PCI

Action = Literal["override", "unbind", "probe", "bind"]


@dataclass(frozen=True, slots=True)
class Move:
    """One write to the kernel: `override` says which driver alone may have the function (None: any), `unbind` takes it
    from its driver, `probe` has the kernel choose one, `bind` gives it to `driver`."""

    action: Action
    bus_id: str
    driver: str | None = None


def are_bound(now: Mapping[str, str | None], vfio_drivers: Collection[str]) -> bool:
    """Whether one of these drivers has every function; `now` is the driver of each."""
    return all(driver in vfio_drivers for driver in now.values())


def to_vfio(now: Mapping[str, str | None], gpu: str, vfio_driver: str) -> Sequence[Move]:
    """What binds the functions to vfio; `now` is the driver of each in bus order. The one with the bus ID `gpu` gets
    `vfio_driver`; what accompanies it is an ordinary device."""
    wanted = {bus_id: vfio_driver if bus_id == gpu else VFIO_PCI for bus_id in now}
    moving = [bus_id for bus_id in now if now[bus_id] != wanted[bus_id]]
    return [
        *(Move("override", bus_id, wanted[bus_id]) for bus_id in moving),
        *(Move("unbind", bus_id) for bus_id in moving),
        *(Move("probe", bus_id) for bus_id in moving),
    ]


def back(
    now: Mapping[str, str | None],
    before: Mapping[str, str | None],
    overrides: Mapping[str, str | None],
    vfio_drivers: Collection[str],
) -> Sequence[Move]:
    """What gives the functions back to the drivers that they had `before`, and restores their `overrides`; those that
    are not in them get what the kernel chooses. An override need not name the driver that the function had, so it comes
    last."""
    moving = [bus_id for bus_id in now if bus_id not in before or now[bus_id] != before[bus_id]]
    taken = [bus_id for bus_id in moving if now[bus_id] in vfio_drivers]
    given = [
        Move("bind", bus_id, before[bus_id]) if bus_id in before else Move("probe", bus_id)
        for bus_id in moving
        if before.get(bus_id, "any") is not None
    ]
    return [
        *(Move("override", bus_id) for bus_id in now),
        *(Move("unbind", bus_id) for bus_id in taken),
        *given,
        *(
            Move("override", bus_id, driver)
            for bus_id in now
            if (driver := overrides.get(bus_id)) is not None
        ),
    ]
