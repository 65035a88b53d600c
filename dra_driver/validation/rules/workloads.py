"""Which pods an object makes, how many of them at once, and which claims each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dra_driver.model.shapes import FieldFault

JsonObject = dict[str, Any]

_BY_REPLICAS: Final = ("Deployment", "StatefulSet", "ReplicaSet", "ReplicationController")


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods of one template. `path` is that of the pods' spec; `count` None is one pod on each node."""

    path: str
    spec: JsonObject
    count: int | None = 1


@dataclass(slots=True)
class Workload:
    """What an object makes. `faults` are numbers that are none."""

    groups: list[PodGroup] = field(default_factory=list)
    faults: list[FieldFault] = field(default_factory=list)


def workload(document: Mapping[str, Any]) -> Workload:
    """The pods of an object; no groups if it is nothing that makes pods as far as is known here.

    Of a Job those that run at a time count, of a CronJob those of one Job.
    """
    found, spec, kind = Workload(), document.get("spec"), document.get("kind")
    if not isinstance(spec, dict):
        return found
    if kind == "Pod":
        _add(found, "spec", spec, 1)
    elif kind == "CronJob":
        _add_job(found, "spec.jobTemplate.spec", _inside(spec, "jobTemplate", "spec"), 1)
    elif kind == "Job":
        _add_job(found, "spec", spec, 1)
    elif kind == "JobSet":
        entries = spec.get("replicatedJobs")
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            path = f"spec.replicatedJobs[{number}]"
            if isinstance(entry, dict):
                replicas = _number(found, entry, "replicas", path)
                job = _inside(entry, "template", "spec")
                _add_job(found, f"{path}.template.spec", job, 1 if replicas is None else replicas)
    else:
        count: int | None = None
        if kind in _BY_REPLICAS:
            replicas = _number(found, spec, "replicas", "spec")
            count = 1 if replicas is None else replicas
        elif kind != "DaemonSet":  # of somebody's own, who may mean something else by it
            replicas = spec.get("replicas")
            count = replicas if isinstance(replicas, int) and replicas > 0 else 1
        _add(found, "spec.template.spec", _inside(spec, "template", "spec"), count)
    return found


def surge(document: Mapping[str, Any], count: int) -> int:
    """How many more pods a Deployment's rolling update needs before it ends the first of the old ones; 0 if it ends one
    at once."""
    spec = document.get("spec")
    strategy = spec.get("strategy") if isinstance(spec, dict) else None
    strategy = strategy if isinstance(strategy, dict) else {}
    if document.get("kind") != "Deployment" or strategy.get("type") == "Recreate" or not count:
        return 0
    rolling = strategy.get("rollingUpdate")
    rolling = rolling if isinstance(rolling, dict) else {}
    more = _share(rolling.get("maxSurge", "25%"), count, up=True)
    fewer = _share(rolling.get("maxUnavailable", "25%"), count, up=False)
    return 0 if fewer or not more else 1


def _share(value: Any, count: int, *, up: bool) -> int:
    text = str(value)
    if text.endswith("%") and text[:-1].isdecimal():
        return -(-int(text[:-1]) * count // 100) if up else int(text[:-1]) * count // 100
    return int(text) if text.isdecimal() else 1


def _add_job(found: Workload, path: str, spec: Any, times: int) -> None:
    if not isinstance(spec, dict):
        return
    parallelism = _number(found, spec, "parallelism", path)
    completions = _number(found, spec, "completions", path)
    at_once = 1 if parallelism is None else parallelism
    if completions is not None:
        at_once = min(at_once, completions)
    _add(found, f"{path}.template.spec", _inside(spec, "template", "spec"), at_once * times)


def _add(found: Workload, path: str, spec: Any, count: int | None) -> None:
    if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
        found.groups.append(PodGroup(path, spec, count))


def _number(found: Workload, holder: JsonObject, name: str, path: str) -> int | None:
    value = holder.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        found.faults.append(FieldFault(f"{path}.{name}", f"{value!r} is not a whole number of at least 0"))
        return None
    return value


def _inside(holder: Any, *names: str) -> Any:
    for name in names:
        holder = holder.get(name) if isinstance(holder, dict) else None
    return holder
