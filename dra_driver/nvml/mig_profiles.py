"""Every MIG profile that the GPUs of this machine have, whether MIG mode is on or off."""

from __future__ import annotations

import pynvml

from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.model.inventory import DiscoveryFault
from dra_driver.model.mig import MigProfile
from dra_driver.nvml.failures import nvml_errors
from dra_driver.nvml.mig_devices import read_placed_profiles
from dra_driver.nvml.readings import read_gpu


def read_machine_profiles() -> tuple[list[MigProfile], list[DiscoveryFault]]:
    """The profiles of all GPUs that answer, each once, and what could not be read.

    Raises: NvmlUnavailableError if NVML itself does not answer.
    """
    with nvml_errors("count the GPUs"):
        count = pynvml.nvmlDeviceGetCount()
    found: dict[MigProfile, None] = {}
    faults: list[DiscoveryFault] = []
    for index in range(count):
        try:
            handle, gpu, _ = read_gpu(index)
            if gpu.mig_capable:
                found |= dict.fromkeys(row.profile for row in read_placed_profiles(handle, gpu, faults))
        except NvmlUnavailableError:
            raise
        except DraDriverError as error:
            faults.append(DiscoveryFault(f"GPU with NVML index {index}", str(error)))
    return list(found), faults
