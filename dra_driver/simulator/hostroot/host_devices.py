"""Nodes of other kernel modules that serve a GPU: GPUDirect Storage, RDMA, GDRCopy."""

from __future__ import annotations

from dra_driver.simulator.hostroot.entries import Directory, Entries, Node, Text
from dra_driver.simulator.state import State

KINDS = ("gds", "mofed", "gdrcopy")
"""NVSwitches are functions of a machine, and so are their nodes."""
_FS, _VERBS, _RDMA_CM, _GDR = 511, 231, 10, 510
HOST_DEVICE_MAJORS = (
    ("gds", _FS, "nvidia-fs"),
    ("mofed", _VERBS, "infiniband_verbs"),
    ("gdrcopy", _GDR, "gdrdrv"),
)


def host_devices(state: State) -> list[str]:
    return list(state.system.get("host_devices", []))


def host_device_nodes(state: State) -> Entries:
    """A few storage nodes, and an adapter for each GPU."""
    kinds = host_devices(state)
    entries: Entries = {}
    if "gds" in kinds:
        entries |= {f"dev/nvidia-fs{number}": Node(_FS, number, 0o660) for number in range(8)}
        entries["etc/cufile.json"] = Text('{"logging": {"dir": "/tmp"}}\n')
        entries["run/udev"] = Directory()
    if "mofed" in kinds:
        for number in range(len(state.present)):
            entries[f"dev/infiniband/uverbs{number}"] = Node(_VERBS, 192 + number)
            entries[f"dev/infiniband/umad{number}"] = Node(_VERBS, number, 0o600)
        entries["dev/infiniband/rdma_cm"] = Node(_RDMA_CM, 122)
    if "gdrcopy" in kinds:
        entries["dev/gdrdrv"] = Node(_GDR, 0)
    return entries
