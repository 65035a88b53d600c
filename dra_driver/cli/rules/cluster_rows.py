"""A row for each device of a cluster that a claim has or could have.

For an invalid object the functions `seen_…` raise KeyError, TypeError, ValueError, AttributeError, StopIteration or
InvalidConfigError; the caller reports it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from dra_driver.cli.validation.rules.allocator import amount_of
from dra_driver.cli.validation.rules.pods import IMPLICIT
from dra_driver.model.claim import allocation_results
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.gpu import GpuLoad
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import counted, first_of

Slot = tuple[str, str]
"""Pool and device name."""

_BUS_ID = "resource.kubernetes.io/pciBusID"
_KEEP_AWAY = (":NoSchedule", ":NoExecute")
_ANY_NODE = "(several nodes)"
_VERSIONS = {"NVIDIA driver": "driverVersion", "CUDA": "cudaDriverVersion"}
PLUGIN = "image of gpu-dra-driver"
WHOLE = "whole"
T = TypeVar("T")
_PREFIXES = ("nvidia_dra_device_", "nvidia_dra_pod_")
_GIB = 1 << 30
NOT_PUBLISHED = "the device is not in any slice: run `gpu-dra-driver doctor` in the plugin's pod on this node"


@dataclass(frozen=True, slots=True)
class Device:
    """`card` identifies the GPU: the PCI bus ID, or the device's name. A MIG device on demand has `is_made` False.
    `consumes` are amounts of `counter_set`.
    """

    name: str
    node: str
    card: str
    kind: str
    product: str
    taints: tuple[str, ...]
    is_made: bool
    profile: str | None = None
    counter_set: str = ""
    consumes: tuple[tuple[str, Fraction], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """`total` is how many slices the pool should have. `counters` are amounts by counter set and counter."""

    pool: str
    generation: int
    total: int
    node: str
    devices: tuple[Device, ...]
    counters: Mapping[tuple[str, str], Fraction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """`devices` are what the claim consumes of each device. `serviced` are the devices that it takes out of service."""

    namespace: str
    name: str
    pods: tuple[str, ...]
    devices: Mapping[Slot, str]
    classes: frozenset[str]
    is_allocated: bool
    serviced: frozenset[Slot] = frozenset()


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """`says` is the scheduler's message. `has_claim`: the scheduler has created a claim for the pod's extended
    resources.
    """

    namespace: str
    name: str
    claims: tuple[str, ...]
    resources: frozenset[str]
    says: str
    has_claim: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A device, a waiting claim, or a node without devices. `claim` and `pods` are `NAMESPACE/NAME`.

    `wasted_bytes` is memory that is held and idle: the idle fraction of all memory, or the unused memory if the
    utilisation is unknown.
    """

    node: str
    device: str = "-"
    product: str = "-"
    claim: str = "-"
    pods: tuple[str, ...] = ()
    use: str = "-"
    problem: str = "-"
    load: GpuLoad | None = None
    wasted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Used:
    """`pods` are by `NAMESPACE/NAME`."""

    load: GpuLoad | None = None
    pods: Mapping[str, GpuLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Totals:
    """`tainted` GPUs have a taint that keeps new pods away; they may be in use. `missing` are claimed devices in no
    slice, except those in `maintenance`. `fits` is how many whole GPUs, or devices of each MIG profile, still fit
    by product, each as if nothing else were allocated.
    """

    gpus: int = 0
    free: int = 0
    used: int = 0
    tainted: int = 0
    missing: int = 0
    waiting: int = 0
    maintenance: int = 0
    fits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{counted(self.gpus, 'GPU')}: {self.free} free, {self.used} in use, {self.tainted} tainted"
        missing = f"; {self.maintenance} more in maintenance" if self.maintenance else ""
        missing += f"; claimed devices without a slice: {self.missing}" if self.missing else ""
        waiting = counted(self.waiting, "claim or pod waits", "claims or pods wait")
        return text + missing + (f"; {waiting}" if self.waiting else "")


def seen_slice(entry: JsonObject) -> Slice:
    spec, pool = entry["spec"], entry["spec"]["pool"]
    node = spec.get("nodeName") or _ANY_NODE
    devices = tuple(_device(device, spec["driver"], node) for device in spec.get("devices") or ())
    counters = {
        (str(one["name"]), str(name)): amount_of(entry["value"])
        for one in spec.get("sharedCounters") or ()
        for name, entry in one["counters"].items()
    }
    return Slice(
        str(pool["name"]),
        int(pool["generation"]),
        int(pool["resourceSliceCount"]),
        str(node),
        devices,
        counters,
    )


def _device(device: JsonObject, driver: str, node: str) -> Device:
    attributes = device.get("attributes") or {}

    def text(name: str) -> str | None:
        # A driver may write or omit its own domain in names.
        value = attributes.get(name) or attributes.get(f"{driver}/{name}")
        return str(next(iter(value.values()))) if value else None

    kind = text("type") or "gpu"
    consumed: JsonObject = next(iter(device.get("consumesCounters") or ()), {})
    amounts = ((str(name), amount_of(one["value"])) for name, one in (consumed.get("counters") or {}).items())
    versions = ((name, text(attribute)) for name, attribute in _VERSIONS.items())
    return Device(
        str(device["name"]),
        str(device.get("nodeName") or node),
        text(_BUS_ID) or str(device["name"]),
        kind,
        text("productName") or "-",
        tuple(map(taint_text, device.get("taints") or ())),
        is_made=kind != "mig" or text("uuid") is not None,
        profile=text("profile"),
        counter_set=sys.intern(str(consumed.get("counterSet") or "")),
        consumes=_shared(tuple(amounts)),
        versions=_shared(tuple((name, version) for name, version in versions if version)),
    )


@lru_cache(maxsize=4096)
def _shared(value: T) -> T:
    """Return one object for equal values: a large cluster has a million devices, but few kinds of them."""
    return value


def taint_text(taint: JsonObject) -> str:
    """Format a taint like kubectl, without the plugin's prefix: `xid=48:NoSchedule`."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key'].rpartition('/')[2]}{value}:{taint['effect']}"


def seen_claim(entry: JsonObject, driver: str) -> Claim:
    """Leave out devices with adminAccess, because other claims can still use them, except during maintenance."""
    metadata, status = entry["metadata"], entry.get("status") or {}
    of_driver = [one for one in allocation_results(entry) if one["driver"] == driver]
    devices = {
        (str(one["pool"]), str(one["device"])): ", ".join(
            f"{name.rpartition('/')[2]} {amount}"
            for name, amount in (one.get("consumedCapacity") or {}).items()
        )
        for one in of_driver
        if not one.get("adminAccess")
    }
    is_allocated = bool(status.get("allocation"))
    requests = () if is_allocated else entry["spec"]["devices"].get("requests") or ()
    bodies = [
        body for one in requests for body in (one.get("exactly"), *(one.get("firstAvailable") or ())) if body
    ]
    return Claim(
        str(metadata.get("namespace") or ""),
        str(metadata["name"]),
        tuple(map(_consumer, status.get("reservedFor") or ())),
        devices,
        frozenset(str(body["deviceClassName"]) for body in bodies),
        is_allocated or bool(metadata.get("deletionTimestamp")),
        frozenset(
            (str(one["pool"]), str(one["device"]))
            for one in of_driver
            if one.get("adminAccess") and _is_for_maintenance(status["allocation"]["devices"], driver)
        ),
    )


def _is_for_maintenance(devices: JsonObject, driver: str) -> bool:
    found = (one.get("opaque") or {} for one in devices.get("config") or ())
    return any(
        one.get("driver") == driver and one["parameters"].get("kind") == "MaintenanceConfig" for one in found
    )


def _consumer(entry: JsonObject) -> str:
    """Return a pod's name, or for example `podgroups/train` (KEP-5729)."""
    name, resource = str(entry["name"]), entry.get("resource")
    return name if resource == "pods" else f"{resource}/{name}"


def seen_class(entry: JsonObject) -> tuple[str, str, str | None]:
    spec = entry.get("spec") or {}
    return str(entry["metadata"]["name"]), json.dumps(spec.get("selectors")), spec.get("extendedResourceName")


def seen_pod(entry: JsonObject) -> WaitingPod:
    metadata, spec, status = entry["metadata"], entry.get("spec") or {}, entry.get("status") or {}
    made = {one["name"]: one.get("resourceClaimName") for one in status.get("resourceClaimStatuses") or ()}
    claims = (
        one.get("resourceClaimName") or made.get(one["name"]) for one in spec.get("resourceClaims") or ()
    )
    limits = (one.get("resources", {}).get("limits") or {} for one in spec.get("containers") or ())
    says = (one.get("message") for one in status.get("conditions") or () if one.get("type") == "PodScheduled")
    return WaitingPod(
        str(metadata.get("namespace") or ""),
        str(metadata["name"]),
        tuple(map(str, filter(None, claims))),
        frozenset(str(name) for resources in limits for name in resources),
        str(next(filter(None, says), "the scheduler has not tried this pod yet")),
        bool(status.get("extendedResourceClaimStatus")),
    )


def cluster_rows(
    driver: str,
    slices: Sequence[Slice],
    claims: Sequence[Claim],
    classes: Sequence[tuple[str, str, str | None]],
    pods: Sequence[WaitingPod],
    loads: Mapping[Slot, Used] | None = None,
) -> tuple[list[Row], Totals]:
    """Return the rows and totals. With `loads`, devices with held but idle memory come first; otherwise rows with a
    problem.
    """
    newest: dict[str, int] = {}
    for one in slices:
        newest[one.pool] = max(one.generation, newest.get(one.pool, 0))
    holders: dict[Slot, list[Claim]] = {}
    for claim in claims:
        for slot in claim.devices:
            holders.setdefault(slot, []).append(claim)
    pools: dict[str, list[Slice]] = {}
    for one in slices:
        if one.generation == newest[one.pool]:
            pools.setdefault(one.pool, []).append(one)
    rows: list[Row] = []
    sums: Counter[str] = Counter()
    fits: dict[str, Counter[str]] = {}
    for pool, members in pools.items():
        total = members[0].total
        fault = None if len(members) == total else f"only {len(members)} of {total} slices exist"
        rows += _pool_rows(pool, members, fault, holders, loads or {}, sums)
        # The scheduler does not use an incomplete pool.
        for (product, what), count in ({} if fault else _fitting(pool, members, holders)).items():
            fits.setdefault(product, Counter())[what] += count
    published = {
        (pool, device.name) for pool, members in pools.items() for one in members for device in one.devices
    }
    # A device that is still published will be withdrawn soon, or the plugin refused the claim.
    serviced = {slot: claim for claim in claims for slot in claim.serviced - published}
    for slot in sorted((holders.keys() | serviced.keys()) - published):
        by, held = serviced.get(slot), holders.get(slot, [])
        sums["missing" if by is None else "maintenance"] += 1
        problem = NOT_PUBLISHED if by is None else f"in maintenance for claim {by.namespace}/{by.name}"
        rows += _held(slot, slot[0], "-", held if by is None else [*held, by], problem, loads or {})
    rows.sort(key=lambda row: (-row.wasted_bytes, row.problem == "-", row.node))
    waiting = [*_waiting(driver, claims, classes, pods)]
    of_mig = {product: dict(counts) for product, counts in fits.items() if counts.keys() - {WHOLE}}
    return rows + waiting, Totals(**sums, waiting=len(waiting), fits=of_mig)


def _fitting(
    pool: str, members: Sequence[Slice], holders: Mapping[Slot, Sequence[Claim]]
) -> Mapping[tuple[str, str], int]:
    left = {counter: amount for one in members for counter, amount in one.counters.items()}
    free: dict[tuple[str, str], list[Device]] = {}
    for device in (device for one in members for device in one.devices):
        if (pool, device.name) in holders:
            _take(device, left, is_held=True)
        elif device.kind == "gpu" or device.profile is not None:
            free.setdefault((device.product, device.profile or WHOLE), []).append(device)
    found = {}
    for key, devices in free.items():
        rest = dict(left)
        usable = [one for one in devices if not any(taint.endswith(_KEEP_AWAY) for taint in one.taints)]
        found[key] = sum(_take(one, rest) for one in usable)
    return found


def _take(device: Device, left: dict[tuple[str, str], Fraction], *, is_held: bool = False) -> bool:
    """Take what the device consumes, if there is enough or a claim has the device."""
    wanted = {(device.counter_set, name): amount for name, amount in device.consumes}
    is_taken = is_held or all(left.get(counter, 0) >= amount for counter, amount in wanted.items())
    if is_taken:
        left.update({counter: left.get(counter, Fraction()) - amount for counter, amount in wanted.items()})
    return is_taken


def room_text(product: str, counts: Mapping[str, int]) -> str:
    whole = [counted(counts[WHOLE], "whole GPU")] if WHOLE in counts else []
    profiles = [f"{count} x {profile}" for profile, count in counts.items() if profile != WHOLE]
    return f"{product}: room for {', or '.join([*whole, *profiles])}"


def versions_of(slices: Iterable[Slice], plugins: Iterable[PluginPod]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for device in (device for one in slices for device in one.devices):
        for what, version in device.versions:
            found.setdefault(what, {})[device.node] = version
    images = {pod.node: pod.image for pod in plugins}
    return found | ({PLUGIN: images} if images else {})


def drift(versions: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for what, of_nodes in versions.items():
        (usual, count), *others = Counter(of_nodes.values()).most_common() or [("", 0)]
        for version, _ in others:
            nodes = sorted(node for node, own in of_nodes.items() if own == version)
            yield f"{what} {version} on {first_of(nodes)}, {usual} on {counted(count, 'other node')}"


def _pool_rows(
    pool: str,
    members: Sequence[Slice],
    fault: str | None,
    holders: Mapping[Slot, Sequence[Claim]],
    loads: Mapping[Slot, Used],
    sums: Counter[str],
) -> Iterator[Row]:
    cards: dict[str, list[Device]] = {}
    for one in members:
        for device in one.devices:
            cards.setdefault(device.card, []).append(device)
    if not cards:
        yield Row(members[0].node, problem=fault or "publishes no devices")
    for _, devices in sorted(cards.items()):
        held = [device for device in devices if (pool, device.name) in holders]
        is_tainted = any(taint.endswith(_KEEP_AWAY) for device in devices for taint in device.taints)
        # Converted to int, because an empty Counter stores its first values as they are.
        sums.update(
            gpus=1, used=int(bool(held)), tainted=int(is_tainted), free=int(not held and not is_tainted)
        )
        for device in _shown(devices, held):
            taints = f"taint {', '.join(device.taints)}" if device.taints else None
            problem = "; ".join(filter(None, [taints, fault])) or "-"
            mine = holders.get((pool, device.name), ())
            if not mine:
                yield Row(device.node, device.name, device.product, problem=problem)
            yield from _held((pool, device.name), device.node, device.product, mine, problem, loads)


def _shown(devices: Sequence[Device], held: Sequence[Device]) -> Iterator[Device]:
    """Yield the devices of a card that exist now.

    While a claim has a part of the card, the whole card is unavailable. A virtual machine and containers exclude each
    other.
    """
    has_gpu, has_whole = (
        any(one.kind != kind for one in of) for kind, of in (("vfio", devices), ("mig", held))
    )
    for device in devices:
        hidden = {"mig": has_whole, "vfio": has_gpu or bool(held)}.get(device.kind, bool(held))
        if device in held or (device.is_made and not hidden):
            yield device


def _held(
    slot: Slot,
    node: str,
    product: str,
    claims: Sequence[Claim],
    problem: str,
    loads: Mapping[Slot, Used],
) -> Iterator[Row]:
    used = loads.get(slot, Used())
    is_shared = sum(max(1, len(claim.pods)) for claim in claims) > 1
    for claim in claims:
        pods = tuple(f"{claim.namespace}/{pod}" for pod in claim.pods)
        parts: list[tuple[tuple[str, ...], GpuLoad | None]] = [(pods, used.load)]
        if is_shared and pods and used.pods.keys() >= set(pods):
            parts = [((pod,), used.pods[pod]) for pod in pods]
        for names, load in parts:
            use = "; ".join(filter(None, [claim.devices.get(slot), use_text(load)])) or "-"
            name = f"{claim.namespace}/{claim.name}"
            yield Row(node, slot[1], product, name, names, use, problem, load, _wasted_bytes(used.load))


def _wasted_bytes(load: GpuLoad | None) -> int:
    if load is None or load.memory_total_bytes is None:
        return 0
    total, percent = load.memory_total_bytes, load.utilisation_percent
    return total - (load.memory_used_bytes or 0) if percent is None else total * (100 - percent) // 100


def use_text(load: GpuLoad | None) -> str | None:
    if load is None or not load.memory_total_bytes:
        return None
    percent = "" if load.utilisation_percent is None else f"{load.utilisation_percent}% "
    used = "?" if load.memory_used_bytes is None else f"{load.memory_used_bytes / _GIB:.1f}"
    return f"{percent}{used}/{load.memory_total_bytes / _GIB:.0f} GiB"


def _waiting(
    driver: str,
    claims: Iterable[Claim],
    classes: Iterable[tuple[str, str, str | None]],
    pods: Sequence[WaitingPod],
) -> Iterator[Row]:
    """Claims wait for devices of the driver or of a missing class. The scheduler creates claims for extended
    resources when it has found a node.
    """
    known = {name for name, _, _ in classes}
    ours = {name for name, selectors, _ in classes if driver in selectors}
    served = {IMPLICIT + name for name in ours} | {
        resource for name, _, resource in classes if name in ours and resource
    }
    for claim in claims:
        if claim.is_allocated or not any(name in ours or name not in known for name in claim.classes):
            continue
        waiting = [pod for pod in pods if pod.namespace == claim.namespace and claim.name in pod.claims]
        says = waiting[0].says if waiting else "no pod waits for this claim"
        if unknown := ", ".join(sorted(claim.classes - known)):
            says = f"unknown DeviceClass {unknown}"
        yield Row(
            "-",
            claim=f"{claim.namespace}/{claim.name}",
            pods=tuple(f"{pod.namespace}/{pod.name}" for pod in waiting),
            problem=f"waits: {says}",
        )
    for pod in pods:
        if pod.resources & served and not pod.has_claim:
            yield Row("-", pods=(f"{pod.namespace}/{pod.name}",), problem=f"waits: {pod.says}")


# --- use, from the metrics of the plugins ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PluginPod:
    """`proxy` is the API server's path to the pod's pages. Without metrics, `port` is ""."""

    node: str
    namespace: str
    image: str
    proxy: str
    metrics: str
    port: str


def plugin_pod(pod: Mapping[str, Any], driver: str) -> PluginPod | None:
    spec, metadata = pod.get("spec") or {}, pod["metadata"]
    for container in spec.get("containers") or ():
        values = {entry["name"]: entry.get("value") or "" for entry in container.get("env") or ()}
        if values.get("DRIVER_NAME") == driver and spec.get("nodeName"):
            path = values.get("METRICS_PATH") or "/metrics"
            port = "" if path == "off" else values.get("HTTP_ENDPOINT", "").rpartition(":")[2]
            proxy = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}:{port}/proxy"
            image = str(container.get("image"))
            return PluginPod(spec["nodeName"], metadata["namespace"], image, proxy, path, port)
    return None


def loads_of(text: str, driver: str) -> dict[str, Used] | None:
    """Return the use of each device by name; None if the plugin does not measure it."""
    from prometheus_client.parser import text_string_to_metric_families

    # Other lines are not parsed: most of a page is histograms, and a cluster has many pages.
    lines = [line for line in text.splitlines() if line.removeprefix("# HELP ").startswith(_PREFIXES)]
    if not lines:
        return None
    devices: dict[str, dict[str, float]] = {}
    pods: dict[str, dict[str, dict[str, float]]] = {}
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            labels = sample.labels
            if labels.get("driver") != driver:
                continue
            device = labels.get("device", "")
            values = devices.setdefault(device, {})
            if "pod" in labels:
                pod = f"{labels.get('namespace', '')}/{labels['pod']}"
                values = pods.setdefault(device, {}).setdefault(pod, {})
            for prefix in _PREFIXES:
                if sample.name.startswith(prefix):
                    values[sample.name.removeprefix(prefix)] = sample.value
    return {
        device: Used(
            _load(values, values),
            {pod: _load(own, values) for pod, own in pods.get(device, {}).items()},
        )
        for device, values in devices.items()
    }


def _load(own: Mapping[str, float], device: Mapping[str, float]) -> GpuLoad:
    used, ratio = own.get("memory_used_bytes"), own.get("utilization_ratio")
    total = device.get("memory_total_bytes")
    return GpuLoad(
        memory_used_bytes=None if used is None else int(used),
        memory_total_bytes=None if total is None else int(total),
        utilisation_percent=None if ratio is None else round(ratio * 100),
    )
