"""Every kind of claim with every failure of what its steps need, in Prepare, in Unprepare, and with a restart
in between. A kind that needs nothing of what fails is tested with one failure of each part.

Unprepare always succeeds, other claims are not affected, and when the failure is over nothing remains.
docs/conformance.md has the table.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dra_driver.errors import ApiRejectedError, ApiUnavailableError, RetryableError
from dra_driver.model.claim import Failed, Prepared
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus
from dra_driver.mps_host.host_files import NoMpsHostError
from dra_driver.nvml.limits import GpuLimits
from tests.fakes.kindnode import KINDS, KindNode, RecordedMpsHost, Site, TimeSliceSettings
from tests.fakes.matrix import BOOTS, Case
from tests.fakes.samples import claim

PAGE = Path(__file__).parents[2] / "docs/conformance.md"
SLICED = {"several requests", "time-slicing", "eight GPUs with an interval", "metadata"}
SERVED = {"MPS settings", "MPS over several GPUs", "share", "second share"}
SERVED |= {"MIG on demand with MPS and metadata"}
LIMITED = {"power limit", "locked clocks", "second share with limits"}
API = {
    "429": ApiUnavailableError("get claim: too many requests (HTTP 429)", retry_after_s=60.0, is_brief=True),
    "500": ApiUnavailableError("get claim: internal error (HTTP 500)", is_brief=True),
    "403": ApiRejectedError("get claim: forbidden (HTTP 403)", status=403),
    "undecodable": ApiUnavailableError("get claim: Expecting value: line 1 column 1 (char 0)"),
}
FAULTS = (
    "nvidia-smi: fails",
    "nvidia-smi: hangs",
    "NVML: sets no limits",
    "MPS host: absent",
    "MPS host: hangs",
    *(f"API server: {name}" for name in API),
    "disk full",
)


@pytest.fixture
def node(site: Site, memory_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> KindNode:
    for name in ("TIME_SLICE", "MPS_START", "MPS_STOP"):
        monkeypatch.setattr(f"dra_driver.sharing.steps._{name}_S", 0.5)
    monkeypatch.setattr("dra_driver.journal.cleaner.UNDO_S", 0.5)
    site.reset()
    one = KindNode(site, memory_path / "node", metadata=KINDS[kind].metadata)
    for other in KINDS[kind].beside(site):
        assert isinstance(one.prepare(other), Prepared)
    return one


@contextmanager
def tool(name: str) -> Iterator[None]:
    """A program or the MPS host fails or hangs."""

    def fail(*arguments: object) -> Any:
        if name.endswith("hangs"):
            time.sleep(float(str(arguments[-1])))
        raise NoMpsHostError(name) if name == "MPS host: absent" else RetryableError(name)

    def ensure(host: RecordedMpsHost, spec: MpsDaemonSpec, timeout_s: float) -> MpsDaemonStatus:
        if name.endswith("hangs") and host.runs(spec):  # as its files say
            return MpsDaemonStatus(spec.device, "ready", spec)
        return fail(timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        if name.startswith("MPS"):
            patch.setattr(RecordedMpsHost, "ensure", ensure)
            patch.setattr(RecordedMpsHost, "stop", fail)
        elif name.startswith("NVML"):
            for method in ("set_power", "lock_clock", "unlock_clock"):
                patch.setattr(GpuLimits, method, fail)
        else:
            patch.setattr(TimeSliceSettings, "set_time_slice", fail)
        yield


@contextmanager
def api_server(node: KindNode, name: str) -> Iterator[None]:
    def refuse(*_arguments: object) -> Any:
        raise API[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.claims, "read", refuse)
        patch.setattr(node.claims, "current", refuse)
        yield


@contextmanager
def full_disk(node: KindNode) -> Iterator[None]:
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


def broken(node: KindNode, fault: str) -> AbstractContextManager[None]:
    what, _, name = fault.partition(": ")
    match what:
        case "API server":
            return api_server(node, name)
        case "disk full":
            return full_disk(node)
    return tool(fault)


def needs(kind: str, fault: str) -> bool:
    """Whether a step of the claim needs what is broken. One that joins a daemon needs no more than a host."""
    if kind.startswith("second share") and fault.startswith("MPS"):
        return fault == "MPS host: absent"
    needed = {"nvidia-smi": SLICED, "MPS host": SERVED, "NVML": LIMITED}
    return kind in needed.get(fault.partition(": ")[0], ())


def cells(faults: Iterable[str]) -> list[tuple[str, str]]:
    """Kinds with failures. If a claim needs nothing of what fails, or all failures have the same effect, one
    failure of each part is enough. The plain claim is tested with all, and every kind with a hang.
    """
    faults = list(faults)
    first = {fault.partition(": ")[0]: fault for fault in reversed(faults)}.values()
    return [
        (kind, fault)
        for kind in KINDS
        for fault in faults
        if needs(kind, fault) or kind == "plain" or fault in first or fault.endswith("hangs")
    ]


def a_neighbour_feels_nothing(node: KindNode) -> None:
    other = claim(node.site.whole(4), uid="neighbour")
    assert isinstance(node.prepare(other), Prepared)
    assert node.unprepare(other) is None


@pytest.mark.parametrize(("kind", "fault"), cells(FAULTS))
def test_prepare(node: KindNode, kind: str, fault: str) -> None:
    untouched, wanted = node.state(), KINDS[kind].wanted(node.site)
    with broken(node, fault):
        # The API server is retried until two seconds before the kubelet's deadline.
        answer = node.prepare(wanted, 2.2 if fault.startswith("API") else None)
        fails = needs(kind, fault) or fault.startswith(("API", "disk"))
        assert isinstance(answer, Failed if fails else Prepared), answer
        if fails:
            assert re.fullmatch(r"cannot prepare claim default/claim-\S+ \(UID \S+\): .+", answer.error), (
                answer
            )
            assert node.specs.list().keys() == {one.ref.uid for one in KINDS[kind].beside(node.site)}
        if not fault.startswith(("API", "disk")):
            a_neighbour_feels_nothing(node)
        assert node.unprepare(wanted) is None
        assert wanted.ref.uid not in node.records.all()
    assert node.cleaner.clean_all() == []
    assert node.state() == untouched
    assert isinstance(node.prepare(wanted), Prepared), "and all is well again"


@pytest.mark.parametrize("restarts", [False, True], ids=["unprepare", "restart between"])
@pytest.mark.parametrize(("kind", "fault"), cells(fault for fault in FAULTS if not fault.startswith("API")))
def test_unprepare(node: KindNode, kind: str, fault: str, restarts: bool) -> None:
    untouched, wanted = node.state(), KINDS[kind].wanted(node.site)
    assert isinstance(node.prepare(wanted), Prepared)
    with broken(node, fault):
        if restarts and fault != "disk full":
            node = node.again()
        assert node.unprepare(wanted) is None
        assert wanted.ref.uid not in node.records.all()
        assert wanted.ref.uid not in node.specs.list()
        left = node.cleaner.outstanding()
        assert bool(left) == (needs(kind, fault) and not kind.startswith("second share"))
        for one in left:
            assert str(wanted.ref) in one.text
            assert "check that" in one.text
        if fault != "disk full":
            a_neighbour_feels_nothing(node)
    if restarts:
        node = node.again()
    assert node.cleaner.clean_all() == []
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
    """An audio function whose driver does not accept it is only reported, and does not withhold the GPU."""
    return state | {"GPUs": [seen for seen in state["GPUs"] if not str(seen[0]).endswith(".1")]}


@pytest.mark.parametrize("kind", KINDS)
def test_unprepare_after_one_with_a_change_that_failed_leaves_nothing(case: Case) -> None:
    untouched = case.untouched()
    for point, node in case.failing(case.prepared, case.unprepare):
        assert (case.unprepare(node), node.cleaner.clean_all()) == (None, []), point
        assert without_companion(node.state()) == without_companion(untouched), point


def test_table_of_the_manual_names_every_failure() -> None:
    section = PAGE.read_text().partition("## Failures")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row != "What is broken"] == list(FAULTS)
