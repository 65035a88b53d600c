"""What the plugin counts and times; what a scrape gets is valid in both formats, complete and documented."""

import math
import re
import subprocess
import sys
from typing import get_args

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from dra_driver import __version__, errors
from dra_driver.claims.calls import KUBELET_DEADLINE_S
from dra_driver.errors import ApiRejectedError, RetryableError
from dra_driver.journal.executor import StepDispatcher
from dra_driver.model.claim import AllocatedClaim, ClaimRef, PodRef
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import STEPS, RunMps, SetTimeSlice, WriteCdiSpec
from dra_driver.reporting.metrics import Metrics, Operation, reason_of
from tests.fakes.samples import DRIVER, GPU_0, NODE, claim, hold, plan, record
from tests.fakes.scrapes import (
    DOCUMENT,
    by_label,
    complete_metrics,
    labelled,
    labels_of_samples,
    scraped,
    table,
    value,
)
from tests.fakes.tables import IsGenerated, tabled

REASONS = {
    "api_unavailable", "api_rejected", "nvml_unavailable", "device_lost", "claim_refused", "invalid_config", "state",
    "busy", "internal",
}  # fmt: skip


@pytest.fixture
def kinds() -> list[str]:
    return []


@pytest.fixture
def metrics(kinds: list[str]) -> Metrics:
    return Metrics(DRIVER, NODE, lambda: iter(kinds))


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
    assert max(bounds - {math.inf}) == KUBELET_DEADLINE_S


def test_success_is_counted_and_timed(metrics: Metrics) -> None:
    metrics.ended("prepare", 0.004)
    metrics.ended("prepare", 0.2)
    metrics.ended("unprepare", 1.0)
    assert value(metrics, "nvidia_dra_requests_total", driver=DRIVER, operation="prepare") == 2
    assert value(metrics, "nvidia_dra_requests_total", driver=DRIVER, operation="unprepare") == 1
    seconds = value(metrics, "nvidia_dra_request_duration_seconds_sum", driver=DRIVER, operation="prepare")
    assert seconds == pytest.approx(0.204)


@tabled("name", "reason")
def test_failure_is_counted_by_its_cause_and_not_as_a_request(
    metrics: Metrics, name: str, reason: str
) -> None:
    more = {"status": 403} if name == "ApiRejectedError" else {}
    error = getattr(errors, name, ValueError)("x", **more)
    assert reason_of(error) == reason
    metrics.ended("prepare", 0.1, error)
    metrics.ended("unprepare", 0.1, error)
    for operation in ("prepare", "unprepare"):
        name = f"nvidia_dra_node_{operation}_errors_total"
        assert value(metrics, name, driver=DRIVER, error_type=reason) == 1
        assert value(metrics, "nvidia_dra_requests_total", driver=DRIVER, operation=operation) == 0


def test_calls_in_flight_go_up_and_down(metrics: Metrics) -> None:
    labels = {"driver": DRIVER, "operation": "prepare"}
    with metrics.in_flight("prepare"):
        assert value(metrics, "nvidia_dra_requests_inflight", **labels) == 1
    with pytest.raises(RuntimeError), metrics.in_flight("unprepare"):
        raise RuntimeError
    assert value(metrics, "nvidia_dra_requests_inflight", driver=DRIVER, operation="unprepare") == 0
    assert value(metrics, "nvidia_dra_requests_inflight", **labels) == 0


def test_prepared_devices_are_those_of_the_records_at_each_scrape(metrics: Metrics, kinds: list[str]) -> None:
    def prepared(kind: str) -> float:
        return value(metrics, "nvidia_dra_prepared_devices", node=NODE, driver=DRIVER, device_type=kind)

    kinds += ["gpu", "mig", "mig"]
    assert [prepared(kind) for kind in ("gpu", "mig", "vfio", "unknown")] == [1, 2, 0, 0]
    kinds[:] = ["quantum"]
    assert [prepared(kind) for kind in ("gpu", "mig", "vfio", "unknown")] == [0, 0, 0, 1]


def test_each_observation_is_in_its_histogram(metrics: Metrics) -> None:
    def seen(name: str) -> tuple[float, float]:
        return value(metrics, f"{name}_count", driver=DRIVER), value(metrics, f"{name}_sum", driver=DRIVER)

    assert seen("nvidia_dra_release_wait_seconds") == seen("nvidia_dra_publish_lag_seconds") == (0, 0)
    metrics.waited(3)
    metrics.published(0.5)
    metrics.published(1)
    assert seen("nvidia_dra_release_wait_seconds") == (1, 3)
    assert seen("nvidia_dra_publish_lag_seconds") == (2, 1.5)


def test_failed_attempts_to_publish_are_counted_by_cause(metrics: Metrics) -> None:
    name = "nvidia_dra_publish_errors_total"
    assert by_label(metrics, name, "error_type") == {(reason,): 0 for reason in REASONS}
    metrics.publish_failed(ApiRejectedError("x", status=403))
    assert value(metrics, name, driver=DRIVER, error_type="api_rejected") == 1


def test_requests_to_the_api_server_are_counted_by_method_and_code(metrics: Metrics) -> None:
    name = "nvidia_dra_api_requests_total"
    methods = ("GET", "POST", "PUT", "PATCH", "DELETE")
    assert set(by_label(metrics, name, "method", "code")) == {
        pair
        for method in methods
        for pair in ((method, "201" if method == "POST" else "200"), (method, "none"))
    }
    for code in (200, 200, 409, None):
        metrics.api_answered("PUT", code)
    found = by_label(metrics, name, "method", "code")
    assert [found["PUT", code] for code in ("200", "409", "none")] == [2, 1, 1]


def test_every_kind_of_step_has_its_own_name_from_the_start(metrics: Metrics) -> None:
    kinds = {kind.tag for kind in STEPS}
    assert len(kinds) == len(STEPS)
    assert kinds >= {"set_time_slice", "run_mps", "create_mig", "leave_mig_mode", "write_cdi_spec"}
    for name in ("nvidia_dra_step_duration_seconds_count", "nvidia_dra_step_errors_total"):
        assert by_label(metrics, name, "step", "action") == {
            (kind, action): 0 for kind in kinds for action in ("do", "undo")
        }


class Runner:
    """Does nothing, or fails, while the clock advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    def do(self, step, plan):
        self._called("do", step, plan)

    def undo(self, step, ref):
        self._called("undo", step, ref)

    def in_place(self, step, record):
        self._called("in_place", step, record)
        return False

    def _called(self, *call: object) -> None:
        self.calls.append(call)
        self.now += 0.25
        if self.error is not None:
            raise self.error


def test_steps_are_timed_by_kind_whether_they_fail_or_not(metrics: Metrics) -> None:
    runner, kept = Runner(), record(hold(GPU_0))
    made = plan(claim(GPU_0))
    observed = StepDispatcher(dict.fromkeys(STEPS, runner), metrics.step_ended, lambda: runner.now)
    time_slice, daemon = SetTimeSlice("GPU-1", 2), RunMps(MpsDaemonSpec(GPU_0, "GPU-1", "gpu", "GPU-1"))
    observed.do(WriteCdiSpec(), made)
    observed.undo(time_slice, kept.ref)
    assert not observed.in_place(daemon, kept)
    runner.error = RetryableError("x")
    with pytest.raises(RetryableError):
        observed.do(WriteCdiSpec(), made)
    with pytest.raises(RetryableError):
        observed.undo(daemon, kept.ref)
    assert [call[0] for call in runner.calls] == ["do", "undo", "in_place", "do", "undo"]
    assert runner.calls[1] == ("undo", time_slice, kept.ref)
    spec, slices, other = (("write_cdi_spec", "do"), ("set_time_slice", "undo"), ("run_mps", "undo"))
    counts = by_label(metrics, "nvidia_dra_step_duration_seconds_count", "step", "action")
    assert {key: count for key, count in counts.items() if count} == {spec: 2, slices: 1, other: 1}
    assert by_label(metrics, "nvidia_dra_step_duration_seconds_sum", "step", "action")[spec] == 0.5
    errors = by_label(metrics, "nvidia_dra_step_errors_total", "step", "action")
    assert {key: count for key, count in errors.items() if count} == {spec: 1, other: 1}


def test_nothing_is_reported_when_a_series_was_made(metrics: Metrics) -> None:
    assert not [name for name, _ in scraped(metrics) if name.endswith("_created")]


# Their values come from outside or from what happens, so no series can be there before.
OPEN = {
    "nvidia_dra_claim_info", "nvidia_dra_gpu_severity", "nvidia_dra_gpu_reason", "nvidia_dra_gpu_monitored",
    "nvidia_dra_gpu_xids_total", "nvidia_dra_mig_devices", "nvidia_dra_mig_severity",
}  # fmt: skip


def test_both_formats_say_the_same() -> None:
    metrics = complete_metrics()
    for operation in get_args(Operation):
        metrics.ended(operation, 0.1)
        metrics.ended(operation, 0.1, ValueError())
    metrics.waited(1)
    metrics.published(1)
    texts = generate_latest(metrics.registry).decode(), generate_openmetrics(metrics.registry).decode()
    plain, strict = (
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.startswith(("process_", "python_"))
        }
        for families in (parse(texts[0]), parse_openmetrics(texts[1]))
    )
    assert plain == strict
    assert len(plain) > 300


def test_names_and_texts_follow_the_conventions() -> None:
    for family in complete_metrics().registry.collect():
        if not family.name.startswith(("process_", "python_")):
            assert re.fullmatch(r"nvidia_dra_[a-z]+(_[a-z]+)*", family.name)
            assert re.fullmatch(r"[A-Za-z0-9][^\n]+\.", family.documentation)
            assert family.type in ("counter", "gauge", "histogram", "info")
            assert family.type != "histogram" or family.name.endswith("_seconds")


def test_names_of_others_cannot_break_the_text() -> None:
    odd = 'a"b\\c\nd{}é'
    kept = record(hold(GPU_0))
    claim = AllocatedClaim(ClaimRef(odd, odd, "uid-1"), kept.claim.results, pods=(PodRef(odd, odd),))
    metrics = Metrics(DRIVER, NODE, list)
    metrics.show.claims(
        lambda: [ClaimRecord(claim, "prepared", "boot-1", kept.devices, ())], lambda _: None, lambda: None
    )
    families = parse_openmetrics(generate_openmetrics(metrics.registry).decode())
    (found,) = (sample for family in families for sample in family.samples if "claim" in sample.labels)
    assert [found.labels[name] for name in ("namespace", "claim", "pod")] == [odd] * 3


def test_all_that_happens_later_is_there_at_zero_from_the_start() -> None:
    fresh = Metrics(DRIVER, NODE, list)
    series = {key for key in scraped(complete_metrics()) if key[0].startswith("nvidia_dra_")}
    views = {name for name, _ in series} - {name for name, _ in scraped(fresh)}
    assert views >= OPEN
    fresh.show.value("readiness", "ready", lambda: True)
    fresh.show.mps(list)
    started = {key for key in scraped(fresh) if key[0].startswith("nvidia_dra_")}
    lacking = {name for name, _ in series - started} - OPEN
    assert lacking <= views | {"nvidia_dra_scrape_errors_total"}
    moving = ("_total", "_count", "_sum", "_bucket")
    assert {
        value
        for (name, _), value in scraped(fresh).items()
        if name.startswith("nvidia") and name.endswith(moving)
    } == {0}


def test_the_number_of_series_of_an_idle_node_is_small() -> None:
    assert len(scraped(Metrics(DRIVER, NODE, list))) < 500


def test_table_of_the_document_is_the_generated_one(is_generated: IsGenerated) -> None:
    is_generated(DOCUMENT, "metrics", table())


def test_every_label_is_bounded_in_the_document() -> None:
    text = DOCUMENT.read_text()
    section = text[text.index("## Labels") :].partition("\n## ")[0]
    explained = set(re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE))
    names = {name for cell in explained for name in cell.split(", ")}
    used = set().union(
        *(
            labels
            for name, labels in labels_of_samples(complete_metrics()).items()
            if name.startswith("nvidia_")
        )
    )
    assert used - {"le"} <= names


def test_nothing_heavy_is_imported_for_the_metrics() -> None:
    heavy = {"grpc", "pynvml", "urllib3", "yaml"}
    code = f"import dra_driver.reporting.metrics, sys; print(*{heavy!r} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []
