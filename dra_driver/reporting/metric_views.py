"""The metrics that each scrape reads from other parts of the plugin, in limited time.

A scrape counts and omits a part that fails or is late.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, get_args

import structlog
from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dra_driver.base.threads import BoundedCall
from dra_driver.health.book import HealthBook
from dra_driver.health.rules.taints import MadeInstance, device_reasons
from dra_driver.journal.rules.cleanups import CLEANUP_KINDS, PendingCleanup
from dra_driver.model.claim import Pods
from dra_driver.model.gpu import THROTTLES, GpuLoad, GpuMeters
from dra_driver.model.health import UNRESPONSIVE, Condition, HealthState, HealthTarget, Severity, condition
from dra_driver.model.inventory import Inventory, OfferedDevice, StaticMigDevice, VfioDevice, WholeGpu
from dra_driver.model.maintenance import Maintenance, MaintenanceState
from dra_driver.model.mig import GpuLayout
from dra_driver.model.mps import MPS_STATES
from dra_driver.model.problems import FOUND_BY_TOP, ProblemCode
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.rules.claim_usage import DeviceUse, GpuLabels, NodeUse, PodUse, mig_profile
from dra_driver.reporting.rules.receipts import Part, totals

_log = structlog.get_logger(__name__)

_WITHIN_S = 1.0
_CAUSES = ("error", "timeout")

_PREPARED_TYPES = ("gpu", "mig", "vfio", "unknown")
_OFFERED_TYPES = ("gpu", "mig", "possible_mig")
_MAX_PODS = 16
"""Hundreds of pods must not flood the time series database."""
_CONDITIONS: tuple[Condition, ...] = get_args(Condition)

Instances = Mapping[str, MadeInstance]
Samples = Mapping[tuple[str, ...], float]
InventorySource = Callable[[], Inventory | None]


def _busy(load: GpuLoad) -> float | None:
    return None if load.utilisation_percent is None else load.utilisation_percent / 100


_GAUGES: Mapping[str, tuple[str, ...]] = {
    "claims_failing": ("Claims whose last Prepare or Unprepare failed.",),
    "pending_cleanups": ("Pending cleanups.", "kind"),
    "devices": ("Published devices; `possible_mig` are MIG devices on demand.",
                "device_type", "health"),
    "discovery_faults": ("GPUs and attributes that discovery could not read.",),
    "gpu_info": ("1 for each GPU; `product` is empty while unknown.",
                 "uuid", "product"),
    "gpu_monitored": ("1 while the GPU's health is known, 0 if the last answer is too old.", "uuid"),
    "gpu_reason": ("Severity of each health reason of a GPU or its MIG devices.", "uuid", "reason"),
    "gpu_severity": ("0 healthy, 1 information, 2 degraded, 3 unhealthy, 4 lost; missing while unknown.", "uuid"),
    "maintenance_gpus": ("GPUs of a maintenance claim, by claim state.", "claim_namespace", "claim_name", "state"),
    "mig_devices": ("MIG devices that exist.", "uuid", "profile"),
    "mig_layout": ("1 for each GPU of the node's MIG layout.",
                   "uuid", "layout", "state"),
    "mig_severity": ("Like `nvidia_dra_gpu_severity`, for each MIG device that has its own reasons.",
                     "parent_uuid", "uuid", "mig_instance"),
    "mps_daemons": ("MPS control daemons of the node.", "state"),
    "node_problem": ("1 while `/readyz` shows a problem or a note.",),
    "partitions_unsupported": ("1 while the API server lacks the counters that the configuration needs.",),
    "publish_problem": ("1 while the slices in the API server are out of date.",),
    "problems": ("Problems of the node by kind, as in `/problems`.", "problem"),
    "published_slices": ("Slices of this node in the API server.",),
    "ready": ("1 while `/readyz` is ready.",),
    "unclaimed_memory_bytes": ("GPU memory in use by processes without a claim or container.", "uuid"),
    "withdrawn_devices": ("Bad devices that the slices omit, because taints cannot keep pods away.",),
}  # fmt: skip
"""By name without `nvidia_dra_`: help, and labels in addition to `driver`."""
_OF_PODS: Mapping[str, tuple[str, Callable[[PodUse], float | None]]] = {
    "utilization_ratio": ("Fraction of the last two seconds in which the pod computed on a whole GPU.",
                          lambda pod: None if pod.utilisation_percent is None else pod.utilisation_percent / 100),
    "memory_used_bytes": ("Memory that the pod uses on a device.",
                          lambda pod: pod.memory_bytes),
    "processes": ("Processes of the pod on a device.", lambda pod: pod.processes),
}  # fmt: skip
"""By name without `nvidia_dra_pod_`: help and value."""
_OF_DEVICES: Mapping[str, tuple[str, Callable[[DeviceUse, GpuLoad], float | None]]] = {
    "utilization_ratio": ("Fraction of time in which programs computed on the device.", lambda _, load: _busy(load)),
    "memory_used_bytes": ("Memory in use on the device.", lambda _, load: load.memory_used_bytes),
    "memory_total_bytes": ("Memory of the device.", lambda _, load: load.memory_total_bytes),
    "processes": ("Processes on the device.",
                  lambda device, _: device.processes),
    "gpu_fraction": ("Fraction of the GPU's memory that the device has.", lambda device, _: device.gpu_fraction),
}  # fmt: skip
_OfGpu = Callable[[GpuLoad, GpuMeters], Mapping[str, float | None]]
_OF_GPUS: Mapping[str, tuple[str, str, _OfGpu]] = {
    "utilization_ratio": ("Fraction of time in which programs computed on the GPU.", "",
                          lambda load, _: {"": _busy(load)}),
    "memory_used_bytes": ("Memory in use on the GPU.", "", lambda load, _: {"": load.memory_used_bytes}),
    "memory_total_bytes": ("Memory of the GPU.", "", lambda load, _: {"": load.memory_total_bytes}),
    "temperature_celsius": ("Temperature of the GPU.", "", lambda load, _: {"": load.temperature_c}),
    "power_watts": ("Power of the GPU.", "", lambda load, _: {"": load.power_w}),
    "power_limit_watts": ("Power limit of the GPU: as it was set, and as it is enforced.", "limit",
                          lambda load, meters: {"set": meters.power_limit_set_w, "enforced": load.power_limit_w}),
    "energy_joules_total": ("Energy of the GPU since the NVIDIA driver was loaded.", "",
                            lambda _, meters: {"": meters.energy_j}),
    "nvlink_bytes_total": ("Data over all NVLinks of the GPU.", "direction", lambda _, meters: {
        "sent": meters.nvlink_sent_bytes, "received": meters.nvlink_received_bytes}),
    "pcie_bytes_total": ("Data between the GPU and its PCIe slot.", "direction", lambda _, meters: {
        "sent": meters.pcie_sent_bytes, "received": meters.pcie_received_bytes}),
    "clock_hertz": ("Clock of the multiprocessors or of the memory.", "clock", lambda _, meters: {
        "sm": meters.sm_clock_hz, "memory": meters.memory_clock_hz}),
    "throttled": ("1 while the GPU reduces its clocks for this reason.", "reason", lambda _, meters: {
        reason: None if meters.throttles is None else reason in meters.throttles for reason in THROTTLES}),
}  # fmt: skip
"""By name without `nvidia_dra_gpu_`: help, an additional label, and the values by that label."""

_OF_CLAIMS: Mapping[str, tuple[str, Literal["gpu_s", "busy_s", "energy_j"]]] = {
    "gpu_seconds": ("GPU-seconds for which claims had devices.", "gpu_s"),
    "busy_gpu_seconds": ("GPU-seconds in which programs of claims computed.", "busy_s"),
    "energy_joules": ("Energy of the devices of claims.", "energy_j"),
}


class Views(Collector):
    """Sources of metrics by name, each called in a separate thread. Call each method once."""

    def __init__(self, driver: str, node: str, errors: Counter, *, within_s: float = _WITHIN_S) -> None:
        """`within_s` is for all sources together."""
        self._driver = driver
        self._node = node
        self._errors = errors
        self._within_s = within_s
        self._turn = threading.Lock()
        self._calls: dict[str, BoundedCall[tuple[Metric, ...]]] = {}

    def collect(self) -> Sequence[Metric]:
        """Return the metrics of all sources that answer in time. Concurrent scrapes take turns."""
        with self._turn:
            calls = self._calls.copy()
            # Do not wait for these sources: an earlier scrape already has.
            late = {name for name, call in calls.items() if call.is_running}
            for call in calls.values():
                call.start()
            end, found = time.monotonic() + self._within_s, list[Metric]()
            for name, call in calls.items():
                families, problem = call.result(0.0 if name in late else max(0.0, end - time.monotonic()))
                if problem is not None:
                    _log.debug("metrics_not_read", source=name, reason=problem)
                    self._errors.labels(self._driver, name, "timeout" if call.is_running else "error").inc()
                else:
                    found += families or ()
            return found

    def prepared_devices(self, kinds: Callable[[], Iterable[str]]) -> None:
        def read() -> Iterator[Metric]:
            tally = Tally(kind if kind in _PREPARED_TYPES else "unknown" for kind in kinds())
            yield _gauge(
                "nvidia_dra_prepared_devices",
                "Devices of prepared claims.",
                ("node", "driver", "device_type"),
                {(self._node, self._driver, kind): tally[kind] for kind in _PREPARED_TYPES},
            )

        self._add("prepared", read)

    def claims(
        self,
        records: Callable[[], Iterable[ClaimRecord]],
        made_uuid: Callable[[str], str | None],
        inventory: InventorySource,
    ) -> None:
        """Which claim has which device, for which pods. The labels that begin with `dra_` are those of the DCGM
        exporter.
        """

        def read() -> Iterator[Metric]:
            samples: dict[tuple[str, ...], float] = {}
            found = inventory() or Inventory()
            for record in records():
                if record.phase != "prepared":
                    continue
                names = _names(record.claim.pods)
                for held in record.devices:
                    uuid = held.uuid or made_uuid(held.device) or ""
                    ref = record.ref
                    kind = held.kind if held.kind in _PREPARED_TYPES else "unknown"
                    claim = (self._driver, self._node, ref.namespace, ref.name, ref.uid)
                    admin = "true" if held.admin_access else "false"
                    is_mig = held.kind == "mig"
                    profile = (mig_profile(held, found) or "") if is_mig else ""
                    of_dcgm = (
                        ref.namespace, ref.name, self._node, held.device, profile, uuid if is_mig else "",
                    )  # fmt: skip
                    for pod in names:
                        samples[*claim, pod, held.device, kind, uuid, held.gpu_uuid, admin, *of_dcgm] = 1
            yield _gauge(
                "nvidia_dra_claim_info",
                "1 for each prepared device of a claim and each pod of the claim.",
                (
                    "driver", "node", "namespace", "claim", "claim_uid", "pod", "device", "device_type", "uuid",
                    "parent_uuid", "admin_access", "dra_claim_namespace", "dra_claim_name", "dra_pool_name",
                    "dra_device_name", "dra_mig_profile", "dra_mig_device_uuid",
                ),
                samples,
            )  # fmt: skip

        self._add("claims", read)

    def devices(
        self, inventory: InventorySource, health: HealthBook, instances: Callable[[], Instances]
    ) -> None:
        def read() -> Iterator[Metric]:
            found, made = inventory(), instances()
            tally: Tally[tuple[str, str]] = Tally()
            for device in found.devices() if found else ():
                tally[_type_of(device), _condition_of(device, health, made)] += 1
            kinds = dict.fromkeys((*_OFFERED_TYPES, *(kind for kind, _ in tally)))
            counts: Samples = {(kind, word): tally[kind, word] for kind in kinds for word in _CONDITIONS}
            yield self._gauge("devices", counts)

        self._add("devices", read)

    def usage(self, look: Callable[[], NodeUse]) -> None:
        """Each scrape queries NVML."""
        self._add("usage", lambda: self._usage(look()))

    def receipts(self, sums: Callable[[], Mapping[tuple[str, str, str], Part]]) -> None:
        def read() -> Iterator[Metric]:
            found = sums()
            for name, (text, value) in _OF_CLAIMS.items():
                samples: Samples = {(self._driver, *key): number for key, number in totals(found, value)}
                labels = ("driver", "namespace", "product", "device_type")
                yield _family(CounterMetricFamily, f"nvidia_dra_claim_{name}_total", text, labels, samples)

        self._add("receipts", read)

    def inventory(self, inventory: InventorySource) -> None:
        self._add("inventory", partial(self._read_inventory, inventory))

    def health(self, inventory: InventorySource, health: HealthBook) -> None:
        """Includes lost GPUs, which discovery no longer lists."""
        self._add("health", partial(self._read_health, inventory, health))

    def publishing(
        self, problem: Callable[[], str | None], slices: Callable[[], int], withdrawn: Callable[[], int]
    ) -> None:
        def read() -> Iterator[Metric]:
            yield self._one("publish_problem", problem() is not None)
            yield self._one("published_slices", slices())
            yield self._one("withdrawn_devices", withdrawn())

        self._add("publishing", read)

    def mig_layouts(self, layouts: Callable[[], Mapping[str, GpuLayout]]) -> None:
        def read() -> Iterator[Metric]:
            found = layouts().values()
            yield self._gauge("mig_layout", {(one.gpu_uuid, one.layout, one.state): 1 for one in found})

        self._add("mig_layout", read)

    def cleanups(self, cleanups: Callable[[], Iterable[PendingCleanup]]) -> None:
        def kinds() -> Iterator[str]:
            return (step.cleanup for one in cleanups() for step in one.steps)

        self._show_tally("cleanups", "pending_cleanups", CLEANUP_KINDS, kinds)

    def maintenances(self, found: Callable[[], Iterable[Maintenance]]) -> None:
        def read() -> Iterator[Metric]:
            yield self._gauge(
                "maintenance_gpus",
                {
                    (one.claim.namespace, one.claim.name, state): len(one.gpu_uuids) * (state == one.state)
                    for one in found()
                    for state in get_args(MaintenanceState)
                },
            )

        self._add("maintenance", read)

    def value(self, source: str, name: str, read: Callable[[], float]) -> None:
        self._add(source, lambda: (self._one(name, read()),))

    def mps(self, states: Callable[[], Iterable[str]]) -> None:
        self._show_tally("mps", "mps_daemons", MPS_STATES, states)

    def problems(self, codes: Callable[[], Iterable[ProblemCode]]) -> None:
        kinds = [code for code in get_args(ProblemCode) if code not in FOUND_BY_TOP]
        self._show_tally("problems", "problems", kinds, codes)

    def reports(self, counts: Callable[[], Mapping[str, int]]) -> None:
        def read() -> Iterator[Metric]:
            yield _family(
                CounterMetricFamily,
                "nvidia_dra_notices",
                "Events and claim statuses: accepted (`written`), refused (`failed`) or `dropped`.",
                ("driver", "outcome"),
                {(self._driver, outcome): count for outcome, count in counts().items()},
            )

        self._add("notices", read)

    def _usage(self, node: NodeUse) -> Iterator[Metric]:
        labels = ("driver", "device", "device_type", "uuid", "parent_uuid", "shared")
        values = {
            one: (self._driver, one.device, one.kind, one.uuid, one.gpu_uuid, str(one.is_shared).lower())
            for one in node.devices
            if one.uuid
        }
        for name, (text, value) in _OF_DEVICES.items():
            found = ((key, value(one, one.load or GpuLoad())) for one, key in values.items())
            samples: Samples = {key: number for key, number in found if number is not None}
            yield _gauge(f"nvidia_dra_device_{name}", text, labels, samples)
        pods = {
            one: (self._driver, self._node, one.namespace, one.pod, one.claim or "", one.device, one.kind, one.uuid,
                  one.gpu_uuid)
            for one in node.pods
        }  # fmt: skip
        of_pods = (
            "driver",
            "node",
            "namespace",
            "pod",
            "claim",
            "device",
            "device_type",
            "uuid",
            "parent_uuid",
        )
        for name, (text, of_pod) in _OF_PODS.items():
            counts = ((key, of_pod(one)) for one, key in pods.items())
            yield _gauge(
                f"nvidia_dra_pod_{name}", text, of_pods, {key: n for key, n in counts if n is not None}
            )
        for name, of_gpu in _OF_GPUS.items():
            yield self._of_gpus(name, *of_gpu, node)
        unclaimed: Samples = {
            (uuid,): sum(one.memory_bytes or 0 for one in processes)
            for uuid, processes in node.unclaimed.items()
        }
        yield self._gauge("unclaimed_memory_bytes", unclaimed)

    def _of_gpus(self, name: str, text: str, label: str, values: _OfGpu, node: NodeUse) -> Metric:
        samples = {
            (self._driver, uuid, *node.labels.get(uuid, GpuLabels()), *([value] if label else [])): number
            for uuid, use in node.gpus.items()
            for value, number in values(use.load, use.meters).items()
            if number is not None
        }
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        labels = ("driver", "uuid", *GpuLabels._fields, *([label] if label else []))
        return _family(kind, f"nvidia_dra_gpu_{name}", text, labels, samples)

    def _read_inventory(self, inventory: InventorySource) -> Iterator[Metric]:
        found = inventory() or Inventory()
        driver, cuda = found.versions.driver, found.versions.cuda
        info = InfoMetricFamily(
            "nvidia_dra_gpu_driver",
            "Versions of the installed NVIDIA driver; empty while unknown.",
            labels=("driver",),
        )
        version = {"version": driver or "", "cuda": ".".join(map(str, cuda or ()))}
        info.add_metric((self._driver,), version)
        yield info
        yield self._one("discovery_faults", len(found.faults))
        yield self._gauge("gpu_info", {(gpu.uuid, gpu.product_name or ""): 1 for gpu in found.gpus})
        made: Tally[tuple[str, ...]] = Tally(
            (gpu.uuid, mig.profile.name) for gpu in found.gpus for mig in gpu.mig_devices
        )
        yield self._gauge("mig_devices", made)

    def _read_health(self, inventory: InventorySource, health: HealthBook) -> Iterator[Metric]:
        states = health.states()
        found = inventory()
        known = {gpu.uuid for gpu in found.gpus} if found else set()
        known |= {target.gpu_uuid for target, state in states.items() if state.severity == Severity.LOST}
        # Known without a query of the GPU, because the query may hang too.
        unresponsive = {target.gpu_uuid for target, state in states.items() if state.has(UNRESPONSIVE)}
        known |= unresponsive
        fresh = {uuid: health.is_fresh(uuid) for uuid in sorted(known)}
        severities: dict[tuple[str, ...], float] = {
            (uuid,): Severity.OK for uuid, is_fresh in fresh.items() if is_fresh or uuid in unresponsive
        }
        reasons: dict[tuple[str, ...], float] = {}
        instances: dict[tuple[str, ...], float] = {}
        for target, state in states.items():
            uuid = target.gpu_uuid
            if (uuid,) not in severities:
                continue
            if not target.is_instance:
                severities[uuid,] = state.severity
            else:
                # An Xid may arrive before the instance's UUID is read; the severity is shown even then.
                for mig in (state.identity or "unknown").split(","):
                    instances[uuid, mig, _ids_of(target)] = state.severity
            for reason in state.reasons:
                reasons[uuid, reason.key] = max(reason.severity, reasons.get((uuid, reason.key), 0))
        yield self._gauge("gpu_severity", severities)
        yield self._gauge("mig_severity", instances)
        yield self._gauge("gpu_reason", reasons)
        yield self._gauge("gpu_monitored", {(uuid,): is_fresh for uuid, is_fresh in fresh.items()})
        counts = health.history.xid_counts().items()
        yield _family(
            CounterMetricFamily,
            "nvidia_dra_gpu_xids",
            "Xid errors of the GPU since the plugin's start.",
            ("driver", "uuid", "xid"),
            {(self._driver, uuid, str(number)): count for (uuid, number), count in counts},
        )

    def _add(self, source: str, read: Callable[[], Iterable[Metric]]) -> None:
        for cause in _CAUSES:
            self._errors.labels(self._driver, source, cause)
        self._calls[source] = BoundedCall(source, lambda: tuple(read()))

    def _show_tally(
        self,
        source: str,
        name: str,
        values: Sequence[str],
        found: Callable[[], Iterable[str]],
    ) -> None:
        def read() -> Iterator[Metric]:
            tally = Tally(found())
            yield self._gauge(name, {(value,): tally[value] for value in values})

        self._add(source, read)

    def _one(self, name: str, value: float) -> Metric:
        return self._gauge(name, {(): value})

    def _gauge(self, name: str, samples: Samples) -> Metric:
        text, *labels = _GAUGES[name]
        named = {(self._driver, *values): value for values, value in samples.items()}
        return _gauge(f"nvidia_dra_{name}", text, ("driver", *labels), named)


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Samples,
) -> Metric:
    family = kind(name, text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, float(value))
    return family


_gauge = partial(_family, GaugeMetricFamily)


def _names(pods: Pods) -> Sequence[str]:
    return [pod.name for pod in (pods or ())[:_MAX_PODS]] or [""]


def _type_of(device: OfferedDevice) -> str:
    if isinstance(device, WholeGpu):
        return "gpu"
    if isinstance(device, VfioDevice):
        return "vfio"
    return "mig" if isinstance(device, StaticMigDevice) else "possible_mig"


def _ids_of(instance: HealthTarget) -> str:
    """Return for example `3/0`; only the first ID for a whole GPU instance."""
    ids = (instance.gpu_instance_id, instance.compute_instance_id)
    return "/".join(str(number) for number in ids if number is not None)


def _condition_of(device: OfferedDevice, health: HealthBook, instances: Instances) -> Condition:
    reasons = device_reasons(device, health.states(), instances)
    state = HealthState(HealthTarget(device.gpu.uuid), reasons)
    is_bound = (
        isinstance(device, VfioDevice) and device.card.is_bound
    )  # not monitored while bound to vfio, which is expected
    return condition(state, is_fresh=is_bound or health.is_fresh(device.gpu.uuid))
