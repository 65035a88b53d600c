"""DRA v1 and v1beta1: turns the kubelet's calls into calls of a ClaimService, and its outcomes into answers.

A claim's failure goes into that claim's entry, never into the status of the call. So the kubelet can still use the
other claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from dra_driver.kubelet.claim_check import check_claims
from dra_driver.kubelet.pb import dra_v1_pb2 as pb
from dra_driver.kubelet.rpc import Methods, RpcError, error_text, unary
from dra_driver.model.claim import (
    ClaimRef,
    Failed,
    Prepared,
    PreparedDevice,
    PrepareOutcome,
    UnprepareOutcome,
)

V1 = "v1.DRAPlugin"
V1BETA1 = "v1beta1.DRAPlugin"
MAX_CLAIMS = 1024
"""A call of the kubelet names the claims of one pod."""

_MAX_LOGGED_UID_CHARS = 128
_log = structlog.get_logger(__name__)
_Outcome = TypeVar("_Outcome")
_Call = Callable[[Sequence[ClaimRef], float, Callable[[], bool]], Mapping[str, _Outcome]]


class ClaimService(Protocol):
    """Prepares and unprepares the claims of a call. Many threads call it at the same time.

    `deadline_s` is the number of seconds until the caller gives up, very large if it never does. `has_left` returns
    whether the caller has gone or has cancelled the call; a newer call may then be on its way, perhaps to another
    instance. Every claim has valid names and occurs once. The answer has an entry for the UID of each claim. A claim
    without an entry, and every claim of a call that raises, is reported to the kubelet as failed.
    """

    def prepare(
        self, claims: Sequence[ClaimRef], deadline_s: float, has_left: Callable[[], bool]
    ) -> Mapping[str, PrepareOutcome]: ...

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float, has_left: Callable[[], bool]
    ) -> Mapping[str, UnprepareOutcome]: ...


def method_path(version: str, method: str) -> str:
    """The path of a method in the service of this version, V1 or V1BETA1."""
    return f"/k8s.io.kubelet.pkg.apis.dra.{version}/{method}"


class DraService:
    """Both versions. Their messages have the same fields under the same numbers, but v1beta1 has no share IDs; a test
    compares the protos. So both use the messages of v1."""

    def __init__(self, claims: ClaimService) -> None:
        self._claims = claims

    def methods(self) -> Methods:
        """The methods of both versions by their paths."""
        return {
            method_path(version, name): unary(name, behavior, request)
            for version, prepare in ((V1, self.prepare), (V1BETA1, self._prepare_v1beta1))
            for name, behavior, request in (
                ("NodePrepareResources", prepare, pb.NodePrepareResourcesRequest),
                ("NodeUnprepareResources", self.unprepare, pb.NodeUnprepareResourcesRequest),
            )
        }

    def prepare(
        self, request: pb.NodePrepareResourcesRequest, context: Any
    ) -> pb.NodePrepareResourcesResponse:
        response = pb.NodePrepareResourcesResponse()
        for uid, outcome in _outcomes(self._claims.prepare, request.claims, context).items():
            response.claims[uid].CopyFrom(_prepare_entry(uid, outcome))
        return response

    def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, context: Any
    ) -> pb.NodeUnprepareResourcesResponse:
        response = pb.NodeUnprepareResourcesResponse()
        for uid, outcome in _outcomes(self._claims.unprepare, request.claims, context).items():
            response.claims[uid].error = "" if outcome is None else _failure(outcome)
        return response

    def _prepare_v1beta1(
        self, request: pb.NodePrepareResourcesRequest, context: Any
    ) -> pb.NodePrepareResourcesResponse:
        response = self.prepare(request, context)
        for entry in response.claims.values():
            for device in entry.devices:
                device.ClearField("share_id")
        return response


def _outcomes(
    call: _Call[_Outcome], claims: Sequence[pb.Claim], context: grpc.ServicerContext
) -> dict[str, _Outcome | Failed]:
    """One outcome for each UID of the request: the service's outcome, or an error.

    Raises: RpcError if the call has too many claims.
    """
    if len(claims) > MAX_CLAIMS:
        raise RpcError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the call names {len(claims)} claims, but one call may have at most {MAX_CLAIMS}; make several calls",
        )
    checked = check_claims(ClaimRef(claim.namespace, claim.name, claim.uid) for claim in claims)
    outcomes: dict[str, _Outcome | Failed] = {uid: Failed(text) for uid, text in checked.refused.items()}
    uids = [ref.uid for ref in checked.accepted]
    try:
        answers = (
            call(checked.accepted, context.time_remaining(), lambda: not context.is_active()) if uids else {}
        )
        missing = Failed("internal error: the driver gave no answer for this claim")
        outcomes |= {uid: answers.get(uid, missing) for uid in uids}
        if unasked := sorted(map(str, answers.keys() - outcomes.keys())):
            _log.error("claim_answers_unasked", claim_uids=unasked)
    except Exception as error:  # noqa: BLE001 - goes into the entries of the claims
        _log.exception("claim_service_failed", claim_uids=uids)
        outcomes |= dict.fromkeys(uids, Failed(error_text(error)))
    for uid, outcome in outcomes.items():
        if isinstance(outcome, Failed):
            # A refused UID may have any length.
            _log.error("claim_failed", claim_uid=uid[:_MAX_LOGGED_UID_CHARS], error=outcome.error)
    return outcomes


def _prepare_entry(uid: str, outcome: PrepareOutcome) -> pb.NodePrepareResourceResponse:
    if not isinstance(outcome, Prepared):
        return pb.NodePrepareResourceResponse(error=_failure(outcome))
    try:
        return pb.NodePrepareResourceResponse(devices=[_device(device) for device in outcome.devices])
    except Exception as error:  # noqa: BLE001 - must not fail the other claims
        _log.exception("claim_answer_malformed", claim_uid=uid)
        return pb.NodePrepareResourceResponse(error=error_text(error))


def _failure(outcome: object) -> str:
    """The text of an error, never empty: the kubelet takes an empty text for success."""
    if isinstance(outcome, Failed):
        return error_text(outcome.error) or "internal error: the driver failed without giving a reason"
    return f"internal error: the driver answered with {type(outcome).__name__} for this claim"


def _device(device: PreparedDevice) -> pb.Device:
    if not device.pool or not device.device:
        raise ValueError(f"prepared device {device} lacks its pool or its name")
    base_names = dict.fromkeys(request.partition("/")[0] for request in device.requests)
    return pb.Device(
        request_names=base_names,
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
        share_id=device.share_id,
    )
