"""Which problem fails which probe, and how it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import structlog

from dra_driver.inventory.discovery import NOT_DISCOVERED
from dra_driver.kubelet.registration import RegistrationStatus
from dra_driver.reporting.http import Probes, problems_page
from tests.fakes.tables import tabled

UNKNOWN = NOT_DISCOVERED
REGISTERED = RegistrationStatus(True)
HANGS = "NVML has not answered for 34 s; look for Xid errors"
NOT_YET = "slices have not been published yet"
FORBIDDEN = "cannot create the ResourceSlice: forbidden"


@dataclass
class Sockets:
    down: str | None = None
    answered: bool = True

    def fault(self) -> str | None:
        return self.down

    def start_fault(self) -> str | None:
        return None if self.answered else self.down


@dataclass
class FakePlugin:
    status: RegistrationStatus | None = REGISTERED
    stopping: bool = False
    liveness: Sockets = field(default_factory=Sockets)


@dataclass
class FakePublisher:
    problem: str | None = None
    published: bool = True

    def wait_published(self, timeout_s: float) -> bool:
        assert timeout_s == 0.0
        return self.published


@dataclass
class Node:
    """A node on which all is well until a test says otherwise."""

    plugin: FakePlugin = field(default_factory=FakePlugin)
    publisher: FakePublisher = field(default_factory=FakePublisher)
    devices: str | None = None
    other: str | None = None
    probes: Probes = field(init=False)

    def __post_init__(self) -> None:
        self.probes = Probes(
            self.plugin, self, self.publisher, lambda: [] if self.other is None else [self.other]
        )

    def problem(self) -> str | None:
        return self.devices


def test_all_is_well() -> None:
    probes = Node().probes
    assert probes.startup() == probes.liveness() == probes.readiness() == probes.notes() == []
    assert probes.is_ready()


def node_of(given: dict[str, Any]) -> Node:
    """A node with what a row of the table says; words for sentences that the code has."""
    sentences = {"UNKNOWN": UNKNOWN, "HANGS": HANGS, "NOT YET": NOT_YET, "FORBIDDEN": FORBIDDEN}
    plugin = FakePlugin(**given.get("plugin", {}))
    if "status" in given:
        plugin.status = None if given["status"] is None else RegistrationStatus(*given["status"])
    problem, published = given.get("publisher", (None, True))
    return Node(
        plugin,
        FakePublisher(sentences.get(problem), published),
        sentences.get(given.get("devices", "")),
        given.get("other"),
    )


@tabled("given", "faults", "notes")
def test_readiness_fails_for_what_an_update_would_spread(
    given: dict[str, Any], faults: list[str], notes: list[str]
) -> None:
    probes = node_of(given).probes
    assert probes.liveness() == [], "nothing but the sockets fails it"
    for found, wanted in ((probes.readiness(), faults), (probes.notes(), notes)):
        assert len(found) == len(wanted), found
        for sentence, words in zip(found, wanted, strict=True):
            assert words in sentence
    assert probes.is_ready() is (not faults)


def test_sockets_fail_liveness_and_before_the_first_answer_the_start() -> None:
    sockets = Sockets("the DRA socket does not answer", answered=False)
    node = Node(FakePlugin(liveness=sockets))
    assert node.probes.startup() == node.probes.liveness() == ["the DRA socket does not answer"]
    assert (node.probes.readiness(), node.probes.notes()) == ([], [])
    sockets.answered = True
    assert node.probes.startup() == []
    assert node.probes.liveness() == ["the DRA socket does not answer"]


def test_change_of_readiness_is_reported_once_with_its_reasons() -> None:
    node = Node(FakePlugin(None))
    with structlog.testing.capture_logs() as lines:
        for status in (None, None, RegistrationStatus(False, "old"), REGISTERED, REGISTERED):
            node.plugin.status = status
            node.probes.readiness()
    assert [(line["event"], len(line.get("reasons", ()))) for line in lines] == [
        ("not_ready", 1),
        ("not_ready", 1),
        ("ready", 0),
    ]


def test_page_shows_reasons_and_notes() -> None:
    node = Node(devices=HANGS)
    page = problems_page(node.probes.readiness, node.probes.notes)
    assert (page().status, page().body.decode()) == (200, f"ok\nnote: {HANGS}\n")
    node.plugin.status = None
    assert page().status == 503
    first, second = page().body.decode().splitlines()
    assert "has not registered" in first
    assert second == f"note: {HANGS}"
