"""The files that say which cards this plugin has given to virtual machines, and what they had before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.base.json_store import UnreadableFile
from dra_driver.errors import StateError
from dra_driver.passthrough.ledger import FunctionBefore, OwnedCard, PassthroughLedger

ENTRY = OwnedCard(
    "vfio-0000-1b-00-0",
    "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
    "0000:1b:00.0",
    "boot-1",
    "uid-1",
    (FunctionBefore("0000:1b:00.0", "nvidia"), FunctionBefore("0000:1b:00.1", None, "none")),
    True,
    "NVIDIA L40S",
)
FILE = "vfio-0000-1b-00-0.json"


@pytest.fixture
def ledger(memory_path: Path) -> PassthroughLedger:
    made = PassthroughLedger(memory_path / "passthrough", "boot-1")
    made.open()
    return made


def test_entry_is_there_for_the_other_instance_until_it_is_removed(
    ledger: PassthroughLedger, memory_path: Path
) -> None:
    other = PassthroughLedger(memory_path / "passthrough", "boot-1")
    ledger.save(ENTRY)
    assert (other.get(ENTRY.device), dict(other.all())) == (ENTRY, {ENTRY.device: ENTRY})
    other.delete(ENTRY.device)
    assert (ledger.get(ENTRY.device), dict(ledger.all())) == (None, {})


def test_files_have_the_golden_form(
    ledger: PassthroughLedger, memory_path: Path, is_golden: Callable[[Path, str], None]
) -> None:
    """Another form would need another format number."""
    ledger.save(ENTRY)
    document = json.loads((memory_path / "passthrough" / FILE).read_text())
    is_golden(Path(__file__).parent / "golden" / "ledger-card.json", json.dumps(document, indent=1) + "\n")


def test_reboot_makes_entries_void(ledger: PassthroughLedger, memory_path: Path) -> None:
    ledger.save(ENTRY)
    following = PassthroughLedger(memory_path / "passthrough", "boot-2")
    assert (following.get(ENTRY.device), dict(following.all())) == (None, {})
    following.open()
    assert not (memory_path / "passthrough" / FILE).exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"version": 1, "device": "another"}', b"[1]", b'{"version": 0}'],
)
def test_unreadable_entry_is_set_aside_and_told_and_the_card_stays_ours(
    ledger: PassthroughLedger, memory_path: Path, logs: Any, content: bytes
) -> None:
    ledger.save(ENTRY)
    (memory_path / "passthrough" / FILE).write_bytes(content)
    assert dict(ledger.all()) == {}
    assert (ledger.has_unreadable(), ledger.is_unreadable(ENTRY.device)) == (True, True)
    assert not ledger.is_unreadable("vfio-0000-1b-00-1")
    assert [entry["device"] for entry in logs if entry["event"] == "passthrough_ledger_unreadable"] == [
        ENTRY.device
    ]
    ledger.save(ENTRY)
    assert ledger.get(ENTRY.device) == ENTRY


def test_entry_of_a_newer_release_is_not_written_over(ledger: PassthroughLedger, memory_path: Path) -> None:
    path = memory_path / "passthrough" / FILE
    path.write_text('{"version": 2}')
    assert (ledger.get(ENTRY.device), ledger.is_unreadable(ENTRY.device)) == (None, True)
    with pytest.raises(StateError, match="newer release"):
        ledger.save(ENTRY)
    assert path.read_text() == '{"version": 2}'
    ledger.delete(ENTRY.device)
    assert not path.exists()


def test_reader_changes_nothing(ledger: PassthroughLedger, memory_path: Path) -> None:
    path = memory_path / "passthrough" / FILE
    path.write_bytes(b"torn")
    told: list[UnreadableFile] = []
    reader = PassthroughLedger(memory_path / "passthrough", "boot-1", told.append)
    assert dict(reader.all()) == {}
    assert [found.name for found in told] == [ENTRY.device]
    assert path.read_bytes() == b"torn"


def test_device_whose_name_leads_elsewhere_is_refused(ledger: PassthroughLedger) -> None:
    for call in (ledger.get, ledger.delete):
        with pytest.raises(StateError, match="not usable as a file name"):
            call("../claims/uid-1")
