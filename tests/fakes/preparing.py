"""A node for tests of Prepare and Unprepare: real records, locks and CDI directory, data for the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.metadata_files import MetadataFiles, MetadataSteps
from dra_driver.cdi.spec_step import ExtraDeviceFinder
from dra_driver.claims.calls import PrepareAttempt
from dra_driver.claims.gpu_processes import InUse
from dra_driver.claims.lifecycle import ClaimLifecycle
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.claims.rules.plan import Identity
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.waiting import Waiter, WaitTimeouts
from dra_driver.errors import ApiUnavailableError, ClaimRefusedError
from dra_driver.host.device_nodes import LstatDeviceNodeReader
from dra_driver.inventory.detachment import Detachments
from dra_driver.inventory.maintenance_step import MaintenanceSteps
from dra_driver.journal.executor import StepDispatcher
from dra_driver.model.claim import AllocatedClaim, ClaimNow, ClaimRef, Failed
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.model.host import HostPaths
from dra_driver.model.inventory import Inventory
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, StartMaintenance, Step, WriteCdiSpec, WriteDeviceMetadata
from tests.fakes.journal import Journaled
from tests.fakes.samples import DRIVER, NODE
from tests.fakes.waiting import PATIENCE_S


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

    def current(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """`unused` claims are not reserved, `deallocated` ones have no allocation; all others are in use."""
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
    """Discovery with an inventory that tests set; `hidden` appears with the next scan while NVML is not closed."""

    inventory: Inventory | None
    hidden: Inventory | None = None
    problem: str | None = None
    scans: int = 0
    detachments: Detachments | None = None

    def latest(self) -> Inventory | None:
        return self.inventory

    def unavailable(self) -> str | None:
        return self.problem

    def scan_now(self, timeout_s: float) -> None:
        self.scans += 1
        is_closed = self.detachments is not None and self.detachments.problem() is not None
        if self.hidden is not None and not is_closed:
            self.inventory, self.hidden, self.problem = self.hidden, None, None


class SpecSteps:
    """Steps that write a small file into the CDI directory; each can fail, die, or wait."""

    def __init__(self, specs: CdiDirectory) -> None:
        self._specs = specs
        self.on_do: Callable[[Plan], None] = lambda plan: None
        self.after_do: Callable[[Plan], None] = lambda plan: None
        self.on_undo: Callable[[ClaimRef], None] = lambda ref: None
        self.after_undo: Callable[[ClaimRef], None] = lambda ref: None

    def do(self, step: Step, plan: Plan) -> None:
        self.on_do(plan)
        uid = plan.claim.ref.uid
        names = sorted({planned.offered.name for planned in plan.devices})
        devices = [{"name": f"{uid}-{name}", "containerEdits": {"env": ["A=1"]}} for name in names]
        spec = {
            "cdiVersion": "0.5.0",
            "kind": f"k8s.{DRIVER}/claim",
            "containerEdits": {},
            "devices": devices,
        }
        self._specs.write(uid, spec)
        self.after_do(plan)

    def undo(self, step: Step, ref: ClaimRef) -> None:
        self.on_undo(ref)
        self._specs.remove(ref.uid)
        self.after_undo(ref)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return self._specs.read(record.ref.uid) is not None


@dataclass
class Outcomes:
    """What metrics are told."""

    reported: list[tuple[str, str | None]] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    @contextmanager
    def in_flight(self, action: str, claims: Sequence[ClaimRef]) -> Iterator[None]:
        self.calls.append(f"{action} begins")
        yield
        self.calls.append(f"{action} ends")

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        assert duration_s >= 0
        self.reported.append(("prepare", None))

    def unprepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        assert duration_s >= 0
        self.reported.append(("unprepare", None))

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        assert duration_s >= 0
        self.waits.append(ref.uid)

    def failed(self, action: str, ref: ClaimRef, duration_s: float, error: Exception, reported: str) -> None:
        assert ref.uid in reported
        self.reported.append((action, type(error).__name__))

    def recovered(self, ref: ClaimRef, why: str) -> None:
        self.reported.append(("recovered", why))

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        self.reported.append(("still in use", text))


@dataclass
class Users:
    """What computes on the devices of claims, by their UID."""

    texts: dict[str, str] = field(default_factory=dict)

    def describe(self, record: ClaimRecord) -> str | None:
        return self.texts.get(record.ref.uid)

    def of(self, record: ClaimRecord) -> InUse | None:
        text = self.describe(record)
        return None if text is None else InUse(frozenset({1}), text)


def no_programs() -> DriverPrograms:
    """A host on which the NVIDIA driver's programs are not installed."""
    return DriverPrograms("/", {}, "")


def claims_of(
    node: Any,
    identity: Identity,
    devices: Any,
    users: Any,
    timeouts: WaitTimeouts = WaitTimeouts(),  # noqa: B008
) -> ClaimLifecycle:
    """Prepare and Unprepare over the records, locks, specs and executor of a node."""
    parts = ClaimLifecycle(
        identity,
        discovery=devices,
        records=node.records,
        without_record=SpecsWithoutRecord(node.records, node.specs),
        executor=node.executor,
        cleaner=node.cleaner,
        lookup=node.claims,
        users=users,
        extra_devices=ExtraDeviceFinder(HostPaths(), no_programs, nodes=LstatDeviceNodeReader()),
        observer=node.outcomes,
        pods_run=lambda _record: None,
        find_node=lambda: None,
        setting_for_lost=lambda: None,
        layouts=None,
        timeouts=timeouts,
    )
    parts.admission.open()
    return parts


def maintenance_steps(node: Journaled, directory: Path) -> MaintenanceSteps:
    """Of a node whose slices never have a device, and whose NVML no one has open."""
    return MaintenanceSteps(
        Detachments(directory, node.boot_id, clock=lambda: 0.0),
        node.records,
        node.ledger,
        is_offered=lambda _gpus: False,
        publish=lambda: None,
        rescan=lambda: None,
    )


def noted_waits(waiter: Waiter) -> list[str]:
    """From now on it has the UIDs of the claims whose Prepare waits."""
    waiting: list[str] = []
    sleep = waiter._sleep

    def noted(attempt: PrepareAttempt, seconds: float) -> None:
        waiting.append(attempt.ref.uid)
        try:
            sleep(attempt, seconds)
        finally:
            waiting.remove(attempt.ref.uid)

    waiter._sleep = noted  # type: ignore[method-assign]
    return waiting


class Node(Journaled):
    """One instance of the plugin over a directory; `restarted` is the next one over the same."""

    def __init__(
        self,
        directory: Path,
        inventory: Inventory,
        *,
        boot_id: str = "boot-1",
        claims: Claims | None = None,
        metadata: tuple[str, ...] = (),
        patience: WaitTimeouts = WaitTimeouts(),  # noqa: B008  frozen
    ) -> None:
        self.directory = directory
        self.metadata = metadata
        self.patience = patience
        self.claims = claims or Claims()
        self.devices = Devices(inventory)
        self.open_journal(directory, boot_id)
        self.specs = CdiDirectory(directory / "cdi", DRIVER)
        self.specs.create()
        self.steps = SpecSteps(self.specs)
        self.metadata_files = MetadataFiles(directory / "plugin", directory / "cdi", DRIVER)
        self.metadata_files.create()
        described = MetadataSteps(self.metadata_files, self.devices, None)
        self.outcomes = Outcomes()
        mps = SpecSteps(self.specs)  # of which no test wants more than that it runs
        self.work_with(
            StepDispatcher(
                {
                    WriteCdiSpec: self.steps,
                    WriteDeviceMetadata: described,
                    RunMps: mps,
                    StartMaintenance: maintenance_steps(self, directory),
                }
            )
        )
        self.waited_for: list[str] = []
        self.users: dict[str, str] = {}
        self.serve(Identity(DRIVER, NODE, metadata=metadata))

    def serve(self, identity: Identity) -> None:
        """Put Prepare and Unprepare together over what the node has now."""
        parts = claims_of(self, identity, self.devices, Users(self.users), self.patience)
        parts.waiter.on_leaving = lambda ref: self.waited_for.append(ref.uid)
        self.service, self.preparer, self.unpreparer = parts.service, parts.preparer, parts.unpreparer
        self.waiter, self.calls = parts.waiter, parts.calls
        self.waiting = noted_waits(parts.waiter)

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
        return self.service.prepare([claim.ref], deadline_s)[claim.ref.uid]

    def unprepare(self, claim: AllocatedClaim) -> Any:
        return self.service.unprepare([claim.ref], None)[claim.ref.uid]

    def files(self) -> dict[str, bytes]:
        """Return records and specs, which is all that a claim may leave; lock files and the boot's name
        remain on purpose.
        """
        return {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in sorted(self.directory.rglob("*"))
            if path.is_file() and path.parent.name != "locks" and path.name != ".boot"
        }


def reconciler_of(
    node: Any,
    reported: Any,
    *,
    in_use: Callable[[ClaimRecord], InUse | None] = lambda record: None,
    check_node: Callable[[], object] = lambda: None,
    pods_run: Callable[[ClaimRecord], bool | None] = lambda _record: None,
    rhythm: Rhythm = Rhythm(between_requests_s=0),  # noqa: B008  frozen
    clock: Callable[[], float] = time.monotonic,
) -> Reconciler:
    """A reconciler over a node of its own pace, which tells `told`."""
    return Reconciler(
        node.records,
        node.claims,
        node.unpreparer,
        SpecsWithoutRecord(node.records, node.specs),
        SimpleNamespace(of=in_use),  # type: ignore[arg-type]
        DRIVER,
        reported,
        check_node,
        pods_run,
        rhythm,
        clock,
    )


def error_of(answer: object) -> str:
    """The error of a Prepare or an Unprepare that must fail."""
    assert isinstance(answer, Failed), answer
    assert "\n" not in answer.error
    return answer.error


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
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return answers
