"""What this machine would publish, without a cluster."""

from __future__ import annotations

from typing import Any

from dra_driver.core.slicediff import Owner, slice_changes
from dra_driver.core.slices import build_pool
from dra_driver.errors import NvmlUnavailableError
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.mig import MigProfile
from dra_driver.platforms import NvmlReader, platform_of
from dra_driver.services.discovery import Discovery
from dra_driver.services.hostview import HostView
from dra_driver.settings import Settings
from dra_driver.state.readonly import OwnershipOnDisk

JsonObject = dict[str, Any]


def slices_to_publish(settings: Settings) -> tuple[list[JsonObject], list[str]]:
    """The very slices that `run` would publish on this machine, and what discovery could not read.

    Raises: NvmlUnavailableError.
    """
    platform = platform_of(settings)
    boot_id = Sysfs(platform.paths.sys, platform.paths.proc).boot_id() or "unknown"
    discovery = Discovery(
        NvmlReader(platform.load_nvml, settings.on_demand),
        HostView(platform.paths),
        lambda: None,
        ownership=OwnershipOnDisk(settings.plugin_directory, boot_id),
    )
    discovery.scan_now(0)
    inventory = discovery.inventory
    problem = discovery.state.problem
    discovery.stop()
    if inventory is None or problem is not None:
        raise NvmlUnavailableError(problem or "devices were not discovered")
    pool = build_pool(inventory, settings.node_name, settings.sharing)
    changes = slice_changes(pool, (), Owner(settings.driver_name, settings.node_name, ""))
    slices = [
        {**entry, "metadata": {"generateName": entry["metadata"]["generateName"]}}
        for entry in changes.creates
    ]
    notes = [f"{fault.subject}: {fault.text}" for fault in inventory.faults] + list(pool.faults)
    return slices, notes


def possible_profiles(settings: Settings) -> tuple[list[MigProfile], list[str]]:
    """The MIG profiles of this machine's GPUs, each once, and what could not be read.

    Raises: NvmlUnavailableError.
    """
    from dra_driver.nvml.profiles import read_machine_profiles

    reader = NvmlReader(platform_of(settings).load_nvml)
    reader.reopen()
    try:
        profiles, faults = read_machine_profiles()
    finally:
        reader.close()
    return profiles, [f"{fault.subject}: {fault.text}" for fault in faults]
