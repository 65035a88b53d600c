"""Whatever others may write in names: no path leaves its directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fuzz.inputs import names
from hypothesis import given

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
SPEC = {"cdiVersion": "0.5.0", "containerEdits": {}, "devices": []}


def attempts(base: Path, ref: ClaimRef, request: str, device: str) -> Iterator[Callable[[], object]]:
    """Everything that makes a path of a name and then writes, reads or removes."""
    claim = AllocatedClaim(
        ref, (DeviceResult(request, DRIVER, "node", device),), pod_claim_name=request or None
    )
    records, ledger = RecordStore(base / "claims"), MigLedger(base / "mig", "boot")
    specs, metadata = CdiDirectory(base / "cdi", DRIVER), MetadataFiles(base, base / "cdi", DRIVER)
    daemons, locks = DaemonRecords(MpsLayout(base / "mps")), ClaimLocks(base / "locks")
    owned = OwnedInstance(device, device, None, 19, "1g", Placement(0, 1), "boot", "created", 1, 0, None, 0)
    yield lambda: records.save(ClaimRecord(claim, "prepared", "boot", (), ()), durable=False)
    yield lambda: records.get(ref.uid)
    yield lambda: records.delete(ref.uid)
    yield lambda: specs.write(ref.uid, SPEC)
    yield lambda: specs.remove(ref.uid)
    yield lambda: metadata.write(claim, request, lambda _generation: b"{}")
    yield lambda: metadata.remove(claim)
    yield lambda: metadata.forget(ref.uid)
    yield lambda: ledger.save(owned)
    yield lambda: ledger.delete(device)
    yield lambda: ledger.own_mode(device, None)
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

    @given(names, names, names, names, names)
    def check(namespace: str, name: str, uid: str, request: str, device: str) -> None:
        for number, attempt in enumerate(attempts(base, ClaimRef(namespace, name, uid), request, device)):
            with suppress(DraDriverError):
                attempt()
                done.add(number)
        assert outside(root, base) == before

    check()
    good = ClaimRef("default", "claim", "6a1b2c3d-0000-4000-8000-000000000001")
    for number, attempt in enumerate(attempts(base, good, "gpu", "gpu-0")):
        attempt()
        done.add(number)
    assert outside(root, base) == before
    assert len(done) == 14, "each of them works with good names"
