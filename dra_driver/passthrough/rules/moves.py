"""In which order the functions of a card change drivers. No I/O.

A group of the IOMMU is usable for a virtual machine only while no other driver has one of its functions. So all are
taken from their drivers first, then given to vfio. Back, each goes to the driver that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dra_driver.model.passthrough import VFIO_PCI

Action = Literal["override", "unbind", "probe", "bind"]


@dataclass(frozen=True, slots=True)
class Move:
    """One write to the kernel: `override` says which driver alone may have the function (None: any), `unbind` takes it
    from its driver, `probe` has the kernel choose one, `bind` names it. `driver` is None for the other two."""

    action: Action
    bus_id: str
    driver: str | None = None


def vfio_driver_of(bus_id: str, gpu: str, vfio_driver: str) -> str:
    """The vfio driver of a function: what accompanies the GPU is an ordinary device."""
    return vfio_driver if bus_id == gpu else VFIO_PCI


def is_under_vfio(now: Mapping[str, str | None], vfio_driver: str) -> bool:
    """Whether a vfio driver has every function; `now` is the driver of each."""
    return all(driver in (vfio_driver, VFIO_PCI) for driver in now.values())


def to_vfio(now: Mapping[str, str | None], gpu: str, vfio_driver: str) -> Sequence[Move]:
    """What binds all functions to vfio; `now` is the driver of each in bus order, `gpu` the GPU's bus ID."""
    wanted = {bus_id: vfio_driver_of(bus_id, gpu, vfio_driver) for bus_id in now}
    moving = [bus_id for bus_id in now if now[bus_id] != wanted[bus_id]]
    return [
        *(Move("override", bus_id, wanted[bus_id]) for bus_id in moving),
        *(Move("unbind", bus_id) for bus_id in moving if now[bus_id] is not None),
        *(Move("probe", bus_id) for bus_id in moving),
    ]


def back(
    now: Mapping[str, str | None], before: Mapping[str, str | None] | None, vfio_driver: str
) -> Sequence[Move]:
    """What gives the functions back to the drivers that they had `before`; where that is not known, to those that the
    kernel chooses."""
    bound = (vfio_driver, VFIO_PCI)
    moving = [bus_id for bus_id in now if before is None or now[bus_id] != before.get(bus_id)]
    return [
        *(Move("override", bus_id) for bus_id in now),
        *(Move("unbind", bus_id) for bus_id in moving if now[bus_id] in bound),
        *(
            Move("probe", bus_id) if driver is None else Move("bind", bus_id, driver)
            for bus_id in moving
            if (driver := (before or {}).get(bus_id)) is not None or before is None
        ),
    ]
