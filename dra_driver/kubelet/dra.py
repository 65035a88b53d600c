"""The DRA service, v1 and v1beta1.

A claim's failure goes into that claim's entry, never into the status of the call, so the kubelet can still use the
other claims. Claim references are checked before any code uses them, especially in paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from dra_driver.kubelet.grpc_server import Methods, RpcError, error_text, unary
from dra_driver.kubelet.pb import dra_v1_pb2 as pb
from dra_driver.model.claim import (
    ClaimRef,
    Failed,
    PreparedDevice,
    PrepareOutcome,
    UnprepareOutcome,
)
from dra_driver.model.ids import is_dns_label, is_subdomain, is_uid

V1 = "v1.DRAPlugin"
V1BETA1 = "v1beta1.DRAPlugin"
MAX_CLAIMS = 1024
"""Far more than a call contains, because the kubelet sends only the claims of one pod."""

_log = structlog.get_logger(__name__)
_Outcome = TypeVar("_Outcome")
_Call = Callable[[Sequence[ClaimRef], float, Callable[[], bool]], Mapping[str, _Outcome]]

_MAX_UID_CHARS = 128
_MAX_SHOWN_CHARS = 64


class ClaimCalls(Protocol):
    """Prepares and unprepares the claims of a call, which have valid, distinct names. Called by many threads.

    `deadline_s` is the seconds until the caller gives up. `is_cancelled` returns whether the caller has left; it may
    call again, perhaps another instance. The result has an entry for each UID. An exception fails all claims.
    """

    def prepare(
        self, claims: Sequence[ClaimRef], deadline_s: float, is_cancelled: Callable[[], bool]
    ) -> Mapping[str, PrepareOutcome]: ...

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float, is_cancelled: Callable[[], bool]
    ) -> Mapping[str, UnprepareOutcome]: ...


def method_path(version: str, method: str) -> str:
    return f"/k8s.io.kubelet.pkg.apis.dra.{version}/{method}"


class DraService:
    """Serves both versions with the messages of v1.

    Those of v1beta1 differ only in share IDs, which a v1beta1 kubelet ignores. A test compares them.
    """

    def __init__(self, claims: ClaimCalls) -> None:
        self._claims = claims

    def methods(self) -> Methods:
        return {
            method_path(version, name): unary(name, behavior, request)
            for version in (V1, V1BETA1)
            for name, behavior, request in (
                ("NodePrepareResources", self.prepare, pb.NodePrepareResourcesRequest),
                ("NodeUnprepareResources", self.unprepare, pb.NodeUnprepareResourcesRequest),
            )
        }

    def prepare(
        self, request: pb.NodePrepareResourcesRequest, context: Any
    ) -> pb.NodePrepareResourcesResponse:
        response = pb.NodePrepareResourcesResponse()
        for uid, outcome in _outcomes(self._claims.prepare, request.claims, context).items():
            response.claims[uid].CopyFrom(_prepare_entry(outcome))
        return response

    def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, context: Any
    ) -> pb.NodeUnprepareResourcesResponse:
        response = pb.NodeUnprepareResourcesResponse()
        for uid, outcome in _outcomes(self._claims.unprepare, request.claims, context).items():
            response.claims[uid].error = "" if outcome is None else _failure(outcome)
        return response


def _outcomes(
    call: _Call[_Outcome], claims: Sequence[pb.Claim], context: grpc.ServicerContext
) -> dict[str, _Outcome | Failed]:
    if len(claims) > MAX_CLAIMS:
        raise RpcError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the call names {len(claims)} claims, but one call may have at most {MAX_CLAIMS}; use several calls",
        )
    accepted, refused = check_claims(ClaimRef(claim.namespace, claim.name, claim.uid) for claim in claims)
    outcomes: dict[str, _Outcome | Failed] = {uid: Failed(text) for uid, text in refused.items()}
    uids = [ref.uid for ref in accepted]
    try:
        if uids:
            outcomes |= call(accepted, context.time_remaining(), lambda: not context.is_active())
    except Exception as error:  # noqa: BLE001 - goes into the entries of the claims
        _log.exception("claim_service_failed", claim_uids=uids)
        outcomes |= dict.fromkeys(uids, Failed(error_text(error)))
    for uid, outcome in outcomes.items():
        if isinstance(outcome, Failed):
            # A refused UID may have any length.
            _log.error("claim_failed", claim_uid=uid[:_MAX_UID_CHARS], error=outcome.error)
    return outcomes


def _prepare_entry(outcome: PrepareOutcome) -> pb.NodePrepareResourceResponse:
    if isinstance(outcome, Failed):
        return pb.NodePrepareResourceResponse(error=_failure(outcome))
    return pb.NodePrepareResourceResponse(devices=[_device(device) for device in outcome.devices])


def _failure(outcome: Failed) -> str:
    """Never return an empty text: the kubelet treats it as success."""
    return error_text(outcome.error) or "internal error: the plugin failed without giving a reason"


def _device(device: PreparedDevice) -> pb.Device:
    return pb.Device(
        request_names=device.requests,
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
        share_id=device.share_id,
    )


def check_claims(claims: Iterable[ClaimRef]) -> tuple[Sequence[ClaimRef], Mapping[str, str]]:
    """Return the claims of one request, and the reasons for the refused ones by UID.

    Identical references count once; a UID with two different names is refused.
    """
    accepted: dict[str, ClaimRef] = {}
    refused: dict[str, str] = {}
    for ref in claims:
        known = accepted.get(ref.uid)
        fault = claim_fault(ref)
        if fault is None and known is not None and known != ref:
            fault = (
                f"claim UID {ref.uid} is named twice in one request, as {known.namespace}/{known.name} "
                f"and as {ref.namespace}/{ref.name}"
            )
        if fault is not None:
            refused.setdefault(ref.uid, fault)
        else:
            accepted[ref.uid] = ref
    return [ref for uid, ref in accepted.items() if uid not in refused], refused


def claim_fault(ref: ClaimRef) -> str | None:
    if not ref.uid:
        return f"claim {_shown(f'{ref.namespace}/{ref.name}')} has no UID"
    if not is_uid(ref.uid):
        return (
            f"claim UID {_shown(ref.uid)} is not valid: it must have at most {_MAX_UID_CHARS} characters: "
            f"letters and digits, with '-', '_' or '.' between them, but without '..'"
        )
    if not is_dns_label(ref.namespace):
        return f"claim namespace {_shown(ref.namespace)} is not valid: it must be a DNS label"
    if not is_subdomain(ref.name):
        return f"claim name {_shown(ref.name)} is not valid: it must be a DNS subdomain"
    return None


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]!r}…"
