"""The ClusterRole compared with the daemon's actual requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from playground.apiserver import RecordedRequest

from dra_driver.reporting.event_recorder import EventRecorder, ReportLimits
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node

RBAC = Path(__file__).resolve().parents[2] / "daemonset/install.yaml"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_OF_REQUESTS = {"get", "list", "watch", *_VERBS.values()}


def granted() -> set[tuple[str, str]]:
    """Return (resource, verb) of the role. Verbs without a request are those that policies and the API
    server check.
    """
    role = next(entry for entry in yaml.safe_load_all(RBAC.read_text()) if entry["kind"] == "ClusterRole")
    return {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if verb in _OF_REQUESTS
    }


def right_of(request: RecordedRequest) -> tuple[str, str] | None:
    """Return what an authorizer would check; None for what everyone may read."""
    parts = [part for part in request.path.split("/") if part]
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if not parts:
        return None
    if parts[0] == "namespaces" and len(parts) > 2:
        parts = parts[2:]
    resource = "/".join([parts[0], *parts[2:]])
    if request.method != "GET":
        return resource, _VERBS[request.method]
    if len(parts) > 1:
        return resource, "get"
    return resource, "watch" if request.query.get("watch") == "true" else "list"


def test_the_role_has_what_the_daemon_requests_and_nothing_else(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = partial(EventRecorder, limits=ReportLimits(again_s=0.1))
    monkeypatch.setattr("dra_driver.reporting.reporter.EventRecorder", soon)
    node = make_node().running()
    ref = node.claim("one")
    node.prepare(ref)
    node.machine.raise_xid(0, 79)
    eventually(lambda: any(device.get("taints") for device in node.devices()))
    stray = node.slices()[0]
    stray["metadata"] = {"name": "stray"}
    node.server.add("resourceslices", stray, group="resource.k8s.io")
    eventually(lambda: len(node.slices()) == 1)
    absent = node.allocated_by_hand("absent", "gpu-none")
    for _ in range(2):  # the second event of a kind changes the first
        node.prepare(absent)

    def requested() -> set[tuple[str, str] | None]:
        return {right_of(request) for request in node.server.requests if request.path.startswith("/api")}

    eventually(
        lambda: ("events", "patch") in requested() and ("resourceclaims/status", "patch") in requested()
    )
    node.unprepare(ref)
    assert requested() - {None} == granted()
