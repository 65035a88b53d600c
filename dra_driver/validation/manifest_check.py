"""One report for each document: is it right, what is probably not meant, and would it fit the machine?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dra_driver.validation.documents import Document
from dra_driver.validation.machine_fit import Fit, MachineFit
from dra_driver.validation.rules.cel.values import NotJudgedError
from dra_driver.validation.rules.manifests import (
    KINDS,
    alternatives,
    as_v1,
    claim_spec,
    class_names,
    is_parameters,
    object_faults,
    parameter_faults,
    pod_faults,
    pod_spec,
    unused_claims,
)
from dra_driver.validation.rules.selectors import compiled, driver_asked_for, hints
from dra_driver.validation.rules.standard_classes import standard_classes

JsonObject = dict[str, Any]

NOT_JUDGED = "not judged"
_SHOWN_DEVICES = 4
_ADMIN_LABEL = "resource.kubernetes.io/admin-access"


@dataclass(slots=True)
class DocumentReport:
    """What is said about one document.

    `verdict` is OK, FAULT, SKIP for what has nothing to do with this driver, or "not judged" where nobody here can say
    what Kubernetes makes of a selector.
    """

    place: str
    name: str
    verdict: str = "OK"
    faults: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    devices: list[dict[str, str]] = field(default_factory=list)
    requests: list[JsonObject] = field(default_factory=list)


def check_documents(
    documents: Sequence[Document],
    driver: str,
    machine: MachineFit | None,
    config_faults: Mapping[int, Sequence[str]],
) -> list[DocumentReport]:
    """A report for each document, in their order. Claims are tried on the machine, if there is one.

    `config_faults` are the faults of configuration files by the number of the document.
    """
    check = ManifestCheck(documents, driver, machine)
    reports = []
    for number, document in enumerate(documents):
        report = DocumentReport(document.place, document.name, faults=list(config_faults.get(number, ())))
        try:
            check.document(document, report)
        except NotJudgedError as error:
            report.verdict = NOT_JUDGED
            report.notes.append(f"not judged: a selector's CEL: {error}")
        report.verdict = "FAULT" if report.faults else report.verdict
        reports.append(report)
    return reports


class ManifestCheck:
    """Looks at documents one by one, knowing all of them."""

    def __init__(self, documents: Sequence[Document], driver: str, machine: MachineFit | None) -> None:
        self._driver = driver
        self._machine = machine
        self._variables = [device.variable for device in machine.devices] if machine else []
        self._faults: dict[int, list[str]] = {}
        self._good: dict[tuple[str, str, str], JsonObject] = {}
        self._labels: dict[str, JsonObject] = {}
        attributes = [variable["attributes"][driver] for variable in self._variables]
        self._classes = dict(standard_classes(driver, [a["profile"] for a in attributes if "profile" in a]))
        for document in documents:
            content = document.content
            kind = content.get("kind") if isinstance(content, dict) else None
            if kind == "Namespace":
                metadata = content.get("metadata") or {}
                self._labels[str(metadata.get("name"))] = metadata.get("labels") or {}
            if kind not in KINDS:
                continue
            faults = [str(fault) for fault in object_faults(content, driver)]
            self._faults[id(document)] = faults
            if not faults:
                metadata = content["metadata"]
                namespace = "" if kind == "DeviceClass" else str(metadata.get("namespace") or "default")
                self._good[kind, namespace, str(metadata.get("name"))] = as_v1(content)
        self._own = {name: entry for (kind, _, name), entry in self._good.items() if kind == "DeviceClass"}
        self._classes |= self._own

    def document(self, document: Document, report: DocumentReport) -> None:
        """Fill the report of one document."""
        content = document.content
        if document.problem is not None:
            report.faults.append(document.problem)
        elif not isinstance(content, dict):
            report.faults.append("is not an object")
        elif content.get("kind") in KINDS:
            report.faults += self._faults[id(document)]
            if not report.faults:
                self._object(content, as_v1(content), report)
        elif is_parameters(content):
            report.faults += [str(fault) for fault in parameter_faults(content, "")]
        elif (pods := pod_spec(content)) is not None:
            self._pods(content, *pods, report)
        elif "kind" in content or "apiVersion" in content:
            report.verdict = "SKIP"
            report.notes.append("not looked at: nothing in it concerns this driver")

    def _object(self, content: JsonObject, v1: JsonObject, report: DocumentReport) -> None:
        if content["apiVersion"] != v1["apiVersion"]:
            report.hints.append(
                f"{content['apiVersion']} goes away; write {v1['apiVersion']} (Kubernetes 1.34 and newer)"
            )
        report.hints += list(dict.fromkeys(self._selector_hints(v1)))
        self._judge_selectors(v1)
        if v1["kind"] == "DeviceClass":
            self._class(v1, report)
            return
        spec = claim_spec(v1)
        self._admin_hint(spec, str((content.get("metadata") or {}).get("namespace") or "default"), report)
        if self._knows_classes(v1, report) and self._machine is not None:
            self._tell(self._machine.claim(spec, self._classes), report)

    def _class(self, v1: JsonObject, report: DocumentReport) -> None:
        """A class matches devices, but wants none; on a machine without any it is still right."""
        if self._machine is None:
            return
        name = v1["metadata"]["name"]
        request = {"name": "device", "exactly": {"deviceClassName": name}}
        fit = self._machine.claim({"devices": {"requests": [request]}}, {name: v1})
        report.requests += [asdict(found) for found in fit.funnels]
        found = fit.funnels[0]
        other = self._other_driver(name)
        if other is not None:
            report.notes.append(f"is for devices of {other}; not tried on a machine")
        elif found.error is not None:
            report.faults.append(f"selector {found.error}")
        elif not found.matching:
            nearest = f"; nearest: {found.nearest}" if found.nearest else ""
            report.notes.append(f"no device of {self._machine.name} matches{nearest}")
        else:
            report.notes.append(f"{len(found.matching)} of {len(self._machine.devices)} devices match")

    def _knows_classes(self, v1: JsonObject, report: DocumentReport) -> bool:
        names = sorted(set(class_names(v1)))
        unknown = [name for name in names if name not in self._classes]
        report.notes += [
            f"DeviceClass {name} is neither among the files nor one of this driver's; not tried on a machine"
            for name in unknown
        ]
        others = {name: self._other_driver(name) for name in names if name not in unknown}
        report.notes += [
            f"DeviceClass {name} is for devices of {driver}; not tried on a machine"
            for name, driver in others.items()
            if driver is not None
        ]
        return not unknown and not any(others.values())

    def _other_driver(self, class_name: str) -> str | None:
        """The driver that a class asks for, if it is not this one."""
        selectors = self._classes[class_name]["spec"].get("selectors") or ()
        drivers = (driver_asked_for(entry["cel"]["expression"]) for entry in selectors)
        return next((name for name in drivers if name not in (None, self._driver)), None)

    def _selector_hints(self, v1: JsonObject) -> Iterator[str]:
        for body in _selecting(v1):
            for selector in body.get("selectors") or ():
                yield from hints(selector["cel"]["expression"], self._driver, self._variables)

    def _judge_selectors(self, v1: JsonObject) -> None:
        """Raises: NotJudgedError if nobody can say what the API server makes of one."""
        for body in _selecting(v1):
            for selector in body.get("selectors") or ():
                compiled(selector["cel"]["expression"])

    def _admin_hint(self, spec: JsonObject, namespace: str, report: DocumentReport) -> None:
        requests = (spec.get("devices") or {}).get("requests") or ()
        asks = any((request.get("exactly") or {}).get("adminAccess") for request in requests)
        if asks and str(self._labels.get(namespace, {}).get(_ADMIN_LABEL)) != "true":
            report.hints.append(
                f'adminAccess needs the label {_ADMIN_LABEL}: "true" on namespace {namespace}'
            )

    def _tell(self, fit: Fit, report: DocumentReport) -> None:
        assert self._machine is not None  # noqa: S101
        report.requests += [asdict(found) for found in fit.funnels]
        if fit.problem is not None:
            report.faults.append(f"does not fit {self._machine.name}: {fit.problem}")
            return
        if fit.refusal is not None:
            report.faults.append(fit.refusal)
            return
        report.devices += [{"request": request, "device": device} for request, device in fit.devices]
        matching = ", ".join(f"{found.request}: {found.sentence()}" for found in fit.funnels)
        shown = [device for _, device in fit.devices[:_SHOWN_DEVICES]]
        more = len(fit.devices) - len(shown)
        report.notes.append(matching)
        report.notes.append(f"fits, for example: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}")

    def _pods(self, content: JsonObject, path: str, spec: JsonObject, report: DocumentReport) -> None:
        report.faults += [str(fault) for fault in pod_faults(spec, path)]
        if report.faults:
            return
        report.hints += [
            f"no container uses the claim {name}: its devices are taken for nothing; "
            "list it under resources.claims of a container"
            for name in unused_claims(spec)
        ]
        self._extended(spec, report)
        namespace = str((content.get("metadata") or {}).get("namespace") or "default")
        specs: list[JsonObject] = []
        for entry in spec.get("resourceClaims") or ():
            kind = "ResourceClaim" if entry.get("resourceClaimName") else "ResourceClaimTemplate"
            name = entry.get("resourceClaimName") or entry.get("resourceClaimTemplateName")
            found = self._good.get((kind, namespace, name))
            if found is None:
                report.notes.append(f"{kind} {namespace}/{name} is not among the files, or has faults")
            else:
                specs.append(claim_spec(found))
        if len(specs) > 1 and self._machine is not None:
            self._together(specs, report)

    def _together(self, specs: Sequence[JsonObject], report: DocumentReport) -> None:
        """The claims of a pod go to one node, so they have to fit there at one time."""
        assert self._machine is not None  # noqa: S101
        others: list[JsonObject] = []
        for spec in specs:
            names = {body["deviceClassName"] for body in _bodies(spec)}
            if names - set(self._classes) or any(self._other_driver(name) for name in names):
                return
            fit = self._machine.claim(spec, self._classes, others)
            if fit.problem is not None:
                report.faults.append(f"does not fit {self._machine.name}: {fit.problem}")
                return
            others.append({"status": {"allocation": fit.allocation}})
        report.notes.append(f"its {len(specs)} claims fit at one time")

    def _extended(self, spec: JsonObject, report: DocumentReport) -> None:
        """Devices that are asked for the old way, as `nvidia.com/gpu: 1`."""
        by_resource = {
            entry["spec"].get("extendedResourceName"): name for name, entry in self._classes.items()
        }
        for container in spec["containers"]:
            resources = container.get("resources") if isinstance(container, dict) else None
            limits = (resources or {}).get("limits") or {}
            for resource, amount in limits.items():
                if not str(resource).startswith("nvidia.com/"):
                    continue
                name = by_resource.get(resource)
                if name is None:
                    report.hints.append(
                        f"{resource} is served by this driver only if a DeviceClass has "
                        f"extendedResourceName: {resource} (Kubernetes 1.36, or the gate DRAExtendedResource)"
                    )
                elif self._machine is not None and str(amount).isdecimal() and int(amount) > 0:
                    exactly = {"deviceClassName": name, "count": int(amount)}
                    request = {"name": "extended", "exactly": exactly}
                    self._tell(
                        self._machine.claim({"devices": {"requests": [request]}}, self._classes), report
                    )


def _selecting(v1: JsonObject) -> list[JsonObject]:
    """What has selectors: a class, or the requests of a claim and their alternatives."""
    return [v1["spec"]] if v1["kind"] == "DeviceClass" else _bodies(claim_spec(v1))


def _bodies(spec: JsonObject) -> list[JsonObject]:
    requests = (spec.get("devices") or {}).get("requests") or ()
    return [body for request in requests for _, body in alternatives(request)]
