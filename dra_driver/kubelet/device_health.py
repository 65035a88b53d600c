"""Where a stream of device health plugs into the DRA socket.

Kubelet 1.36 opens the v1alpha1 stream to every DRA plugin, whether it is advertised or not, and tries again every five
seconds while the answer is Unimplemented. If there is no stream, that answer costs no thread. Kubelet 1.37 opens only
an advertised stream, v1 if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dra_driver.kubelet.pb import dra_health_v1_pb2 as pb
from dra_driver.kubelet.rpc import Methods, streaming

VERSIONS = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

Watch = Callable[[Any, Any], Iterator[pb.NodeWatchResourcesResponse]]
"""Gets the request and gRPC's context."""


def health_methods(watch: Watch) -> Methods:
    """Both versions, which are the same on the wire, by their paths."""
    methods = [f"{version}/NodeWatchResources" for version in VERSIONS]
    return {f"/{method}": streaming(method, watch, pb.NodeWatchResourcesRequest) for method in methods}
