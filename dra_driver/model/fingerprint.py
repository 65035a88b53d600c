"""What the plugin looks at again and again to notice that the hardware has changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostFingerprint:
    """What the host's kernel shows.

    `hardware` changes when a GPU or another PCI function of NVIDIA appears or disappears. `driver` changes when another
    driver is loaded; it is empty while none is loaded. `instances` has a value for each GPU, by its minor number, that
    changes when a GPU instance or a compute instance of it appears or disappears.
    """

    hardware: Hashable
    driver: str
    instances: Mapping[int, Hashable]


@dataclass(frozen=True, slots=True)
class GpuFingerprint:
    """A GPU that answers NVML, or hangs: then it has the values of before, and an empty `uuid` if there are none.

    `mig_mode` is (now, after the next reset) in NVML's numbers, None without MIG; `minor`
    is the N of /dev/nvidiaN, which the mode may change."""

    uuid: str
    minor: int | None = None
    mig_mode: tuple[int, int] | None = None


NvmlFingerprint = tuple[GpuFingerprint | None, ...]
"""One entry for each GPU in NVML's order, None for one that is lost or whose queries fail."""
