"""Creates the tables for `kubectl get`: columns and rows, with the metadata of each object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dra_driver.cli.rules.prepared_claims import age_text
from playground.apiserver.store import Object, at

Cell = Callable[[Object], Any]

ACCEPTED = "as=Table;v=v1;g=meta.k8s.io"
_WIDE = "On Node"
"""The column that only `-o wide` shows."""


def table(objects: Sequence[Object], metadata: Mapping[str, Any]) -> Object:
    """Return the Table of objects of one kind, in their order."""
    columns = _columns(str(objects[0].get("kind")) if objects else "")
    of_row = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": dict(metadata),
        "columnDefinitions": [
            {"name": name, "type": "string", "format": "", "description": "", "priority": int(name == _WIDE)}
            for name in columns
        ],
        "rows": [
            {
                "cells": [cell(one) for cell in columns.values()],
                "object": {**of_row, "metadata": one["metadata"]},
            }
            for one in objects
        ],
    }


def _columns(kind: str) -> Mapping[str, Cell]:
    if kind == "Event":
        return _EVENT
    wide: dict[str, Cell] = {_WIDE: _text("spec.nodeName")} if kind == "Pod" else {}
    return {
        "Name": _text("metadata.name"),
        **_BY_KIND.get(kind, {}),
        "Age": _age("metadata.creationTimestamp"),
        **wide,
    }


def _text(path: str) -> Cell:
    return lambda one: str(at(one, path) or "<none>")


def _age(*paths: str) -> Cell:
    def age(one: Object) -> str:
        time = next(filter(None, (at(one, path) for path in paths)), None)
        passed = time and datetime.now(UTC) - datetime.fromisoformat(time)
        return age_text(max(0.0, passed.total_seconds())) if passed else "<unknown>"

    return age


def _ready(pod: Object) -> str:
    ready = sum(one["ready"] for one in at(pod, "status.containerStatuses") or ())
    return f"{ready}/{len(at(pod, 'spec.containers') or ())}"


def _status(pod: Object) -> str:
    """Return what kubectl shows for a pod on a cluster: of containers that ended the reason, `Completed` or `Error`."""
    if at(pod, "metadata.deletionTimestamp"):
        return "Terminating"
    reasons = (at(one, "state.terminated.reason") for one in at(pod, "status.containerStatuses") or ())
    return str(next(filter(None, reasons), None) or at(pod, "status.phase") or "Pending")


def _job_state(job: Object) -> str:
    return "Complete" if at(job, "status.completionTime") else "Running"


def _completions(job: Object) -> str:
    wanted = next(filter(None, (at(job, "spec.completions"), at(job, "spec.parallelism"))), 1)
    return f"{at(job, 'status.succeeded') or 0}/{wanted}"


def _claim_state(claim: Object) -> str:
    if not at(claim, "status.allocation"):
        return "pending"
    return "allocated,reserved" if at(claim, "status.reservedFor") else "allocated"


_BY_KIND: Mapping[str, dict[str, Cell]] = {
    "Pod": {"Ready": _ready, "Status": _status, "Restarts": lambda pod: "0"},
    "Node": {"Status": lambda node: "Ready", "Version": _text("status.nodeInfo.kubeletVersion")},
    "Job": {"Status": _job_state, "Completions": _completions},
    "ResourceClaim": {"State": _claim_state},
    "ResourceSlice": {
        "Node": _text("spec.nodeName"), "Driver": _text("spec.driver"), "Pool": _text("spec.pool.name")
    },
}  # fmt: skip
_EVENT: Mapping[str, Cell] = {
    "Last Seen": _age("lastTimestamp", "metadata.creationTimestamp"),
    "Type": _text("type"),
    "Reason": _text("reason"),
    "Object": lambda event: f"{event['involvedObject']['kind'].lower()}/{event['involvedObject']['name']}",
    "Message": _text("message"),
}
