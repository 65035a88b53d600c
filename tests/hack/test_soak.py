"""What `hack/bench soak` takes for a failure."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.model.claim import ClaimRef, Prepared, PreparedDevice
from tests.fakes.tables import tabled


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "hack/bench"))


@tabled("faults", "states", "is_as_new", "words")
def test_soak_judges_what_is_left_and_what_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    faults: list[str],
    states: list[int],
    is_as_new: bool,
    words: str,
) -> None:
    left = list(states)

    def state() -> dict[str, object]:
        return {"records": left.pop(0) if len(left) > 1 else left[0]}

    node = SimpleNamespace(is_complete=lambda: True, state=state)
    churned = SimpleNamespace(counts={}, faults=faults, calm=lambda: None)
    soak = import_module("soak")
    monkeypatch.setattr(soak, "Churn", lambda *_: churned)
    monkeypatch.setattr(soak, "_SETTLE_S", 0.01)
    assert soak.soak(node, 0.0, 7) == is_as_new
    assert words in capsys.readouterr().out


def slices(*numbers: int) -> list[dict[str, Any]]:
    return [{"counterSet": "gpu", "counters": {f"memory-slice-{number}": {} for number in numbers}}]


DEVICES = [
    {"name": "whole", "consumesCounters": slices(0, 1)},
    {"name": "part", "consumesCounters": slices(1)},
    {"name": "other", "consumesCounters": slices(0)},
    {"name": "shared", "allowMultipleAllocations": True},
]


@tabled("taken", "gone", "faults")
def test_two_claims_that_hold_one_device_are_a_fault(
    taken: list[tuple[str, str, str | None]], gone: list[str], faults: list[str]
) -> None:
    node = SimpleNamespace(devices=lambda: DEVICES, has_spec=lambda life: life.ref.uid not in gone)
    holders, life_of = import_module("random_churn").Holders(node), import_module("churn").Life
    lives: dict[str, Any] = {}
    for uid, kind, device in taken:
        life = lives.setdefault(uid, life_of(ClaimRef("default", uid, uid), kind))
        if device is None:
            holders.drop(life)
        else:
            holders.take(life, Prepared((PreparedDevice(("gpu",), "pool", device, ()),)))
    assert holders.faults == faults
