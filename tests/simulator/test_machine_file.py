"""What a machine file can say beyond a static layout, as discovery reads it."""

from __future__ import annotations

from pathlib import Path

import yaml

from dra_driver.app.platforms import simulated_platform
from dra_driver.inventory.discovery import discover_once
from dra_driver.inventory.host_facts import HostView
from dra_driver.nvml.reader import NvmlReader

H100 = {"model": "h100-sxm", "addressing": "hmm"}


def test_what_a_static_layout_cannot_say_is_discovered(tmp_path: Path) -> None:
    """Shared GPU instances, instances without a device, links that are down, GPUs that are not registered."""
    compute = [
        {"index": 4, "id": 1, "slices": 1, "start": 2, "uuid": "MIG-00000000-0000-5000-8000-000000000001"},
        {"index": 2, "id": 0, "slices": 2, "start": 0, "uuid": "MIG-00000000-0000-5000-8000-000000000002"},
    ]
    mig = [
        {"profile": "3g.40gb", "start": 4, "instance": 1, "compute": compute},
        {"profile": "1g.10gb", "start": 0, "instance": 13, "compute": []},
    ]
    bound = {"bus": "0000:05:00.0", "device": 0x2330, "class": 0x030200, "pcie": "pci0000:00"}
    document = {
        "driver": {"version": "570.124.06", "cuda": "12.8"},
        "gpus": [
            {**H100, "bus": "0000:1b:00.0", "minor": 5, "mig": mig},
            {**H100, "bus": "0000:43:00.0", "minor": 3, "links_down": [0, 17], "numa": 1},
            {**H100, "bus": "0000:52:00.0", "fabric": {"state": "in-progress"}, "drm": None},
            {"model": "l40s", "bus": "0000:61:00.0"},
        ],
        "nvlink": {"topology": "switched", "remote": "placeholder"},
        "fabric": {"state": "completed", "cluster": "7f3c1ad2-96f4-4e0b-8b7a-0d5f6a2c9e11", "clique": 7},
        "functions": [{**bound, "driver": "vfio-pci"}],
        "missing_functions": ["nvmlDeviceGetAddressingMode", "nvmlDeviceGetGpuInstanceProfileInfoV"],
    }
    file = tmp_path / "custom.yaml"
    file.write_text(yaml.safe_dump(document))
    platform = simulated_platform(str(file), tmp_path / "machine")
    reader = NvmlReader(platform.load_nvml)
    try:
        reader.session.reopen()
        found = discover_once(reader, HostView(platform.paths), None)
    finally:
        reader.session.close()
    assert [(mig.uuid[-1], mig.profile.name) for mig in found.gpus[0].mig_devices] == [
        ("2", "2c.3g.40gb"),
        ("1", "1c.3g.40gb"),
    ]
    assert [gpu.nvlink_links for gpu in found.gpus] == [18, 16, 18, None]
    assert [gpu.minor for gpu in found.gpus] == [5, 3, 2, 3]
    assert [gpu.fabric is None for gpu in found.gpus] == [False, False, True, True]
    assert [fault.subject for fault in found.faults] == ["PCI function 0000:05:00.0"]
