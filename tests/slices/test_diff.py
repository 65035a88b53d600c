"""The publishing rules, against an API server that is a dictionary."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.units import same_quantity
from dra_driver.slices.rules.build import Pool, SliceContent
from dra_driver.slices.rules.diff import (
    MAX_GENERATION,
    Owner,
    SliceChanges,
    dropped_fields,
    same_content,
    slice_changes,
)
from tests.fakes.tables import data_of, tabled

JsonObject = dict[str, Any]
OWNER = Owner("gpu.nvidia.com", "node-a", "node-uid")
_TAINT = {"key": "gpu.nvidia.com/x", "value": "y", "effect": "NoSchedule"}


def device(name: str, memory: str = "1Gi", **more: Any) -> JsonObject:
    return {
        "name": name,
        "attributes": {"type": {"string": "gpu"}, "index": {"int": 1}},
        "capacity": {"memory": {"value": memory}},
        **more,
    }


def pool(*contents: list[JsonObject], name: str = "node-a") -> Pool:
    return Pool(name, tuple(SliceContent(devices=tuple(devices)) for devices in contents))


class Server:
    """Stores slices as the API server does: names, UIDs, resource versions, taint times."""

    def __init__(self) -> None:
        self.objects: dict[str, JsonObject] = {}
        self._serial = itertools.count(1)

    def apply(self, changes: SliceChanges) -> SliceChanges:
        for entry in changes.deletes:
            del self.objects[entry["metadata"]["name"]]
        for entry in changes.updates:
            known = self.objects[entry["metadata"]["name"]]
            assert entry["metadata"]["resourceVersion"] == known["metadata"]["resourceVersion"]
            assert entry["spec"]["pool"]["name"] == known["spec"]["pool"]["name"]
            self.put(entry)
        for entry in changes.creates:
            name = f"{entry['metadata']['generateName']}{next(self._serial):05d}"
            metadata = {**entry["metadata"], "name": name, "uid": f"uid-{name}"}
            self.put({**entry, "metadata": metadata})
        return changes

    def put(self, entry: JsonObject) -> None:
        stored = copy.deepcopy(entry)
        assert stored["spec"]["pool"]["generation"] <= MAX_GENERATION
        stored["metadata"]["resourceVersion"] = str(next(self._serial))
        for item in stored["spec"].get("devices", []):
            for taint in item.get("taints", []):
                taint.setdefault("timeAdded", "2026-08-07T12:00:00Z")
        self.objects[stored["metadata"]["name"]] = stored

    def publish(self, wanted: Pool, owner: Owner = OWNER) -> SliceChanges:
        return self.apply(slice_changes(wanted, list(self.objects.values()), owner))

    def generations(self) -> list[int]:
        return [entry["spec"]["pool"]["generation"] for entry in self.sorted()]

    def sorted(self) -> list[JsonObject]:
        return [self.objects[name] for name in sorted(self.objects)]


@pytest.fixture
def server() -> Server:
    return Server()


def counts(changes: SliceChanges) -> tuple[int, int, int]:
    return len(changes.deletes), len(changes.updates), len(changes.creates)


def test_first_publish_creates_every_slice_with_generation_1(server: Server) -> None:
    changes = slice_changes(pool([device("a")], [device("b")]), [], OWNER)
    assert changes == SliceChanges(creates=tuple(data_of(__file__)["first publish"]))


def test_empty_pool_is_one_slice_without_devices(server: Server) -> None:
    server.publish(pool([]))
    (entry,) = server.sorted()
    assert "devices" not in entry["spec"]
    assert not server.publish(pool([]))


def test_counter_sets_are_published_and_compared_by_value(server: Server) -> None:
    def counters(memory: str) -> Pool:
        entry = {"name": "set", "counters": {"memory": {"value": memory}}}
        return Pool("node-a", (SliceContent(shared_counters=(entry,)), SliceContent(devices=(device("a"),))))

    server.publish(counters("1Gi"))
    assert server.sorted()[0]["spec"]["sharedCounters"] == [
        {"name": "set", "counters": {"memory": {"value": "1Gi"}}}
    ]
    assert not server.publish(counters("1024Mi"))
    assert counts(server.publish(counters("2Gi"))) == (0, 1, 0)


@tabled("changed", "deleted", "expected", "generation")
def test_generation_grows_when_a_slice_is_created_or_several_change(
    server: Server, changed: int, deleted: int, expected: list[int], generation: int
) -> None:
    server.publish(pool([device("a")], [device("b")], [device("c")]))
    for name in sorted(server.objects, reverse=True)[:deleted]:
        del server.objects[name]
    wanted = pool(*([device(name, "2Gi" if index < changed else "1Gi")] for index, name in enumerate("abc")))
    assert counts(server.publish(wanted)) == tuple(expected)
    assert server.generations() == [generation] * 3
    assert not server.publish(wanted)


@pytest.mark.parametrize(
    ("before", "after", "expected", "generation"),
    [(1, 2, (0, 1, 1), 2), (2, 1, (1, 1, 0), 1), (3, 2, (1, 2, 0), 2), (3, 1, (2, 1, 0), 1)],
)
def test_slices_go_and_come_when_the_count_changes(
    server: Server, before: int, after: int, expected: tuple[int, int, int], generation: int
) -> None:
    server.publish(pool(*([device(f"d{index}")] for index in range(before))))
    wanted = pool(*([device(f"d{index}")] for index in range(after)))
    assert counts(server.publish(wanted)) == tuple(expected)
    assert server.generations() == [generation] * after
    assert {entry["spec"]["pool"]["resourceSliceCount"] for entry in server.sorted()} == {after}
    assert not server.publish(wanted)


def test_slice_of_an_older_generation_is_obsolete(server: Server) -> None:
    wanted = pool([device("a")], [device("b")])
    server.publish(wanted)
    server.sorted()[0]["spec"]["pool"]["generation"] = 5
    assert counts(server.publish(wanted)) == (1, 1, 1)
    assert server.generations() == [6, 6]
    assert not server.publish(wanted)


@tabled("name")
def test_slice_is_obsolete_when_its_name_has_no_index_of_the_pool(server: Server, name: str) -> None:
    wanted = pool([device("a")], [device("b")])
    server.publish(wanted)
    foreign = copy.deepcopy(server.sorted()[0])
    foreign["metadata"]["name"] = name
    server.put(foreign)
    changes = server.publish(wanted)
    assert [entry["metadata"]["name"] for entry in changes.deletes] == [name]
    assert counts(changes) == (1, 0, 0)


def test_slices_of_another_pool_are_deleted(server: Server) -> None:
    server.publish(pool([device("a")], name="old-pool"))
    changes = server.publish(pool([device("a")]))
    assert counts(changes) == (1, 0, 1)
    assert server.generations() == [1]


def test_index_is_hexadecimal_and_wide_enough() -> None:
    changes = slice_changes(pool(*([device(f"d{index}")] for index in range(17))), [], OWNER)
    assert [entry["metadata"]["generateName"][:6] for entry in changes.creates][9:] == [
        "00009-", "0000a-", "0000b-", "0000c-", "0000d-", "0000e-", "0000f-", "00010-",
    ]  # fmt: skip


@tabled("key", "value")
def test_slice_is_put_right_when_someone_edited_it(server: Server, key: str, value: Any) -> None:
    wanted = pool([device("a")])
    server.publish(wanted)
    (entry,) = server.sorted()
    expected = copy.deepcopy(entry["spec"])
    entry["spec"][key] = value
    assert counts(server.publish(wanted)) == (0, 1, 0)
    assert server.sorted()[0]["spec"] == expected


def test_owner_is_replaced_when_the_node_was_registered_again(server: Server) -> None:
    wanted = pool([device("a")])
    server.publish(wanted)
    reborn = Owner("gpu.nvidia.com", "node-a", "other-uid")
    assert counts(server.publish(wanted, reborn)) == (0, 1, 0)
    assert [item["uid"] for item in server.sorted()[0]["metadata"]["ownerReferences"]] == ["other-uid"]
    assert not server.publish(wanted, reborn)


def test_labels_and_annotations_of_others_are_kept_when_a_slice_is_updated(server: Server) -> None:
    server.publish(pool([device("a")]))
    (entry,) = server.sorted()
    entry["metadata"]["labels"] = {"team": "x"}
    (updated,) = server.publish(pool([device("b")])).updates
    assert updated["metadata"] == entry["metadata"]


@tabled("one", "other", "same")
def test_contents_are_compared_by_their_meaning(one: Any, other: Any, same: bool) -> None:
    assert (same_content(one, other), same_content(other, one)) == (same, same)


def policy(memory: str = "16Gi", value: str = "80Gi", **more: Any) -> JsonObject:
    range_ = {"min": "1Gi", "max": memory, "step": "1Gi"}
    return {"memory": {"value": value, "requestPolicy": {"default": memory, "validRange": range_, **more}}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (policy("16Gi"), policy("16384Mi"), True),
        (policy("16Gi"), policy("16G"), False),
        (policy("16Gi", "80Gi"), policy("16Gi", "81920Mi"), True),
        (policy(validValues=["1Gi", "2Gi"]), policy(validValues=["1024Mi", "2048Mi"]), True),
        (policy(validValues=["1Gi", "2Gi"]), policy(validValues=["2Gi", "1Gi"]), False),
        (policy(validValues=["1Gi", "2Gi"]), policy(validValues=["1Gi"]), False),
        (policy(validValues=["1Gi"]), policy(), False),
        (policy(), {"memory": {"value": "80Gi"}}, False),
        (policy(default="many"), policy(default="few"), False),
        (policy(default="0.5"), policy(default="500m"), True),
        # Attributes and capacities may be called like fields.
        ({"requestPolicy": {"string": "1Gi"}}, {"requestPolicy": {"string": "1024Mi"}}, False),
        ({"value": {"value": "1Gi"}}, {"value": {"value": "1024Mi"}}, True),
        ({"value": "x"}, {"value": "y"}, False),
    ],
)
def test_request_policies_are_compared_by_value(one: Any, other: Any, same: bool) -> None:
    assert (same_content(one, other), same_content(other, one)) == (same, same)


def taint(**changes: Any) -> JsonObject:
    return {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"} | changes


def tainted(*taints: JsonObject, memory: str = "1Gi") -> Pool:
    return pool([device("a", memory, taints=list(taints))])


@tabled("seconds", "writes")
def test_time_of_a_taint_is_compared_to_the_second(server: Server, seconds: str | None, writes: int) -> None:
    server.publish(tainted(taint()))
    wanted = taint() if seconds is None else taint(timeAdded=seconds)
    assert counts(server.publish(tainted(wanted))) == (0, writes, 0)


def test_time_of_an_unchanged_taint_is_kept_when_the_slice_changes(server: Server) -> None:
    server.publish(tainted(taint()))
    server.sorted()[0]["spec"]["devices"][0]["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    wanted = tainted(taint(), taint(value="48"), memory="2Gi")
    (updated,) = server.publish(wanted).updates
    assert updated["spec"]["devices"][0]["taints"] == [
        taint(timeAdded="2026-01-01T00:00:00Z"),
        taint(value="48"),
    ]
    assert wanted == tainted(taint(), taint(value="48"), memory="2Gi")


@pytest.mark.parametrize("changes", [{"key": "x/y"}, {"value": "48"}, {"effect": "NoExecute"}])
def test_time_of_another_taint_is_not_taken_over(server: Server, changes: JsonObject) -> None:
    server.publish(tainted(taint()))
    (updated,) = server.publish(tainted(taint(**changes))).updates
    assert updated["spec"]["devices"][0]["taints"] == [taint(**changes)]


contents = st.lists(
    st.builds(
        device,
        st.sampled_from("abcdef"),
        st.sampled_from(["1Gi", "1024Mi", "2Gi"]),
        taints=st.lists(st.builds(taint, value=st.sampled_from(["1", "2"])), max_size=1),
    ),
    max_size=3,
)
pools = st.lists(contents, min_size=1, max_size=4).map(lambda items: pool(*items))


@given(st.lists(pools, min_size=1, max_size=4), st.data())
def test_publishing_again_writes_nothing_whatever_happened_before(
    history: list[Pool], data: st.DataObject
) -> None:
    server = Server()
    for wanted in history:
        server.publish(wanted)
        for name in list(server.objects):
            match data.draw(st.sampled_from(["keep", "keep", "delete", "spoil", "age", "end", "rename"])):
                case "delete":
                    del server.objects[name]
                case "spoil":
                    server.objects[name]["spec"]["devices"] = [device("spoilt")]
                case "age":
                    generation = server.objects[name]["spec"]["pool"]["generation"]
                    server.objects[name]["spec"]["pool"]["generation"] = min(generation + 3, MAX_GENERATION)
                case "end":
                    server.objects[name]["spec"]["pool"]["generation"] = MAX_GENERATION
                case "rename":
                    entry = server.objects.pop(name)
                    entry["metadata"]["name"] = f"x{name}"
                    server.objects[entry["metadata"]["name"]] = entry
    wanted = history[-1]
    server.publish(wanted)
    assert not server.publish(wanted)
    assert len({entry["spec"]["pool"]["generation"] for entry in server.sorted()}) == 1
    for entry, content in zip(server.sorted(), wanted.slices, strict=True):
        assert same_content(entry["spec"].get("devices", []), content.devices)


def at_the_last_generation(server: Server) -> Pool:
    """A pool of three slices, of which another program left two, at a generation that has no successor."""
    server.publish(pool([device("a")], [device("b")]))
    for entry in server.objects.values():
        entry["spec"]["pool"]["generation"] = MAX_GENERATION
    return pool([device("a")], [device("b")], [device("c")])


def test_pool_at_the_last_generation_starts_again_at_one_after_its_slices_are_deleted(server: Server) -> None:
    """The scheduler ignores slices of an older generation, so none of the last one may remain."""
    wanted = at_the_last_generation(server)
    before = set(server.objects)
    changes = server.publish(wanted)
    assert {entry["metadata"]["name"] for entry in changes.deletes} == before
    assert not changes.updates
    assert server.generations() == [1, 1, 1]
    assert not server.publish(wanted)


def test_pool_keeps_the_last_generation_if_one_of_its_slices_cannot_be_deleted(server: Server) -> None:
    wanted = at_the_last_generation(server)
    kept = server.sorted()[1]["metadata"]["uid"]
    changes = server.apply(slice_changes(wanted, list(server.objects.values()), OWNER, undeletable={kept}))
    assert not changes.deletes
    assert server.generations() == [MAX_GENERATION] * 3
    assert not server.publish(wanted)


def spec(**fields):
    return {"spec": fields}


def probed(**fields):
    return spec(devices=[{"name": "gpu-0", **fields}])


@tabled("sent", "returned", "expected")
def test_loss_is_named_with_its_gate(sent, returned, expected):
    assert dropped_fields(sent, returned) == tuple((path, gate) for path, gate in expected)


@tabled("sent", "returned")
def test_nothing_is_reported_when_values_are_equal(sent, returned):
    assert dropped_fields(sent, returned) == ()


def test_other_time_of_a_taint_is_a_loss():
    sent = probed(taints=[_TAINT | {"timeAdded": "2026-01-01T00:00:00Z"}])
    returned = probed(taints=[_TAINT | {"timeAdded": "2026-01-02T00:00:00Z"}])
    assert dropped_fields(sent, returned) == (("spec.devices[0].taints[0].timeAdded", "DRADeviceTaints"),)


@tabled("left", "right", "same")
def test_quantities_are_compared_by_value(left, right, same):
    assert same_quantity(left, right) is same
