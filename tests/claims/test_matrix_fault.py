"""Every kind of claim meets every failure of what its steps need, in Prepare, in Unprepare, and with a restart between;
a kind that needs nothing of what fails meets one failure of each part.

Unprepare succeeds under each, other claims feel nothing, and when the failure is over nothing is left.
docs/conformance.md has the table.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.atomic import write_atomically
from dra_driver.base.file_lock import hold_file
from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.host.driver_programs import InstalledPrograms, NvidiaSmi
from dra_driver.mig.mode import MigContext
from dra_driver.model.claim import Failed, Prepared
from dra_driver.model.driver_files import DriverPrograms
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.model.record import RunMps, SetTimeSlice
from dra_driver.mps_host.host_files import (
    MpsHostFiles,
    MpsLayout,
    encode_status,
    mps_layout,
    wanted_files,
)
from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps
from tests.fakes.kindnode import KINDS, KindNode, RecordedMpsHost, Site
from tests.fakes.matrix import BOOTS, Case
from tests.fakes.samples import claim

PAGE = Path(__file__).parents[2] / "docs/conformance.md"
SLICED = {"several requests", "time-slicing", "metadata"}
SERVED = {"MPS settings", "MPS over several GPUs", "share", "share beside another"}
SERVED |= {"MIG on demand with MPS and metadata"}
SMI = {
    "missing": None,
    "exit 4": "echo 'Insufficient Permissions'; exit 4",
    "exit 18": "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
    "exit 127": "echo 'error while loading shared libraries: libc.so.6'; exit 127",
    "exit 255": "exit 255",
    "hang": "exec sleep 600",
    "no output": "exit 1",
}
MPS_HOST = ("absent", "dies", "rubbish", "older version", "hang")
API = {
    "429": ApiUnavailableError("get claim: too many requests (HTTP 429)", retry_after_s=60.0, is_brief=True),
    "500": ApiUnavailableError("get claim: internal error (HTTP 500)", is_brief=True),
    "403": ApiRejectedError("get claim: forbidden (HTTP 403)", status=403),
    "undecodable": ApiUnavailableError("get claim: Expecting value: line 1 column 1 (char 0)"),
}
FAULTS = (
    *(f"nvidia-smi: {name}" for name in SMI),
    *(f"MPS host: {name}" for name in MPS_HOST),
    *(f"API server: {name}" for name in API),
    "disk full",
)


class MpsHostOnFiles:
    """The MPS host of a node behind its real files; `mode` is how it fails, None as it should."""

    def __init__(self, host: RecordedMpsHost, layout: MpsLayout) -> None:
        self._host = host
        self._layout = layout
        self.mode: str | None = None
        self._turn = threading.Lock()
        for directory in (layout.wishes, layout.statuses):
            directory.mkdir(parents=True)
        self.open()

    def open(self) -> None:
        """Held until `close`; the thread ends with it."""
        for path in self._layout.statuses.iterdir():
            path.unlink()
        self._closed = threading.Event()
        self._lock = ExitStack()
        held = hold_file(self._layout.lock, threading.Lock(), time.monotonic() + 1, "the host")
        os.pwrite(self._lock.enter_context(held), b'{"format": 3}', 0)
        self._thread = threading.Thread(target=self._serve, args=(self._closed,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._lock.close()

    def be(self, mode: str | None) -> None:
        with self._turn:  # so that nothing is done any more as before
            self.mode = mode
        if mode == "absent":
            self.close()
        elif mode == "older version":
            self._layout.lock.write_text('{"format": 0}')
        elif mode is None:
            self.close()
            self.open()

    def _serve(self, closed: threading.Event) -> None:
        wanted, done = wanted_files(self._layout), dict[str, MpsDaemonSpec]()
        while not closed.wait(0.005):
            with self._turn:
                if self.mode in ("older version", "hang"):
                    continue  # it reads nothing of another format, or nothing at all
                now = wanted.all()
                for device in {*now, *self._host.daemons()}:
                    if device not in now or done.get(device) != now[device]:
                        if self.mode == "dies":
                            self._lock.close()
                            return
                        self._do(device, now.get(device))
                done = now

    def _do(self, device: str, spec: MpsDaemonSpec | None) -> None:
        path = self._layout.status(device)
        if self.mode == "rubbish":
            path.write_bytes(b"\x00{{")
            return
        if spec is None:
            path.unlink(missing_ok=True)
            self._host.stop(device, 0.0)
            return
        self._host.ensure(spec, 0.0)
        status = MpsDaemonStatus(device, "ready", spec, pid=os.getpid())
        write_atomically(path, encode_status(status), durable=False)


class FaultyNode(KindNode):
    """A node whose steps run a real nvidia-smi and ask an MPS host by files."""

    smi: Path | None = None
    host: MpsHostOnFiles | None = None

    def _runners(self, context: MigContext) -> dict[type, Any]:
        runners = super()._runners(context)
        root, layout = self.site.machine.host_root, mps_layout(self.plugin)

        installed = InstalledPrograms(str(root), self.site.machine.directory / "links")

        def programs() -> DriverPrograms:
            smi = FaultyNode.smi or root / "usr/bin/nvidia-smi"
            return replace(installed(), paths={"nvidia-smi": str(smi)} if smi.exists() else {})

        if FaultyNode.host is None:
            FaultyNode.host = MpsHostOnFiles(self.mps, layout)
        client = MpsHostFiles(layout, wait_s=0.0)
        return runners | {
            SetTimeSlice: TimeSliceSteps(NvidiaSmi(programs), self.records),
            RunMps: MpsSteps(client, self.ledger),
        }

    def state(self) -> dict[str, object]:
        """As of any node, without what the MPS host has for itself."""
        return {name: seen for name, seen in super().state().items() if "mps/host." not in name}

    def settled(self) -> None:
        assert self.cleaner.clean_all() == []


@pytest.fixture
def node(site: Site, memory_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyNode]:
    for name in ("TIME_SLICE", "MPS_START", "MPS_STOP"):
        monkeypatch.setattr(f"dra_driver.sharing.steps._{name}_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.cleaner.UNDO_S", 0.5)
    monkeypatch.setattr("dra_driver.mps_host.host_files.is_control_daemon", lambda *_: True)
    site.reset()
    one = FaultyNode(site, memory_path / "node", metadata=KINDS[kind].metadata)
    for other in KINDS[kind].beside(site):
        assert isinstance(one.prepare(other), Prepared)
    yield one
    assert FaultyNode.host is not None
    FaultyNode.host.close()
    FaultyNode.host = FaultyNode.smi = None


@contextmanager
def nvidia_smi(node: FaultyNode, name: str) -> Iterator[None]:
    script = node.directory.parent / "nvidia-smi"
    if (text := SMI[name]) is not None:
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    FaultyNode.smi = script
    yield
    FaultyNode.smi = None


@contextmanager
def mps_host(mode: str) -> Iterator[None]:
    host = FaultyNode.host
    assert host is not None
    host.be(mode)
    yield
    host.be(None)


@contextmanager
def api_server(node: FaultyNode, name: str) -> Iterator[None]:
    def refuse(*_arguments: object) -> Any:
        raise API[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.claims, "read", refuse)
        patch.setattr(node.claims, "look", refuse)
        yield


@contextmanager
def full_disk(node: FaultyNode) -> Iterator[None]:
    """Not for what the simulated machine writes down for its silicon."""
    ours = f"{node.directory}/"

    def unless_full(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(ours):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "posix_fallocate"):
            patch.setattr(os, name, unless_full(getattr(os, name)))
        yield


def broken(node: FaultyNode, fault: str) -> AbstractContextManager[None]:
    what, _, name = fault.partition(": ")
    match what:
        case "nvidia-smi":
            return nvidia_smi(node, name)
        case "MPS host":
            return mps_host(name)
        case "API server":
            return api_server(node, name)
    return full_disk(node)


def needs(kind: str, fault: str) -> bool:
    """Whether a step of the claim needs what is broken. One that joins a daemon needs no more than a host."""
    if kind == "share beside another" and fault.startswith("MPS"):
        return fault in ("MPS host: absent", "MPS host: older version")
    return (kind in SLICED and fault.startswith("nvidia-smi")) or (kind in SERVED and fault.startswith("MPS"))


def cells(faults: Iterable[str]) -> list[tuple[str, str]]:
    """Kinds with failures. Where a claim needs nothing of what fails, or all fail alike, one failure of each part
    stands for the others. The plain claim meets all, and every kind meets the one that hangs."""
    faults = list(faults)
    first = {fault.partition(": ")[0]: fault for fault in reversed(faults)}.values()
    return [
        (kind, fault)
        for kind in KINDS
        for fault in faults
        if needs(kind, fault) or kind == "plain" or fault in first or fault.endswith("hang")
    ]


def a_neighbour_feels_nothing(node: FaultyNode) -> None:
    other = claim(node.site.whole(4), uid="neighbour")
    assert isinstance(node.prepare(other), Prepared)
    assert node.unprepare(other) is None


@pytest.mark.parametrize(("kind", "fault"), cells(FAULTS))
def test_prepare(node: FaultyNode, kind: str, fault: str) -> None:
    untouched, wanted = node.state(), KINDS[kind].wanted(node.site)
    with broken(node, fault):
        # The API server is retried until two seconds before the kubelet's deadline.
        answer = node.prepare(wanted, 2.2 if fault.startswith("API") else None)
        fails = needs(kind, fault) or fault.startswith(("API", "disk"))
        assert isinstance(answer, Failed if fails else Prepared), answer
        if fails:
            assert re.fullmatch(r"prepare claim default/claim-\S+ \(UID \S+\): .+", answer.error), answer
            assert node.specs.list().keys() == {one.ref.uid for one in KINDS[kind].beside(node.site)}
        if not fault.startswith(("API", "disk")):
            a_neighbour_feels_nothing(node)
        assert node.unprepare(wanted) is None
        assert wanted.ref.uid not in node.records.all()
    node.settled()
    assert node.state() == untouched
    assert isinstance(node.prepare(wanted), Prepared), "and all is well again"


@pytest.mark.parametrize("restarts", [False, True], ids=["unprepare", "restart between"])
@pytest.mark.parametrize(("kind", "fault"), cells(fault for fault in FAULTS if not fault.startswith("API")))
def test_unprepare(node: FaultyNode, kind: str, fault: str, restarts: bool) -> None:
    untouched, wanted = node.state(), KINDS[kind].wanted(node.site)
    assert isinstance(node.prepare(wanted), Prepared)
    with broken(node, fault):
        if restarts and fault != "disk full":
            node = node.again()
        assert node.unprepare(wanted) is None
        assert wanted.ref.uid not in node.records.all()
        assert wanted.ref.uid not in node.specs.list()
        left = node.cleaner.outstanding()
        assert bool(left) == (needs(kind, fault) and kind != "share beside another")
        for one in left:
            assert str(wanted.ref) in one.text
            assert "check that" in one.text
        if fault != "disk full":
            a_neighbour_feels_nothing(node)
    if restarts:
        node = node.again()
    node.settled()
    assert node.state() == untouched


@pytest.fixture(params=BOOTS)
def case(request: pytest.FixtureRequest, site: Site, memory_path: Path, kind: str) -> Case:
    return Case(site, memory_path / "node", kind, request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_after_one_with_a_change_that_failed_ends_as_any_other(case: Case) -> None:
    untouched, expected = case.untouched(), case.uninterrupted()
    for point, node in case.failing(case.fresh, case.prepare):
        assert (case.prepare(node), node.cleaner.clean_all(), node.state()) == (
            expected[0],
            [],
            expected[1],
        ), point
        assert (case.unprepare(node), node.state()) == (None, untouched), point


def without_companion(state: dict[str, Any]) -> dict[str, Any]:
    """An audio function whose driver does not take it back is only reported, so that it withholds no GPU."""
    return state | {"GPUs": [seen for seen in state["GPUs"] if not str(seen[0]).endswith(".1")]}


@pytest.mark.parametrize("kind", KINDS)
def test_unprepare_after_one_with_a_change_that_failed_leaves_nothing(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.failing(case.prepared, case.unprepare):
        assert (case.unprepare(node), node.cleaner.clean_all()) == (None, []), point
        assert without_companion(node.state()) == without_companion(untouched), point


def test_table_of_the_manual_names_every_kind_and_every_failure() -> None:
    section = PAGE.read_text().partition("## Failures")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row != "What is broken"] == list(FAULTS)
    assert all(f"`{name}`" in section for name in KINDS)
