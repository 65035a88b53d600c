"""Wiring: NVLinks between GPUs and switches, and how far two PCI functions are apart."""

from __future__ import annotations

from dra_driver.simulator.state import Gpu, Model, State

REMOTE_GPU = 0x00
REMOTE_SWITCH = 0x02

Wiring = dict[tuple[int, int], int]


def parse_pairs(pairs: dict[str, int]) -> Wiring:
    """`{"0-1": 2}` as {(0, 1): 2}."""
    wiring: Wiring = {}
    for key, count in pairs.items():
        first, _, second = key.partition("-")
        wiring[int(first), int(second)] = int(count)
    return wiring


def switch_links(gpu: Gpu, model: Model, switches: list[str]) -> None:
    """All links of the GPU lead to switches; `switches` are their addresses, or one placeholder."""
    gpu.links = [[REMOTE_SWITCH, switches[link % len(switches)]] for link in range(model.nvlinks)]


def wire_pairs(gpus: list[Gpu], models: dict[str, Model], wiring: Wiring) -> None:
    """Direct links between GPUs, numbered in the order of the pairs; the other links are not connected."""
    for gpu in gpus:
        gpu.links = []
    for (first, second), count in wiring.items():
        for _ in range(count):
            gpus[first].links.append([REMOTE_GPU, gpus[second].bus_id])
            gpus[second].links.append([REMOTE_GPU, gpus[first].bus_id])
    for gpu in gpus:
        gpu.links += [[None, None]] * (models[gpu.model].nvlinks - len(gpu.links))


def active_links(gpu: Gpu) -> list[tuple[int, int, str | None]]:
    """(link, remote type, remote address) of the links that are up."""
    if gpu.lost or not gpu.present:
        return []
    return [
        (number, kind, remote)
        for number, (kind, remote) in enumerate(gpu.links)
        if kind is not None and number not in (*gpu.links_down, *gpu.links_unsupported)
    ]


def nvlink_count(state: State, first: Gpu, second: Gpu) -> int:
    """How many NVLinks join two GPUs; over switches, all links of the narrower one."""
    ours, theirs = active_links(first), active_links(second)
    direct = sum(kind == REMOTE_GPU and remote == second.bus_id for _, kind, remote in ours)
    if direct:
        return direct
    switched = [sum(kind == REMOTE_SWITCH for _, kind, _ in links) for links in (ours, theirs)]
    if not all(switched) or state.fabric.get("state", 3) != 3:
        return 0
    return min(switched)


def nvlink_peers(state: State, first: Gpu, second: Gpu) -> bool:
    """Whether the two can address each other over NVLink now."""
    if first.mig_mode or second.mig_mode:
        return False
    return nvlink_count(state, first, second) > 0


def sysfs_bus_id(text_form: str) -> str:
    """`00000000:1B:00.0` and its relatives as `0000:1b:00.0`."""
    domain, _, rest = text_form.strip().lower().rpartition(":")[0].rpartition(":")
    tail = text_form.strip().lower().rpartition(":")[2]
    return f"{domain[-4:].rjust(4, '0') if domain else '0000'}:{rest}:{tail}"


def nvml_bus_id(bus_id: str) -> str:
    return f"0000{bus_id}".upper()


def pci_numbers(bus_id: str) -> tuple[int, int, int]:
    domain, bus, rest = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
