"""The GPUs of this machine as `inspect` draws them: NVML's word, and what the driver's directory says of holders."""

from __future__ import annotations

from contextlib import ExitStack

from dra_driver.core.migholders import KnownState, gpu_maps
from dra_driver.core.migmap import GpuMap
from dra_driver.model.gpu import Gpu
from dra_driver.settings import Settings


def mig_maps(settings: Settings, session: ExitStack) -> tuple[list[GpuMap], list[str]]:
    """The content of a drawing for each GPU that is in MIG mode or whose MIG devices are made on demand, and what
    could not be read. Changes nothing, on the GPUs or on the disk.

    NVML stays open until `session` is closed: who opens it anew after its last client waits for seconds.
    Raises: NvmlUnavailableError.
    """
    from dra_driver.host.sysfs import Sysfs
    from dra_driver.nvml.discovery import read_inventory
    from dra_driver.platforms import NvmlReader, platform_of
    from dra_driver.state.readonly import read_state

    def on_demand(gpu: Gpu) -> bool:
        return settings.dynamic_mig and settings.dynamic_mig_gpus.matches_gpu(gpu)

    platform = platform_of(settings)
    reader = NvmlReader(platform.load_nvml)
    reader.reopen()
    session.callback(reader.close)
    inventory = read_inventory(on_demand=lambda gpu: gpu.mig_enabled or on_demand(gpu))
    notes = [f"{fault.subject}: {fault.text}" for fault in inventory.faults]
    notes += [
        f"GPU {gpu.uuid}: MIG devices cannot be made on demand, because its MIG mode is off and takes effect only "
        "after a reset: run nvidia-smi -mig 1, then reset the GPU or reboot the node"
        for gpu in inventory.gpus
        if on_demand(gpu) and gpu.mig_capable and gpu.partitioning is None and not gpu.mig_enabled
    ]
    state = read_state(settings.plugin_directory)
    boot_id = Sysfs(platform.paths.sys, platform.paths.proc).boot_id()
    known = KnownState(state.records, state.owned, boot_id, is_known=not state.faults)
    maps = gpu_maps(inventory, known, on_demand)
    return maps, notes + (list(state.faults) if maps else [])
