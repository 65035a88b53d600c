"""How busy the devices of a cluster are, from the metrics of the plugins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dra_driver.model.gpu import GpuLoad

_PREFIX = "nvidia_dra_device_"


@dataclass(frozen=True, slots=True)
class PluginPod:
    """A pod of the plugin: the node, and the path of its metrics through the API server's proxy."""

    node: str
    namespace: str
    path: str
    port: str


def plugin_pod(pod: Mapping[str, Any], driver: str) -> PluginPod | None:
    """None for a pod of another program or driver, and for one that serves no metrics or has no node."""
    spec, metadata = pod.get("spec") or {}, pod["metadata"]
    for container in spec.get("containers") or ():
        values = {entry["name"]: entry.get("value") or "" for entry in container.get("env") or ()}
        port = values.get("HTTP_ENDPOINT", "").rpartition(":")[2]
        if values.get("DRIVER_NAME") == driver and port and spec.get("nodeName"):
            path = values.get("METRICS_PATH") or "/metrics"
            place = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{port}/proxy{path}"
            return PluginPod(spec["nodeName"], metadata["namespace"], place, port)
    return None


def loads_of(text: str, driver: str) -> dict[str, GpuLoad] | None:
    """The loads in the metrics of one plugin, by device name; None if it does not measure them."""
    from prometheus_client.parser import text_string_to_metric_families

    # Most of a page is histograms, and a cluster has many pages.
    lines = [line for line in text.splitlines() if line.removeprefix("# HELP ").startswith(_PREFIX)]
    if not lines:
        return None
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if sample.labels.get("driver") == driver:
                values = found.setdefault(sample.labels.get("device", ""), {})
                values[sample.name.removeprefix(_PREFIX)] = sample.value
    return {device: _load(values) for device, values in found.items()}


def _load(values: Mapping[str, float]) -> GpuLoad:
    used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
    ratio = values.get("utilization_ratio")
    return GpuLoad(
        memory_used_bytes=None if used is None else int(used),
        memory_total_bytes=None if total is None else int(total),
        utilisation_percent=None if ratio is None else round(ratio * 100),
    )


@dataclass(frozen=True, slots=True)
class Used:
    """How devices are used together. `utilisation_percent` is their mean by memory, None if none has a utilisation.
    `wasted_bytes` is the memory that is held and idle: of a device with a utilisation the idle part of its memory, of
    others what is not in use. `unknown` counts the devices of which nothing is known."""

    utilisation_percent: int | None = None
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    wasted_bytes: int = 0
    unknown: int = 0
    is_shared: bool = False


def used_together(loads: Iterable[GpuLoad | None], *, is_shared: bool) -> Used:
    """The sum. With `is_shared` others use some of the devices too, and nobody knows whose use it is."""
    busy = weighed = used = total = wasted = unknown = 0
    for load in loads:
        if load is None or load.memory_total_bytes is None:
            unknown += 1
            continue
        memory, in_use = load.memory_total_bytes, load.memory_used_bytes or 0
        used, total = used + in_use, total + memory
        if load.utilisation_percent is None:
            wasted += memory - in_use
        else:
            busy += memory * load.utilisation_percent
            weighed += memory
            wasted += memory * (100 - load.utilisation_percent) // 100
    percent = round(busy / weighed) if weighed else None
    return Used(percent, used, total, wasted, unknown, is_shared)
