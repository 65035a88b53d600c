"""An older release and files of a newer one: the older instance of a rolling update, or the release after a rollback.

Every kind of file has a row in `ROWS`. The newer release raised the format number, or wrote a word that the older one
does not know.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import dra_driver
from dra_driver.base.fields import Codec, FileFormat, NewerFormatError
from dra_driver.base.file_lock import hold_file
from dra_driver.errors import NvmlDetachedError, RetryableError, StateError
from dra_driver.health.store import HealthStore, ServicedGpus
from dra_driver.inventory.detachment import Detachments
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.mig.layout_file import LayoutFile
from dra_driver.model.claim import ClaimRef
from dra_driver.model.maintenance import Detachment
from dra_driver.model.mig import GpuLayout
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import FailingClaim
from dra_driver.mps_host.host_files import LOCK_FILE, DaemonRecord, DaemonRecords, MpsHostFiles, mps_layout
from dra_driver.reporting.node_problems import Reported, read_problems
from dra_driver.reporting.receipts import KeptReceipts, receipt_store
from dra_driver.reporting.rules.advice import Size
from dra_driver.reporting.rules.receipts import Part, Receipt
from tests.fakes.waiting import eventually
from tests.health.test_store import KEPT
from tests.journal.test_ledger import CARD, ENTRY, GPU, MODE, ONE
from tests.journal.test_record_codec import MPS, RECORD
from tests.reporting.test_node_problems import UNKNOWN
from tests.reporting.test_node_problems import Bench as ProblemsBench

REF = ClaimRef("default", "reset", "uid-9")
RECEIPT = Receipt(REF, 1.0, 2.0, (Part("H100", "gpu", 1, gpu_s=1.0, peak_bytes=5),))
ENDED = Codec(Receipt).encode(replace(RECEIPT, end="ended"))
NEWER = "gpu-dra-driver 9.0.0 wrote the "
REMEDY = "install gpu-dra-driver 9.0.0 or newer"
REFUSED = pytest.raises(StateError, match=REMEDY)
UNKNOWN_WORD = "of-a-newer-release"


@cache
def formats() -> dict[str, FileFormat[Any]]:
    """Every kind of file that the package can read, by its name in errors."""
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(dra_driver.__path__, "dra_driver.")
        if not found.name.endswith("__main__")
    ]
    found = [one for module in modules for one in vars(module).values() if isinstance(one, FileFormat)]
    return {one.what: one for one in found}


@contextmanager
def host_of(plugin: Path, lock: bytes) -> Iterator[MpsHostFiles]:
    """The plugin's access to an MPS host, whose lock file has this content."""
    layout = mps_layout(plugin)
    layout.root.mkdir(exist_ok=True)
    with hold_file(layout.lock, 0.0, "the lock") as descriptor:
        os.pwrite(descriptor, lock, 0)
        yield MpsHostFiles(layout, wait_s=0.0)


def use_records(plugin: Path) -> None:
    records = RecordStore(plugin / "claims")
    records.open("boot-1")
    assert (records.all(), records.get("uid-1")) == ({}, None)
    with REFUSED:
        records.save(RECORD)


def use_ledger(plugin: Path) -> None:
    records = RecordStore(plugin / "claims")
    records.open("boot-1")
    ledger = Ledger(plugin / "ledger", records, "boot-1")
    ledger.open()
    assert (ledger.entries(), ledger.pending(), ledger.void()) == ([], [], set())
    assert Ledger(plugin / "ledger", records, "boot-2").void() == set(), "no one removes what a reboot undid"
    ledger.remove(ONE)
    ledger.change((), [ENTRY, CARD], [GPU])
    for write in (
        partial(ledger.add, ENTRY),
        partial(ledger.save, CARD),
        partial(ledger.refuse_newer, [GPU]),
    ):
        with REFUSED:
            write()
    ledger.refuse_newer(["GPU-other"])


def use_health(plugin: Path) -> None:
    store = HealthStore(plugin / "health.json")
    assert store.load() is None
    with REFUSED:
        store.save(KEPT)
    [problem] = store.problems()
    assert (problem.code, REMEDY in problem.text) == ("newer-files", True)


def use_serviced(plugin: Path) -> None:
    serviced = ServicedGpus(plugin, "boot-1")
    for use in (serviced.times, partial(serviced.add, GPU, 5)):
        with REFUSED:
            use()


def use_detachments(plugin: Path) -> None:
    detachments = Detachments(plugin, "boot-1", clock=lambda: 1000.0)
    assert re.search(r"^NVML is closed until .* at the latest \(a newer release", detachments.problem() or "")
    with REFUSED:
        detachments.begin(60)
    with pytest.raises(NvmlDetachedError):
        detachments.begin(60, replace(REF, uid="uid-2"))
    assert not detachments.end_of(replace(REF, uid="uid-2"))


def use_layouts(plugin: Path) -> None:
    layouts = LayoutFile(plugin / "mig-layout.json")
    assert layouts.load() == ()
    layouts.save([GpuLayout(GPU, "a", "applied", "", 1)])
    assert len(LayoutFile(plugin / "mig-layout.json").load()) == 1


def use_receipts(plugin: Path) -> None:
    store = receipt_store(plugin)
    store.load()
    assert store.get("receipts") is None
    with REFUSED:
        store.write("receipts", KeptReceipts(), durable=False, whole=True)
    [problem] = store.problems()
    assert (problem.code, REMEDY in problem.text) == ("newer-files", True)


def use_lock(plugin: Path) -> None:
    with host_of(plugin, (plugin / "mps/host.lock").read_bytes()) as host:
        assert "is from a different release than gpu-dra-driver" in (host.host_problem() or "")


def use_wanted(plugin: Path) -> None:
    with host_of(plugin, LOCK_FILE.write(None)) as host, REFUSED:
        host.ensure(MPS, 1.0)


def use_status(plugin: Path) -> None:
    with host_of(plugin, LOCK_FILE.write(None)) as host:
        mps_layout(plugin).wanted_directory.mkdir()
        with pytest.raises(RetryableError, match=REMEDY):
            host.ensure(MPS, 0.1)


def use_daemon_records(plugin: Path) -> None:
    records = DaemonRecords(mps_layout(plugin))
    assert records.all() == {}
    for use in (
        partial(records.refuse_newer, MPS.device),
        partial(records.save, DaemonRecord(MPS)),
    ):
        with REFUSED:
            use()


def use_problems(plugin: Path) -> None:
    with REFUSED:
        read_problems(plugin)
    bench = ProblemsBench(plugin)
    bench.found = UNKNOWN
    bench.made.turn()
    eventually(lambda: reads(partial(read_problems, plugin)))


def reads(call: Callable[[], object]) -> bool:
    with suppress(StateError):
        call()
        return True
    return False


@dataclass(frozen=True)
class Row:
    """A kind of file: where it is below the plugin's directory, what it may contain, and how an older release uses it.
    `stays` is False for a report, which the release that works replaces by its own.
    """

    path: str
    value: Any
    use: Callable[[Path], None]
    stays: bool = True


ROWS = {
    "claim record": Row("claims/uid-1.json", RECORD, use_records),
    "ledger": Row(f"ledger/{GPU}.json", (ENTRY, ONE, MODE, CARD), use_ledger),
    "health file": Row("health.json", KEPT, use_health),
    "file of serviced GPUs": Row("serviced.json", ("boot-1", {GPU: 3}), use_serviced),
    "detach file": Row("detach.json", Detachment("boot-1", 1e9, "later", REF, (GPU,)), use_detachments),
    "MIG layout file": Row(
        "mig-layout.json", (GpuLayout(GPU, "b", "waiting", "", 2),), use_layouts, stays=False
    ),
    "file of receipts": Row(
        "receipts.json",
        KeptReceipts(
            (RECEIPT,), (ENDED,), {GPU: (5.0, 7.0)}, {"H100": (Size(9984 << 20, 0.125, "1g.10gb"),)}
        ),
        use_receipts,
    ),
    "lock file": Row("mps/host.lock", None, use_lock),
    "MPS daemon request": Row("mps/host.wanted/gpu-1.json", MPS, use_wanted),
    "MPS status file": Row("mps/host.status/gpu-1.json", MpsDaemonStatus("gpu-1", "ready", MPS), use_status),
    "MPS record": Row("mps/gpu-1.json", DaemonRecord(MPS), use_daemon_records),
    "list of problems": Row(
        "problems.json",
        (Reported((), (FailingClaim(REF, "prepare", 1, 2, 3, "it fails"),)), 5),
        use_problems,
        stays=False,
    ),
}


def test_every_kind_of_file_has_a_row() -> None:
    assert set(ROWS) == set(formats())


def document_of(what: str) -> dict[str, Any]:
    """A file as the newer release writes it, without anything that the older one does not know."""
    made = formats()[what]
    document: dict[str, Any] = json.loads(made.write(ROWS[what].value))
    assert made.read(json.dumps(document).encode()) == ROWS[what].value
    return document | {"release": "9.0.0", "ofANewerRelease": [{}]}


def texts_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """The container and key of each text in a document."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, one in entries:
        if isinstance(one, str):
            yield value, key
        yield from texts_in(one)


def newer_contents(what: str) -> Iterator[bytes]:
    """The file with a higher number, and with each unknown word that it may have."""
    made, document = formats()[what], document_of(what)
    yield json.dumps(document | {"version": made.number + 1}).encode()
    yield json.dumps({"version": made.number + 1, "release": "9.0.0"}).encode()
    for container, key in texts_in(document):
        known, container[key] = container[key], UNKNOWN_WORD
        content = json.dumps(document).encode()
        container[key] = known
        try:
            made.read(content)
        except NewerFormatError:
            if key != "release":
                yield content


@pytest.mark.parametrize("what", ROWS)
def test_unknown_word_and_higher_number_are_newer_and_never_damage(what: str) -> None:
    made = formats()[what]
    for content in newer_contents(what):
        with pytest.raises(NewerFormatError) as caught:
            made.read(content)
        assert str(caught.value).startswith(
            f"{NEWER}{what}, which release {dra_driver.__version__} cannot read: "
        )
        assert str(caught.value).endswith(f"; {REMEDY}")
    assert made.read(json.dumps(document_of(what)).encode()) == ROWS[what].value, (
        "an unknown field is ignored"
    )


@pytest.mark.parametrize("what", ROWS)
def test_older_release_keeps_the_file_of_a_newer_one(what: str, tmp_path: Path) -> None:
    row = ROWS[what]
    for number, content in enumerate(newer_contents(what)):
        plugin = tmp_path / str(number)
        file = plugin / row.path
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        now = time.time()
        os.utime(file, (now, now))
        row.use(plugin)
        assert (file.read_bytes() == content) == row.stays
        assert not list(plugin.rglob("*.unreadable*"))
