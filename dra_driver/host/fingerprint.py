"""A cheap look at the host, which shows whether the hardware, the driver or its MIG devices have changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path

from dra_driver.host.reading import names_in, text_of
from dra_driver.model.fingerprint import HostFingerprint

_NVIDIA = "0x10de"
_VIRTUAL = "virtual"
_GPU = "gpu"


class HostFingerprintReader:
    """Tells NVIDIA's PCI functions from the many others by their vendor, which it reads once for each function."""

    def __init__(self, sys: str, proc: str) -> None:
        self._functions = Path(sys, "bus/pci/devices")
        self._proc = proc
        self._vendors: dict[str, str] = {}

    def read(self) -> HostFingerprint:
        """The fingerprint now: a few directory listings without NVML, under a millisecond on a node with eight GPUs. A
        file or directory that cannot be read counts as empty."""
        gpus = names_in(Path(self._proc, "driver/nvidia/gpus"))
        return HostFingerprint(
            (gpus, self._nvidia_functions()), driver_fingerprint(self._proc), _instances(self._proc)
        )

    def _nvidia_functions(self) -> tuple[str, ...]:
        present = names_in(self._functions)
        # A name that comes again may be another card.
        self._vendors = {name: self._vendors[name] for name in present if name in self._vendors}
        return tuple(name for name in present if self._vendor(name) == _NVIDIA)

    def _vendor(self, function: str) -> str:
        known = self._vendors.get(function)
        if known is None:
            # Virtual functions (SR-IOV) come and go without any change of what NVML shows.
            is_virtual = (self._functions / function / "physfn").is_symlink()
            known = _VIRTUAL if is_virtual else text_of(self._functions / function / "vendor").strip()
            if known:
                self._vendors[function] = known
        return known


def driver_fingerprint(proc: str) -> str:
    """A value that changes when another driver is loaded; empty while no driver is loaded."""
    return text_of(Path(proc, "driver/nvidia/version"))


def _instances(proc: str) -> Mapping[int, Hashable]:
    capabilities = Path(proc, "driver/nvidia/capabilities")
    found: dict[int, Hashable] = {}
    for name in names_in(capabilities):
        minor = name.removeprefix(_GPU)
        if minor == name or not minor.isdecimal():
            continue
        instances = capabilities / name / "mig"
        shown = tuple((instance, names_in(instances / instance)) for instance in names_in(instances))
        if shown:
            found[int(minor)] = shown
    return found
