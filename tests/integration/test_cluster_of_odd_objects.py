"""`cluster` on servers whose objects violate the API, as behind a proxy or from a later version."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3 import HTTPResponse

from dra_driver.cli.commands import call
from dra_driver.cli.output import Output
from dra_driver.cli.validation.rules.classes import standard_classes
from dra_driver.errors import DraDriverError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import Endpoint
from tests.fakes.tables import data_of, tabled

DATA = data_of(__file__)
DRIVER = "gpu.nvidia.com"
GROUP = "/apis/resource.k8s.io"
Json = dict[str, Any]


class OddServer:
    """Answers each path with what `lists` has for it, right or wrong."""

    def __init__(self) -> None:
        self.lists: Json = {}

    def answer(self, request: Any) -> tuple[HTTPResponse, bytes]:
        body = json.dumps(self.lists.get(request.path, {})).encode()
        return HTTPResponse(status=200 if request.path in self.lists else 404), body

    def serve(self, objects: Json) -> None:
        """These lists, by plural."""
        self.lists = {}
        for plural, items in objects.items():
            pods = plural == "pods"
            path = "/api/v1/pods" if pods else f"{GROUP}/v1/{plural}"
            kind = KINDS[plural]
            group = "v1" if pods else "resource.k8s.io/v1"
            self.lists[path] = {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": items}

    def shown(self, output: Output = Output.json) -> tuple[str, str]:
        """What the command writes, and what it writes of errors."""
        out, err = io.StringIO(), io.StringIO()
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch("dra_driver.cli.cluster.load_endpoint", return_value=Endpoint(server="http://api")),
            mock.patch.object(
                ApiClient, "_send_repeated", lambda _client, request, _access: self.answer(request)
            ),
        ):
            try:
                call(["cluster", "-o", output])
            except DraDriverError as error:
                err.write(f"gpu-dra-driver: {error}\n")
        return out.getvalue(), err.getvalue()

    def look(self) -> Json:
        return json.loads(self.shown()[0])


KINDS = {
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
    "deviceclasses": "DeviceClass",
    "pods": "Pod",
}


@pytest.fixture(scope="module")
def server() -> OddServer:
    return OddServer()


def device(name: str, **more: Any) -> Json:
    made = copy.deepcopy(DATA["device"]) | {"name": name}
    made["attributes"]["uuid"] = {"string": f"GPU-{name}"}
    return made | more  # type: ignore[no-any-return]


def slice_of(node: str, *devices: Json, **spec: Any) -> Json:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    counters = [{"name": "set", "counters": {"slices": {"value": "7"}}}]
    own = {
        "driver": DRIVER, "nodeName": node, "pool": pool, "devices": [*devices], "sharedCounters": counters,
    }  # fmt: skip
    return {"metadata": {"name": f"{node}-slice"}, "spec": own | spec}


def claim(name: str, *devices: tuple[str, str]) -> Json:
    made: Json = {
        "metadata": {"namespace": "ml", "name": name, "uid": f"uid-{name}"},
        "spec": {"devices": copy.deepcopy(DATA["devices of a claim"])},
        "status": {},
    }
    if devices:
        results = [{**copy.deepcopy(DATA["result"]), "pool": pool, "device": one} for pool, one in devices]
        made["status"] = {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "train-0", "uid": "u"}],
        }
    return made


def good_objects() -> Json:
    classes = copy.deepcopy(list(standard_classes(DRIVER).values())[:2])
    classes[0]["spec"]["extendedResourceName"] = "nvidia.com/gpu"
    shared = device("s", allowMultipleAllocations=True)
    return {
        "resourceslices": [
            slice_of("node-a", device("a"), device("b"), shared),
            slice_of("node-b", device("c")),
        ],
        "resourceclaims": [claim("held", ("node-a", "a"), ("node-a", "s")), claim("waits")],
        "deviceclasses": classes,
        "pods": [copy.deepcopy(DATA["pod"])],
    }


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield (*here, key)
        yield from paths(child, (*here, key))


GOOD = good_objects()
PATHS = sorted((path for path in paths(GOOD) if len(path) > 1), key=str)
REMOVED = "removed"
ODD = st.sampled_from([
    REMOVED, None, {}, [], "", "x", 7, -1, 10**40, 1.5, True, [None], [[]], {"later": None}, {"later": {}},
    "\ud800\x1b[2J", {"ints": [1, 2]}, [{"name": "x"}], ["x", 7],
])  # fmt: skip


def mutated(objects: Json, path: Sequence[Any], odd: Any) -> None:
    *way, last = path
    inside = objects
    for key in way:
        try:
            inside = inside[key]
        except (KeyError, IndexError, TypeError):
            return
    if not (
        isinstance(inside, dict)
        or (isinstance(inside, list) and isinstance(last, int) and last < len(inside))
    ):
        return
    if odd == REMOVED:
        inside.pop(last, None) if isinstance(inside, dict) else inside.pop(last)
    else:
        inside[last] = copy.deepcopy(odd)


@given(
    changes=st.lists(st.tuples(st.sampled_from(PATHS), ODD), min_size=1, max_size=3),
    output=st.sampled_from([Output.table, Output.json, Output.yaml]),
)
def test_any_object_is_shown_or_reported_when_it_breaks_the_rules(
    server: OddServer, changes: list[tuple[Any, Any]], output: Output
) -> None:
    objects = good_objects()
    for path, odd in changes:
        mutated(objects, path, odd)
    server.serve(objects)
    out, err = server.shown(output)
    assert out
    assert all(line.startswith("gpu-dra-driver: ") for line in err.splitlines())


@tabled("plural", "path", "odd", "why")
def test_unreadable_objects_are_named_and_the_rest_shown(
    server: OddServer, plural: str, path: list[Any], odd: Any, why: str
) -> None:
    objects = good_objects()
    mutated(objects[plural], path, odd)
    server.serve(objects)
    found = server.look()
    [text] = found["unknown"]
    assert text.startswith(f"{why} is skipped, because it cannot be read: ")
    assert [row["device"] for row in found["rows"] if row["node"] == "node-a"]


def test_values_of_later_versions_are_shown(server: OddServer) -> None:
    objects = good_objects()
    attributes = objects["resourceslices"][0]["spec"]["devices"][0]["attributes"]
    attributes |= {"tags": {"strings": ["a", "b"]}, "later": {"later": {"a": 1}}}
    objects["resourceslices"][1]["spec"]["devices"] = None
    server.serve(objects)
    found = server.look()
    assert found["unknown"] == []
    assert [(row["node"], row["device"]) for row in found["rows"]][-3:] == [
        ("node-b", "-"),
        ("-", "-"),
        ("-", "-"),
    ]


def test_many_unreadable_objects_do_not_fill_the_screen(server: OddServer) -> None:
    objects = good_objects()
    objects["resourceslices"] += [{"metadata": {"name": f"s{number}"}} for number in range(12)]
    server.serve(objects)
    reported = server.shown(Output.table)[1].splitlines()
    assert len(reported) == 6
    assert reported[-1] == "gpu-dra-driver: 7 more (-o json shows all)"
    assert len(server.look()["unknown"]) == 12


@pytest.mark.parametrize("answer", [7, {"items": 7}, {"items": {}}, {"kind": "Status"}])
def test_an_answer_that_is_not_a_list_is_one_sentence(server: OddServer, answer: Any) -> None:
    server.serve(good_objects())
    server.lists[f"{GROUP}/v1/resourceslices"] = answer
    reported = "gpu-dra-driver: cannot list resourceslices: the answer contains no list of resourceslices\n"
    assert server.shown() == ("", reported)


def test_no_items_is_an_empty_list(server: OddServer) -> None:
    server.serve(dict.fromkeys(KINDS))
    found = server.look()
    assert (found["rows"], found["unknown"]) == ([], [])
