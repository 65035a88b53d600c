from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from dra_driver import __version__
from dra_driver.errors import (
    ApiRejectedError,
    ApiUnavailableError,
    ClaimRefusedError,
    DeviceLostError,
    FatalError,
    InvalidConfigError,
    NotSupportedError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.services.metrics import CountedCalls, Metrics, reason_of

DRIVER, NODE = "gpu.nvidia.com", "node-a"
REASONS = {
    "api_unavailable", "api_rejected", "nvml_unavailable", "device_lost", "claim_refused", "invalid_config", "state",
    "busy", "internal",
}  # fmt: skip

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def kinds() -> list[str]:
    return []


@pytest.fixture
def metrics(kinds: list[str]) -> Metrics:
    return Metrics(DRIVER, NODE, lambda: iter(kinds))


def scraped(metrics: Metrics) -> Samples:
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return scraped(metrics)[(name, tuple(sorted(labels.items())))]


def labelled(samples: Samples, name: str) -> Iterator[dict[str, str]]:
    return (dict(labels) for found, labels in samples if found == name)


def test_every_series_of_the_incumbent_is_there_from_the_start_at_zero(metrics: Metrics) -> None:
    samples = scraped(metrics)
    for operation in ("prepare", "unprepare"):
        labels = (("driver", DRIVER), ("operation", operation))
        for name in (
            "nvidia_dra_requests_total", "nvidia_dra_requests_inflight", "nvidia_dra_request_duration_seconds_count",
            "nvidia_dra_request_duration_seconds_sum",
        ):  # fmt: skip
            assert samples[(name, labels)] == 0
        found = list(labelled(samples, f"nvidia_dra_node_{operation}_errors_total"))
        assert {entry["error_type"] for entry in found} == REASONS
        assert {entry["driver"] for entry in found} == {DRIVER}
    assert {
        (entry["node"], entry["driver"], entry["device_type"])
        for entry in labelled(samples, "nvidia_dra_prepared_devices")
    } == {(NODE, DRIVER, kind) for kind in ("gpu", "mig", "vfio", "unknown")}
    assert samples[("nvidia_dra_build_info", (("version", __version__),))] == 1


def test_buckets_hold_those_of_the_incumbent(metrics: Metrics) -> None:
    bounds = {
        float(entry["le"])
        for entry in labelled(scraped(metrics), "nvidia_dra_request_duration_seconds_bucket")
    }
    assert bounds >= {0.05 * 2**n for n in range(9)} | {math.inf}


def test_success_is_counted_and_timed(metrics: Metrics) -> None:
    metrics.prepared(0.004, None)
    metrics.prepared(0.2, None)
    metrics.unprepared(1.0, None)
    assert value(metrics, "nvidia_dra_requests_total", driver=DRIVER, operation="prepare") == 2
    assert value(metrics, "nvidia_dra_requests_total", driver=DRIVER, operation="unprepare") == 1
    seconds = value(metrics, "nvidia_dra_request_duration_seconds_sum", driver=DRIVER, operation="prepare")
    assert seconds == pytest.approx(0.204)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiUnavailableError("x"), "api_unavailable"),
        (ApiRejectedError("x", status=403), "api_rejected"),
        (NvmlUnavailableError("x"), "nvml_unavailable"),
        (DeviceLostError("x"), "device_lost"),
        (ClaimRefusedError("x"), "claim_refused"),
        (InvalidConfigError("x"), "invalid_config"),
        (StateError("x"), "state"),
        (RetryableError("x"), "busy"),
        (NotSupportedError("x"), "internal"),
        (FatalError("x"), "internal"),
        (ValueError("x"), "internal"),
    ],
)
def test_failure_is_counted_by_its_cause_and_not_as_a_request(
    metrics: Metrics, error: Exception, reason: str
) -> None:
    assert reason_of(error) == reason
    metrics.prepared(0.1, error)
    metrics.unprepared(0.1, error)
    for operation in ("prepare", "unprepare"):
        name = f"nvidia_dra_node_{operation}_errors_total"
        assert value(metrics, name, driver=DRIVER, error_type=reason) == 1
        assert value(metrics, "nvidia_dra_requests_total", driver=DRIVER, operation=operation) == 0


def test_calls_in_flight_go_up_and_down(metrics: Metrics) -> None:
    labels = {"driver": DRIVER, "operation": "prepare"}
    seen: list[float | None] = []

    class Service:
        def prepare(self, claims, deadline_s):
            seen.append(value(metrics, "nvidia_dra_requests_inflight", **labels))
            return {}

        def unprepare(self, claims, deadline_s):
            raise RuntimeError

    CountedCalls(Service(), metrics).prepare([], None)
    with pytest.raises(RuntimeError):
        CountedCalls(Service(), metrics).unprepare([], None)
    assert seen == [1]
    assert value(metrics, "nvidia_dra_requests_inflight", driver=DRIVER, operation="unprepare") == 0
    assert value(metrics, "nvidia_dra_requests_inflight", **labels) == 0


def test_prepared_devices_are_those_of_the_records_at_each_scrape(metrics: Metrics, kinds: list[str]) -> None:
    def prepared(kind: str) -> float:
        return value(metrics, "nvidia_dra_prepared_devices", node=NODE, driver=DRIVER, device_type=kind)

    kinds += ["gpu", "mig", "mig"]
    assert [prepared(kind) for kind in ("gpu", "mig", "vfio", "unknown")] == [1, 2, 0, 0]
    kinds.clear()
    assert prepared("mig") == 0


def test_text_is_valid_in_both_formats(metrics: Metrics) -> None:
    metrics.prepared(0.1, None)
    names = {family.name for family in parse_openmetrics(generate_openmetrics(metrics.registry).decode())}
    assert names >= {
        "nvidia_dra_requests", "nvidia_dra_request_duration_seconds", "nvidia_dra_requests_inflight",
        "nvidia_dra_node_prepare_errors", "nvidia_dra_node_unprepare_errors", "nvidia_dra_prepared_devices",
        "nvidia_dra_build", "process_resident_memory_bytes",
    }  # fmt: skip
    assert scraped(metrics)


def test_two_drivers_in_one_process_do_not_meet() -> None:
    first, second = Metrics("a", NODE, list), Metrics("b", NODE, list)
    first.prepared(0.1, None)
    assert value(second, "nvidia_dra_requests_total", driver="b", operation="prepare") == 0
