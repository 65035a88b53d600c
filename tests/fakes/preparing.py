"""A node for tests of Prepare and Unprepare: real records, locks and CDI directory, data for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dra_driver.core.planning import Plan
from dra_driver.errors import ApiUnavailableError, ClaimRefusedError
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef
from dra_driver.model.inventory import Inventory
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, WriteCdiSpec, WriteDeviceMetadata
from dra_driver.services.executor import Executor
from dra_driver.services.metadatasteps import MetadataSteps
from dra_driver.services.preparer import Identity, Preparer
from dra_driver.services.steps import StepDispatcher
from dra_driver.services.waiting import Patience, Releases
from dra_driver.state.cdi_directory import CdiDirectory
from dra_driver.state.claimlocks import ClaimLocks
from dra_driver.state.locks import GpuLocks
from dra_driver.state.metadatafiles import MetadataFiles
from dra_driver.state.records import RecordStore
from tests.core.samples import DRIVER, NODE


class Crash(BaseException):
    """The process dies here: nothing after this line runs, no handler of ours either."""


class Claims:
    """The API server's claims by UID."""

    def __init__(self) -> None:
        self.allocated: dict[str, AllocatedClaim] = {}
        self.down = False
        self.reads: list[tuple[str, float]] = []
        self.looks: list[str] = []
        self.unused: set[str] = set()
        self.deallocated: set[str] = set()

    def add(self, claim: AllocatedClaim) -> ClaimRef:
        self.allocated[claim.ref.uid] = claim
        return claim.ref

    def read(self, ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        self.reads.append((ref.uid, timeout_s))
        if self.down:
            raise ApiUnavailableError("read claim: the API server does not answer")
        if ref.uid not in self.allocated:
            raise ClaimRefusedError(
                f"claim {ref.namespace}/{ref.name} does not exist in the API server; it was deleted"
            )
        return self.allocated[ref.uid]

    def look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """`unused` claims are reserved for nobody, `deallocated` ones have no allocation; the rest is in use."""
        self.looks.append(ref.uid)
        if self.down:
            raise ApiUnavailableError("look at claim: the API server does not answer")
        found = next((claim for claim in self.allocated.values() if claim.ref.name == ref.name), None)
        if found is None:
            return None
        uid = found.ref.uid
        allocated = frozenset((item.driver, item.pool, item.device) for item in found.results)
        is_used = uid not in self.unused
        return ClaimNow(
            uid, False, is_used, None if uid in self.deallocated else allocated, found.pods if is_used else ()
        )


@dataclass
class Devices:
    """Discovery with an inventory that tests set; `hidden` appears with the next scan."""

    inventory: Inventory | None
    hidden: Inventory | None = None
    problem: str | None = None
    scans: int = 0

    def unavailable(self) -> str | None:
        return self.problem

    def scan_now(self, timeout_s: float) -> None:
        self.scans += 1
        if self.hidden is not None:
            self.inventory, self.hidden, self.problem = self.hidden, None, None


class SpecSteps:
    """Steps that write a small file into the CDI directory; each can fail, die, or wait."""

    def __init__(self, specs: CdiDirectory) -> None:
        self._specs = specs
        self.on_do: Callable[[Plan], None] = lambda plan: None
        self.after_do: Callable[[Plan], None] = lambda plan: None
        self.on_undo: Callable[[ClaimRecord], None] = lambda record: None
        self.after_undo: Callable[[ClaimRecord], None] = lambda record: None

    def do(self, step: Step, plan: Plan) -> None:
        self.on_do(plan)
        uid = plan.claim.ref.uid
        names = sorted({planned.offered.name for planned in plan.devices})
        devices = [{"name": f"{uid}-{name}", "containerEdits": {"env": ["A=1"]}} for name in names]
        self._specs.write(uid, {"cdiVersion": "0.5.0", "kind": f"k8s.{DRIVER}/claim", "devices": devices})
        self.after_do(plan)

    def undo(self, step: Step, record: ClaimRecord) -> None:
        self.on_undo(record)
        self._specs.remove(record.ref.uid)
        self.after_undo(record)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return self._specs.read(record.ref.uid) is not None

    def forget(self, claim_uid: str) -> None:
        self._specs.remove(claim_uid)


@dataclass
class Outcomes:
    """What metrics are told."""

    told: list[tuple[str, str | None]] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        assert duration_s >= 0
        self.told.append(("prepare", None))

    def unprepared(self, ref: ClaimRef, duration_s: float) -> None:
        assert duration_s >= 0
        self.told.append(("unprepare", None))

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        assert duration_s >= 0
        self.waits.append(ref.uid)

    def failed(self, action: str, ref: ClaimRef, duration_s: float, error: Exception, told: str) -> None:
        assert ref.uid in told
        self.told.append((action, type(error).__name__))


class Node:
    """One instance of the plugin over a directory; `restarted` is the next one over the same."""

    def __init__(
        self,
        directory: Path,
        inventory: Inventory,
        *,
        boot_id: str = "boot-1",
        claims: Claims | None = None,
        metadata: tuple[str, ...] = (),
        patience: Patience = Patience(),  # noqa: B008  frozen
    ) -> None:
        self.directory = directory
        self.metadata = metadata
        self.patience = patience
        self.claims = claims or Claims()
        self.devices = Devices(inventory)
        self.records = RecordStore(directory / "claims")
        self.records.open(boot_id)
        self.locks = GpuLocks(directory / "locks")
        self.locks.open()
        self.claim_locks = ClaimLocks(directory / "locks")
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        self.steps = SpecSteps(self.specs)
        self.metadata_files = MetadataFiles(directory / "plugin", directory / "cdi", DRIVER)
        self.metadata_files.create()
        described = MetadataSteps(self.metadata_files, lambda: self.devices.inventory, lambda device: None)
        self.outcomes = Outcomes()
        self.executor = Executor(
            self.records,
            StepDispatcher({WriteCdiSpec: self.steps, WriteDeviceMetadata: described}),
            boot_id,
            # As for steps that change more than the spec, so that the tests see the syncs too.
            must_last=lambda plan: True,
            now=lambda: "2026-08-07T12:00:00.000+00:00",
        )
        self.releases = Releases(
            self.claims,
            self.records,
            DRIVER,
            on_wait=lambda ref: self.waited_for.append(ref.uid),
            users=lambda holder: self.users.get(holder.ref.uid),
            patience=patience,
        )
        self.waited_for: list[str] = []
        self.users: dict[str, str] = {}
        self.preparer = Preparer(
            Identity(DRIVER, NODE, metadata=metadata),
            self.claims,
            self.devices,
            self.records,
            self._orphans,
            self.claim_locks,
            self.locks,
            self.executor,
            self.outcomes,
            self.releases,
        )

    def restarted(self, *, boot_id: str = "boot-1", metadata: tuple[str, ...] | None = None) -> Node:
        assert self.devices.inventory is not None
        return Node(
            self.directory,
            self.devices.inventory,
            boot_id=boot_id,
            claims=self.claims,
            metadata=self.metadata if metadata is None else metadata,
            patience=self.patience,
        )

    def prepare(self, claim: AllocatedClaim, deadline_s: float | None = None) -> Any:
        self.claims.add(claim)
        return self.preparer.prepare([claim.ref], deadline_s)[claim.ref.uid]

    def unprepare(self, claim: AllocatedClaim) -> Any:
        return self.preparer.unprepare([claim.ref], None)[claim.ref.uid]

    def files(self) -> dict[str, bytes]:
        """Records and specs, which is all that a claim may leave; lock files and the boot's name stay on purpose."""
        return {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in sorted(self.directory.rglob("*"))
            if path.is_file() and path.parent.name != "locks" and path.name != ".boot"
        }

    def _orphans(self, records: Mapping[str, ClaimRecord]) -> Sequence[tuple[str, Sequence[str]]]:
        if not self.records.quarantined():
            return ()
        return [(uid, names) for uid, names in self.specs.list().items() if uid not in records]


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """What each call returned or raised, all run at once."""
    answers: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            answers[number] = calls[number]()
        except BaseException as error:
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return answers
