"""A cheap look at the host that tells whether discovery has to look again."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path


def hardware_fingerprint(sys: str, proc: str) -> Hashable:
    """A value that differs when the driver, a GPU or a PCI function came, went or changed.

    A few directory listings, under a millisecond on a node with eight GPUs; NVML is not needed.
    """
    return (
        _text(Path(proc, "driver/nvidia/version")),
        _names(Path(proc, "driver/nvidia/gpus")),
        _names(Path(sys, "bus/pci/devices")),
    )


def instance_fingerprint(proc: str) -> Hashable:
    """A value that differs when a GPU instance or a compute instance came or went."""
    capabilities = Path(proc, "driver/nvidia/capabilities")
    return tuple(
        (gpu, instance, _names(capabilities / gpu / "mig" / instance))
        for gpu in _names(capabilities)
        for instance in _names(capabilities / gpu / "mig")
    )


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(directory)))  # noqa: PTH208  no Path objects wanted every second
    except OSError:
        return ()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
