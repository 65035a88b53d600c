"""The faults of ResourceClaims, ResourceClaimTemplates and DeviceClasses, as in Kubernetes 1.37.

Older served versions are accepted; `as_v1` converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

import yaml

from dra_driver.api.config import GROUP_VERSION, WORDS, DeviceType
from dra_driver.api.config import KINDS as CONFIG_KINDS
from dra_driver.api.resolve import decode, needs_admin_access
from dra_driver.cli.validation.rules.schema import GROUP, QUALIFIED, SERVED, dns_name, faults, object_shape
from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.schema import YAML_ERRORS, JsonObject, Scalar

_OLD = (
    "belongs to the old API of NVIDIA's DRA driver, before Kubernetes 1.31; write a ResourceClaim of "
    "resource.k8s.io/v1, and sharing under spec.devices.config as opaque parameters of resource.nvidia.com/v1beta1"
)
_KUBEVIRT = "belongs to KubeVirt; its GPUs come from the ResourceClaims that it names (docs/passthrough.md)"
_KINDS = {
    "GpuClaimParameters": _OLD,
    "MigDeviceClaimParameters": _OLD,
    "ComputeInstanceParameters": _OLD,
    "ResourceClass": "was replaced by DeviceClass in Kubernetes 1.31; the chart installs the classes of this driver",
    "PodSchedulingContext": "was removed in Kubernetes 1.32 without a replacement",
    "ComputeDomain": "belongs to NVIDIA's driver for compute domains, which can run next to gpu-dra-driver; validate "
    "does not check it",
    "ClusterPolicy": "belongs to NVIDIA's GPU operator; docs/gpu-operator.md lists the parts that must be off",
    "NVIDIADriver": "belongs to NVIDIA's GPU operator, which installs the NVIDIA driver; validate does not check it",
    "ResourceSlice": "is written by the plugin of a node; `gpu-dra-driver inspect` prints the slices",
    "VirtualMachine": _KUBEVIRT,
    "VirtualMachineInstance": _KUBEVIRT,
}


def neighbour(content: JsonObject) -> str | None:
    kind = str(content.get("kind"))
    return f"{kind} {_KINDS[kind]}" if kind in _KINDS else None


_PLUGIN_KEYS: Final = {"version", "flags", "resources", "sharing", "imex"}
"""Keys of a configuration file of NVIDIA's device plugin."""
OF_DEVICE_PLUGIN: Final = (
    "it shares GPUs through NVIDIA's device plugin, whose configuration gpu-dra-driver does not read; write the list "
    "`sharing` of gpu-dra-driver's configuration, such as sharing: [{mode: shares, shares: 4}] (docs/migration.md, "
    "docs/sharing.md)"
)


def is_of_device_plugin(content: Any) -> bool:
    """Whether a document is, or a ConfigMap has, a file of NVIDIA's device plugin with time-slicing or MPS."""
    if not isinstance(content, dict):
        return False
    data = content.get("data")
    if content.get("kind") == "ConfigMap" and isinstance(data, dict):
        return any(is_of_device_plugin(_yaml(text)) for text in data.values() if "sharing" in str(text))
    sharing = content.get("sharing")
    return (
        content.keys() <= _PLUGIN_KEYS
        and isinstance(sharing, dict)
        and bool({"timeSlicing", "mps"} & sharing.keys())
    )


def _yaml(text: Any) -> Any:
    try:
        return yaml.safe_load(text) if isinstance(text, str) else None
    except (yaml.YAMLError, *YAML_ERRORS):
        return None


def names_devices(content: Any, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    if isinstance(content, list):
        return any(names_devices(inner, depth + 1) for inner in content)
    if not isinstance(content, dict):
        return isinstance(content, str) and content.startswith(_RESOURCES)
    return any(
        str(key) in _CLAIM_FIELDS or "nvidia.com" in str(key) or names_devices(inner, depth + 1)
        for key, inner in content.items()
    )


def misspelled_kind(content: JsonObject, known: tuple[str, ...]) -> str | None:
    kind = str(content.get("kind"))
    return next((one for one in known if one.lower() == kind.lower() and one != kind), None)


KINDS = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")
CLASS_TYPES: Mapping[str, DeviceType] = {
    "gpu.nvidia.com": "gpu",
    "timeslice.gpu.nvidia.com": "gpu",
    "mps.gpu.nvidia.com": "gpu",
    "mig.nvidia.com": "mig",
    "vfio.gpu.nvidia.com": "vfio",
}
"""Only classes that select one type."""
_FOREIGN_KINDS: Final = ("ComputeDomain", "ComputeDomainClique")
"""Kinds of NVIDIA's own DRA driver in the API group of the plugin's parameters."""
_ALIKE: Final = 0.8
_DEEPEST: Final = 32
_RESOURCES: Final = ("nvidia.com/", "gpu.nvidia.com", "deviceclass.resource.kubernetes.io/")
_CLAIM_FIELDS: Final = ("resourceClaims", "resourceClaimName", "resourceClaimTemplateName", "deviceClassName")
PROFILE_CLASS: Final = ("mig-", ".nvidia.com")


def object_faults(document: JsonObject, driver: str) -> list[str]:
    """Return the faults of a claim, template or class. If its API version is not served, that is the only fault."""
    kind, version = str(document.get("kind")), str(document.get("apiVersion")).partition("/")[2]
    if version not in SERVED:
        text = f"{document.get('apiVersion')!r} is unknown or was removed; write {GROUP}/v1 (Kubernetes 1.34 and newer)"
        return [f"apiVersion: {text}"]
    found = faults(document, object_shape(kind, version), "")
    found += metadata_faults(document.get("metadata"))
    if found:
        return found
    v1 = as_v1(document)
    if kind == "DeviceClass":
        return _config_faults(v1["spec"].get("config") or [], "spec.config", None, driver)
    path = "spec.spec.devices" if kind == "ResourceClaimTemplate" else "spec.devices"
    return _claim_faults(claim_spec(v1)["devices"], path, driver)


def as_v1(document: JsonObject) -> JsonObject:
    """Convert an object with valid fields to v1. Like the API server, this turns a `count` of 0 into 1."""
    if document.get("kind") == "DeviceClass":
        return document | {"apiVersion": f"{GROUP}/v1"}
    spec = claim_spec(document)
    devices = spec.get("devices") or {}
    is_flat = document.get("apiVersion") == f"{GROUP}/v1beta1"
    requests = [
        _counted(_exact_request(request) if is_flat else request) for request in devices.get("requests") or ()
    ]
    spec = spec | {"devices": devices | {"requests": requests}}
    if document.get("kind") == "ResourceClaimTemplate":
        spec = document["spec"] | {"spec": spec}
    return document | {"apiVersion": f"{GROUP}/v1", "spec": spec}


def claim_spec(document: JsonObject) -> JsonObject:
    spec: JsonObject = document["spec"]
    return spec["spec"] if document.get("kind") == "ResourceClaimTemplate" else spec


def bodies(request: JsonObject) -> list[JsonObject]:
    """Return one body, those of `firstAvailable` in order, or none for a request of a later version."""
    return list(request.get("firstAvailable") or filter(None, [request.get("exactly")]))


def alternatives(request: JsonObject) -> list[tuple[str, JsonObject]]:
    """Return the bodies of a v1 request with their names in allocation results."""
    name = request["name"]
    if request.get("firstAvailable"):
        return [(f"{name}/{body['name']}", body) for body in bodies(request)]
    return [(name, body) for body in bodies(request)]


def requests_of(spec: JsonObject) -> Sequence[JsonObject]:
    return (spec.get("devices") or {}).get("requests") or ()


def class_names(spec: JsonObject) -> list[str]:
    return [str(body.get("deviceClassName")) for request in requests_of(spec) for body in bodies(request)]


def _counted(request: JsonObject) -> JsonObject:
    def filled(body: JsonObject) -> JsonObject:
        return body | {"count": 1} if body.get("count") == 0 and body.get("allocationMode") != "All" else body

    inner: JsonObject = (
        {"exactly": filled(request["exactly"])} if isinstance(request.get("exactly"), dict) else {}
    )
    if request.get("firstAvailable"):
        inner["firstAvailable"] = [filled(body) for body in request["firstAvailable"]]
    return request | inner


def _exact_request(request: JsonObject) -> JsonObject:
    outer = {key: value for key, value in request.items() if key in ("name", "firstAvailable")}
    inner = {key: value for key, value in request.items() if key not in outer}
    return outer | {"exactly": inner} if inner else outer


def metadata_faults(metadata: Any) -> list[str]:
    if not isinstance(metadata, dict) or not (metadata.get("name") or metadata.get("generateName")):
        return ["metadata.name: is required"]
    name = metadata.get("name")
    return [] if name is None else faults(name, Scalar(str, dns_name), "metadata.name")


def _claim_faults(devices: JsonObject, path: str, driver: str) -> list[str]:
    requests = devices.get("requests") or []
    found: list[str] = []
    seen: set[str] = set()
    for number, request in enumerate(requests):
        here = f"{path}.requests[{number}]"
        seen.add(request["name"])
        if (request.get("exactly") is None) == (not request.get("firstAvailable")):
            found.append(f"{here}: exactly one of `exactly` and `firstAvailable` is required")
            continue
        for index, (_, body) in enumerate(alternatives(request)):
            place = "exactly" if request.get("exactly") else f"firstAvailable[{index}]"
            found += _body_faults(body, f"{here}.{place}")
            seen.update({f"{request['name']}/{body['name']}"} if "name" in body else ())
    for number, constraint in enumerate(devices.get("constraints") or ()):
        here = f"{path}.constraints[{number}]"
        if (constraint.get("matchAttribute") is None) == (constraint.get("distinctAttribute") is None):
            found.append(f"{here}: exactly one of `matchAttribute` and `distinctAttribute` is required")
        found += _unknown_requests(constraint.get("requests"), f"{here}.requests", seen)
    entries = devices.get("config") or []
    refused = [] if found else [fault for use in _uses(devices, path, driver) for fault in _use_faults(use)]
    return found + _config_faults(entries, f"{path}.config", seen, driver) + refused


@dataclass(frozen=True, slots=True)
class _Use:
    """Parameters of this driver for a request.

    `entry` is the path of the config entry, and `named` that of the request name in it, if any. `bodies` are by their
    names in allocation results.
    """

    entry: str
    named: str | None
    request: str
    parameters: JsonObject
    bodies: Mapping[str, JsonObject]

    @property
    def kind(self) -> str:
        return str(self.parameters["kind"])

    def of_type(self, *types: DeviceType | None) -> list[str]:
        """Return names of bodies whose class selects these types; None means an unknown class."""
        return [name for name, body in self.bodies.items() if class_type(body["deviceClassName"]) in types]


def _uses(devices: JsonObject, path: str, driver: str) -> Iterator[_Use]:
    requests = devices.get("requests") or ()
    for number, entry in enumerate(devices.get("config") or ()):
        parameters = entry["opaque"]["parameters"]
        is_ours = entry["opaque"]["driver"] == driver and is_parameters(parameters)
        if not is_ours or str(parameters.get("kind")) not in CONFIG_KINDS:
            continue
        here, names = f"{path}.config[{number}]", entry.get("requests")
        for index, name in enumerate(names or [request["name"] for request in requests]):
            meant = {
                full: body
                for request in requests
                for full, body in alternatives(request)
                if name in (full, request["name"])
            }
            named = f"{here}.requests[{index}]" if names else None
            if meant:
                yield _Use(here, named, name, parameters, meant)


def _use_faults(use: _Use) -> Iterator[str]:
    """Yield what Prepare would refuse: parameters for a request whose classes all select another type of device, and
    `management` or MaintenanceConfig without adminAccess.
    """
    kinds = CONFIG_KINDS[use.kind]
    if use.named is not None and not use.of_type(None, *kinds):
        classes = ", ".join(body["deviceClassName"] for body in use.bodies.values())
        yield f"{use.named}: {use.kind} does not apply to request {use.request!r} of class {classes}"
    what = "management" if use.parameters.get("management") is True and "vfio" not in kinds else None
    what = use.kind if use.kind == "MaintenanceConfig" else what
    if what is None:
        return
    concerns = use.named is not None or len(use.of_type(*kinds)) == len(use.bodies)
    if concerns and not all(body.get("adminAccess") is True for body in use.bodies.values()):
        place = use.named or f"{use.entry}.opaque.parameters.{'kind' if what == use.kind else what}"
        yield f"{place}: {needs_admin_access(what, use.request.partition('/')[0])}"


def alternative_hints(devices: JsonObject, path: str, driver: str) -> Iterator[str]:
    """Yield hints for parameters that fit only some alternatives of the named request, or no request."""
    for use in _uses(devices, path, driver):
        fits = use.of_type(None, *CONFIG_KINDS[use.kind])
        misfits = [name for name in use.bodies if name not in fits]
        if use.named is None and not fits:
            yield (
                f"{use.entry}: {use.kind} does not apply to requests of class "
                f"{', '.join(dict.fromkeys(body['deviceClassName'] for body in use.bodies.values()))}, which ignore it"
            )
        if use.named is not None and misfits and fits:
            yield (
                f"{use.entry}.requests: {use.kind} does not apply to {', '.join(misfits)}, so Prepare would refuse its "
                f"devices; write {', '.join(fits)} instead of {use.request}"
            )


def class_type(name: str) -> DeviceType | None:
    """Return the only type of device that an installed class selects."""
    begin, end = PROFILE_CLASS
    return "mig" if name.startswith(begin) and name.endswith(end) else CLASS_TYPES.get(name)


def _body_faults(body: JsonObject, path: str) -> Iterator[str]:
    if not body.get("deviceClassName"):
        yield f"{path}.deviceClassName: is required"
    if body.get("allocationMode") == "All" and body.get("count"):
        yield f"{path}.count: cannot be combined with allocationMode All; remove one of them"
    if (body.get("count") or 0) < 0:
        yield f"{path}.count: {body['count']} must be greater than zero"
    for number, toleration in enumerate(body.get("tolerations") or ()):
        here = f"{path}.tolerations[{number}]"
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            yield f"{here}.value: must be empty with operator Exists; write operator: Equal"
    for name in (body.get("capacity") or {}).get("requests") or {}:
        if not QUALIFIED.match(str(name)):
            yield f"{path}.capacity.requests.{name}: {name!r} is not the name of a capacity"


def _config_faults(
    entries: Sequence[JsonObject], path: str, requests: set[str] | None, driver: str
) -> list[str]:
    """Return the faults of config entries; they may name `requests`, except in a class (None)."""
    found: list[str] = []
    for number, entry in enumerate(entries):
        here = f"{path}[{number}]"
        if requests is not None:
            found += _unknown_requests(entry.get("requests"), f"{here}.requests", requests)
        named = entry["opaque"]["driver"]
        if named == driver:
            found += parameter_faults(entry["opaque"]["parameters"], f"{here}.opaque.parameters")
        elif is_misspelled(named, driver):
            text = f"{named!r} is another driver, so gpu-dra-driver ignores the parameters; did you mean {driver}?"
            found.append(f"{here}.opaque.driver: {text}")
        elif not isinstance(entry["opaque"]["parameters"], dict):
            found.append(f"{here}.opaque.parameters: must be an object")
    return found


def is_misspelled(named: str, driver: str) -> bool:
    return named != driver and bool(get_close_matches(named, [driver], 1, _ALIKE))


def parameter_faults(parameters: Any, path: str) -> list[str]:
    try:
        decode(parameters, replace(WORDS, unknown=None, meant=True))
    except InvalidConfigError as error:
        whole = error.faults[0].startswith("the parameters ")  # not a field of them
        before = f"{path}{': ' if whole else '.'}" if path else ""
        return [before + fault for fault in error.faults]
    return []


def _unknown_requests(names: Any, path: str, known: set[str]) -> list[str]:
    return [
        f"{path}[{number}]: there is no request {name!r}; the requests are: {', '.join(sorted(known)) or 'none'}"
        for number, name in enumerate(names or ())
        if name not in known
    ]


def is_parameters(document: Any) -> bool:
    return (
        isinstance(document, Mapping)
        and str(document.get("apiVersion", "")).partition("/")[0] == GROUP_VERSION.partition("/")[0]
        and document.get("kind") not in _FOREIGN_KINDS
    )


def default_hints(spec: JsonObject, path: str) -> Iterator[str]:
    for number, request in enumerate(requests_of(spec)):
        for body in (request, request.get("exactly") or {}, *(request.get("firstAvailable") or ())):
            if body.get("count") == 0 and body.get("allocationMode") != "All":
                yield f"{path}.requests[{number}]: the API server changes a count of 0 to 1; write the count you want"
            if any(
                one.get("operator") != "Exists" and not one.get("key")
                for one in body.get("tolerations") or ()
            ):
                yield (
                    f"{path}.requests[{number}]: a toleration without a key tolerates only taints with its value; "
                    "write operator: Exists to tolerate every taint"
                )
