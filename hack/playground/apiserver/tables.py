"""Objects as `kubectl get` asks for them: columns and rows, with the metadata of each object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dra_driver.cli.rules.prepared_claims import age_text

Object = dict[str, Any]
Cell = Callable[[Object], Any]

ACCEPTED = "as=Table;v=v1;g=meta.k8s.io"
_WIDE = "On Node"
"""A column of `-o wide` only."""


def table(objects: Sequence[Object], metadata: Mapping[str, Any]) -> Object:
    """The Table of objects of one kind, in the order of the objects."""
    columns = _columns(str(objects[0].get("kind")) if objects else "")
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
                "object": {
                    "kind": "PartialObjectMetadata",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": one["metadata"],
                },
            }
            for one in objects
        ],
    }


def _columns(kind: str) -> dict[str, Cell]:
    if kind == "Event":
        return _EVENT
    wide: dict[str, Cell] = {_WIDE: _text("spec.nodeName")} if kind == "Pod" else {}
    return {"Name": lambda one: one["metadata"]["name"], **_BY_KIND.get(kind, {}), "Age": _age, **wide}


def _ready(pod: Object) -> str:
    statuses = _at(pod, "status.containerStatuses") or ()
    return f"{sum(one['ready'] for one in statuses)}/{len(_at(pod, 'spec.containers') or ())}"


def _phase(pod: Object) -> str:
    return (
        "Terminating" if pod["metadata"].get("deletionTimestamp") else _at(pod, "status.phase") or "Pending"
    )


def _claim_state(claim: Object) -> str:
    if not _at(claim, "status.allocation"):
        return "pending"
    return "allocated,reserved" if _at(claim, "status.reservedFor") else "allocated"


def _at(one: Object, path: str) -> Any:
    value: Any = one
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(path: str) -> Cell:
    return lambda one: str(_at(one, path) or "<none>")


def _since(time: str | None) -> str:
    if not time:
        return "<unknown>"
    return age_text(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()))


def _age(one: Object) -> str:
    return _since(one["metadata"].get("creationTimestamp"))


_BY_KIND: Mapping[str, dict[str, Cell]] = {
    "Pod": {"Ready": _ready, "Status": _phase, "Restarts": lambda pod: "0"},
    "Node": {"Status": lambda node: "Ready", "Version": _text("status.nodeInfo.kubeletVersion")},
    "ResourceClaim": {"State": _claim_state},
    "ResourceSlice": {name: _text(f"spec.{path}") for name, path in (
        ("Node", "nodeName"), ("Driver", "driver"), ("Pool", "pool.name")
    )},
}  # fmt: skip
_EVENT: dict[str, Cell] = {
    "Last Seen": lambda event: _since(
        event.get("lastTimestamp") or event["metadata"].get("creationTimestamp")
    ),
    "Type": _text("type"),
    "Reason": _text("reason"),
    "Object": lambda event: "{kind}/{name}".format(
        kind=str(_at(event, "involvedObject.kind")).lower(), name=_at(event, "involvedObject.name")
    ),
    "Message": _text("message"),
}
