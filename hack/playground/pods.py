"""Runs pods in the playground: schedules them, prepares their claims, starts and deletes them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

from dra_driver.cli.validation.rules.allocator import AllocationError
from dra_driver.model.claim import ClaimRef, Failed
from playground.apiserver.failure import ApiFailure
from playground.apiserver.operations import now
from playground.jobs import OVER, JobController, evicting_taint, job_of
from playground.kubelet_client import KubeletError
from playground.node import DRIVER, PlaygroundNode

Pod = dict[str, Any]

_AGAIN_S = 1.0
_JOB_S = 1.0
"""How long a pod of a Job runs. No program runs in it."""


class PodLoop:
    """Acts as scheduler, controllers, kubelet and garbage collector for the pods of one node.

    It runs in a thread inside `with`, and finally unprepares all claims. `report` is called with a line for each step
    of a pod.
    """

    def __init__(self, node: PlaygroundNode, report: Callable[[str], object]) -> None:
        self._node = node
        self._say = report
        self._prepared: dict[str, tuple[str, list[ClaimRef]]] = {}  # name and claims by pod UID
        self._troubles: dict[str, str] = {}  # the last error of each waiting pod, by its name
        self._again_at: dict[str, float] = {}  # when to retry a failed step, by pod UID
        self._complete_at: dict[str, float] = {}  # when a pod of a Job ends, by its UID
        self._jobs = JobController(node.server)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="playground-pods", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping.set()
        self._node.server.store.wake()
        self._thread.join()
        self._again_at.clear()
        self._end_pods(())

    def _run(self) -> None:
        store = self._node.server.store
        while not self._stopping.is_set():
            version = store.version
            self._turn()
            store.wait_after(version, _AGAIN_S, self._stopping.is_set)

    def _turn(self) -> None:
        with contextlib.suppress(ApiFailure):  # such as a template that no pod can have
            self._jobs.sync()
        pods = [
            pod
            for pod in self._node.server.objects("pods", group="")
            if pod.get("status", {}).get("phase") not in OVER and "deletionTimestamp" not in pod["metadata"]
        ]
        self._end_pods(pod["metadata"]["uid"] for pod in pods)
        self._take_claims_back({pod["metadata"]["uid"] for pod in pods} | set(self._prepared))
        slices = self._node.server.objects("resourceslices")
        for pod in pods:
            taint = evicting_taint(self._claims(pod), slices) if pod.get("spec", {}).get("nodeName") else None
            if taint is not None:
                self._evict(pod, taint)
            elif time.monotonic() >= self._complete_at.get(pod["metadata"]["uid"], math.inf):
                self._complete(pod)
            elif pod["metadata"]["uid"] not in self._prepared:
                step = self._start if pod.get("spec", {}).get("nodeName") else self._schedule
                self._attempt(pod["metadata"]["uid"], _name(pod), partial(step, pod), pod)

    def _attempt(self, uid: str, name: str, step: Callable[[], object], pod: Pod | None = None) -> None:
        """Perform a step of a pod. Report a failure once, and retry later."""
        if time.monotonic() < self._again_at.get(uid, 0.0):
            return
        try:
            step()
        except Exception as error:  # this API server stores any pod, even with fields of a wrong type
            self._again_at[uid] = time.monotonic() + _AGAIN_S
            if self._troubles.get(name) != str(error):
                self._say(f"pod {name} is waiting: {error}")
                if pod is not None:
                    self._report(pod, str(error))
            self._troubles[name] = str(error)
        else:
            self._again_at.pop(uid, None)
            self._troubles.pop(name, None)

    def _report(self, pod: Pod, error: str) -> None:
        """Report the error where kubectl shows it: in an event, and in a condition if the pod has no node."""
        node = pod.get("spec", {}).get("nodeName")
        if node:
            self._event(pod, "Warning", "FailedPrepareDynamicResources", error, "kubelet")
            return
        message = f"0/1 nodes are available: 1 {error}"
        self._event(pod, "Warning", "FailedScheduling", message, "default-scheduler")
        condition = {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message
        }  # fmt: skip
        self._set_status(pod, {"phase": "Pending", "conditions": [condition]})

    def _event(self, pod: Pod, kind: str, reason: str, message: str, component: str) -> None:
        involved = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        metadata = {"generateName": f"{involved['name']}.", "namespace": involved["namespace"]}
        event = {
            "metadata": metadata,
            "involvedObject": {"kind": "Pod", "apiVersion": "v1", **involved},
            "type": kind, "reason": reason, "message": message, "count": 1,
            "firstTimestamp": now(), "lastTimestamp": now(),
            "source": {"component": component}, "reportingComponent": component,
        }  # fmt: skip
        with contextlib.suppress(ApiFailure):
            self._node.server.add("events", event)

    def _set_status(self, pod: Pod, changes: Pod) -> None:
        """Change the pod's status, unless the pod was deleted. Keep concurrent changes to other fields."""
        server, metadata = self._node.server, pod["metadata"]
        resource, key = server.resource("pods", group=""), (metadata["namespace"], metadata["name"])
        with server.store.changed:
            now_stored = server.store.get(resource, key)
            if now_stored is not None and now_stored["metadata"]["uid"] == metadata["uid"]:
                status = (now_stored.get("status") or {}) | changes
                written = {"metadata": {"name": key[1], "uid": metadata["uid"]}, "status": status}
                server.operations.update(resource, key, written, status=True)

    def _schedule(self, pod: Pod) -> None:
        metadata = pod["metadata"]
        bound = self._node.scheduler.schedule_pod(metadata["namespace"], metadata["name"])
        devices = [
            result["device"]
            for claim in self._claims(bound)
            for result in claim["status"]["allocation"]["devices"]["results"]
        ]
        where = f"Successfully assigned {_name(pod)} to {bound['spec']['nodeName']}"
        self._event(pod, "Normal", "Scheduled", where, "default-scheduler")
        self._say(
            f"pod {_name(pod)} scheduled on {bound['spec']['nodeName']}: {', '.join(devices) or 'no devices'}"
        )

    def _start(self, pod: Pod) -> None:
        refusal = self._node.scheduler.admit_pod(pod["metadata"]["namespace"], pod["metadata"]["name"])
        if refusal is not None:
            raise KubeletError(refusal)
        claims = [_ref(claim) for claim in self._claims(pod)]
        started = time.monotonic()
        outcomes = self._node.kubelet.prepare(DRIVER, claims) if claims else {}
        for outcome in outcomes.values():
            if isinstance(outcome, Failed):
                raise KubeletError(outcome.error)
        self._prepared[pod["metadata"]["uid"]] = (_name(pod), claims)
        if claims:
            self._say(f"pod {_name(pod)} prepared in {(time.monotonic() - started) * 1000:.0f} ms")
        containers = [
            {
                "name": one["name"], "image": one.get("image", ""), "imageID": "", "ready": True, "started": True,
                "restartCount": 0, "state": {"running": {"startedAt": now()}},
            }
            for one in pod["spec"].get("containers") or ()
        ]  # fmt: skip
        conditions = [
            {"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")
        ]
        status = {"phase": "Running", "conditions": conditions, "containerStatuses": containers}
        self._set_status(pod, status | {"startTime": now()})
        self._say(f"pod {_name(pod)} running")
        if job_of(pod) is not None:
            self._complete_at[pod["metadata"]["uid"]] = time.monotonic() + _JOB_S

    def _complete(self, pod: Pod) -> None:
        """End a pod of a Job successfully."""
        del self._complete_at[pod["metadata"]["uid"]]
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now()}}
        containers = [
            one | {"ready": False, "started": False, "state": ended}
            for one in pod["status"].get("containerStatuses") or ()
        ]
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False", "reason": "PodCompleted"},
        ]
        status = {"phase": "Succeeded", "conditions": conditions, "containerStatuses": containers}
        self._set_status(pod, status)
        self._say(f"pod {_name(pod)} completed")

    def _evict(self, pod: Pod, why: str) -> None:
        """Delete a pod, like Kubernetes' controller of device taints."""
        self._event(
            pod, "Normal", "DeviceTaintManagerEviction", "Marking for deletion", "device-taint-eviction"
        )
        self._say(f"pod {_name(pod)} is evicted: {why}")
        server, metadata = self._node.server, pod["metadata"]
        with contextlib.suppress(ApiFailure):
            server.operations.delete(
                server.resource("pods", group=""), (metadata["namespace"], metadata["name"]), {}
            )

    def _end_pods(self, staying: Iterable[str]) -> None:
        """Unprepare the claims of pods that are not in `staying`."""
        for uid in self._prepared.keys() - set(staying):
            self._attempt(uid, self._prepared[uid][0], partial(self._end, uid))

    def _end(self, uid: str) -> None:
        name, claims = self._prepared[uid]
        others = {ref for other, (_, refs) in self._prepared.items() if other != uid for ref in refs}
        if left := [ref for ref in claims if ref not in others]:
            for outcome in self._node.kubelet.unprepare(DRIVER, left).values():
                if outcome is not None:
                    raise KubeletError(outcome.error)
        del self._prepared[uid]
        self._say(f"pod {name} deleted" + (", its claims are unprepared" if left else ""))

    def _take_claims_back(self, pods: set[str]) -> None:
        """Remove the reservations of deleted pods, and delete the claims that were created for these pods."""
        server = self._node.server
        for claim in server.objects("resourceclaims"):
            key = (claim["metadata"]["namespace"], claim["metadata"]["name"])
            owners = [owner["uid"] for owner in claim["metadata"].get("ownerReferences") or ()]
            with contextlib.suppress(AllocationError, ApiFailure):  # the claim was deleted in between
                for entry in (claim.get("status") or {}).get("reservedFor") or ():
                    if entry["uid"] not in pods:
                        self._node.scheduler.release_claim(*key, pod={"metadata": entry})
                if owners and not pods.intersection(owners):
                    server.operations.delete(server.resource("resourceclaims"), key, {})

    def _claims(self, pod: Pod) -> list[Pod]:
        """Return the claims that are reserved for a pod."""
        uid = pod["metadata"]["uid"]
        return [
            claim
            for claim in self._node.server.objects("resourceclaims")
            if any(entry["uid"] == uid for entry in (claim.get("status") or {}).get("reservedFor") or ())
        ]


def _name(pod: Pod) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _ref(claim: Pod) -> ClaimRef:
    metadata = claim["metadata"]
    return ClaimRef(metadata["namespace"], metadata["name"], metadata["uid"])
