"""Measurements of a daemon process on a simulated node: calls as from a kubelet, and scrapes of its metrics."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from node import GPUS, MeasuredNode, Node
from playground.node import DRIVER
from processes import Wear, cpu_s, wait_for, wear
from prometheus_client.exposition import generate_latest

from dra_driver.app.daemon import Driver
from dra_driver.app.logs import configure_logs
from dra_driver.model.claim import ClaimRef

_PROFILE = "1g.10gb"
_MAX_DEVICES = 56

_OLD_ENDS_S = 60.0
_WORKERS_LEAVE_S = 12.0
"""Worker threads of the gRPC server stay for ten seconds after their last call."""


def single_prepares(node: Node, count: int) -> tuple[list[float], list[float]]:
    """Return the durations of Prepare and of Unprepare in milliseconds, one claim at a time."""
    names = [device["name"] for device in node.devices()]
    prepared: list[float] = []
    unprepared: list[float] = []
    for number in range(count + 1):
        ref = node.add_claim(names[number % len(names)])
        prepared.append(node.prepare(ref))
        unprepared.append(node.unprepare(ref))
    return prepared[1:], unprepared[1:]


def cpu_of_prepares(node: Node, count: int) -> float:
    """Return the CPU time, user and system, of one Prepare and its Unprepare in milliseconds."""
    before = cpu_s(node.daemon)
    single_prepares(node, count)
    return (cpu_s(node.daemon) - before) / (count + 1) * 1000


def crowded(node: Node, few: int, many: int, count: int) -> tuple[list[float], list[float], list[float]]:
    """Return the duration of a Prepare with `many` prepared claims, relative to `few`; the same for an Unprepare; and
    the same for a Prepare while a record is unreadable.

    The duration with `few` claims is measured before and after, because the speed of a machine varies.
    """
    name = node.devices()[0]["name"]
    others: list[ClaimRef] = []

    def fill(total: int) -> None:
        while len(others) < total:
            others.append(node.add_claim(name, looks=True))
            node.prepare(others[-1])

    fill(few)
    before = single_prepares(node, count)
    fill(many)
    more_prepared, more_unprepared = single_prepares(node, count)
    (node.plugin_dir / "claims" / f"{others[0].uid}.json").write_text("{")
    node.end()
    node.start()  # the daemon reads records only at its start
    spoiled, _ = single_prepares(node, count)
    for ref in others[:-few]:
        node.unprepare(ref)
    for aside in (node.plugin_dir / "claims").glob("*.unreadable-*"):
        aside.unlink()
    after = single_prepares(node, count)
    prepared, unprepared = (
        statistics.median([*one, *other]) for one, other in zip(before, after, strict=True)
    )
    for ref in others[-few:]:
        node.unprepare(ref)
    return (
        [value / prepared for value in more_prepared],
        [value / unprepared for value in more_unprepared],
        [value / prepared for value in spoiled],
    )


def parallel_prepares(node: Node, count: int) -> list[float]:
    """Return the mean duration of a Prepare in milliseconds for each burst of eight."""
    names = [device["name"] for device in node.devices()]
    means: list[float] = []
    with ThreadPoolExecutor(GPUS) as pool:
        for _ in range(count):
            refs = [node.add_claim(name) for name in names]
            means.append(sum(pool.map(node.prepare, refs)) / len(refs))
            list(pool.map(node.unprepare, refs))
    return means


def wipes(node: Node, count: int) -> list[float]:
    """Return the seconds from the deletion of all slices, as at a start of the kubelet, until they are back."""
    took: list[float] = []
    for _ in range(count):
        time.sleep(0.3)
        node.wipe()
        started = time.monotonic()
        wait_for(lambda: len(node.devices()) == GPUS)
        took.append(time.monotonic() - started)
    return took


def hand_overs(node: Node, count: int) -> list[float]:
    """Return the seconds from a newer daemon's registration with the kubelet until its first Prepare is answered, as in
    a rolling update. It can answer when the older one has handed the node over.
    """
    name = node.devices()[0]["name"]
    took: list[float] = []
    for number in range(count):
        ref, old = node.add_claim(name), node.process
        node.begin(f"update-{number}")
        took.append(node.prepare(ref) / 1000)
        node.unprepare(ref)
        if old is not None:
            old.terminate()
            old.wait(_OLD_ENDS_S)
    return took


def idle(node: Node, duration_s: float) -> tuple[float, float]:
    """Return the percent of a core that the idle daemon uses, and the number of its API writes."""
    time.sleep(1.0)
    writes, cpu = len(node.server.writes()), cpu_s(node.daemon)
    time.sleep(duration_s)
    used = cpu_s(node.daemon) - cpu
    return used / duration_s * 100, float(len(node.server.writes()) - writes)


def growth_over_cycles(node: Node, cycles: int) -> tuple[Wear, int]:
    """Return by how much the process grows, and how many files it leaves, over many cycles of Prepare and Unprepare."""
    names = [device["name"] for device in node.devices()]
    refs = [node.add_claim(name) for name in names]

    def after(count: int) -> tuple[Wear, set[str]]:
        for number in range(count):
            node.prepare(refs[number % len(refs)])
            node.unprepare(refs[number % len(refs)])
        time.sleep(_WORKERS_LEAVE_S)
        return wear(node.daemon), node.files()

    before, files = after(min(500, cycles))  # caches reach their size first
    now, more_files = after(cycles)
    grown = Wear(
        now.memory_mib - before.memory_mib,
        max(0, now.descriptors - before.descriptors),
        max(0, now.threads - before.threads),
    )
    return grown, len(more_files - files)


def shares(node: Node, count: int) -> tuple[float, list[float]]:
    """Return the milliseconds of the Prepare that starts a device's MPS daemon, and of later Prepares that use it."""
    time.sleep(2.0)  # each Prepare searches an NVIDIA driver that was just installed
    device = node.devices()[0]["name"]
    first = node.add_claim(device, share=True)
    cold = node.prepare(first)
    warm: list[float] = []
    for _ in range(count):
        ref = node.add_claim(device, share=True)
        warm.append(node.prepare(ref))
        node.unprepare(ref)
    node.unprepare(first)
    return cold, warm


def cpu_of_scrapes(root: Path, count: int) -> list[float]:
    """Return the CPU milliseconds of each scrape of eight GPUs with 56 MIG devices in use. They include the simulator's
    CPU time, because the daemon runs in this process.
    """
    configure_logs("warning", "json")
    node = MeasuredNode(root)
    driver = node.make_driver(dynamic_mig=True)
    driver.start()
    try:
        node.kubelet.wait_registered(DRIVER)
        for name in wait_for(lambda: _all_devices(node)):
            node.prepare(node.add_claim(name, of="mig"))
        return [_cpu_of_one(driver) for _ in range(count)]
    finally:
        driver.stop()
        node.stop()


def _all_devices(node: MeasuredNode) -> list[str] | None:
    profile = {"string": _PROFILE}
    found = [one["name"] for one in node.devices() if one["attributes"].get("profile") == profile]
    return found if len(found) == _MAX_DEVICES else None


def _cpu_of_one(driver: Driver) -> float:
    time.sleep(1.1)  # an earlier scrape would take no samples
    before = time.process_time()
    page = generate_latest(driver.metrics.registry)
    used = time.process_time() - before
    if page.count(b"\nnvidia_dra_device_memory_used_bytes{") != _MAX_DEVICES:
        raise AssertionError("the scrape does not show the use of all MIG devices")
    return used * 1000
