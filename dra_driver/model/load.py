"""How busy a GPU is at the moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """One reading; None is what the GPU does not tell. Memory in bytes, without what the driver keeps for itself.

    `utilisation_percent` is the share of the last sample period in which a kernel ran; in MIG mode no GPU tells it.
    """

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
