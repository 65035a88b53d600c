"""Whatever others may write in names, parameters and files: no path leaves its directory, no parser breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fuzz import samples
from fuzz.loop import Target, Trace
from fuzz.parsers import targets
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.metadata_files import MetadataFiles
from dra_driver.errors import DraDriverError
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.records import RecordStore
from dra_driver.mig.ledger import MigLedger
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult
from dra_driver.model.mig import OwnedInstance, Placement
from dra_driver.model.record import ClaimRecord
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.records import DaemonRecords

DRIVER = "gpu.nvidia.com"
LINK = "leads-out"
PARTS = [
    "..",
    ".",
    "/",
    "a",
    "\0",
    "\n",
    "-",
    "_",
    "é",
    "%2f",
    LINK,
    "victim",
    "A",
    "0",
    "\u202e",
    "x" * 120,
]
hostile = st.lists(st.sampled_from(PARTS), max_size=5).map("".join) | st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | hostile | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile, inner, max_size=3),
    max_leaves=6,
)
STRUCTURED = (
    "claim", "parameters", "record", "record-file", "ledger-file", "health-file", "lock-file", "cdi-file",
    "metadata-file", "mps-record", "mps-message",
)  # fmt: skip


@pytest.fixture(scope="module")
def known(scratch: Path) -> dict[str, Target]:
    return {target.name: target for target in targets(scratch)}


def places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON document."""
    yield here
    inside = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in inside:
        yield from places(value, (*here, key))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = changed(document[place[0]], place[1:], value)
    return copy


@st.composite
def near(draw: st.DrawFn, name: str) -> bytes:
    """A good document of a target in which up to three values are others."""
    document = json.loads(draw(st.sampled_from(samples.seeds(name))))
    for _ in range(draw(st.integers(1, 3))):
        document = changed(document, draw(st.sampled_from(list(places(document)))), draw(values))
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_document_with_other_values_is_refused_or_understood(known: dict[str, Target], name: str) -> None:
    trace = Trace()

    @given(near(name))
    def check(content: bytes) -> None:
        # Raises for every error that the parser does not announce, and for work out of proportion.
        trace.run(known[name].run, content)

    check()
    # The refusals were reached, which good documents do not do.
    alone = Trace()
    for seed in samples.seeds(name):
        alone.run(known[name].run, seed)
    assert trace.seen - alone.seen


def attempts(base: Path, ref: ClaimRef, request: str, device: str) -> Iterator[Callable[[], object]]:
    """Everything that makes a path of a name and then writes, reads or removes."""
    claim = AllocatedClaim(
        ref, (DeviceResult(request, DRIVER, "node", device),), pod_claim_name=request or None
    )
    records, ledger = RecordStore(base / "claims"), MigLedger(base / "mig")
    specs, metadata = CdiDirectory(base / "cdi", DRIVER), MetadataFiles(base, base / "cdi", DRIVER)
    daemons, locks = DaemonRecords(MpsLayout(base / "mps")), ClaimLocks(base / "locks")
    owned = OwnedInstance(device, device, None, 19, "1g", Placement(0, 1), "boot", "created", 1, 0, None, 0)
    yield lambda: records.save(ClaimRecord(claim, "prepared", "boot", (), ()), durable=False)
    yield lambda: records.get(ref.uid)
    yield lambda: records.delete(ref.uid)
    yield lambda: specs.write(ref.uid, samples.SPEC)
    yield lambda: specs.remove(ref.uid)
    yield lambda: metadata.write(claim, request, lambda _generation: b"{}")
    yield lambda: metadata.remove(claim)
    yield lambda: metadata.forget(ref.uid)
    yield lambda: ledger.save(owned)
    yield lambda: ledger.delete(device)
    yield lambda: ledger.own_mode(device, None, "boot")
    yield lambda: ledger.disown_mode(device)
    yield lambda: daemons.remove(device)
    yield lambda: take_and_leave(locks, ref.uid)


def take_and_leave(locks: ClaimLocks, uid: str) -> None:
    with locks.hold(uid, 1.0) as turn:
        turn.note_unprepared()


def outside(root: Path, base: Path) -> dict[str, bytes | None]:
    """What lies beside the driver's directories."""
    found = (path for path in root.rglob("*") if not path.is_relative_to(base))
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def test_no_name_reads_writes_or_removes_outside(make_memory_path: Callable[[], Path]) -> None:
    root = make_memory_path()
    base = root / "plugin"
    for name in ("claims", "mig", "cdi", "mps", "locks"):
        (base / name).mkdir(parents=True)
        # A link that nobody follows by a name alone.
        (base / name / LINK).symlink_to(root / "elsewhere")
    for name in ("victim", "victim.json", "elsewhere/victim", "elsewhere/victim.json", "mode-victim.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("precious")
    before = outside(root, base)
    done = set()

    @given(hostile, hostile, hostile, hostile, hostile)
    def check(namespace: str, name: str, uid: str, request: str, device: str) -> None:
        for number, attempt in enumerate(attempts(base, ClaimRef(namespace, name, uid), request, device)):
            with suppress(DraDriverError):
                attempt()
                done.add(number)
        assert outside(root, base) == before

    check()
    good = ClaimRef("default", "claim", samples.UID)
    for number, attempt in enumerate(attempts(base, good, "gpu", "gpu-0")):
        attempt()
        done.add(number)
    assert outside(root, base) == before
    assert len(done) == 14, "each of them works with good names"
