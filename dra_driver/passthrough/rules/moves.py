"""Decides the order in which the functions of a card change drivers.

A virtual machine can use an IOMMU group only if no other driver is bound to a function of the group. So all functions
are first unbound, then bound to vfio.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import VFIO_PCI

Action = Literal["override", "unbind", "probe", "bind"]


@dataclass(frozen=True, slots=True)
class Move:
    """One write to the kernel.

    `override` sets the only driver that may bind the function (None: any), `unbind` detaches the driver, `probe` lets
    the kernel choose a driver, `bind` attaches `driver`.
    """

    action: Action
    bus_id: str
    driver: str | None = None


def are_bound(now: Mapping[str, str | None], vfio_drivers: Collection[str]) -> bool:
    return all(driver in vfio_drivers for driver in now.values())


def to_vfio(now: Mapping[str, str | None], gpu: str, vfio_driver: str) -> Sequence[Move]:
    """Return the moves to vfio; `now` maps each function to its current driver, in bus order.

    The function `gpu` gets `vfio_driver`, the others plain vfio-pci.
    """
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
    """Return the moves that restore each function's driver and override.

    The kernel chooses the driver of a function that is not in `before`. Overrides come last, because an override need
    not name the driver that the function had.
    """
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
