"""Validation of Events of core/v1, as far as a client meets it."""

from __future__ import annotations

from typing import Any

from playground.apiserver.failure import Cause
from playground.apiserver.faultlist import FaultList


def event_faults(obj: dict[str, Any], _before: dict[str, Any] | None) -> list[Cause]:
    """Every fault of an event. Its namespace must be that of its object, or `default` if the object is
    cluster-scoped."""
    faults = FaultList()
    if obj.get("apiVersion") != "v1":
        return faults.causes
    about = (obj.get("involvedObject") or {}).get("namespace") or ""
    if obj["metadata"].get("namespace") != (about or "default"):
        faults.invalid("involvedObject.namespace", about, "does not match event.namespace")
    return faults.causes
