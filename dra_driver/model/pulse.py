"""What is looked at every second of each GPU to see that something changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Beat:
    """A GPU that answers. `mig_mode` is (now, after the next reset) in NVML's numbers, None without MIG; `minor` the
    N of /dev/nvidiaN, which the mode may change."""

    uuid: str
    minor: int | None = None
    mig_mode: tuple[int, int] | None = None


Pulse = tuple[Beat | None, ...]
"""An entry a GPU in NVML's order, None for one that does not answer."""
