"""The driver's own time when it makes a MIG device: the time of the Prepare without the time inside NVML. And what a
scrape of many MIG devices costs.

The daemon runs in this process, so that the time of every NVML call can be subtracted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node import MeasuredNode
from playground.node import DRIVER
from processes import wait_for
from prometheus_client.exposition import generate_latest

from dra_driver.app.daemon import Driver
from dra_driver.app.platforms import platform_of
from dra_driver.logs import configure_logs
from dra_driver.simulator.hostroot import render

_PROFILE = "1g.10gb"
_MOST_DEVICES = 56


class TimedLibrary:
    """An NVML library that knows how long each thread was inside it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._inside: dict[int, float] = {}
        self.creator: int | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def timed(*arguments: Any) -> Any:
            thread = threading.get_ident()
            started = time.monotonic()
            try:
                return function(*arguments)
            finally:
                self._inside[thread] = self._inside.get(thread, 0.0) + time.monotonic() - started
                if name == "nvmlDeviceCreateGpuInstanceWithPlacement":
                    self.creator = thread

        return timed

    def reset(self) -> None:
        """Count from here."""
        self._inside.clear()
        self.creator = None

    def seconds(self) -> float:
        """Time inside the library of the thread that made the last GPU instance."""
        return 0.0 if self.creator is None else self._inside[self.creator]


def leave_programs_alone() -> None:
    """The simulated nvidia-smi and MPS control program are written anew with each change of a machine, and the driver's
    files are then looked through again. Real ones stay as they are."""
    for name in ("nvidia_smi", "driver_files"):
        vars(render)[name] = functools.partial(_as_at_first, vars(render)[name], {})


def _as_at_first(
    really: Callable[[Any], dict[str, Any]], first: dict[str, Any], state: Any
) -> dict[str, Any]:
    first.update(first or really(state))
    return first


def own_shares(root: Path, count: int) -> list[float]:
    """Milliseconds of each Prepare of a MIG device that has to be made, without NVML's part."""
    configure_logs("warning", "json")
    leave_programs_alone()
    node = MeasuredNode(root)
    platform = platform_of(node.settings)
    library = TimedLibrary(platform.load_nvml())
    driver = node.make_driver(replace(platform, load_nvml=lambda: library), dynamic_mig=True)
    driver.start()
    try:
        node.kubelet.wait_registered(DRIVER)
        name = wait_for(lambda: _first_device(node))
        time.sleep(2.0)  # the driver's files are not of this second
        return [_one(node, name, library) for _ in range(count)]
    finally:
        driver.stop()
        node.stop()


def cpu_of_scrapes(root: Path, count: int) -> list[float]:
    """Milliseconds of CPU of each scrape of eight GPUs with 56 MIG devices in use, with the simulator's part."""
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
    return found if len(found) == _MOST_DEVICES else None


def _cpu_of_one(driver: Driver) -> float:
    time.sleep(1.1)  # a look that comes sooner takes no samples
    before = time.process_time()
    page = generate_latest(driver.metrics.registry)
    used = time.process_time() - before
    if page.count(b"\nnvidia_dra_device_memory_used_bytes{") != _MOST_DEVICES:
        raise AssertionError("the scrape does not show the use of all MIG devices")
    return used * 1000


def _first_device(node: MeasuredNode) -> str | None:
    profile = {"string": _PROFILE}
    return next((one["name"] for one in node.devices() if one["attributes"].get("profile") == profile), None)


def _one(node: MeasuredNode, device: str, library: TimedLibrary) -> float:
    ref = node.add_claim(device, of="mig")
    library.reset()
    duration_ms = node.prepare(ref)
    if library.creator is None:
        raise AssertionError(f"the Prepare of {device} made no MIG device")
    own_ms = duration_ms - library.seconds() * 1000
    node.unprepare(ref)
    return own_ms
