"""Where a stream of device health plugs into the DRA socket.

Kubelet 1.36 opens the v1alpha1 stream to every DRA plugin, whether it is advertised or not, and tries again every five
seconds while the answer is Unimplemented. If there is no stream, gRPC's own thread gives that answer, so it costs no
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from dra_driver.kubelet.pb import dra_health_v1_pb2 as v1
from dra_driver.kubelet.rpc import stream_handler

METHODS = frozenset(f"/{version}.DRAResourceHealth/NodeWatchResources" for version in ("v1", "v1alpha1"))

Watch = Callable[[Any, Any], Iterator[v1.NodeWatchResourcesResponse]]


class DraHealth(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves both generations, which are the same on the wire, from one `watch`; without a `watch` it serves
    neither."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch

    @property
    def offered(self) -> bool:
        """Whether to tell the kubelet that there is a stream."""
        return self._watch is not None

    def service(self, handler_call_details: Any) -> Any:
        if self._watch is None or handler_call_details.method not in METHODS:
            return None
        return stream_handler(
            "NodeWatchResources", self._watch, v1.NodeWatchResourcesRequest, v1.NodeWatchResourcesResponse
        )
