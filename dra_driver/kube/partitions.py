"""Whether the API server keeps counters that devices share, and takes them from a slice of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dra_driver.core.slicediff import Owner, slice_changes
from dra_driver.core.slices import Pool, SliceContent
from dra_driver.errors import ApiRejectedError
from dra_driver.kube.dropped import dropped_fields
from dra_driver.kube.versions import ResourceApi

_GATE = "DRAPartitionableDevices"
_REMEDY = (
    f"use Kubernetes 1.36 or newer, where the feature gate {_GATE} is on unless it is switched off, or 1.35 with it"
    " switched on, in API server and scheduler"
)
_INVALID = 422
_COUNTERS: dict[str, Any] = {"memory": {"value": "1Gi"}}
_SET: dict[str, Any] = {"name": "probe", "counters": _COUNTERS}
_DEVICE: dict[str, Any] = {
    "name": "probe",
    "consumesCounters": [{"counterSet": "probe", "counters": _COUNTERS}],
}


@dataclass(frozen=True, slots=True)
class PartitionsSupported:
    """The API server's answer; `reason` is empty, or one sentence that says why not and what to do."""

    supported: bool
    reason: str = ""


def supports_partitions(api: ResourceApi, owner: Owner) -> PartitionsSupported:
    """Try to create the two slices of a partitioned pool, counter sets and devices apart; nothing is written.

    Until Kubernetes 1.34 both had to be in one slice, which is refused here. Where the feature gate is off, the
    server takes the slices and drops the fields.
    Raises: ApiUnavailableError; ApiRejectedError if it refuses to be asked (permissions, admission).
    """
    contents = (SliceContent(shared_counters=(_SET,)), SliceContent(devices=(_DEVICE,)))
    probe = slice_changes(Pool(owner.node_name, contents), (), owner)
    for sent in probe.creates:
        try:
            stored = api.call(
                "POST",
                "resourceslices",
                query={"dryRun": "All"},
                body=sent,
                action="ask the API server for partitionable devices",
            )
        except ApiRejectedError as error:
            if error.status != _INVALID:
                raise
            why = f"the API server refuses counters in a slice of their own ({error})"
            return PartitionsSupported(supported=False, reason=f"{why}; {_REMEDY}")
        lost = [path for path, _ in dropped_fields(sent, stored)]
        if lost:
            why = f"the API server drops {', '.join(lost)} of a slice: its feature gate {_GATE} is off"
            return PartitionsSupported(supported=False, reason=f"{why}; {_REMEDY}")
    return PartitionsSupported(supported=True)
