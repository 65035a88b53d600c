"""Receipts of claims, against GPUs whose work is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.errors import StateError
from dra_driver.model.claim import ClaimRef, HeldDevice
from dra_driver.model.gpu import GpuLoad, GpuMeasure
from dra_driver.model.record import ClaimRecord
from dra_driver.reporting import receipts
from dra_driver.reporting.metrics import Metrics
from dra_driver.reporting.receipts import (
    RECEIPTS_FILE,
    Receipts,
    advice_of_page,
    ended_receipts,
    kept_advice,
    read_kept,
    receipt_store,
)
from dra_driver.reporting.rules.receipts import EndedPart, busy_between, ended, line
from dra_driver.reporting.usage import Wanted
from tests.fakes.samples import DRIVER, GPU_0, GPU_1, MIG_1G, MIG_3G, MIXED, NODE, hold, record, uuid
from tests.fakes.scrapes import by_label

IDLE_W, BUSY_W = 100.0, 500.0
SAMPLE_S, KEPT_SAMPLES = 0.5, 40
START = 1_800_000_000.0
FRACTION = 9984 / 81559
MIG_GIB = {MIG_1G: 10, MIG_3G: 40}
KNOWN = replace(MIXED, gpus=tuple(replace(gpu, multiprocessors=132) for gpu in MIXED.gpus))


class Node:
    """The GPUs of MIXED, which are busy at the times in `busy`, and the plugin, which looks every two seconds."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now = directory, START
        self.busy: dict[str, list[tuple[float, float]]] = {}
        self.silent: set[str] = set()
        self.counted_from = START - 1000
        self.memory, self.loads = 30 << 30, 0
        self.mig_percent: int | None = 50
        self.records: dict[str, ClaimRecord] = {}
        self.start()

    def start(self) -> None:
        self.receipts = Receipts(
            receipt_store(self.directory),
            self.measure,
            lambda: KNOWN,
            lambda: self.records,
            lambda _: None,
            lambda: self.loads,
            clock=lambda: self.now,
        )
        self.receipts.start()

    def measure(self, wanted: Wanted) -> dict[str, GpuMeasure]:
        return {gpu: self.reading(gpu, since) for gpu, (_, since) in wanted.items() if gpu not in self.silent}

    def reading(self, gpu: str, since: float) -> GpuMeasure:
        first = max(int(since / SAMPLE_S) + 1, int(self.now / SAMPLE_S) - KEPT_SAMPLES + 1)
        ends = [tick * SAMPLE_S for tick in range(first, int(self.now / SAMPLE_S) + 1)]
        samples = [(at, 100 * self.busy_s(gpu, at - SAMPLE_S, at) / SAMPLE_S) for at in ends]
        energy = IDLE_W * (self.now - self.counted_from) + (BUSY_W - IDLE_W) * self.busy_s(
            gpu, self.counted_from, self.now
        )
        mig = {hold(one).uuid: GpuLoad(4 << 30, gib << 30, self.mig_percent) for one, gib in MIG_GIB.items()}
        return GpuMeasure(self.now, energy, self.memory, 80 << 30, samples, mig)

    def busy_s(self, gpu: str, start: float, end: float) -> float:
        return sum(max(0.0, min(end, to) - max(start, since)) for since, to in self.busy.get(gpu, ()))

    def work(self, gpu: int, seconds: float) -> None:
        """The GPU is busy from now on."""
        self.busy.setdefault(uuid(gpu), []).append((self.now, self.now + seconds))

    def prepare(self, name: str, *devices: HeldDevice, namespace: str = "team") -> ClaimRef:
        made = record(*devices, uid=f"uid-{name}")
        made = replace(made, claim=replace(made.claim, ref=ClaimRef(namespace, name, f"uid-{name}")))
        self.records[made.ref.uid] = made
        self.receipts.prepared(made)
        return made.ref

    def unprepare(self, ref: ClaimRef) -> None:
        del self.records[ref.uid]
        self.receipts.unprepared(ref)

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 2.0)
            assert self.receipts.problems() == []

    def restart(self) -> None:
        self.receipts.stop()
        self.start()

    def parts(self) -> dict[str, EndedPart]:
        """The first part of each ended claim, by the claim's name."""
        self.wait(62)
        return {one.claim.name: ended(one).parts[0] for one in ended_receipts(read_kept(self.directory))}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def near(value: float) -> object:
    return pytest.approx(value, rel=0.05)


def test_claim_gets_what_its_gpu_did_and_an_idle_one_gets_no_busy_time(node: Node) -> None:
    train, idle = node.prepare("train", hold(GPU_0)), node.prepare("idle", hold(GPU_1))
    node.work(0, 300)
    node.wait(600)
    node.unprepare(train)
    node.unprepare(idle)
    parts = node.parts()
    assert parts["train"].busy == parts["train"].energy == parts["idle"].busy == "measured"
    assert (parts["train"].gpu_seconds, parts["train"].busy_gpu_seconds) == (near(600), near(300))
    assert parts["train"].energy_joules == near(600 * 100 + 300 * 400)
    assert (parts["train"].peak_memory_bytes, parts["train"].memory_bytes) == (30 << 30, 80 << 30)
    assert (parts["idle"].busy_gpu_seconds, parts["idle"].energy_joules) == (0, near(600 * 100))
    [text] = [line(one.parts[0]) for one in ended_receipts(read_kept(node.directory)) if one.claim == train]
    assert text == "1 x NVIDIA H100 80GB HBM3, 600 GPU-seconds, busy 50 %, peak 30.0 of 80 GiB, 0.0499 kWh"


def test_devices_of_one_product_are_one_part(node: Node) -> None:
    both = node.prepare("both", hold(GPU_0), hold(GPU_1), replace(hold(MIG_1G), admin_access=True))
    node.wait(3600)
    node.unprepare(both)
    part = node.parts()["both"]
    assert (part.count, part.gpu_seconds) == (2, near(7200))


def test_job_shorter_than_a_look_counts_and_its_energy_is_unknown_and_not_zero(node: Node) -> None:
    node.now += 0.2
    short = node.prepare("short", hold(GPU_0))
    node.work(0, 1.6)
    node.now += 1.6
    node.unprepare(short)
    node.now += 0.2
    part = node.parts()["short"]
    assert (part.gpu_seconds, part.busy_gpu_seconds) == (near(1.6), pytest.approx(1.6, abs=SAMPLE_S))
    assert (part.energy_joules, part.energy, part.peak_memory_bytes) == (None, "unknown", None)
    metrics = Metrics(DRIVER, NODE, list)
    metrics.show.receipts(node.receipts.sums)
    labels = "namespace", "product", "device_type"
    key = "team", "NVIDIA H100 80GB HBM3", "gpu"
    assert by_label(metrics, "nvidia_dra_claim_gpu_seconds_total", *labels) == {key: near(1.6)}
    busy = by_label(metrics, "nvidia_dra_claim_busy_gpu_seconds_total", *labels)
    assert busy == {key: pytest.approx(1.6, abs=SAMPLE_S)}
    assert by_label(metrics, "nvidia_dra_claim_energy_joules_total", *labels) == {}


def test_claims_that_share_a_gpu_get_equal_parts_as_estimates(node: Node) -> None:
    one, other = node.prepare("one", hold(GPU_0)), node.prepare("other", hold(GPU_0))
    node.work(0, 1000)
    node.wait(200)
    node.unprepare(other)
    node.wait(20)
    node.unprepare(one)
    parts = node.parts()
    assert (parts["other"].gpu_seconds, parts["other"].busy_gpu_seconds) == (near(100), near(100))
    assert (parts["other"].energy_joules, parts["other"].energy) == (near(100 * 500), "estimated")
    assert (parts["other"].busy, parts["other"].peak_memory_bytes) == ("estimated", None)
    assert (parts["one"].gpu_seconds, parts["one"].energy_joules) == (near(120), near(120 * 500))


@pytest.mark.parametrize("percent", [50, None])
def test_mig_device_is_a_part_of_its_gpu_and_its_energy_is_estimated(node: Node, percent: int | None) -> None:
    node.mig_percent = percent
    part = node.prepare("part", hold(MIG_1G))
    node.wait(1000)
    node.unprepare(part)
    found = node.parts()["part"]
    assert (found.profile, found.gpu_seconds) == ("1g.10gb", near(1000 * FRACTION))
    assert (found.energy_joules, found.energy) == (near(1000 * FRACTION * IDLE_W), "estimated")
    assert (found.peak_memory_bytes, found.memory_bytes) == (4 << 30, 10 << 30)
    if percent is None:
        assert (found.busy_gpu_seconds, found.busy) == (None, "unknown")
    else:
        assert (found.busy_gpu_seconds, found.busy) == (near(500 * FRACTION), "measured")


def test_gpu_without_an_answer_makes_only_its_own_claim_unknown(node: Node) -> None:
    node.silent.add(uuid(0))
    lost, well = node.prepare("lost", hold(GPU_0)), node.prepare("well", hold(GPU_1))
    node.wait(300)
    node.unprepare(lost)
    node.unprepare(well)
    parts = node.parts()
    assert (parts["lost"].gpu_seconds, parts["lost"].busy, parts["lost"].energy) == (
        near(300),
        "unknown",
        "unknown",
    )
    assert (parts["well"].busy, parts["well"].energy) == ("measured", "measured")


def test_energy_counter_that_starts_over_makes_the_energy_an_estimate(node: Node) -> None:
    train = node.prepare("train", hold(GPU_0))
    node.wait(100)
    node.counted_from = node.now  # the NVIDIA driver was loaded again
    node.wait(100)
    node.unprepare(train)
    part = node.parts()["train"]
    assert (part.energy_joules, part.energy) == (near(200 * IDLE_W), "estimated")


def test_reload_of_the_driver_between_two_readings_loses_only_the_energy_between_them(node: Node) -> None:
    """The energy counter is soon higher than before the reload, so that alone it would not tell."""
    node.counted_from = node.now
    train = node.prepare("train", hold(GPU_0))
    node.wait(12)  # read at 2 s and at 12 s
    node.counted_from, node.loads = node.now + 1, 1
    node.work(0, 8)
    node.wait(100)
    node.unprepare(train)
    node.wait(62)
    [found] = ended_receipts(read_kept(node.directory))
    lost_s = found.parts[0].gpu_s - found.parts[0].energy_known_s
    assert (lost_s, found.parts[0].energy_j) == (pytest.approx(12), pytest.approx(100 * IDLE_W))


def test_restart_continues_receipts_and_loses_nothing(node: Node) -> None:
    train, short = node.prepare("train", hold(GPU_0)), node.prepare("short", hold(GPU_1))
    node.work(0, 1000)
    node.wait(101)
    node.now += 1
    node.unprepare(short)
    node.restart()
    node.now += 8  # without a process
    node.wait(90)
    node.unprepare(train)
    parts = node.parts()
    assert (parts["train"].gpu_seconds, parts["train"].busy_gpu_seconds) == (near(200), near(200))
    assert parts["train"].energy_joules == near(200 * BUSY_W)
    assert parts["short"].gpu_seconds == near(102)
    assert len(parts) == 2


def test_crash_loses_busy_time_of_a_minute_and_no_energy(node: Node) -> None:
    train = node.prepare("train", hold(GPU_0))
    node.work(0, 1000)
    node.wait(62)
    node.wait(50)
    node.start()  # the last write was 50 s ago
    node.now += 8
    node.wait(100)
    node.unprepare(train)
    part = node.parts()["train"]
    assert (part.gpu_seconds, part.energy_joules) == (near(220), near(220 * BUSY_W))
    [written] = ended_receipts(read_kept(node.directory))
    assert 220 - 60 <= written.parts[0].busy_s <= 220
    assert part.busy == "estimated"


def test_claim_that_ends_before_a_new_process_has_looked_is_complete(node: Node) -> None:
    train = node.prepare("train", hold(GPU_0))
    node.work(0, 1000)
    node.wait(62)
    node.wait(50)
    node.start()  # after a crash; the last write was 50 s ago
    node.now += 8
    node.unprepare(train)
    node.now += 1
    part = node.parts()["train"]
    assert (part.gpu_seconds, part.energy_joules) == (near(120), near(120 * BUSY_W))
    [found] = ended_receipts(read_kept(node.directory))
    assert found.end == "ended"


def test_claim_that_ends_without_a_process_is_cut(node: Node) -> None:
    train = node.prepare("train", hold(GPU_0))
    node.wait(62)
    del node.records[train.uid]
    node.start()
    node.now += 3600
    node.parts()
    [found] = ended_receipts(read_kept(node.directory))
    assert (found.end, found.parts[0].gpu_s) == ("cut", near(62))


def test_claim_of_before_the_first_write_begins_when_it_was_prepared(node: Node) -> None:
    train = node.prepare("train", hold(GPU_0))
    node.records[train.uid] = replace(node.records[train.uid], prepared_at="2027-01-15T08:00:00+00:00")
    node.start()
    node.now += 100
    node.wait(4)
    node.unprepare(train)
    part = node.parts()["train"]
    assert (part.gpu_seconds, part.busy) == (near(104), "estimated")


def test_file_keeps_the_last_claims_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "_KEPT", 3)
    node.start()
    for number in range(5):
        ref = node.prepare(f"claim-{number}", hold(GPU_0))
        node.wait(2)
        node.unprepare(ref)
        node.wait(2)
    assert list(node.parts()) == ["claim-4", "claim-3", "claim-2"]
    node.restart()
    assert list(node.parts()) == ["claim-4", "claim-3", "claim-2"]


def test_namespaces_beyond_the_limit_share_a_series(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "_MAX_SERIES", 2)
    for name in ("a", "b", "c", "d"):
        ref = node.prepare(name, hold(GPU_0), namespace=name)
        node.wait(2)
        node.unprepare(ref)
        node.wait(2)
    assert {key[0]: part.gpu_s for key, part in node.receipts.sums().items()} == {"a": 2, "b": 2, "": 4}


def test_advice_of_the_page_and_of_the_file_are_the_same(node: Node) -> None:
    serve, part = node.prepare("serve", hold(GPU_0)), node.prepare("part", hold(MIG_3G))
    node.mig_percent = 20
    node.wait(700)
    node.unprepare(part)
    node.wait(70)
    page = advice_of_page(node.receipts.advice_as_json(DRIVER).decode())
    assert [(one.name, one.end, one.advice) for one in page] == [
        (serve.name, "running", "idle"), (part.name, "ended", "profile"),
    ]  # fmt: skip
    assert page[1].text.startswith(
        "1g.10gb is enough instead of 3g.40gb: it has 9.8 GiB, for a peak of 4.0 GiB"
    )
    written = kept_advice(read_kept(node.directory), DRIVER)
    assert [one for one in written if one.end == "ended"] == page[1:]
    assert [one.advice for one in written] == ["idle", "profile"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"advice": [{}]}', '{"advice": [{"advice": "new"}]}', "ok"])
def test_page_of_another_release_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="another release" if text[0] in "{[" else "Expecting value"):
        advice_of_page(text)


def test_idle_node_writes_nothing(node: Node) -> None:
    node.wait(300)
    assert not (node.directory / RECEIPTS_FILE).exists()


def test_damaged_file_is_set_aside_and_a_command_names_it(node: Node) -> None:
    (node.directory / RECEIPTS_FILE).write_text("{")
    with pytest.raises(StateError, match=RECEIPTS_FILE):
        read_kept(node.directory)
    node.start()
    node.unprepare(node.prepare("train", hold(GPU_0)))
    assert list(node.parts()) == ["train"]
    assert len(list(node.directory.glob(f"{RECEIPTS_FILE}.unreadable*"))) == 1
    assert json.loads((node.directory / RECEIPTS_FILE).read_text())["version"] == 1


@pytest.mark.parametrize(
    ("samples", "start", "end", "expected"),
    [
        ([], 0, 10, (0, 0)),
        ([(1, 100), (2, 100), (3, 0), (4, 0)], 0, 4, (2, 4)),
        ([(10, 100), (10.5, 100)], 0, 10.5, (2.0, 2.0)),  # nothing is known of the time before
        ([(1, 50), (2, 50)], 0, 3.5, (1.75, 3.5)),  # the first and last second are like the others
        ([(0, 0), (10, 0)], 0, 10, (0, 10)),  # an idle GPU, of which NVML keeps no samples
        ([(5, 100)], 20, 30, (0, 0)),
    ],
)
def test_busy_time_between_samples(
    samples: list[tuple[float, float]], start: float, end: float, expected: tuple[float, float]
) -> None:
    assert busy_between(samples, start, end) == pytest.approx(expected)
