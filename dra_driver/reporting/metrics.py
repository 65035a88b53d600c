"""Counters and histograms that the plugin updates when something happens.

Metrics of requests have the names of NVIDIA's DRA driver, so that one dashboard serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

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
from dra_driver.model.steps import STEPS
from dra_driver.reporting.metric_views import Views

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

REASONS = (*(reason for _, reason in _REASONS), _INTERNAL)


def reason_of(error: Exception) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), _INTERNAL)


_DURATION_BUCKETS = (0.002, 0.005, 0.01, 0.025, *(0.05 * 2**n for n in range(10)), 45.0)
"""The buckets of NVIDIA's DRA driver, extended to the kubelet's timeout."""
_STEP_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 45.0)
_WAIT_BUCKETS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0)
_LAG_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
Operation = Literal["prepare", "unprepare"]
_OPERATIONS = get_args(Operation)
_MIG_ACTIONS = ("create", "destroy", "mode-on", "mode-off")
_NO_ANSWER = "none"
_USUAL_ANSWERS = (("GET", 200), ("POST", 201), ("PUT", 200), ("PATCH", 200), ("DELETE", 200))

StepAction = Literal["do", "undo"]
_Shown = TypeVar("_Shown", Counter, Gauge, Histogram)


_OPERATION = {"operation": _OPERATIONS}
_STEP = {"step": [kind.tag for kind in STEPS], "action": get_args(StepAction)}
_Labels = Mapping[str, Sequence[str]]
_COUNTERS: Mapping[str, tuple[str, _Labels]] = {
    "requests": ("Claims prepared or unprepared successfully.", _OPERATION),
    "node_prepare_errors": ("Failed Prepares of claims, by cause.", {"error_type": REASONS}),
    "node_unprepare_errors": ("Failed Unprepares of claims, by cause.", {"error_type": REASONS}),
    "mig_errors": ("Failed changes of MIG devices or MIG mode.",
                   {"operation": _MIG_ACTIONS, "error_type": REASONS}),
    "step_errors": ("Failed steps of claims.", _STEP),
    "publish_errors": ("Failed updates of the slices, by cause.", {"error_type": REASONS}),
    "api_requests": ("Requests to the API server; code `none` means no response.",
                     {"method": [method for method, _ in _USUAL_ANSWERS], "code": [_NO_ANSWER]}),
}  # fmt: skip
"""By name without `nvidia_dra_`: help, and the values of each label in addition to `driver`."""
_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float], _Labels]] = {
    "request_duration_seconds": ("Time to prepare or unprepare one claim.", _DURATION_BUCKETS, _OPERATION),
    "release_wait_seconds": ("Time that a Prepare waited for a device.",
                             _WAIT_BUCKETS, {}),
    "mig_duration_seconds": ("Time to change one MIG device, or MIG mode.", _DURATION_BUCKETS,
                             {"operation": _MIG_ACTIONS}),
    "step_duration_seconds": ("Time to do or undo one step of a claim, even if it failed.", _STEP_BUCKETS,
                              _STEP),
    "publish_lag_seconds": ("Time from a change on the node to the slices that show it.",
                            _LAG_BUCKETS, {}),
}  # fmt: skip


class Metrics:
    """All metrics of the process in a separate registry; all start at zero.

    Each scrape calls `prepared`, which returns the types of prepared devices, such as `mig`.
    """

    def __init__(self, driver: str, node: str, prepared: Callable[[], Iterable[str]]) -> None:
        # Otherwise every counter and histogram has an additional `_created` series, which Prometheus does not use.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._driver = driver
        errors = Counter(
            "nvidia_dra_scrape_errors",
            "Sources whose metrics were missing in a scrape.",
            ("driver", "source", "cause"),
            registry=None,
        )
        self.show = Views(driver, node, errors)
        # Registered first, so that a scrape shows its own errors.
        self.registry.register(self.show)
        self.registry.register(errors)
        self._counts = {
            name: self._shown(Counter, name, text, labels) for name, (text, labels) in _COUNTERS.items()
        }
        self._durations = {
            name: self._shown(partial(Histogram, buckets=buckets), name, text, labels)
            for name, (text, buckets, labels) in _HISTOGRAMS.items()
        }
        inflight = "gRPC calls in progress."
        self._inflight = self._shown(Gauge, "requests_inflight", inflight, {"operation": _OPERATIONS})
        for method, code in _USUAL_ANSWERS:
            self._counts["api_requests"].labels(driver, method, str(code))
        Info("nvidia_dra_build", "Version of gpu-dra-driver.", registry=self.registry).info(
            {"version": __version__}
        )
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.show.prepared_devices(prepared)

    def ended(self, operation: Operation, duration_s: float, error: Exception | None = None) -> None:
        self._durations["request_duration_seconds"].labels(self._driver, operation).observe(duration_s)
        if error is None:
            self._counts["requests"].labels(self._driver, operation).inc()
        else:
            self._counts[f"node_{operation}_errors"].labels(self._driver, reason_of(error)).inc()

    def waited(self, duration_s: float) -> None:
        self._durations["release_wait_seconds"].labels(self._driver).observe(duration_s)

    def mig_changed(self, action: str, duration_s: float, error: Exception | None) -> None:
        if error is None:
            self._durations["mig_duration_seconds"].labels(self._driver, action).observe(duration_s)
        else:
            self._counts["mig_errors"].labels(self._driver, action, reason_of(error)).inc()

    def step_ended(self, step: str, action: StepAction, duration_s: float, error: Exception | None) -> None:
        self._durations["step_duration_seconds"].labels(self._driver, step, action).observe(duration_s)
        if error is not None:
            self._counts["step_errors"].labels(self._driver, step, action).inc()

    def published(self, lag_s: float) -> None:
        """`lag_s` is the time since the change that the slices show."""
        self._durations["publish_lag_seconds"].labels(self._driver).observe(lag_s)

    def publish_failed(self, error: Exception) -> None:
        self._counts["publish_errors"].labels(self._driver, reason_of(error)).inc()

    def api_answered(self, method: str, code: int | None) -> None:
        """None as `code` means that the API server did not answer."""
        self._counts["api_requests"].labels(
            self._driver, method, _NO_ANSWER if code is None else str(code)
        ).inc()

    @contextmanager
    def in_flight(self, operation: Operation) -> Iterator[None]:
        gauge = self._inflight.labels(self._driver, operation)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def _shown(
        self, kind: Callable[..., _Shown], name: str, text: str, labels: Mapping[str, Sequence[str]]
    ) -> _Shown:
        metric = kind(f"nvidia_dra_{name}", text, ("driver", *labels), registry=self.registry)
        for values in product(*labels.values()):
            metric.labels(self._driver, *values)
        return metric
