"""Where a stream of device health plugs into the DRA socket.

Kubelet 1.36 opens the v1alpha1 stream to every DRA plugin, whether it is advertised or not, and tries again every five
seconds while the answer is Unimplemented. If there is no stream, that answer costs no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dra_driver.kubelet.grpc_server import Caller, Method
from dra_driver.kubelet.pb import dra_health_v1_pb2 as v1
from dra_driver.kubelet.rpc import stream_method

METHODS = frozenset(f"/{version}.DRAResourceHealth/NodeWatchResources" for version in ("v1", "v1alpha1"))

Watch = Callable[[Any, Caller], Iterator[v1.NodeWatchResourcesResponse]]


def health_methods(watch: Watch) -> dict[str, Method]:
    """Both generations, which are the same on the wire, by their paths."""
    return dict.fromkeys(METHODS, stream_method("NodeWatchResources", watch, v1.NodeWatchResourcesRequest))
