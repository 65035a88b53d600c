"""What a machine file can say beyond a static layout, as discovery reads it."""

from __future__ import annotations

from pathlib import Path

from dra_driver.app.platforms import simulated_platform
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import discover_once
from dra_driver.nvml.reader import NvmlReader

MACHINE = Path(__file__).with_suffix(".yaml")


def test_what_a_static_layout_cannot_say_is_discovered(tmp_path: Path) -> None:
    """Shared GPU instances, instances without a device, links that are down, GPUs that are not registered."""
    platform = simulated_platform(str(MACHINE), tmp_path / "machine")
    reader = NvmlReader(platform.load_nvml)
    try:
        reader.session.reopen()
        found = discover_once(reader, Sysfs(platform.paths.sys, platform.paths.proc), None)
    finally:
        reader.session.close()
    assert [(mig.uuid[-1], mig.profile.name) for mig in found.gpus[0].mig_devices] == [
        ("2", "2c.3g.40gb"),
        ("1", "1c.3g.40gb"),
    ]
    assert [gpu.nvlink_links for gpu in found.gpus] == [18, 16, 18, None]
    assert [gpu.minor for gpu in found.gpus] == [5, 3, 2, 3]
    assert [gpu.fabric is None for gpu in found.gpus] == [False, False, True, True]
    assert [fault.subject for fault in found.faults] == ["GPU 0000:05:00.0"]
