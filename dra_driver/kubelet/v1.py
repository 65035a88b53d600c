"""DRA v1: turns the kubelet's calls into calls of a ClaimService, and its outcomes into answers.

A claim's failure goes into that claim's entry, never into the status of the call. So the kubelet can still use the
other claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import structlog

from dra_driver.kubelet.claim_check import check_claims
from dra_driver.kubelet.grpc_server import Caller, Method
from dra_driver.kubelet.grpc_wire import RpcError, Status
from dra_driver.kubelet.pb import dra_v1_pb2 as pb
from dra_driver.kubelet.rpc import error_text, unary_method
from dra_driver.model.claim import (
    ClaimRef,
    Failed,
    Prepared,
    PreparedDevice,
    PrepareOutcome,
    UnprepareOutcome,
)

SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
MAX_CLAIMS = 1024
"""A call of the kubelet names the claims of one pod."""

_MAX_LOGGED_UID_CHARS = 128
_log = structlog.get_logger(__name__)
_Outcome = TypeVar("_Outcome")
_Call = Callable[[Sequence[ClaimRef], float | None, Callable[[], bool]], Mapping[str, _Outcome]]


class ClaimService(Protocol):
    """Prepares and unprepares the claims of a call. Many threads call it at the same time.

    `deadline_s` is the number of seconds until the kubelet gives up, None if it does not. `has_left` answers whether
    the kubelet has cancelled the call; a newer call may then be on its way, perhaps to another instance. Every claim
    has valid names and occurs once. The answer has an entry for the UID of each claim. A claim without an entry, and
    every claim of a call that raises, is reported to the kubelet as failed.
    """

    def prepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None, has_left: Callable[[], bool]
    ) -> Mapping[str, PrepareOutcome]: ...

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None, has_left: Callable[[], bool]
    ) -> Mapping[str, UnprepareOutcome]: ...


class DraV1:
    """The v1 service; v1beta1 wraps it."""

    def __init__(self, claims: ClaimService) -> None:
        self._claims = claims

    def methods(self) -> dict[str, Method]:
        """The methods of the service by their paths."""
        return dra_methods(SERVICE, self.prepare, self.unprepare)

    def prepare(
        self, request: pb.NodePrepareResourcesRequest, caller: Caller
    ) -> pb.NodePrepareResourcesResponse:
        response = pb.NodePrepareResourcesResponse()
        for uid, outcome in _outcomes(self._claims.prepare, request.claims, caller).items():
            try:
                response.claims[uid].CopyFrom(_prepare_entry(outcome))
            except Exception as error:  # noqa: BLE001 - must not fail the other claims
                _log.exception("claim_answer_malformed", claim_uid=uid)
                response.claims[uid].CopyFrom(pb.NodePrepareResourceResponse(error=error_text(error)))
        return response

    def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, caller: Caller
    ) -> pb.NodeUnprepareResourcesResponse:
        response = pb.NodeUnprepareResourcesResponse()
        for uid, outcome in _outcomes(self._claims.unprepare, request.claims, caller).items():
            response.claims[uid].CopyFrom(_unprepare_entry(outcome))
        return response


def dra_methods(
    service: str, prepare: Callable[[Any, Caller], Any], unprepare: Callable[[Any, Caller], Any]
) -> dict[str, Method]:
    """The methods of a DRA service that speaks the v1 messages, by their paths."""
    asked = (
        ("NodePrepareResources", prepare, pb.NodePrepareResourcesRequest),
        ("NodeUnprepareResources", unprepare, pb.NodeUnprepareResourcesRequest),
    )
    return {f"/{service}/{name}": unary_method(name, answer, request) for name, answer, request in asked}


def _outcomes(
    call: _Call[_Outcome],
    claims: Sequence[pb.Claim],
    caller: Caller,
) -> dict[str, _Outcome | Failed]:
    """One outcome for each UID of the request: the service's outcome, or an error.

    Raises: RpcError if the call has too many claims.
    """
    if len(claims) > MAX_CLAIMS:
        raise RpcError(
            Status.RESOURCE_EXHAUSTED,
            f"the call names {len(claims)} claims, but one call may have at most {MAX_CLAIMS}; make several calls",
        )
    checked = check_claims(ClaimRef(claim.namespace, claim.name, claim.uid) for claim in claims)
    outcomes: dict[str, _Outcome | Failed] = {uid: Failed(text) for uid, text in checked.refused.items()}
    if checked.accepted:
        outcomes |= _call(call, checked.accepted, caller)
    for uid, outcome in outcomes.items():
        if isinstance(outcome, Failed):
            # A refused UID may have any length.
            _log.error("claim_failed", claim_uid=uid[:_MAX_LOGGED_UID_CHARS], error=outcome.error)
    return outcomes


def _call(
    call: _Call[_Outcome],
    refs: Sequence[ClaimRef],
    caller: Caller,
) -> dict[str, _Outcome | Failed]:
    try:
        answers = call(refs, caller.time_remaining(), lambda: not caller.is_active())
        missing = Failed("internal error: the driver gave no answer for this claim")
        outcomes: dict[str, _Outcome | Failed] = {ref.uid: answers.get(ref.uid, missing) for ref in refs}
        if unasked := sorted(map(str, answers.keys() - outcomes.keys())):
            _log.error("claim_answers_unasked", claim_uids=unasked)
    except Exception as error:  # noqa: BLE001 - goes into the entries of the claims
        _log.exception("claim_service_failed", claim_uids=[ref.uid for ref in refs])
        failed = Failed(error_text(error))
        return {ref.uid: failed for ref in refs}
    return outcomes


def _prepare_entry(outcome: PrepareOutcome) -> pb.NodePrepareResourceResponse:
    match outcome:
        case Prepared(devices):
            return pb.NodePrepareResourceResponse(devices=[_device(device) for device in devices])
        case Failed(error):
            return pb.NodePrepareResourceResponse(error=_failure(error))
    raise TypeError(f"the driver answered with {type(outcome).__name__} for this claim")


def _unprepare_entry(outcome: UnprepareOutcome) -> pb.NodeUnprepareResourceResponse:
    match outcome:
        case None:
            return pb.NodeUnprepareResourceResponse()
        case Failed(error):
            return pb.NodeUnprepareResourceResponse(error=_failure(error))
    text = f"the driver answered with {type(outcome).__name__} for this claim"
    return pb.NodeUnprepareResourceResponse(error=error_text(TypeError(text)))


def _failure(error: str) -> str:
    """The text of an error, never empty: the kubelet takes an empty text for success."""
    return error_text(error) or "internal error: the driver failed without giving a reason"


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
