"""`cluster` on servers whose objects break the rules of the API, as those of a proxy or of a later version may."""

from __future__ import annotations

import copy
import io
import json
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra_driver.cli.commands import call
from dra_driver.cli.output import Output
from dra_driver.errors import DraDriverError
from dra_driver.validation.rules.standard_classes import standard_classes

DRIVER = "gpu.nvidia.com"
GROUP = "/apis/resource.k8s.io"
Json = dict[str, Any]


class OddServer:
    """Answers each path with what `lists` has for it, right or wrong."""

    def __init__(self, directory: Path) -> None:
        server = self
        self.lists: Json = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet an answer

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                body = json.dumps(server.lists.get(path, {})).encode()
                self.send_response(200 if path in server.lists else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.kubeconfig = directory / "kubeconfig"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": url}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c"}}],
                    "current-context": "c",
                }
            )
        )

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def serve(self, objects: Json, version: str = "v1") -> None:
        """These lists, by plural."""
        self.lists = {GROUP: {"versions": [{"version": version}]}}
        for plural, items in objects.items():
            pods = plural == "pods"
            path = "/api/v1/pods" if pods else f"{GROUP}/{version}/{plural}"
            kind = KINDS[plural]
            group = "v1" if pods else f"resource.k8s.io/{version}"
            self.lists[path] = {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": items}

    def shown(self, by: Any = "node", output: Output = Output.json) -> tuple[str, str]:
        """What the command writes, and what it writes of errors."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                call(["cluster", "--by", by, "-o", output, "--kubeconfig", str(self.kubeconfig)])
            except DraDriverError as error:
                err.write(f"gpu-dra-driver: {error}\n")
        return out.getvalue(), err.getvalue()

    def rows(self, by: Any = "node") -> Json:
        return json.loads(self.shown(by)[0])


KINDS = {
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
    "deviceclasses": "DeviceClass",
    "pods": "Pod",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddServer]:
    made = OddServer(tmp_path_factory.mktemp("odd"))
    yield made
    made.close()


def device(name: str, **more: Any) -> Json:
    return {
        "name": name,
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": "H100"},
            "uuid": {"string": f"GPU-{name}"},
            "driverVersion": {"version": "580.1.0"},
            "index": {"int": 0},
            "example.com/ready": {"bool": True},
        },
        "capacity": {"memory": {"value": "80Gi"}},
        "consumesCounters": [{"counterSet": "set", "counters": {"slices": {"value": "1"}}}],
        "taints": [{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}],
        **more,
    }


def slice_of(node: str, *devices: Json, **spec: Any) -> Json:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    counters = [{"name": "set", "counters": {"slices": {"value": "7"}}}]
    own = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": pool,
        "devices": [*devices],
        "sharedCounters": counters,
    }
    return {"metadata": {"name": f"{node}-slice"}, "spec": own | spec}


def claim(name: str, *devices: tuple[str, str]) -> Json:
    exactly = {
        "deviceClassName": DRIVER,
        "allocationMode": "ExactCount",
        "count": 1,
        "selectors": [{"cel": {"expression": f'device.attributes["{DRIVER}"].productName == "H100"'}}],
        "tolerations": [{"key": "gpu.nvidia.com/xid", "operator": "Exists", "effect": "NoSchedule"}],
        "capacity": {"requests": {"memory": "10Gi"}},
    }
    wanted = {
        "requests": [{"name": "gpu", "exactly": exactly}],
        "constraints": [{"requests": ["gpu"], "matchAttribute": f"{DRIVER}/productName"}],
        "config": [
            {
                "requests": ["gpu"],
                "opaque": {
                    "driver": DRIVER,
                    "parameters": {"apiVersion": f"{DRIVER}/v1alpha1", "kind": "GpuConfig"},
                },
            }
        ],
    }
    made: Json = {
        "metadata": {"namespace": "ml", "name": name, "uid": f"uid-{name}"},
        "spec": {"devices": wanted},
        "status": {},
    }
    if devices:
        results = [
            {
                "request": "gpu",
                "driver": DRIVER,
                "pool": pool,
                "device": one,
                "shareID": "s",
                "consumedCapacity": {"memory": "10Gi"},
            }
            for pool, one in devices
        ]
        made["status"] = {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "train-0", "uid": "u"}],
        }
    return made


def good_objects() -> Json:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u", "controller": True}
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
        "pods": [
            {
                "metadata": {"namespace": "ml", "name": "train-0", "ownerReferences": [owner]},
                "spec": {
                    "resourceClaims": [{"name": "gpu", "resourceClaimName": "waits"}],
                    "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
                },
                "status": {
                    "phase": "Pending",
                    "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "waits"}],
                    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}],
                },
            }
        ],
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
REMOVED = object()
ODD = st.sampled_from(
    [
        *(
            REMOVED,
            None,
            {},
            [],
            "",
            "x",
            7,
            -1,
            10**40,
            1.5,
            True,
            [None],
            [[]],
            {"later": None},
            {"later": {}},
        ),
        *("\ud800\x1b[2J", {"ints": [1, 2]}, [{"name": "x"}], ["x", 7]),
    ]
)


def mutated(objects: Json, path: tuple[Any, ...], odd: Any) -> None:
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
    if odd is REMOVED:
        inside.pop(last, None) if isinstance(inside, dict) else inside.pop(last)
    else:
        inside[last] = copy.deepcopy(odd)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(st.tuples(st.sampled_from(PATHS), ODD), min_size=1, max_size=3),
    by=st.sampled_from(["node", "product", "workload", "claim"]),
    output=st.sampled_from([Output.table, Output.json, Output.yaml]),
    version=st.sampled_from(["v1", "v1beta1"]),
)
def test_any_object_is_shown_or_told_when_it_breaks_the_rules(
    server: OddServer, changes: list[tuple[Any, Any]], by: Any, output: Output, version: str
) -> None:
    objects = good_objects()
    for path, odd in changes:
        mutated(objects, path, odd)
    server.serve(objects, version)
    out, err = server.shown(by, output)
    assert out
    assert all(line.startswith("gpu-dra-driver: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("plural", "path", "odd", "why"),
    [
        ("resourceslices", (1, "spec"), REMOVED, "ResourceSlice node-b-slice {}: spec: is required"),
        (
            "resourceslices",
            (1, "spec", "pool"),
            REMOVED,
            "ResourceSlice node-b-slice {}: spec.pool: is required",
        ),
        (
            "resourceslices",
            (1, "spec", "devices", 0, "taints", 0, "key"),
            7,
            "ResourceSlice node-b-slice {}: spec.devices[0].taints[0].key: must be a string, not the number 7",
        ),
        (
            "resourceslices",
            (1, "spec", "devices", 0, "attributes", "index"),
            {},
            "ResourceSlice node-b-slice {}: spec.devices[0].attributes.index: must have one value, not 0",
        ),
        (
            "resourceclaims",
            (0, "status", "reservedFor"),
            "x",
            "ResourceClaim ml/held {}: status.reservedFor: must be",
        ),
        ("resourceclaims", (1, "spec"), None, "ResourceClaim ml/waits {}: spec: is required"),
        (
            "deviceclasses",
            (0, "metadata", "name"),
            REMOVED,
            "DeviceClass without a name {}: metadata.name: is required",
        ),
        (
            "pods",
            (0, "status", "conditions", 0),
            None,
            "Pod ml/train-0 {}: status.conditions[0]: must be an object, not",
        ),
        ("resourceslices", (1,), 7, "ResourceSlice without a name {}: must be an object, not the number 7"),
    ],
)
@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_what_cannot_be_read_is_named_and_the_rest_shown(
    server: OddServer, version: str, plural: str, path: tuple[Any, ...], odd: Any, why: str
) -> None:
    objects = good_objects()
    mutated(objects[plural], path, odd)
    server.serve(objects, version)
    table, told = server.shown(output=Output.table)
    [line] = told.splitlines()
    assert line.startswith(f"gpu-dra-driver: {why.format('is left out, it cannot be read')}")
    assert table.splitlines()[1].startswith("node-a ")
    assert [f"gpu-dra-driver: {text}" for text in server.rows()["unreadable"]] == [line]


def test_values_of_later_versions_are_shown(server: OddServer) -> None:
    objects = good_objects()
    attributes = objects["resourceslices"][0]["spec"]["devices"][0]["attributes"]
    attributes |= {"tags": {"strings": ["a", "b"]}, "later": {"later": {"a": 1}}}
    objects["resourceslices"][1]["spec"]["devices"] = None
    server.serve(objects)
    shown = server.rows()
    assert shown["unreadable"] == []
    assert [(row["node"], row["count"]["gpus"]) for row in shown["rows"]] == [("node-a", 3), ("node-b", 0)]


def test_many_unreadable_objects_do_not_fill_the_screen(server: OddServer) -> None:
    objects = good_objects()
    objects["resourceslices"] += [{"metadata": {"name": f"s{number}"}} for number in range(12)]
    server.serve(objects)
    told = server.shown(output=Output.table)[1].splitlines()
    assert len(told) == 6
    assert told[-1] == "gpu-dra-driver: 7 more objects cannot be read (-o json has all)"
    assert len(server.rows()["unreadable"]) == 12


@pytest.mark.parametrize("answer", [{}, 7, {"items": 7}, {"items": {}}, {"kind": "Status"}])
def test_an_answer_that_is_no_list_is_one_sentence(server: OddServer, answer: Any) -> None:
    server.serve(good_objects())
    server.lists[f"{GROUP}/v1/resourceslices"] = answer
    told = "gpu-dra-driver: list resourceslices: the answer has no list of resourceslices in it\n"
    assert server.shown() == ("", told)


def test_no_items_is_an_empty_list(server: OddServer) -> None:
    server.serve(dict.fromkeys(KINDS))
    shown = server.rows()
    assert (shown["rows"], shown["pending"], shown["unreadable"]) == ([], [], [])


# --- pools that nodes share ---------------------------------------------------------------------


def shared_slice(name: str, *devices: Json, **spec: Any) -> Json:
    made = slice_of(name, *devices, **spec)
    if "nodeName" not in spec:
        del made["spec"]["nodeName"]
    made["metadata"]["name"] = f"{name}-{len(json.dumps(made))}"
    return made


def bare(name: str, **more: Any) -> Json:
    return {"name": name, "attributes": {"productName": {"string": "H100"}}, **more}


@pytest.mark.parametrize(
    ("slices", "rows"),
    [
        ([shared_slice("net", bare("x"), allNodes=True)], [("(all nodes)", 1, None)]),
        (
            [shared_slice("net", bare("x"), nodeSelector={"nodeSelectorTerms": []})],
            [("(some nodes)", 1, None)],
        ),
        (
            [
                shared_slice(
                    "switch",
                    bare("x", nodeName="node-x"),
                    bare("y", nodeName="node-y"),
                    bare("z", allNodes=True),
                    bare("s", nodeSelector={"nodeSelectorTerms": []}),
                    perDeviceNodeSelection=True,
                )
            ],
            [("(all nodes)", 1, None), ("(some nodes)", 1, None), ("node-x", 1, None), ("node-y", 1, None)],
        ),
        (  # One pool with slices of two nodes, of which a third is missing.
            [
                shared_slice(
                    "rack",
                    bare("x"),
                    nodeName="node-x",
                    pool={"name": "rack", "generation": 1, "resourceSliceCount": 3},
                ),
                shared_slice(
                    "rack",
                    bare("yy"),
                    nodeName="node-y",
                    pool={"name": "rack", "generation": 1, "resourceSliceCount": 3},
                ),
            ],
            [
                ("node-x", 1, "pool rack: 2 of 3 slices are there"),
                ("node-y", 1, "pool rack: 2 of 3 slices are there"),
            ],
        ),
        # A pool of which there are counters only.
        ([shared_slice("empty", allNodes=True)], [("(all nodes)", 0, None)]),
        # The pool's name is not the node's.
        ([shared_slice("pool-1", bare("x"), nodeName="node-x")], [("node-x", 1, None)]),
    ],
)
def test_rows_of_pools_that_nodes_share(
    server: OddServer, slices: list[Json], rows: list[tuple[str, int, str | None]]
) -> None:
    server.serve({**good_objects(), "resourceslices": slices})
    shown = server.rows()["rows"]
    assert [(row["node"], row["count"]["gpus"], row["problem"]) for row in shown] == rows


def test_who_waits_hears_of_pools_that_were_not_looked_at(server: OddServer) -> None:
    objects = good_objects()
    objects["resourceslices"] = [shared_slice("net", device("x"), allNodes=True)]
    server.serve(objects)
    assert (
        "\nclaim ml/waits has no devices:\n  1 pool that nodes share was not looked at\n"
        in (server.shown(output=Output.table)[0])
    )
    assert [(row["product"], row["nodes"]) for row in server.rows("product")["rows"]] == [("H100", 0)]
    objects["resourceslices"].append(slice_of("pool-1", device("y"), nodeName="node-y"))
    server.serve(objects)
    assert "  node-y could serve it\n" in server.shown(output=Output.table)[0]
