"""Metrics as a scrape reads them; and all of them at once, to compare with docs, dashboard and alerts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

from dra_driver.model.claim import ClaimRef, PodRef
from dra_driver.model.gpu import GpuLoad, GpuMeters, GpuProcess, GpuUse, ProcessOrigin
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity
from dra_driver.model.inventory import StaticMigDevice
from dra_driver.model.maintenance import Maintenance
from dra_driver.model.mig import GpuLayout, MigAddress
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.rules.claim_usage import NodeUse, device_uses, gpu_labels, pod_uses
from dra_driver.reporting.rules.receipts import Part
from tests.fakes.samples import DRIVER, GPU_0, MIG_1G, MIXED, NODE, hold, record, uuid

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(metrics: Metrics) -> Samples:
    return samples_in(generate_latest(metrics.registry).decode())


def samples_in(text: str) -> Samples:
    """What an answer to a scrape has."""
    samples: Samples = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"{key} appears twice"
            samples[key] = sample.value
    return samples


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return scraped(metrics)[(name, tuple(sorted(labels.items())))]


def labelled(samples: Samples, name: str) -> Iterator[dict[str, str]]:
    return (dict(labels) for found, labels in samples if found == name)


def by_label(metrics: Metrics, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by the values of some of its labels."""
    return {
        tuple(dict(found)[label] for label in labels): number
        for (sample, found), number in scraped(metrics).items()
        if sample == name
    }


@dataclass
class KnownHealth:
    """What the book of health would answer."""

    known: dict[HealthTarget, HealthState] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    xids: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def history(self) -> KnownHealth:
        return self

    def states(self) -> Mapping[HealthTarget, HealthState]:
        return self.known

    def is_fresh(self, gpu_uuid: str) -> bool:
        return gpu_uuid not in self.stale

    def xid_counts(self) -> Mapping[tuple[str, int], int]:
        return self.xids

    def has(self, severity: Severity, key: str, target: HealthTarget) -> None:
        reason = Reason(key, "79", severity, 1, 1, "text")
        state = self.known.get(target, HealthState(target))
        self.known[target] = replace(state, reasons=(*state.reasons, reason))


BUSY = GpuLoad(60 << 30, 80 << 30, 70, 40, 350.0, 700.0)
IDLE = GpuLoad(1 << 30, 10 << 30, 0)
METERS = GpuMeters(
    1000.5, 1 << 30, 2 << 30, 3 << 20, 4 << 20, 1_755_000_000, 1_593_000_000, frozenset({"sw_power_cap"})
)


def node_use(
    records: list[ClaimRecord],
    busy: GpuLoad = BUSY,
    idle: GpuLoad = IDLE,
    *,
    by_pod: Mapping[str, int] | None = None,
) -> NodeUse:
    """A node whose whole GPUs are busy, and whose MIG devices are idle. A program of the host has memory too. `by_pod`
    has for each UID of a pod how busy it keeps each of its GPUs, in percent; without it NVML samples no processes."""
    unclaimed = [GpuProcess(4711, "train", 2 << 30, None, None if by_pod is None else 0)]
    mig = {device.uuid: idle for gpu in MIXED.gpus for device in gpu.mig_devices}
    pids = {uid: pid for pid, uid in enumerate(by_pod or {}, start=1)}
    own = [
        GpuProcess(pids[uid], "python3", 1 << 30, None, percent) for uid, percent in (by_pod or {}).items()
    ]
    places = {
        (held.gpu_uuid, pids.get(pod.uid))
        for record in records
        for held in record.devices
        for pod in record.claim.pods or ()
    }
    seen = {
        gpu.uuid: GpuUse(
            busy, mig, [*(one for one in own if (gpu.uuid, one.pid) in places), *unclaimed], METERS
        )
        for gpu in MIXED.gpus
    }
    origins = {pid: ProcessOrigin("container", uid) for uid, pid in pids.items()} | {
        4711: ProcessOrigin("host")
    }
    addresses = {
        name: MigAddress(device.uuid, device.mig.gpu_instance_id, 0)
        for name, device in MIXED.by_name.items()
        if isinstance(device, StaticMigDevice)
    }
    return NodeUse(
        device_uses(records, MIXED, addresses, seen),
        pod_uses(records, addresses, seen, origins),
        seen,
        gpu_labels(records, MIXED),
        dict.fromkeys(seen, unclaimed),
    )


def complete_metrics() -> Metrics:
    """All views are registered, and every event without initial series has happened."""
    health = KnownHealth(xids={(uuid(0), 79): 1})
    health.has(Severity.UNHEALTHY, "xid", HealthTarget(uuid(0)))
    instance = HealthTarget(uuid(2), 7, 0)
    health.has(Severity.UNHEALTHY, "xid", instance)
    health.known[instance] = replace(health.known[instance], identity="MIG-7")
    prepared = record(hold(GPU_0), hold(MIG_1G))
    records = [replace(prepared, claim=replace(prepared.claim, pods=(PodRef("pod-0", "uid-0"),)))]
    metrics = Metrics(DRIVER, NODE, lambda: ["gpu"])
    metrics.show.claims(lambda: records, lambda device: None, lambda: MIXED)
    metrics.show.usage(lambda: node_use(records, by_pod={"uid-0": 70}))
    used = Part("NVIDIA H100 80GB HBM3", "gpu", 0, None, 7200, 3600, 7200, 0, 3.6e6, 7200)
    metrics.show.receipts(lambda: {("default", used.product, used.kind): used})
    metrics.show.devices(lambda: MIXED, health, dict)
    metrics.show.inventory(lambda: MIXED)
    metrics.show.health(lambda: MIXED, health)
    metrics.show.publishing(lambda: None, lambda: 1, lambda: 0)
    metrics.show.cleanups(list)
    service = Maintenance(ClaimRef("ops", "reset", "uid-reset"), (uuid(3),), "active")
    metrics.show.maintenances(lambda: [service])
    metrics.show.mig_layouts(lambda: {uuid(2): GpuLayout(uuid(2), "all-1g.10gb", "applied")})
    metrics.show.value("partitions", "partitions_unsupported", lambda: False)
    metrics.show.value("readiness", "ready", lambda: True)
    metrics.show.value("problem", "node_problem", lambda: False)
    metrics.show.problems(lambda: ["foreign-driver"])
    metrics.show.value("failing", "claims_failing", lambda: 0)
    metrics.show.mps(lambda: ["ready"])
    metrics.show.reports(lambda: dict.fromkeys(("written", "dropped", "failed"), 0))
    return metrics


def labels_of_samples(metrics: Metrics) -> dict[str, set[str]]:
    """The labels of every sample name, as a query sees them."""
    return {name: {label for label, _ in labels} for name, labels in scraped(metrics)}


USUAL_LABELS = {
    "nvidia_dra_gpu_": {"claim", "gpu", "namespace", "pod", "uuid"},
    "nvidia_dra_device_": {"device", "device_type", "parent_uuid", "shared", "uuid"},
    "nvidia_dra_pod_": {"claim", "device", "device_type", "namespace", "node", "parent_uuid", "pod", "uuid"},
}
"""The document says them once, instead of in each row."""


def table() -> str:
    """The driver's own metrics as a Markdown table."""
    lines = [
        f"`…` stands for {', '.join(f'`{label}`' for label in sorted(labels))} in `{start}…`."
        for start, labels in USUAL_LABELS.items()
    ]
    lines += ["", "| Metric and labels | What |", "|---|---|"]
    families = (entry for entry in complete_metrics().registry.collect() if entry.name.startswith("nvidia"))
    lines += [_line(family) for family in sorted(families, key=lambda family: family.name)]
    return "\n".join(lines) + "\n"


def _line(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "driver"})
    assert family.type == "counter" or (family.type == "histogram") == family.name.endswith("_seconds")
    usual = next((usual for start, usual in USUAL_LABELS.items() if family.name.startswith(start)), {"…"})
    if usual <= {*labels}:
        labels = ["…", *(label for label in labels if label not in usual)]
    shown = f"{{{', '.join(labels)}}}" if labels else ""
    return f"| `{family.name}{suffix}{shown}` | {family.documentation} |"
