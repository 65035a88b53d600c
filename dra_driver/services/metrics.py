"""Prometheus metrics under the names of NVIDIA's own DRA driver, so that its dashboards and alerts go on working."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from dra_driver import __version__
from dra_driver.errors import (
    ApiRejectedError,
    ApiUnavailableError,
    ClaimRefusedError,
    DeviceLostError,
    InvalidConfigError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome

_DURATION_BUCKETS = tuple(0.05 * 2**n for n in range(9))
_FINE_BUCKETS = (0.002, 0.005, 0.01, 0.025)
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (ApiUnavailableError, "api_unavailable"),
    (ApiRejectedError, "api_rejected"),
    (NvmlUnavailableError, "nvml_unavailable"),
    (DeviceLostError, "device_lost"),
    (ClaimRefusedError, "claim_refused"),
    (InvalidConfigError, "invalid_config"),
    (StateError, "state"),
    (RetryableError, "busy"),
)
_INTERNAL = "internal"
_OPERATIONS = ("prepare", "unprepare")
_DEVICE_TYPES = ("gpu", "mig", "vfio", "unknown")


def reason_of(error: Exception) -> str:
    """The value of the label `error_type` for an error."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), _INTERNAL)


class Metrics:
    """All metrics of the process in a registry of their own, zero-initialised.

    `prepared` yields the type (`gpu`, `mig`) of each device that is prepared now; it is asked at each scrape.
    """

    def __init__(self, driver: str, node: str, prepared: Callable[[], Iterable[str]]) -> None:
        self.registry = CollectorRegistry()
        self._driver = driver
        labels = ("driver", "operation")
        self._requests = Counter(
            "nvidia_dra_requests",
            "Claims prepared or unprepared with success.",
            labels,
            registry=self.registry,
        )
        self._durations = Histogram(
            "nvidia_dra_request_duration_seconds",
            "Time to prepare or unprepare one claim.",
            labels,
            buckets=_FINE_BUCKETS + _DURATION_BUCKETS,
            registry=self.registry,
        )
        self._inflight = Gauge(
            "nvidia_dra_requests_inflight", "gRPC calls in progress.", labels, registry=self.registry
        )
        self._errors = {
            operation: Counter(
                f"nvidia_dra_node_{operation}_errors",
                f"Claims that could not be {operation}d, by cause.",
                ("driver", "error_type"),
                registry=self.registry,
            )
            for operation in _OPERATIONS
        }
        Info("nvidia_dra_build", "Version of the driver.", registry=self.registry).info(
            {"version": __version__}
        )
        self.registry.register(_PreparedDevices(node, driver, prepared))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        for operation in _OPERATIONS:
            self._requests.labels(self._driver, operation)
            self._durations.labels(self._driver, operation)
            self._inflight.labels(self._driver, operation)
            for reason in (*(reason for _, reason in _REASONS), _INTERNAL):
                self._errors[operation].labels(self._driver, reason)

    def prepared(self, duration_s: float, error: Exception | None) -> None:
        """A claim's Prepare ended."""
        self._ended("prepare", duration_s, error)

    def unprepared(self, duration_s: float, error: Exception | None) -> None:
        """A claim's Unprepare ended."""
        self._ended("unprepare", duration_s, error)

    @contextmanager
    def in_flight(self, operation: str) -> Iterator[None]:
        """Count a gRPC call from its arrival to its answer."""
        gauge = self._inflight.labels(self._driver, operation)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def _ended(self, operation: str, duration_s: float, error: Exception | None) -> None:
        self._durations.labels(self._driver, operation).observe(duration_s)
        if error is None:
            self._requests.labels(self._driver, operation).inc()
        else:
            self._errors[operation].labels(self._driver, reason_of(error)).inc()


class ClaimService(Protocol):
    """What serves the kubelet's calls."""

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """NodePrepareResources."""

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """NodeUnprepareResources."""


class CountedCalls:
    """A claim service whose calls in flight are counted."""

    def __init__(self, service: ClaimService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """NodePrepareResources."""
        with self._metrics.in_flight("prepare"):
            return self._service.prepare(claims, deadline_s)

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """NodeUnprepareResources."""
        with self._metrics.in_flight("unprepare"):
            return self._service.unprepare(claims, deadline_s)


class _PreparedDevices(Collector):
    """`nvidia_dra_prepared_devices`, read from the records so that it is right after a restart too."""

    def __init__(self, node: str, driver: str, prepared: Callable[[], Iterable[str]]) -> None:
        self._node = node
        self._driver = driver
        self._prepared = prepared

    def collect(self) -> Iterator[Metric]:
        """One sample a device type."""
        family = GaugeMetricFamily(
            "nvidia_dra_prepared_devices",
            "Devices that are prepared for claims.",
            labels=("node", "driver", "device_type"),
        )
        tally = Tally(self._prepared())
        for kind in _DEVICE_TYPES:
            family.add_metric((self._node, self._driver, kind), tally[kind])
        yield family
