"""The driver's own time when it makes a MIG device: the time of the Prepare without the time inside NVML.

The daemon runs in this process, so that the time of every NVML call can be subtracted.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurements import NODE, cdi_root, wait_for
from playground.kubelet import KubeletSettings
from playground.node import DRIVER, PlaygroundNode

from dra_driver.app.platforms import platform_of
from dra_driver.logs import configure_logs
from dra_driver.model.claim import ClaimRef, Prepared
from dra_driver.simulator.hostroot import render

_PROFILE = "1g.10gb"


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
    node = PlaygroundNode(
        root, name=NODE, kubelet=KubeletSettings(poll_s=0.002), cdi=cdi_root(root), device_nodes="auto"
    )
    platform = platform_of(node.settings)
    library = TimedLibrary(platform.load_nvml())
    driver = node.make_driver(replace(platform, load_nvml=lambda: library), dynamic_mig=True)
    driver.start()
    try:
        node.kubelet.wait_registered(DRIVER)
        names: list[str] = []

        def published() -> bool:
            names[:] = _devices(node)
            return bool(names)

        wait_for(published)
        time.sleep(2.0)  # the driver's files are not of this second
        return [_one(node, names[0], library) for _ in range(count)]
    finally:
        driver.stop()
        node.stop()
        shutil.rmtree(node.cdi)


def _devices(node: PlaygroundNode) -> list[str]:
    return [
        device["name"]
        for device in node.devices()
        if device["attributes"].get("profile") == {"string": _PROFILE}
    ]


def _one(node: PlaygroundNode, device: str, library: TimedLibrary) -> float:
    name = f"mig-{time.monotonic_ns()}"
    result = {"request": "mig", "driver": DRIVER, "pool": NODE, "device": device}
    stored = node.server.add(
        "resourceclaims",
        {
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "devices": {"requests": [{"name": "mig", "exactly": {"deviceClassName": "mig.nvidia.com"}}]}
            },
            "status": {"allocation": {"devices": {"results": [result]}}},
        },
        group="resource.k8s.io",
    )
    ref = ClaimRef("default", name, stored["metadata"]["uid"])
    library.reset()
    started = time.monotonic()
    outcome = node.kubelet.prepare(DRIVER, [ref])[ref.uid]
    duration = time.monotonic() - started
    if not isinstance(outcome, Prepared) or library.creator is None:
        raise AssertionError(outcome)
    own = duration - library.seconds()
    node.kubelet.unprepare(DRIVER, [ref])
    return own * 1000
