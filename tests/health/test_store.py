"""The file that keeps health over restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.errors import StateError
from dra_driver.health.store import HealthStore, KeptHealth, decode, encode
from dra_driver.model.health import HealthState, HealthTarget, Reason, Severity

XID = Reason("xid", "79", Severity.UNHEALTHY, 100, 120, "Xid 79: the GPU fell off the bus", reset_seen=True)
HOT = Reason("slowdown", "thermal", Severity.INFORMATION, 100, 100, "hot", "poll")
BAD = HealthState(HealthTarget("GPU-a"), (XID,), 3, None, (50, 100), 700)
PART = HealthState(HealthTarget("GPU-a", 3), (replace(XID, value="95"),), identity="MIG-1")
KEPT = KeptHealth("boot-1", "580.95.05", (BAD, PART))

_names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
_numbers = st.integers(0, 2**40)
_optional = st.none() | _numbers
_reasons = st.builds(
    Reason,
    key=st.sampled_from(["xid", "ecc", "gpu-lost"]),
    value=_names,
    severity=st.sampled_from([Severity.DEGRADED, Severity.UNHEALTHY, Severity.LOST]),
    since=_numbers,
    last_at=_numbers,
    text=_names,
    source=st.sampled_from(["event", "poll"]),
    reset_seen=st.booleans(),
)
_states = st.builds(
    HealthState,
    target=st.builds(HealthTarget, _names, _optional, _optional),
    reasons=st.lists(_reasons, min_size=1, max_size=3).map(tuple),
    ecc_uncorrected=_optional,
    identity=st.none() | _names,
    setbacks=st.lists(_numbers, max_size=3).map(tuple),
    held_until=_optional,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "health.json"


@given(st.lists(_states, max_size=4, unique_by=lambda state: state.target), st.none() | _names)
def test_round_trip(states, version):
    kept = KeptHealth("boot", version, tuple(sorted(states, key=lambda state: state.target.order)))
    assert decode(encode(kept)) == kept


def test_nothing_is_kept_at_first(path):
    assert HealthStore(path).load() is None


def test_written_when_something_else_is_known(path):
    store = HealthStore(path)
    store.save(KEPT)
    assert HealthStore(path).load() == KEPT
    path.unlink()
    store.save(replace(KEPT, states=(PART, BAD, HealthState(HealthTarget("GPU-b")))))
    hot = replace(BAD, reasons=(HOT, XID))
    store.save(replace(KEPT, states=(hot, PART, HealthState(HealthTarget("GPU-b"), (HOT,)))))
    assert not path.exists(), "order, well GPUs and what comes and goes are no news"
    store.save(replace(KEPT, boot_id="boot-2"))
    assert json.loads(path.read_bytes())["bootID"] == "boot-2"


def test_a_store_that_loaded_writes_only_news(path):
    HealthStore(path).save(KEPT)
    store = HealthStore(path)
    assert store.load() == KEPT
    path.unlink()
    store.save(KEPT)
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff{",
        b"[]",
        b'{"version": 0, "bootID": "b", "states": []}',
        b'{"version": 2, "bootID": "b"}',
        b'{"version": 1, "states": []}',
        b'{"version": 1, "bootID": "b", "states": [{"gpuUUID": 5}]}',
        b'{"version": 1, "bootID": "b", "states": [{"gpuUUID": "a", "setbacks": ["x"]}]}',
        encode(KEPT).replace(b"unhealthy", b"terrible"),
    ],
)
def test_an_unreadable_file_is_set_aside_and_told(path, content, logs):
    path.write_bytes(content)
    store = HealthStore(path)
    assert store.load() is None
    (aside,) = path.parent.glob("health.json.unreadable-*")
    assert aside.read_bytes() == content
    assert [line["event"] for line in logs] == ["health_unreadable"]
    store.save(KEPT)
    assert HealthStore(path).load() == KEPT


def test_a_disk_that_does_not_answer(path):
    path.write_text("no directory")
    path = path / "health.json"
    with pytest.raises(StateError, match=str(path)):
        HealthStore(path).load()
    with pytest.raises(StateError, match=str(path)):
        HealthStore(path).save(KEPT)
