"""What a scrape gets is valid in both formats, complete from the start, and documented."""

from __future__ import annotations

import re
import subprocess
import sys

from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from dra_driver.model.claim import AllocatedClaim, ClaimRef, PodRef
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting.metrics import Metrics
from tests.fakes.samples import DRIVER, GPU_0, NODE, hold, record
from tests.fakes.scrapes import DOCUMENT, complete_metrics, generated, labels_of_samples, scraped

# Their values come from outside or from what happens, so no series can be there before.
OPEN = {
    "nvidia_dra_claim_info", "nvidia_dra_gpu_severity", "nvidia_dra_gpu_reason", "nvidia_dra_gpu_monitored",
    "nvidia_dra_gpu_xids_total", "nvidia_dra_mig_devices", "nvidia_dra_mig_severity",
}  # fmt: skip


def test_both_formats_say_the_same() -> None:
    metrics = complete_metrics()
    for observe in (metrics.prepared, metrics.unprepared):
        observe(0.1, None)
        observe(0.1, ValueError())
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
        lambda: [ClaimRecord(claim, "prepared", "boot-1", kept.devices, ())],
        lambda _: None,
        lambda: None,
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
    assert len(scraped(Metrics(DRIVER, NODE, list))) < 450


def test_table_of_the_document_is_the_generated_one() -> None:
    text = DOCUMENT.read_text()
    assert text == generated(text), "run `python -m tests.fakes.scrapes`"


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
