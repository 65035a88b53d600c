"""Objects and waits that several API tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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


def wait_until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Poll every 5 ms."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("condition did not come true in time")
