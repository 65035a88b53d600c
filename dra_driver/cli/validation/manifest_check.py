"""Creates a report for each document."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from dra_driver.app.config_file import mig_layouts
from dra_driver.cli.validation.cluster_objects import ClusterObjects, Reference
from dra_driver.cli.validation.documents import Document
from dra_driver.cli.validation.machine_fit import Fit, MachineFit
from dra_driver.cli.validation.rules.cel import NotJudgedError
from dra_driver.cli.validation.rules.classes import profile_label, profile_of_class, standard_classes
from dra_driver.cli.validation.rules.layout_trial import Trial, manager_layouts, read_layouts
from dra_driver.cli.validation.rules.manifests import (
    KINDS,
    OF_DEVICE_PLUGIN,
    alternative_hints,
    as_v1,
    bodies,
    claim_spec,
    class_names,
    class_type,
    default_hints,
    is_misspelled,
    is_of_device_plugin,
    is_parameters,
    misspelled_kind,
    names_devices,
    neighbour,
    object_faults,
    parameter_faults,
    requests_of,
)
from dra_driver.cli.validation.rules.pods import (
    IMPLICIT,
    claims_of,
    extended_requests,
    mps_hints,
    mps_requests,
    node_name_texts,
    pod_faults,
    pod_specs,
    requested_resources,
    served_resources,
    trap_hints,
    unknown_requests,
    unused_claims,
    with_claims_once,
)
from dra_driver.cli.validation.rules.selectors import compiled, selected_driver
from dra_driver.cli.validation.rules.taints import (
    evicting_rule,
    pod_toleration_hints,
    selected,
    selection_hints,
    taint_rule_faults,
    toleration_hints,
)
from dra_driver.model.dataclass import asdict, dataclass, field
from dra_driver.model.mig import LAYOUT_LABEL, Layouts
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import named

NOT_JUDGED = "not judged"
DEFAULT_NAMESPACE = "default"
_SHOWN_DEVICES = 4
_MAX_PROFILES = 16
_ALIKE = 0.92
"""For names that differ in about one letter."""
_ALIKE_OBJECT = 0.8
_CLAIMS = {"ResourceClaim": "resourceClaimName", "ResourceClaimTemplate": "resourceClaimTemplateName"}
_SHARES = "shares.gpu.nvidia.com"
_ADMIN_LABEL = "resource.kubernetes.io/admin-access"


@dataclass(slots=True)
class DocumentReport:
    """`verdict` is OK, FAULT, SKIP if the document does not concern gpu-dra-driver, or "not judged" if a selector, a
    class or a pod's claim is unknown here.
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
    machines: Sequence[MachineFit] = (),
    config_faults: Mapping[int, Sequence[str]] | None = None,
    cluster: ClusterObjects | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    evicting: Collection[str] = (),
) -> list[DocumentReport]:
    """Return a report for each document. `config_faults` are by document number."""
    check = ManifestCheck(documents, driver, machines, cluster, namespace, evicting)
    reports = []
    for number, document in enumerate(documents):
        report = DocumentReport(
            document.place, document.name, faults=list((config_faults or {}).get(number, ()))
        )
        try:
            check.document(document, report)
        except NotJudgedError as error:
            report.verdict = NOT_JUDGED
            report.notes.append(f"its selectors are not judged: {error}")
        report.verdict = "FAULT" if report.faults else report.verdict
        reports.append(report)
    return reports


@dataclass(eq=False)
class ManifestCheck:
    """Checks documents one by one, with knowledge of all of them."""

    documents: Sequence[Document]
    driver: str
    machines: Sequence[MachineFit]
    cluster: ClusterObjects | None
    namespace: str
    evicting: Collection[str] = ()

    def __post_init__(self) -> None:
        attributes = [
            device.view.attributes.get(self.driver, {})
            for machine in self.machines
            for device in machine.devices
        ]
        self._has_mig = any("profile" in one for one in attributes) or not any(
            one.get("migCapable") for one in attributes
        )
        self._has_nvlink_groups = len({one.get("nvlinkDomain") for one in attributes} - {None}) > 1
        self._has_vfio = any(one.get("type") == "vfio" for one in attributes)
        profiles = {one.get("profile") for one in attributes}
        self._layouts = {
            name: entries
            for document in self.documents
            if isinstance(document.content, dict)
            for _, text in manager_layouts(document.content)
            for name, entries in read_layouts(text)[0].items()
        }
        contents = [document.content for document in self.documents if isinstance(document.content, dict)]
        of_rules = (evicting_rule(content, self.driver) for content in contents)
        self._evicting = {*self.evicting, *filter(None, of_rules)}
        self._faults: dict[int, list[str]] = {}
        self._good: dict[Reference, JsonObject] = {}
        self._places: dict[Reference, str] = {}
        self._labels: dict[str, JsonObject] = {}
        for document in self.documents:
            content = document.content
            kind = content.get("kind") if isinstance(content, dict) else None
            if kind == "Namespace":
                self._labels[str(document.metadata.get("name"))] = document.labels
            if kind not in KINDS:
                continue
            found = object_faults(content, self.driver)
            self._faults[id(document)] = found
            of_cluster = kind == "DeviceClass"
            own = "" if of_cluster else self._namespace_of(document)
            reference = (kind, own, str(document.metadata.get("name")))
            self._places[reference] = document.place
            if not found:
                v1 = as_v1(content)
                self._good[reference] = v1
                profiles |= set() if of_cluster else set(map(profile_of_class, class_names(claim_spec(v1))))
        known = self.cluster.classes if self.cluster is not None else None
        self._cluster_classes = None if known is None else {one["metadata"]["name"]: one for one in known}
        # The classes installed with gpu-dra-driver, and those of MIG profiles that the machines or the
        # documents name.
        standard = standard_classes(self.driver, filter(None, profiles)) if known is None else {}
        of_files = {name: entry for (kind, _, name), entry in self._good.items() if kind == "DeviceClass"}
        self._classes: dict[str, JsonObject] = {**standard, **(self._cluster_classes or {}), **of_files}

    def _namespace_of(self, document: Document) -> str:
        return str(document.metadata.get("namespace") or self.namespace)

    def document(self, document: Document, report: DocumentReport) -> None:
        content = document.content
        if document.problem is not None:
            report.faults.append(document.problem)
        elif not isinstance(content, dict):
            report.faults.append("this document is not a Kubernetes object")
        elif content.get("kind") in KINDS:
            report.faults += self._faults[id(document)]
            if not report.faults:
                self._object(document, as_v1(content), report)
        elif is_parameters(content):
            report.faults += parameter_faults(content, "")
        elif pods := list(pod_specs(content)):
            self._pods(pods, self._namespace_of(document), report)
        else:
            self._other(document, content, report)

    def _other(self, document: Document, content: JsonObject, report: DocumentReport) -> None:
        if content.get("kind") == "DeviceTaintRule":
            self._taint_rule(content, report)
        elif document.is_configuration:
            given = content.get("migLayouts")
            if isinstance(given, dict) and not report.faults:
                wanted = mig_layouts(given)
                self._try_layouts([wanted.name] if wanted.name else [*wanted.named], wanted.named, report)
        elif files := [*manager_layouts(content)]:
            for key, text in files:
                self._manager_file(key, text, report)
        elif content.get("kind") == "Node" and (name := document.labels.get(LAYOUT_LABEL)):
            self._try_layouts([str(name)], self._layouts, report)
        elif meant := misspelled_kind(content, (*KINDS, "DeviceTaintRule", "Pod")):
            report.faults.append(f"kind: {content['kind']!r} is not known; did you mean {meant}?")
        elif content.get("kind") == "Namespace" and _ADMIN_LABEL in document.labels:
            report.notes.append(f"the label {_ADMIN_LABEL} decides whether its claims may have adminAccess")
        elif is_of_device_plugin(content):
            report.verdict = "SKIP"
            report.notes.append(f"skipped: {OF_DEVICE_PLUGIN}")
        elif neighbour(content) is None and names_devices(content):
            report.verdict = NOT_JUDGED
            report.notes.append("it names claims or GPUs, but validate does not know this kind")
        else:
            what = neighbour(content)
            report.verdict = "SKIP"
            report.notes.append(f"skipped: {what or 'it is not about GPUs'}")

    def _manager_file(self, key: str, text: Any, report: DocumentReport) -> None:
        layouts, found = read_layouts(text)
        report.faults += [f"{key}: {fault}" if key else fault for fault in found]
        if not found:
            self._try_layouts([*layouts], layouts, report, needs_all=False)

    def _try_layouts(
        self, names: Sequence[str], layouts: Layouts, report: DocumentReport, *, needs_all: bool = True
    ) -> None:
        for machine in self.machines:
            count = len(machine.inventory.offered_gpus)
            tried = Trial(machine.name, count, machine.gpus, layouts)
            problems = tried.problems(names)
            report.hints, report.notes = report.hints + tried.hints, report.notes + tried.fits
            (report.faults if needs_all or not tried.fits else report.notes).extend(problems)

    def _taint_rule(self, content: JsonObject, report: DocumentReport) -> None:
        report.faults += taint_rule_faults(content)
        if report.faults:
            return
        driver = (content["spec"].get("deviceSelector") or {}).get("driver")
        if driver not in (None, self.driver):
            report.verdict = "SKIP"
            self._name_driver(driver, report)
            report.notes += [] if report.faults else [f"skipped: it is for devices of {driver}"]
            return
        machines = {machine.name: [one.name for one in machine.devices] for machine in self.machines}
        report.hints += selection_hints(content, machines)
        report.notes += selected(content, machines)

    def _name_driver(self, named: str | None, report: DocumentReport) -> None:
        if named is not None and is_misspelled(named, self.driver):
            report.faults.append(f"no device has the driver {named}; did you mean {self.driver}?")

    def _object(self, document: Document, v1: JsonObject, report: DocumentReport) -> None:
        content = document.content
        if content["apiVersion"] != v1["apiVersion"]:
            report.hints.append(
                f"{content['apiVersion']} will be removed; write {v1['apiVersion']} (Kubernetes 1.34 and newer)"
            )
        self._judge_selectors(v1)
        if v1["kind"] == "DeviceClass":
            self._class(v1, report)
            return
        spec = claim_spec(v1)
        self._admin_hint(spec, self._namespace_of(document), report)
        path = "spec.spec.devices" if v1["kind"] == "ResourceClaimTemplate" else "spec.devices"
        report.hints += alternative_hints(spec.get("devices") or {}, path, self.driver)
        report.hints += default_hints(claim_spec(content), path)
        report.hints += toleration_hints(spec.get("devices") or {}, self._evicting)
        if self._knows_classes(sorted(set(class_names(spec))), report):
            self._try_claim(spec, report)

    def _class(self, v1: JsonObject, report: DocumentReport) -> None:
        """Check a class, which is valid even if no device matches."""
        name = v1["metadata"]["name"]
        other = self._other_driver(name)
        self._name_driver(other, report)
        if other is not None:
            report.verdict = "SKIP"
            report.notes += [] if report.faults else [f"skipped: it is for devices of {other}"]
            return
        request = {"name": "device", "exactly": {"deviceClassName": name}}
        errors: dict[str, None] = {}
        for machine in self.machines:
            found = machine.claim({"devices": {"requests": [request]}}, {name: v1}).funnels[0]
            report.requests.append(asdict(found))
            if found.error is not None:
                errors[f"selector {found.error}"] = None
            elif not found.matching:
                report.notes.append(f"no device of {machine.name} matches")
            else:
                of = f" of {machine.name}" if len(self.machines) > 1 else ""
                report.notes.append(
                    f"devices{of} that match: {len(found.matching)} of {len(machine.devices)}"
                )
        report.faults += errors

    def _knows_classes(self, names: Sequence[str], report: DocumentReport) -> bool:
        """Return whether all classes are known and select devices of gpu-dra-driver.

        Without the cluster's classes, an unknown class is a fault only if its name resembles a known one.
        """
        unjudged = []
        for name in names:
            if name in self._classes:
                other = self._other_driver(name)
                unjudged += [] if other is None else [f"DeviceClass {name} is for devices of {other}"]
                continue
            near = [
                known
                for known in get_close_matches(name, [*self._classes, *self._profile_classes()], 1, _ALIKE)
                if not name.endswith(f".{known}")
            ]
            near = near or [known for known in self._classes if known.startswith(f"{name}.")][:1]
            meant = f"; did you mean {near[0]}?" if near else ""
            if self._cluster_classes is not None:
                absent = f"DeviceClass {name} is not in the cluster and not in the files"
                report.faults.append(f"{absent}: the claim gets no devices{meant}")
            elif near:
                report.faults.append(f"unknown DeviceClass {name}{meant}")
            else:
                unjudged.append(
                    f"unknown DeviceClass {name}: it is not in the files, and gpu-dra-driver does not install it"
                )
        if unjudged:
            report.verdict = NOT_JUDGED
            report.notes += [f"{text}; fit not checked" for text in unjudged]
        return not unjudged and not report.faults

    def _profile_classes(self) -> dict[str, str]:
        rows = (row for machine in self.machines for gpu in machine.gpus for row in gpu.profiles)
        return {f"mig-{profile_label(row.profile.name)}.nvidia.com": row.profile.name for row in rows}

    def _other_driver(self, class_name: str) -> str | None:
        selectors = self._classes[class_name]["spec"].get("selectors") or ()
        drivers = (selected_driver(entry["cel"]["expression"]) for entry in selectors)
        return next((name for name in drivers if name not in (None, self.driver)), None)

    def _judge_selectors(self, v1: JsonObject) -> None:
        """Raise NotJudgedError if only the API server can evaluate one of the selectors."""
        for body in _selecting(v1):
            for selector in body.get("selectors") or ():
                compiled(selector["cel"]["expression"])

    def _admin_hint(self, spec: JsonObject, namespace: str, report: DocumentReport) -> None:
        asks = any((one.get("exactly") or {}).get("adminAccess") for one in requests_of(spec))
        if asks and str(self._labels.get(namespace, {}).get(_ADMIN_LABEL)) != "true":
            report.hints.append(
                f'adminAccess needs the label {_ADMIN_LABEL}: "true" on namespace {namespace}'
            )

    def _try_claim(self, spec: JsonObject, report: DocumentReport) -> bool:
        """Return whether an empty machine can serve a claim, or there is no machine."""
        fits = [(machine, machine.claim(spec, self._classes)) for machine in self.machines]
        bad = [(machine, fit) for machine, fit in fits if fit.problem is not None or fit.refusal is not None]
        good = [(machine, fit) for machine, fit in fits if fit.problem is None and fit.refusal is None]
        against = [fit.refusal or f"does not fit {machine.name}: {fit.problem}" for machine, fit in bad]
        if good:
            self._report_fit(*good[0], report)
            report.notes += against
            return True
        for _, fit in bad[:1]:
            report.requests += [asdict(found) for found in fit.funnels]
        report.faults += against
        kinds = {class_type(name) for name in class_names(spec)}
        if against and not self._has_vfio and "vfio" in kinds:
            report.hints.append(
                "the machine has no GPUs for virtual machines; with --passthrough, validate includes the GPUs that "
                "can be passed through"
            )
        if against and not self._has_mig and "mig" in kinds:
            made = named(sorted(self._profile_classes().values()), _MAX_PROFILES)
            how = (
                f"; with --dynamic-mig they are created on demand; the possible profiles are {made}"
                if made
                else ""
            )
            report.hints.append(f"the machine has no MIG devices{how}")
        return not against

    def _report_fit(self, machine: MachineFit, fit: Fit, report: DocumentReport) -> None:
        report.requests += [asdict(found) for found in fit.funnels]
        report.devices += [{"request": request, "device": device} for request, device in fit.devices]
        report.hints += [
            f"request {found.request}: selector {found.error}; the claim fits only if the scheduler finds its devices "
            "before it evaluates this selector on such a device"
            for found in fit.funnels
            if found.error is not None
        ]
        report.hints += filter(None, [fit.delay, *fit.near])
        if not fit.devices:
            report.notes.append("the claim requests no devices")
            return
        matching = ", ".join(f"{one.request}: {one.sentence()}" for one in fit.funnels if one.error is None)
        example = named([device for _, device in fit.devices], _SHOWN_DEVICES)
        where = f" {machine.name}" if len(self.machines) > 1 else ""
        taken = list(dict.fromkeys(request for request, _ in fit.devices if "/" in request))
        where += f" by {', '.join(taken)}" if taken else ""
        report.notes += [*filter(None, [matching]), f"fits{where}, for example: {example}"]

    def _pods(self, pods: Sequence[tuple[str, JsonObject]], namespace: str, report: DocumentReport) -> None:
        for path, spec in pods:
            report.faults += pod_faults(spec, path)
        if report.faults:
            return
        for path, spec in ((path, with_claims_once(spec)) for path, spec in pods):
            report.hints += [
                f"no container uses the claim {name}: its devices are allocated but not used; "
                "list the claim under resources.claims of a container"
                for name in unused_claims(spec)
            ]
            report.hints += pod_toleration_hints(spec)
            self._try_pod(path, spec, namespace, report)

    def _try_pod(self, path: str, spec: JsonObject, namespace: str, report: DocumentReport) -> None:
        requests = self._extended(spec, report)
        lacking = ["its extended resources"] if requests else []
        lacking += [f"{kind} {name}" for _, kind, name in claims_of(spec) if kind != "ResourceClaim"]
        report.faults += node_name_texts(spec, path, lacking)
        unsure = [
            f"{kind} {name}, unless it is already allocated"
            for _, kind, name in claims_of(spec)
            if kind == "ResourceClaim" and not self._is_allocated(namespace, name)
        ]
        report.hints += node_name_texts(spec, path, unsure)
        claims = [{"devices": {"requests": requests}}] if requests else []
        extended = mps_requests(claims[0], self._classes, self.driver) if claims else {}
        with_mps: dict[str, Mapping[str, bool]] = {}
        all_fit = all([self._try_claim(claim, report) for claim in claims])
        for entry, kind, name in claims_of(spec):
            found = self._claim(kind, namespace, name, report)
            all_fit = all_fit and found is not None
            if found is None:
                continue
            claims.append(found)
            report.faults += unknown_requests(spec, entry, found)
            with_mps[entry] = mps_requests(found, self._classes, self.driver)
            report.hints += trap_hints(spec, entry, uses_mps=any(with_mps[entry].values()))
        report.hints += mps_hints(spec, with_mps, extended)
        if any(one["exactly"]["count"] > 1 for one in requests) and self._has_nvlink_groups:
            report.hints.append(
                "the GPUs of an extended resource may have no NVLink between them; a claim with the constraint "
                f"matchAttribute: {self.driver}/nvlinkDomain gets GPUs that have one"
            )
        if claims and spec.get("hostUsers") is False:
            report.hints.append(
                "hostUsers is false: the NVIDIA driver's device nodes must be in the host's /dev; if a container does "
                "not start because of a hook, set the chart's nvidiaCDIHookPath to none (docs/cdi.md)"
            )
        if len(claims) < 2 or not all_fit or not self.machines:
            return
        short = {machine.name: machine.together(claims, self._classes) for machine in self.machines}
        if None in short.values():
            report.notes.append(f"the pod's {len(claims)} claims fit together")
        else:
            report.faults += [
                f"the pod's {len(claims)} claims do not fit on {name} together, although each fits alone: {text}"
                for name, text in short.items()
            ]

    def _is_allocated(self, namespace: str, name: str) -> bool:
        found = None if self.cluster is None else self.cluster.found.get(("ResourceClaim", namespace, name))
        return bool(((found or {}).get("status") or {}).get("allocation"))

    def _claim(self, kind: str, namespace: str, name: str, report: DocumentReport) -> JsonObject | None:
        """Return the spec of a claim that a pod names, if an empty machine can serve it."""
        reference = (kind, namespace, name)
        shown = f"{kind} {namespace}/{name}"
        found, place = self._good.get(reference), self._places.get(reference)
        if found is None and place is not None:
            report.faults.append(f"{shown} ({place}) has faults")
            return None
        if found is None and self.cluster is not None and reference in self.cluster.found:
            found = self.cluster.found[reference]
            if found is None and self._meant(reference) is None:
                report.hints.append(
                    f"{shown} is not in the files and not in the cluster: the pods wait for it"
                )
                return None
        if found is None:
            meant = self._meant(reference)
            if meant is not None:
                report.faults.append(f"{shown} is not in the files; {meant}")
                return None
            report.verdict = NOT_JUDGED
            report.notes.append(f"{shown} is not in the files; fit not checked")
            return None
        spec, own = claim_spec(found), DocumentReport("", shown)
        if self._knows_classes(sorted(set(class_names(spec))), own) and self._try_claim(spec, own):
            return spec
        if own.faults:
            report.faults.append(
                f"{shown} has faults: {own.faults[0]}" if place is None else f"{shown} ({place}) has faults"
            )
        else:
            report.verdict = NOT_JUDGED
            report.notes.append(f"{shown} is not judged")
        return None

    def _meant(self, reference: Reference) -> str | None:
        kind, namespace, name = reference
        others = [one for one in self._places if one[0] in _CLAIMS]
        for other in others:
            if other[2] == name and other[1] == namespace:
                return f"{other[0]} {name} is: write {_CLAIMS[other[0]]}"
            # A document without a namespace may be meant for any.
            if other[2] == name and other[0] == kind and self.namespace not in (other[1], namespace):
                return f"{name} is in namespace {other[1]}, but a pod uses only objects of its own namespace"
        known = [one[2] for one in others if one[:2] == (kind, namespace)]
        near = get_close_matches(name, known, 1, _ALIKE_OBJECT)
        return f"did you mean {near[0]}?" if near else None

    def _extended(self, spec: JsonObject, report: DocumentReport) -> list[JsonObject]:
        served = served_resources(self._classes.values())
        asked = {
            resource
            for place in ("initContainers", "containers")
            for container in spec.get(place) or ()
            if isinstance(container, dict)
            for resource in requested_resources(container)
        }
        for resource in sorted(asked - served.keys()):
            if resource.startswith("nvidia.com/") and resource.endswith(".shared"):
                report.hints.append(
                    f"{resource} is a resource of NVIDIA's device plugin; with gpu-dra-driver, pods get a share of a "
                    f"device by a claim of class {_SHARES}, or by the limit {IMPLICIT}{_SHARES} (docs/migration.md, "
                    "docs/sharing.md)"
                )
            elif resource.startswith("nvidia.com/"):
                near = get_close_matches(resource, served, 1, _ALIKE)
                meant = f"; did you mean {near[0]}?" if near else ""
                report.hints.append(
                    f"{resource} is served by gpu-dra-driver only if a DeviceClass has "
                    f"extendedResourceName: {resource} (Kubernetes 1.36, or the gate DRAExtendedResource){meant}"
                )
            elif resource.startswith(IMPLICIT):
                self._knows_classes([resource.removeprefix(IMPLICIT)], report)
        ours = {resource: name for resource, name in served.items() if self._other_driver(name) is None}
        return extended_requests(spec, ours)


def _selecting(v1: JsonObject) -> list[JsonObject]:
    if v1["kind"] == "DeviceClass":
        return [v1["spec"]]
    return [body for request in requests_of(claim_spec(v1)) for body in bodies(request)]
