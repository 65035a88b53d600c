"""DRA v1beta1: the v1 service without share IDs.

The messages of both generations have the same fields under the same numbers, so this service uses the v1 messages; a
test compares them with the v1beta1 proto.
"""

from __future__ import annotations

from dra_driver.kubelet.grpc_server import Caller, Method
from dra_driver.kubelet.pb import dra_v1_pb2 as pb
from dra_driver.kubelet.v1 import DraV1, dra_methods

SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"


class DraV1beta1:
    """Wraps the v1 service."""

    def __init__(self, v1: DraV1) -> None:
        self._v1 = v1

    def methods(self) -> dict[str, Method]:
        """The methods of the service by their paths."""
        return dra_methods(SERVICE, self._prepare, self._v1.unprepare)

    def _prepare(
        self, request: pb.NodePrepareResourcesRequest, caller: Caller
    ) -> pb.NodePrepareResourcesResponse:
        response = self._v1.prepare(request, caller)
        for entry in response.claims.values():
            for device in entry.devices:
                device.ClearField("share_id")
        return response
