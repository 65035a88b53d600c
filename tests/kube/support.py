"""Objects and waits that several API tests share."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from playground.apiserver.failure import ApiFailure, expired
from playground.apiserver.faults import Faults

from dra_driver.kube.client import ApiClient

DRIVER = "gpu.nvidia.com"


def make_slice(
    node: str, *, index: int = 0, count: int = 1, generation: int = 1, **spec: Any
) -> dict[str, Any]:
    """A valid slice as a publisher sends it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": f"{index:05x}-{DRIVER}-{node}-"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": f"gpu-{number}",
                    "attributes": {"type": {"string": "gpu"}, "index": {"int": number}},
                    "capacity": {"memory": {"value": "80Gi"}},
                }
                for number in range(count)
            ],
            **spec,
        },
    }


def bump(obj: dict[str, Any]) -> dict[str, Any]:
    """The same slice at the next pool generation."""
    pool = obj["spec"]["pool"]
    return obj | {"spec": obj["spec"] | {"pool": pool | {"generation": pool["generation"] + 1}}}


def bookmark(version: str) -> dict[str, Any]:
    """A raw event of a watch of slices."""
    return {"type": "BOOKMARK", "object": {"kind": "ResourceSlice", "metadata": {"resourceVersion": version}}}


def busy(code: int, asked_s: int) -> dict[str, Any]:
    """The raw event of a server that requests a later retry."""
    failure = ApiFailure(code, "TooManyRequests", "busy", details={"retryAfterSeconds": asked_s})
    return {"type": "ERROR", "object": failure.status()}


EXPIRED = {"type": "ERROR", "object": expired(1, 2).status()}
AN_END_OF_EACH_WATCH: dict[str, Callable[[Faults], None]] = {
    "410": lambda faults: faults.fail(10_000, 410, reason="Expired", path="watch=true"),
    "410-in-stream": lambda faults: faults.end_watches(EXPIRED),
    "410-after-a-bookmark": lambda faults: faults.end_watches(bookmark("1000000"), EXPIRED),
    "history-set-back": lambda faults: faults.end_watches(bookmark("1")),
    "in-order": lambda faults: faults.end_watches(),
    "in-order-after-a-bookmark": lambda faults: faults.end_watches(bookmark("1000000")),
}
"""Ways in which an API server can end each watch at once."""


def allocated_claim(
    api: ApiClient,
    namespace: str,
    results: Sequence[Mapping[str, Any]],
    *,
    node: str = "",
    name: str = "",
    pods: bool = True,
) -> dict[str, Any]:
    """A claim as the scheduler leaves it: allocated on `node`, reserved for something and, with `pods`, for
    two pods, which a real cluster's controllers remove because they do not exist.
    """
    claim: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name or f"claim-{uuid.uuid4().hex[:8]}"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}},
    }
    stored = api.call("POST", "resourceclaims", namespace=namespace, body=claim, action="test")
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    stored["status"] = {
        "allocation": {
            "devices": {"results": [{"request": "gpu", **result} for result in results]},
            **({"nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]}} if node else {}),
        },
        "reservedFor": [
            *({"resource": "pods", "name": f"pod-{n}", "uid": f"uid-{n}"} for n in (1, 2) if pods),
            {"apiGroup": "batch.example.com", "resource": "pods", "name": "job", "uid": "uid-3"},
        ],
    }
    return write_claim_status(api, stored)


def write_claim_status(api: ApiClient, claim: dict[str, Any]) -> dict[str, Any]:
    """Replace the whole status, as the scheduler does."""
    metadata = claim["metadata"]
    return api.call(
        "PUT",
        "resourceclaims",
        namespace=metadata["namespace"],
        name=metadata["name"],
        subresource="status",
        body=claim,
        action="test",
    )


@contextmanager
def raw_server(answer: Callable[[Callable[[bytes], None], bytes], object]) -> Iterator[int]:
    """The port of a server that reads a request, lets `answer(send, request)` answer, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                request = connection.recv(65536)
                answer(connection.sendall, request)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
