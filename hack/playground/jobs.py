"""The playground's controllers of Jobs and of device taints."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dra_driver.cli.validation.rules.allocator import is_tolerated
from playground.apiserver.operations import now
from playground.apiserver.server import PlaygroundApiServer

Object = dict[str, Any]

OVER = ("Succeeded", "Failed")
"""The phases of pods that have ended."""
_NO_EXECUTE = "NoExecute"


class JobController:
    """Creates the pods of Jobs, and deletes those of deleted Jobs. A pod that was deleted is replaced."""

    def __init__(self, server: PlaygroundApiServer) -> None:
        self._server = server

    def sync(self) -> None:
        """Create and delete the pods that are due, and write the status of each Job."""
        with self._server.store.changed:
            jobs = {job["metadata"]["uid"]: job for job in self._server.objects("jobs", group="batch")}
            pods: dict[str, list[Object]] = {uid: [] for uid in jobs}
            for pod in self._server.objects("pods", group=""):
                uid = job_of(pod)
                if uid is None:
                    continue
                if uid in jobs:
                    pods[uid].append(pod)
                else:
                    key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
                    self._server.operations.delete(self._server.resource("pods", group=""), key, {})
            for uid, job in jobs.items():
                self._sync(job, pods[uid])

    def _sync(self, job: Object, pods: Sequence[Object]) -> None:
        spec, before = job["spec"], job.get("status") or {}
        if before.get("completionTime") or "deletionTimestamp" in job["metadata"]:
            return
        succeeded = sum(pod.get("status", {}).get("phase") == "Succeeded" for pod in pods)
        active = sum(pod.get("status", {}).get("phase") not in OVER for pod in pods)
        parallelism = 1 if spec.get("parallelism") is None else spec["parallelism"]
        wanted = parallelism if spec.get("completions") is None else spec["completions"]
        missing = 0 if spec.get("suspend") else min(parallelism, wanted - succeeded) - active
        for _ in range(missing):
            self._server.add("pods", _pod_of(job), group="")
        status = {"startTime": now()} | before | {"active": active + max(0, missing), "succeeded": succeeded}
        if succeeded >= wanted:
            condition = {"type": "Complete", "status": "True", "reason": "CompletionsReached"}
            status |= {"completionTime": now(), "conditions": [condition]}
        if status != before:
            key = (job["metadata"]["namespace"], job["metadata"]["name"])
            written = {"metadata": {"name": key[1], "uid": job["metadata"]["uid"]}, "status": status}
            self._server.operations.update(
                self._server.resource("jobs", group="batch"), key, written, status=True
            )


def job_of(pod: Object) -> str | None:
    """Return the UID of the Job that a pod belongs to; None if it belongs to none."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("kind") == "Job"), None)


def _pod_of(job: Object) -> Object:
    template, owner = copy.deepcopy(job["spec"]["template"]), job["metadata"]
    metadata = template.get("metadata") or {}
    labels = {"job-name": owner["name"], "batch.kubernetes.io/job-name": owner["name"]}
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner["name"], "uid": owner["uid"]}
    metadata |= {
        "generateName": f"{owner['name']}-",
        "namespace": owner["namespace"],
        "labels": (metadata.get("labels") or {}) | labels,
        "ownerReferences": [reference | {"controller": True, "blockOwnerDeletion": True}],
    }
    return {"metadata": metadata, "spec": template["spec"]}


def evicting_taint(claims: Iterable[Object], slices: Iterable[Object]) -> str | None:
    """Return the device and the taint for which a pod with these claims is evicted now; None if it stays.

    As in Kubernetes, only a toleration with `effect: NoExecute` counts.
    """
    taints = {
        (entry["spec"]["driver"], entry["spec"]["pool"]["name"], device["name"]): device.get("taints") or ()
        for entry in slices
        for device in entry["spec"].get("devices") or ()
    }
    for result in _results(claims):
        tolerations = [one for one in result.get("tolerations") or () if one.get("effect") == _NO_EXECUTE]
        for taint in taints.get((result["driver"], result["pool"], result["device"]), ()):
            if taint["effect"] == _NO_EXECUTE and _tolerated_s(taint, tolerations) <= _age_s(taint):
                return f"device {result['device']} has the taint {taint['key']}={taint.get('value', '')}:NoExecute"
    return None


def _results(claims: Iterable[Object]) -> Iterator[Object]:
    for claim in claims:
        yield from ((claim.get("status") or {}).get("allocation") or {"devices": {}})["devices"].get(
            "results"
        ) or ()


def _tolerated_s(taint: Mapping[str, Any], tolerations: Iterable[Mapping[str, Any]]) -> float:
    """Return how long the tolerations accept a taint, in seconds."""
    matching = [one for one in tolerations if is_tolerated(taint, [one])]
    if not matching:
        return 0.0
    limits = (one.get("tolerationSeconds") for one in matching)
    return min((float(limit) for limit in limits if limit is not None), default=math.inf)


def _age_s(taint: Mapping[str, Any]) -> float:
    added = taint.get("timeAdded")
    return 0.0 if added is None else (datetime.now(UTC) - datetime.fromisoformat(added)).total_seconds()
