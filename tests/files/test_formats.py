"""Files of former releases are read, and what a newer one wrote outlives this one: every format below the plugin's
directory.

`tests/data/state-<version>` is what each release left on a node (`tests.fakes.oldstate`). CDI specs and metadata
files are no state: they are made anew of the records, so fields that a newer release has in them come back with it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dra_driver.diagnostics.state_on_disk import read_state
from dra_driver.errors import StateError
from dra_driver.files.formats import NewerFormatError
from dra_driver.health.store import HealthStore
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.record_codec import decode
from dra_driver.mig.ledger import MigLedger
from dra_driver.model.claim import Failed, Prepared
from dra_driver.model.json_fields import unknown_fields, with_unknown_fields
from dra_driver.model.record import HeldDevice
from dra_driver.model.steps import WriteCdiSpec
from dra_driver.mps.layout import mps_layout
from dra_driver.mps.records import DaemonRecords
from tests.fakes.directories import names
from tests.fakes.kindnode import KindNode, Site
from tests.fakes.oldstate import BOOT, OldState, fixtures, health, put, state_files, write_state
from tests.fakes.samples import claim, result

Json = dict[str, Any]
HEALTH = "plugin/health.json"
HALF_DONE = {"half-made", "half-mps"}
NEWER = "z-of-a-newer-release"
# Maps whose keys are names, and what is the user's own, have no fields of ours.
OPAQUE = {"parameters", "consumedCapacity"}
REPLACED = {".leaving"}
"""Fields that a former release wrote and that another one says now: an entry that was leaving is an orphan."""


@pytest.fixture(scope="module")
def site(make_memory_path: Callable[[], Path]) -> Iterator[Site]:
    one = Site(make_memory_path() / "machine")
    yield one
    one.close()


@pytest.fixture(params=fixtures(), ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def old(site: Site, fixture: Path, memory_path: Path) -> OldState:
    return put(site, fixture, memory_path / "node")


def shown(answer: Any) -> list[Json]:
    assert isinstance(answer, Prepared), answer
    return [
        {
            "requests": list(device.requests),
            "pool": device.pool,
            "device": device.device,
            "cdiIDs": list(device.cdi_ids),
            "shareID": device.share_id,
        }
        for device in answer.devices
    ]


def take_back_all(node: KindNode, old: OldState) -> None:
    """Nothing but health is left."""
    for wanted in reversed(old.claims().values()):
        assert node.unprepare(wanted) is None
    assert node.restarted().state().keys() == {"GPUs", HEALTH}
    old.site.reset()
    assert node.state()["GPUs"] == old.site.settings()


def test_a_release_that_froze_nothing_has_no_test() -> None:
    assert [path.name for path in fixtures()][:1] == ["state-0.1.0"]


@pytest.mark.parametrize("reboot", [False, True], ids=["same boot", "after a reboot"])
def test_claims_of_a_former_release_are_prepared_again_and_taken_back(
    site: Site, fixture: Path, memory_path: Path, reboot: bool
) -> None:
    site.reset()
    at_first = site.settings()
    old = put(site, fixture, memory_path / "node", reboot=reboot)
    before = old.documents()
    boot = "boot-2" if reboot else BOOT
    node = old.node(boot)
    assert node.records.quarantined() == []
    for uid, wanted in old.claims().items():
        answer = node.prepare(wanted)
        assert isinstance(answer, Prepared), answer
        if uid not in HALF_DONE:
            assert shown(answer) == old.answers[uid], uid
    after = old.documents()
    for name, document in before.items():
        if name.startswith("plugin/claims"):
            expected = document | {"bootID": boot}
            if Path(name).stem in HALF_DONE:
                expected |= {"phase": "prepared", "preparedAt": after[name]["preparedAt"]}
            assert after[name] == expected, name
    assert after[HEALTH] == before[HEALTH]
    for wanted in reversed(old.claims().values()):
        assert node.unprepare(wanted) is None
    node.restarted()
    assert node.state().keys() == {"GPUs", HEALTH}
    assert site.settings() == at_first


def test_claims_of_a_former_release_are_taken_back_without_having_been_prepared_again(
    site: Site, fixture: Path, memory_path: Path
) -> None:
    site.reset()
    at_first = site.settings()
    old = put(site, fixture, memory_path / "node")
    node = old.node()
    node.claims.down = True
    for wanted in old.claims().values():
        assert node.unprepare(wanted) is None
    assert node.state().keys() == {"GPUs", HEALTH}
    assert site.settings() == at_first


def test_health_of_a_former_release_is_read(old: OldState) -> None:
    kept = HealthStore(old.directory / HEALTH).load()
    assert kept is not None
    known = health(old.site)
    assert (kept.boot_id, kept.driver_version) == (known.boot_id, known.driver_version)
    assert sorted(kept.states, key=repr) == sorted(known.states, key=repr)


def test_what_commands_read_of_a_former_release_is_all_of_it(old: OldState) -> None:
    state = read_state(old.directory / "plugin")
    assert (len(state.records), state.faults) == (len(old.claims()), ())
    assert {entry.phase for entry in state.owned} == {"creating", "created", "orphan"}


def test_no_field_of_a_former_release_was_given_up(old: OldState, site: Site, memory_path: Path) -> None:
    """A field that is gone from what is written would be missed by that release after a downgrade."""
    former = {name.removeprefix("plugin/").partition("/")[0]: set[str]() for name in old.documents()}
    today = copy.deepcopy(former)
    site.reset()
    write_state(site, memory_path / "today")
    fresh = OldState(site, memory_path / "today", {})
    for found, documents in ((former, old.documents()), (today, fresh.documents())):
        for name, document in documents.items():
            found[name.removeprefix("plugin/").partition("/")[0]] |= set(paths(document))
    assert all(former[kind] - REPLACED <= today[kind] for kind in former), (
        "freeze no fixture anew: keep the field"
    )
    site.reset()


def paths(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{path}.{name}"
            if name not in OPAQUE:
                yield from paths(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{path}[]")


# --- a newer release was here ----------------------------------------------------------------------


def enriched(value: Any, at: str = "") -> Any:
    """The document with one more field in every object of it."""
    if isinstance(value, list):
        return [enriched(inner, f"{at}[{number}]") for number, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    inner = {name: item if name in OPAQUE else enriched(item, f"{at}.{name}") for name, item in value.items()}
    return inner | {NEWER: {"at": at, "deep": [1, {"a": None}]}}


def additions(value: Any) -> list[str]:
    """Where what was added came from, and that it is whole."""
    if isinstance(value, list):
        return [where for inner in value for where in additions(inner)]
    if not isinstance(value, dict):
        return []
    found = [where for name, inner in value.items() if name != NEWER for where in additions(inner)]
    if NEWER in value:
        assert value[NEWER] == {"at": value[NEWER]["at"], "deep": [1, {"a": None}]}
        found.append(value[NEWER]["at"])
    return sorted(found)


def enrich(old: OldState) -> dict[str, Json]:
    """Have every file as a release wrote it that knows more, in a format of a higher number."""
    for name, document in old.documents().items():
        more = enriched(document) | {"format" if "mps" in name else "version": 2}
        (old.directory / name).write_text(json.dumps(more))
    return old.documents()


def test_enriched_documents_have_a_new_field_at_every_level(old: OldState) -> None:
    written = enrich(old)
    assert additions(written["plugin/claims/mps.json"]) == [
        "", ".claim", ".claim.configs[0]", ".claim.results[0]",
        ".devices[0]", ".devices[0].usage", ".devices[0].usage.spec",
        ".steps[0]", ".steps[0].spec", ".steps[1]", ".steps[2]",
    ]  # fmt: skip
    assert len(additions(written[HEALTH])) == 6, "the file, two states, three reasons"


@pytest.mark.parametrize("boot", ["boot-2", BOOT])
def test_records_that_are_written_anew_keep_what_a_newer_release_wrote(
    site: Site, fixture: Path, memory_path: Path, boot: str
) -> None:
    old = put(site, fixture, memory_path / "node", reboot=boot != BOOT)
    before = enrich(old)
    node = old.node(boot)
    for uid, wanted in old.claims().items():
        answer = node.prepare(wanted)
        if uid not in HALF_DONE:
            assert shown(answer) == old.answers[uid]
    after = old.documents()
    rewritten = {name for name, document in after.items() if document.get("version") == 1}
    assert rewritten >= {f"plugin/claims/{uid}.json" for uid in HALF_DONE}
    if boot != BOOT:
        assert rewritten >= {name for name in before if name.startswith("plugin/claims")}
    for name in before:
        if name.startswith("plugin/claims"):
            assert additions(after[name]) == additions(before[name]), name
    take_back_all(node, old)


def test_ledger_keeps_what_a_newer_release_wrote(old: OldState) -> None:
    before = enrich(old)
    ledger = MigLedger(old.directory / "plugin/mig")
    entries = ledger.all()
    assert {f"plugin/mig/{device}.json" for device in entries} == {
        name for name in before if name.startswith("plugin/mig/gpu-")
    }
    for entry in entries.values():
        ledger.save(replace(entry, phase="creating", gpu_instance_id=99))
    for mode in ledger.owned_modes().values():
        ledger.own_mode(mode.gpu_uuid, "0000:00:00.0", mode.boot_id)
    after = old.documents()
    for name in before:
        if name.startswith("plugin/mig"):
            assert (after[name]["version"], additions(after[name])) == (1, additions(before[name])), name
    [gpu_uuid, *_] = ledger.owned_modes()
    ledger.own_mode(gpu_uuid, None, "boot-2")
    assert additions(old.documents()[f"plugin/mig/mode-{gpu_uuid}.json"]) == [], "that spoke of another boot"


def test_half_done_mig_device_keeps_what_a_newer_release_noted_of_it(old: OldState) -> None:
    before = enrich(old)
    node = old.node()
    assert isinstance(node.prepare(old.claims()["half-made"]), Prepared)
    [name] = [name for name in before if name.startswith("plugin/mig/gpu-bb936e07")]
    after = old.documents()[name]
    assert (after["phase"], additions(after)) == ("created", additions(before[name]))


def test_daemons_keep_what_a_newer_release_wrote(old: OldState) -> None:
    before = enrich(old)
    records = DaemonRecords(mps_layout(old.directory / "plugin"))
    found, faults = records.load()
    assert (len(found), faults) == (4, ())
    for record in found.values():
        records.write(replace(record, wanted="stopped", boot_id="boot-2"))
    after = old.documents()
    for name in before:
        if name.startswith("plugin/mps"):
            assert (after[name]["format"], additions(after[name])) == (1, additions(before[name])), name


def test_health_keeps_what_a_newer_release_wrote_of_what_is_still_so(old: OldState) -> None:
    before = enrich(old)
    store = HealthStore(old.directory / HEALTH)
    kept = store.load()
    assert kept is not None
    whole = next(state for state in kept.states if state.setbacks)
    store.save(replace(kept, boot_id="boot-2"))
    after = old.documents()[HEALTH]
    assert (after["bootID"], additions(after)) == ("boot-2", additions(before[HEALTH]))
    store.save(replace(kept, states=(replace(whole, reasons=whole.reasons[:1]),)))
    left = additions(old.documents()[HEALTH])
    assert len(left) == 3, "the file, the state and the reason that is left"
    assert set(left) <= set(additions(before[HEALTH]))


def test_notes_in_lock_files_are_read_whatever_else_they_say(memory_path: Path) -> None:
    locks = ClaimLocks(memory_path)
    locks.open()
    with locks.hold("uid-1", 1) as turn:
        turn.path.write_text('[["uid-1", 5, {"why": "newer"}], ["prepared:uid-1", 6]]')
        assert turn.was_unprepared_since(5)
        assert turn.was_prepared_since(6)
        assert not turn.was_unprepared_since(6)
    assert turn.path.name in names(memory_path)
    assert all(name.endswith(".lock") for name in names(memory_path)), "nothing was set aside"


# --- what only a newer release can read ------------------------------------------------------------


def refusal(answer: Any) -> str:
    assert isinstance(answer, Failed), answer
    assert "\n" not in answer.error
    return answer.error


def unreadable(document: Json, **changes: Any) -> str:
    return json.dumps(document | {"version": 3} | changes)


def test_a_record_that_only_a_newer_release_can_read_is_kept_for_it(old: OldState, logs: list) -> None:
    claims, documents = old.claims(), old.documents()
    name = "plugin/claims/share-0.json"
    file = old.directory / name
    content = unreadable(documents[name], devices={"share-0": "in another form"})
    file.write_text(content)
    node = old.node()
    for _ in range(2):
        text = refusal(node.prepare(claims["share-0"]))
        assert "format version 3 of a newer release of the driver" in text
        assert "install that release again" in text
        assert node.unprepare(claims["share-0"]) is None, "its pod ends"
    told = [line for line in logs if line["event"] == "record_unreadable"]
    assert [(line["claim_uid"], line["kept_as"]) for line in told] == [("share-0", str(file))]
    [fault] = read_state(old.directory / "plugin").faults
    assert "format version 3" in fault
    # Others are served, and what the claim holds is given to nobody else.
    for uid in set(claims) - HALF_DONE - {"share-0"}:
        assert shown(node.prepare(claims[uid])) == old.answers[uid]
        assert node.unprepare(claims[uid]) is None
    device = decode(json.dumps(documents[name]).encode()).devices[0].device
    assert "is held by" in refusal(node.prepare(claim(device, uid="another")))
    assert old.site.machine.compute_mode(old.site.gpu(5).uuid) == 3, "its daemon runs on"
    assert file.read_text() == content
    # The newer release is back.
    file.write_text(json.dumps(documents[name]))
    assert shown(node.prepare(claims["share-0"])) == old.answers["share-0"]
    assert node.unprepare(claims["share-0"]) is None
    assert node.records.quarantined() == []


def files(old: OldState) -> dict[str, str]:
    return {str(path): path.read_text() for path in state_files(old.directory)}


def test_a_claim_with_a_step_of_a_newer_release_is_refused_and_all_of_it_kept(old: OldState) -> None:
    claims, documents = old.claims(), old.documents()
    name = "plugin/claims/plain.json"
    steps = [{"kind": "bind_vfio", "group": 7, "deep": {"a": [1]}}, *documents[name]["steps"]]
    content = json.dumps(documents[name] | {"steps": steps})
    (old.directory / name).write_text(content)
    node = old.node("boot-2")
    before = files(old)
    text = refusal(node.prepare(claims["plain"]))
    assert "by a newer release of the driver, whose" in text
    assert "bind_vfio" in text
    assert "install that release again" in text
    assert files(old) == before
    assert "is held by claim" in refusal(node.prepare(claim(old.site.whole(2), uid="another")))
    assert node.unprepare(claims["static"]) is None


@pytest.mark.parametrize("boot_id", [BOOT, "boot-2"])
def test_a_claim_with_a_step_of_a_newer_release_ends(old: OldState, boot_id: str) -> None:
    """Its pod would hang in Terminating for ever. Whatever the step did holds the GPU, until a reboot or the newer
    release."""
    claims, documents = old.claims(), old.documents()
    name = "plugin/claims/plain.json"
    steps = [{"kind": "bind_vfio", "group": 7, "deep": {"a": [1]}}, *documents[name]["steps"]]
    content = json.dumps(documents[name] | {"steps": steps})
    (old.directory / name).write_text(content)
    node = old.node(boot_id)
    assert node.unprepare(claims["plain"]) is None
    assert not (old.directory / name).exists()
    another = claim(old.site.whole(2), uid="another")
    debt = old.directory / "plugin/debts/plain.json"
    if boot_id == BOOT:
        assert debt.read_text() == content, "that release can read it"
        text = refusal(node.prepare(another))
        assert "owes the undo of step bind_vfio of a newer release" in text
        assert text.endswith("install the newer release again, or reboot the node")
    else:
        assert not debt.exists()
        assert isinstance(node.prepare(another), Prepared)


@pytest.mark.parametrize("uid", ["plain", "sliced", "mps", "share-0", "made"])
@pytest.mark.parametrize("newer", [{"usage": {"kind": "dmem", "limit": 5}}, {"kind": "vfio"}], ids=str)
def test_a_device_that_is_used_as_only_a_newer_release_knows_is_left_to_its_pod(
    old: OldState, uid: str, newer: Json
) -> None:
    """Every step is known, so it can be taken back; to prepare it anew would be to forget what is new."""
    wanted, name = old.claims()[uid], f"plugin/claims/{uid}.json"
    document = old.documents()[name]
    document["devices"][0] |= newer
    (old.directory / name).write_text(json.dumps(document))
    node = old.node()
    before = (files(old), old.site.settings())
    text = refusal(node.prepare(wanted))
    assert f"whose {(newer.get('usage') or newer)['kind']} this one does not know" in text
    assert (files(old), old.site.settings()) == before
    assert "is held by" in refusal(node.prepare(claim(document["devices"][0]["device"], uid="another")))
    take_back_all(node, old)


def test_a_ledger_that_only_a_newer_release_can_read_is_kept_for_it(old: OldState, logs: list) -> None:
    claims, documents = old.claims(), old.documents()
    made = decode(json.dumps(documents["plugin/claims/made.json"]).encode()).devices[0]
    entry, mode = f"plugin/mig/{made.device}.json", f"plugin/mig/mode-{made.gpu_uuid}.json"
    contents = {
        entry: unreadable(documents[entry], placement="0-3"),
        mode: unreadable(documents[mode], gpuUUID=[made.gpu_uuid]),
    }
    for name, content in contents.items():
        (old.directory / name).write_text(content)
    node = old.node()
    before = old.site.machine.gpu(7).instances
    assert "format version 3 of a newer release" in refusal(node.prepare(claims["made"]))
    assert node.unprepare(claims["made"]) is None
    for name, content in contents.items():
        assert (old.directory / name).read_text() == content
    assert {item.id for item in old.site.machine.gpu(7).instances} == {item.id for item in before}
    assert made.device not in node.ledger.all()
    assert made.gpu_uuid not in node.ledger.owned_modes()
    assert not node.ledger.mode_owned_lately(made.gpu_uuid, BOOT)
    with pytest.raises(NewerFormatError):
        node.ledger.get(made.device)
    told = [line["subject"] for line in logs if line["event"] == "mig_ledger_unreadable"]
    assert sorted(told) == sorted(Path(name).stem for name in contents), "once each"
    assert len(read_state(old.directory / "plugin").faults) == 1, "commands read entries"
    # Other GPUs are served, and so is who only looks on.
    assert shown(node.prepare(claims["admin"])) == old.answers["admin"]
    assert isinstance(node.prepare(claims["half-made"]), Prepared)
    assert node.unprepare(claims["half-made"]) is None
    for name in contents:
        (old.directory / name).write_text(json.dumps(documents[name]))
    assert shown(node.prepare(claims["made"])) == old.answers["made"]
    take_back_all(node, old)


def test_daemons_and_health_that_only_a_newer_release_can_read_are_set_aside_whole(
    old: OldState, logs: list
) -> None:
    """Both are found again without the file: daemons by their claims, health by looking."""
    [name, *_] = [name for name in old.documents() if name.startswith("plugin/mps")]
    (old.directory / name).write_text('{"format": 2, "daemons": []}')
    (old.directory / HEALTH).write_text('{"version": 2, "gpus": {}}')
    found, faults = DaemonRecords(mps_layout(old.directory / "plugin")).load()
    assert (len(found), len(faults)) == (3, 1)
    assert HealthStore(old.directory / HEALTH).load() is None
    kept = {path.read_text() for path in old.directory.rglob("*.unreadable*")}
    assert kept == {'{"format": 2, "daemons": []}', '{"version": 2, "gpus": {}}'}


# --- an earlier form -------------------------------------------------------------------------------


def test_what_was_optional_from_the_start_may_be_missing() -> None:
    """Format version 1 is the first one; it has no older one to be read."""
    least = {
        "version": 1,
        "claim": {
            "namespace": "default", "name": "claim-uid-1", "uid": "uid-1",
            "results": [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0"}],
        },
        "phase": "preparing",
        "bootID": "boot-1",
        "devices": [{"device": "gpu-0", "kind": "gpu", "uuid": "GPU-1", "gpuUUID": "GPU-1"}],
        "steps": [{"kind": "write_cdi_spec"}],
    }  # fmt: skip
    record = decode(json.dumps(least).encode())
    assert (record.claim, record.extra) == (claim(result("gpu-0")), {})
    assert record.devices == (HeldDevice("gpu-0", "gpu", "GPU-1", "GPU-1"),)
    assert (record.steps, record.prepared_at) == ((WriteCdiSpec(),), None)
    for version in (0, -1, True, None, "2"):
        with pytest.raises(StateError, match="is unknown") as caught:
            decode(json.dumps(least | {"version": version}).encode())
        assert not isinstance(caught.value, NewerFormatError)


# --- by what things are known again ----------------------------------------------------------------


def test_fields_follow_their_object_and_go_with_it() -> None:
    known = {
        "steps": [
            {"kind": "set_time_slice", "gpuUUID": "a", "interval": 1},
            {"kind": "set_time_slice", "gpuUUID": "b", "interval": 1},
        ],
        "devices": [{"device": "x", "usage": {"kind": "mps", "limit": 1}}, {"device": "x"}],
    }
    more = copy.deepcopy(known)
    more["steps"][1]["new"] = "of b"
    more["devices"][0]["usage"]["new"] = "of MPS"
    more["devices"][1]["new"] = "of the second x"
    unknown = unknown_fields(more, known)
    assert with_unknown_fields(known, unknown) == more
    assert unknown_fields(known, known) == {}
    moved = {
        "steps": [known["steps"][1], {"kind": "write_cdi_spec"}, known["steps"][0] | {"interval": 3}],
        "devices": [{"device": "x", "usage": {"kind": "time_sliced"}}, {"device": "x", "new": "ours"}],
    }
    kept = with_unknown_fields(moved, unknown)
    assert kept["steps"] == [more["steps"][1], *moved["steps"][1:]]
    assert kept["devices"] == moved["devices"], "another kind of use; and what is known by now is ours"
    assert with_unknown_fields({"steps": []}, unknown) == {"steps": [], "devices": unknown["devices"]}
