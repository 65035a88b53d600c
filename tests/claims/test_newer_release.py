"""Claims whose record or ledgers a newer release wrote, as an older release sees them: the older instance of a rolling
update, or the release after a rollback.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.model.claim import AllocatedClaim, Prepared
from dra_driver.model.steps import WriteCdiSpec
from tests.fakes.kindnode import KINDS, KindNode, Site
from tests.fakes.preparing import error_of
from tests.fakes.samples import claim

REMEDY = "install gpu-dra-driver 9.0.0 or newer"
SHARED = ("admin access",)
"""Kinds whose devices other claims may have too."""


@pytest.fixture
def node(site: Site, memory_path: Path) -> KindNode:
    site.reset()
    return KindNode(site, memory_path / "node")


class NewerRelease:
    """A claim that a newer release prepared: `write` puts an unknown kind into files, `back` removes it."""

    def __init__(self, node: KindNode, wanted: AllocatedClaim) -> None:
        self.first = node.state()
        assert isinstance(node.prepare(wanted), Prepared)
        record = node.record_of()
        self.record = node.records.path("uid-1")
        self.ledgers = [node.plugin / LEDGER / f"{uuid}.json" for uuid in sorted(record.gpu_uuids)]
        self._known: dict[Path, str] = {}

    def write(self, file: Path, field: str) -> None:
        document: dict[str, Any] = (
            json.loads(file.read_text()) if file.exists() else {"version": 1, field: []}
        )
        self._known[file] = json.dumps(document)
        unknown = {"kind": "of-a-newer-release"}
        file.write_text(json.dumps({**document, "release": "9.0.0", field: [*document[field], unknown]}))

    def write_ledgers(self) -> None:
        for file in self.ledgers:
            self.write(file, "entries")

    def back(self) -> None:
        for file, text in self._known.items():
            if file.exists():
                file.write_text(text)


def others(node: KindNode) -> list[AllocatedClaim]:
    """A claim for each device of the prepared claim."""
    return [claim(held.device, uid=f"other-{n}") for n, held in enumerate(node.record_of().devices)]


@pytest.mark.parametrize("kind", KINDS)
def test_claim_with_a_newer_record_keeps_its_devices_and_ends(node: KindNode, site: Site, kind: str) -> None:
    wanted = KINDS[kind].wanted(site)
    release = NewerRelease(node, wanted)
    rivals = others(node)
    release.write(release.record, "steps")
    older, kept = node.again(), node.state()
    for _ in range(2):
        older.cleaner.clean_all()
        assert REMEDY in error_of(older.prepare(wanted))
    for rival in rivals if kind not in SHARED else ():
        refused = "is in maintenance for claim" if kind == "maintenance" else "is held by claim"
        assert refused in error_of(older.prepare(rival))
    assert older.state() == kept
    [problem] = older.records.problems()
    assert (problem.code, f"cannot use uid-1.json in {node.records.directory}" in problem.text) == (
        "newer-files",
        True,
    )
    assert older.unprepare(wanted) is None
    assert older.cleaner.clean_all() == []
    assert older.state() == release.first
    assert older.records.problems() == []


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_with_a_newer_ledger_gets_no_new_claim_and_its_claims_end(
    node: KindNode, site: Site, kind: str
) -> None:
    wanted = KINDS[kind].wanted(site)
    release = NewerRelease(node, wanted)
    rivals = others(node)
    release.write_ledgers()
    older, kept = node.again(), node.state()
    older.cleaner.clean_all()
    assert isinstance(older.prepare(wanted), Prepared), "its pod may run"
    assert older.ledger.missing() == [], "no one can write them"
    assert older.unprepare(wanted) is None
    older.cleaner.clean_all()
    after = older.state()
    assert after["GPUs"] == kept["GPUs"] or kind == "maintenance", "no one knows what must be undone first"
    assert {name for name in after if LEDGER in name} == {name for name in kept if LEDGER in name}
    for rival in rivals if kind not in SHARED else ():
        assert "gets no new claims: gpu-dra-driver 9.0.0 wrote the ledger" in error_of(older.prepare(rival))
    assert older.state() == after
    device = site.inventory.by_name[site.whole(4)]
    withheld = older.cleaner.withheld()
    assert withheld(device) is None
    for rival in rivals:
        for result in rival.results:
            found = withheld(site.inventory.by_name[result.device])
            assert found is not None
            assert (found.kinds, REMEDY in found.text) == (("unknown",), True)
    release.back()
    newer = node.again()
    assert newer.cleaner.clean_all() == []
    for file in release.ledgers:
        file.unlink(missing_ok=True)
    assert newer.state() == release.first


def test_newer_record_is_reported_once_and_again_when_its_claim_ends(
    node: KindNode, site: Site, logs: list[Any]
) -> None:
    wanted = KINDS["plain"].wanted(site)
    release = NewerRelease(node, wanted)
    release.write(release.record, "steps")
    older = node.again()
    for _ in range(2):
        older.prepare(wanted)
    assert older.unprepare(wanted) is None
    assert older.unprepare(claim(site.whole(4), uid="without-a-record")) is None
    found = [line for line in logs if line["event"] in ("record_unreadable", "newer_record_removed")]
    assert [(line["event"], line["claim_uid"]) for line in found] == [
        ("record_unreadable", "uid-1"),
        ("newer_record_removed", "uid-1"),
    ]
    assert found[0]["kept_as"] == str(release.record)


@pytest.mark.parametrize("kind", ["MIG on demand", "maintenance"])
def test_step_of_a_claim_whose_newer_record_has_no_spec_yet_is_not_undone(
    node: KindNode, site: Site, kind: str
) -> None:
    """The newer release crashed."""
    wanted = KINDS[kind].wanted(site)
    release = NewerRelease(node, wanted)
    [rival] = others(node)
    node.runner.undo(WriteCdiSpec(), node.record_of().ref)
    release.write(release.record, "steps")
    older, kept = node.again(), node.state()
    assert older.cleaner.clean_all() == []
    refused = "is in maintenance for claim" if kind == "maintenance" else "is held by claim"
    assert refused in error_of(older.prepare(rival))
    assert older.state() == kept
    assert older.unprepare(wanted) is None
    assert older.state() == release.first


def test_mig_devices_in_a_newer_ledger_are_not_those_of_another_program(node: KindNode, site: Site) -> None:
    release = NewerRelease(node, KINDS["MIG on demand"].wanted(site))
    release.write_ledgers()
    older = node.again()
    [device] = [held.device for held in node.record_of().devices]
    assert older.ledger.created_instance(device) is not None
    assert older.mode.gpus() == set()
