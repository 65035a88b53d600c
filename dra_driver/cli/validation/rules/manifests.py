"""ResourceClaims, their templates, DeviceClasses and pods, as people write them: what is wrong with them.

Source: types and validation of resource.k8s.io/v1 as of Kubernetes 1.37. What a served older version would
take is taken too; `as_v1` brings it into the shape of v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dra_driver.api.config import GROUP_VERSION, DeviceType
from dra_driver.api.config import KINDS as CONFIG_KINDS
from dra_driver.api.resolve import decode, needs_admin_access
from dra_driver.cli.validation.rules.selection import NotJudgedError
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.model.ids import is_dns_label
from dra_driver.model.schema import (
    Anything,
    FieldFault,
    JsonObject,
    ListField,
    MapField,
    Object,
    Scalar,
    Shape,
    faults,
)
from dra_driver.model.units import parse_quantity

GROUP = "resource.k8s.io"
SERVED = ("v1", "v1beta2", "v1beta1")
KINDS = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")
CLASS_TYPES: Mapping[str, DeviceType] = {
    "gpu.nvidia.com": "gpu",
    "timeslice.gpu.nvidia.com": "gpu",
    "mps.gpu.nvidia.com": "gpu",
    "mig.nvidia.com": "mig",
    "vfio.gpu.nvidia.com": "vfio",
}
"""Which devices the classes that are installed with gpu-dra-driver give."""
_FOREIGN_KINDS: Final = ("ComputeDomain", "ComputeDomainClique")
"""Objects of NVIDIA's own DRA driver in the API group of our parameters."""
PROFILE_CLASS: Final = ("mig-", ".nvidia.com")
"""How the names of the classes for MIG profiles begin and end."""

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
_ATTRIBUTE = re.compile(r"^(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z_][A-Za-z0-9_]{0,31}\Z")
_FULL_ATTRIBUTE = re.compile(r"^[a-z0-9][-a-z0-9.]*/[A-Za-z_][A-Za-z0-9_]{0,31}\Z")


def _one_of(*values: str) -> Scalar:
    return Scalar(str, lambda value: None if value in values else f"{value!r} must be {' or '.join(values)}")


def _label(value: str) -> str | None:
    if is_dns_label(value):
        return None
    return f"{value!r} is not a DNS label (lower-case letters, digits and -, at most 63)"


def _name(value: str) -> str | None:
    return (
        None if len(value) <= 253 and _SUBDOMAIN.match(value) else f"{value!r} is not a lower-case DNS name"
    )


def _positive(value: int) -> str | None:
    return None if value > 0 else f"{value} must be greater than zero"


def _cel(value: str) -> str | None:
    try:
        compiled(value)
    except InvalidConfigError as error:
        return str(error)
    except NotJudgedError:
        return None  # not known to be wrong; the report says that it is not judged
    return None


def _attribute(value: str) -> str | None:
    if _FULL_ATTRIBUTE.match(value):
        return None
    domain = "; put its domain before it, such as gpu.nvidia.com/" + value if _ATTRIBUTE.match(value) else ""
    return f"{value!r} is not a qualified attribute name{domain}"


def _amount(value: Any) -> str | None:
    try:
        return None if parse_quantity(str(value)) >= 0 else f"{value!r} must not be negative"
    except InvalidConfigError as error:
        return str(error)


_SELECTORS = ListField(
    Object(
        {"cel": Object({"expression": Scalar(str, _cel)}, ("expression",))},
        ("cel",),
        {"expression": "stands under `cel`: cel.expression"},
    )
)
_TOLERATION = Object(
    {
        "key": Scalar(str),
        "operator": _one_of("Exists", "Equal"),
        "value": Scalar(str),
        "effect": _one_of("NoSchedule", "NoExecute"),
        "tolerationSeconds": Scalar(int),
    }
)
_EXACT: dict[str, Shape] = {
    "deviceClassName": Scalar(str, _name),
    "selectors": _SELECTORS,
    "allocationMode": _one_of("ExactCount", "All"),
    "count": Scalar(int, _positive),
    "tolerations": ListField(_TOLERATION, 16),
    "capacity": Object({"requests": MapField(Anything())}),
}
_WITH_ADMIN = {**_EXACT, "adminAccess": Scalar(bool)}
_ALTERNATIVES = ListField(Object({"name": Scalar(str, _label), **_EXACT}, ("name", "deviceClassName")), 8)
_CONFIG = Object(
    {
        "requests": ListField(Scalar(str)),
        "opaque": Object({"driver": Scalar(str, _name), "parameters": Anything()}, ("driver", "parameters")),
    },
    ("opaque",),
)
_CLASS_CONFIG = Object({"opaque": _CONFIG.fields["opaque"]}, ("opaque",))
_CONSTRAINT = Object(
    {
        "requests": ListField(Scalar(str)),
        "matchAttribute": Scalar(str, _attribute),
        "distinctAttribute": Scalar(str, _attribute),
    }
)
_UNDER_EXACTLY = {name: f"stands under `exactly` in {GROUP}/v1: exactly.{name}" for name in _WITH_ADMIN}
_REQUEST = Object(
    {
        "name": Scalar(str, _label),
        "exactly": Object(_WITH_ADMIN, ("deviceClassName",)),
        "firstAvailable": _ALTERNATIVES,
    },
    ("name",),
    _UNDER_EXACTLY,
)
_FLAT_REQUEST = Object(
    {"name": Scalar(str, _label), "firstAvailable": _ALTERNATIVES, **_WITH_ADMIN},
    ("name",),
    {"exactly": f"does not exist in {GROUP}/v1beta1; write apiVersion: {GROUP}/v1"},
)
_OLD_CLAIM = dict.fromkeys(
    ("resourceClassName", "parametersRef", "allocationMode", "controller"),
    f"belongs to {GROUP}/v1alpha2, which is gone; describe the devices under spec.devices.requests",
)


def _claim_spec(request: Object) -> Object:
    devices = Object(
        {"requests": ListField(request), "constraints": ListField(_CONSTRAINT), "config": ListField(_CONFIG)}
    )
    stray = {"requests": "stands under `devices`: devices.requests"}
    return Object({"devices": devices}, ("devices",), {**_OLD_CLAIM, **stray})


def _shape(kind: str, version: str) -> Object:
    spec = _claim_spec(_FLAT_REQUEST if version == "v1beta1" else _REQUEST)
    if kind == "ResourceClaimTemplate":
        inner = "a template holds a claim, so it stands one `spec` deeper: spec.spec.devices"
        spec = Object({"metadata": Anything(), "spec": spec}, ("spec",), {"devices": inner})
    elif kind == "DeviceClass":
        spec = Object(
            {
                "selectors": _SELECTORS,
                "config": ListField(_CLASS_CONFIG),
                "extendedResourceName": Scalar(str),
            },
            (),
            {"suitableNodes": f"belongs to an alpha version of {GROUP}, which is gone; remove it"},
        )
    fields: dict[str, Shape] = {
        "apiVersion": Scalar(str), "kind": Scalar(str), "metadata": Anything(), "spec": spec
    }  # fmt: skip
    if kind == "ResourceClaim":
        fields["status"] = Anything()
    return Object(fields, ("spec",))


def object_faults(document: JsonObject, driver: str) -> list[FieldFault]:
    """The faults of a claim, template or class of a served version of the API."""
    kind, version = str(document.get("kind")), str(document.get("apiVersion")).partition("/")[2]
    if version not in SERVED:
        text = (
            f"{document.get('apiVersion')!r} is gone or unknown; write {GROUP}/v1 (Kubernetes 1.34 and newer)"
        )
        return [FieldFault("apiVersion", text)]
    found = faults(document, _shape(kind, version), "")
    found += _metadata_faults(document.get("metadata"))
    if found:
        return found
    v1 = as_v1(document)
    if kind == "DeviceClass":
        return _config_faults(v1["spec"].get("config") or [], "spec.config", None, driver)
    path = "spec.spec.devices" if kind == "ResourceClaimTemplate" else "spec.devices"
    return _claim_faults(claim_spec(v1)["devices"], path, driver)


def as_v1(document: JsonObject) -> JsonObject:
    """A claim, template or class that has the right fields, in the shape of v1."""
    if document.get("apiVersion") != f"{GROUP}/v1beta1" or document.get("kind") == "DeviceClass":
        return document | {"apiVersion": f"{GROUP}/v1"}
    spec = claim_spec(document)
    devices = spec.get("devices") or {}
    requests = [_exact_request(request) for request in devices.get("requests") or ()]
    spec = spec | {"devices": devices | {"requests": requests}}
    if document.get("kind") == "ResourceClaimTemplate":
        spec = document["spec"] | {"spec": spec}
    return document | {"apiVersion": f"{GROUP}/v1", "spec": spec}


def claim_spec(document: JsonObject) -> JsonObject:
    """The spec of a claim, also of the one in a template."""
    spec: JsonObject = document["spec"]
    return spec["spec"] if document.get("kind") == "ResourceClaimTemplate" else spec


def bodies(request: JsonObject) -> list[JsonObject]:
    """What a v1 request asks for: one body, those of `firstAvailable` in order, or none for a request of a later
    version."""
    return list(request.get("firstAvailable") or filter(None, [request.get("exactly")]))


def alternatives(request: JsonObject) -> list[tuple[str, JsonObject]]:
    """The bodies of a v1 request with the names by which allocation results have them."""
    name = request["name"]
    if request.get("firstAvailable"):
        return [(f"{name}/{body['name']}", body) for body in bodies(request)]
    return [(name, body) for body in bodies(request)]


def requests_of(spec: JsonObject) -> Sequence[JsonObject]:
    """The requests of a claim's spec."""
    return (spec.get("devices") or {}).get("requests") or ()


def class_names(spec: JsonObject) -> list[str]:
    """The classes that a v1 claim spec asks for."""
    return [str(body.get("deviceClassName")) for request in requests_of(spec) for body in bodies(request)]


def _exact_request(request: JsonObject) -> JsonObject:
    outer = {key: value for key, value in request.items() if key in ("name", "firstAvailable")}
    inner = {key: value for key, value in request.items() if key not in outer}
    return outer | {"exactly": inner} if inner else outer


def _metadata_faults(metadata: Any) -> list[FieldFault]:
    if not isinstance(metadata, dict) or not (metadata.get("name") or metadata.get("generateName")):
        return [FieldFault("metadata.name", "is required")]
    name = metadata.get("name")
    return [] if name is None else faults(name, Scalar(str, _name), "metadata.name")


def _claim_faults(devices: JsonObject, path: str, driver: str) -> list[FieldFault]:
    requests = devices.get("requests") or []
    found: list[FieldFault] = []
    seen: set[str] = set()
    for number, request in enumerate(requests):
        here = f"{path}.requests[{number}]"
        if request["name"] in seen:
            found.append(FieldFault(f"{here}.name", f"{request['name']!r} is taken by another request"))
        seen.add(request["name"])
        if (request.get("exactly") is None) == (not request.get("firstAvailable")):
            found.append(FieldFault(here, "exactly one of `exactly` and `firstAvailable` is required"))
            continue
        for _, body in alternatives(request):
            found += _body_faults(body, f"{here}.{'exactly' if request.get('exactly') else 'firstAvailable'}")
            seen.update({f"{request['name']}/{body['name']}"} if "name" in body else ())
    for number, constraint in enumerate(devices.get("constraints") or ()):
        here = f"{path}.constraints[{number}]"
        if (constraint.get("matchAttribute") is None) == (constraint.get("distinctAttribute") is None):
            found.append(
                FieldFault(here, "exactly one of `matchAttribute` and `distinctAttribute` is required")
            )
        found += _unknown_requests(constraint.get("requests"), f"{here}.requests", seen)
    entries = devices.get("config") or []
    refused = [] if found else [fault for use in _uses(devices, path, driver) for fault in _use_faults(use)]
    return found + _config_faults(entries, f"{path}.config", seen, driver) + refused


@dataclass(frozen=True, slots=True)
class _Use:
    """Parameters of ours for a request. `entry` is the path of the config entry, `named` that of the name in it,
    None where it names no request. `bodies` are what is meant of the request, by their names in allocation results."""

    entry: str
    named: str | None
    request: str
    parameters: JsonObject
    bodies: Mapping[str, JsonObject]

    @property
    def kind(self) -> str:
        """Of the parameters."""
        return str(self.parameters["kind"])

    def of_type(self, *types: DeviceType | None) -> list[str]:
        """The names of the bodies whose class gives devices of these types; None: it is not known what it gives."""
        return [name for name, body in self.bodies.items() if class_type(body["deviceClassName"]) in types]


def _uses(devices: JsonObject, path: str, driver: str) -> Iterator[_Use]:
    """Each use of parameters of ours that are of a known kind."""
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


def _use_faults(use: _Use) -> Iterator[FieldFault]:
    """What Prepare would refuse: parameters that name a request none of whose classes gives devices of their kind; and
    `management` without adminAccess, also for a request that is not named, if its class gives devices of that kind."""
    kind = CONFIG_KINDS[use.kind]
    if use.named is not None and not use.of_type(None, kind):
        classes = ", ".join(body["deviceClassName"] for body in use.bodies.values())
        yield FieldFault(use.named, f"{use.kind} does not fit request {use.request!r} of class {classes}")
    if use.parameters.get("management") is not True or kind == "vfio":
        return
    concerns = use.named is not None or len(use.of_type(kind)) == len(use.bodies)
    if concerns and not all(body.get("adminAccess") is True for body in use.bodies.values()):
        place = use.named or f"{use.entry}.opaque.parameters.management"
        yield FieldFault(place, needs_admin_access(use.request.partition("/")[0]))


def alternative_hints(devices: JsonObject, path: str, driver: str) -> Iterator[str]:
    """Parameters that name a request by the name of all its alternatives, and fit only some of them."""
    for use in _uses(devices, path, driver):
        fits = use.of_type(None, CONFIG_KINDS[use.kind])
        misfits = [name for name in use.bodies if name not in fits]
        if use.named is not None and misfits and fits:
            yield (
                f"{use.entry}.requests: {use.kind} does not fit {', '.join(misfits)}, whose devices Prepare would "
                f"refuse; write {', '.join(fits)} instead of {use.request}"
            )


def class_type(name: str) -> DeviceType | None:
    """The type of device that a class of ours gives; None for a class that is not known."""
    begin, end = PROFILE_CLASS
    return "mig" if name.startswith(begin) and name.endswith(end) else CLASS_TYPES.get(name)


def _body_faults(body: JsonObject, path: str) -> Iterator[FieldFault]:
    if not body.get("deviceClassName"):
        yield FieldFault(f"{path}.deviceClassName", "is required")
    if body.get("allocationMode") == "All" and body.get("count"):
        yield FieldFault(f"{path}.count", "does not go with allocationMode All; remove one of them")
    for name, amount in ((body.get("capacity") or {}).get("requests") or {}).items():
        here = f"{path}.capacity.requests.{name}"
        if not _ATTRIBUTE.match(str(name)):
            yield FieldFault(here, f"{name!r} is not the name of a capacity")
        wrong = _amount(amount)
        if wrong is not None:
            yield FieldFault(here, wrong)


def _config_faults(
    entries: Sequence[JsonObject], path: str, requests: set[str] | None, driver: str
) -> list[FieldFault]:
    """`requests` are the names that entries may give; None in a class, where they give none."""
    found: list[FieldFault] = []
    for number, entry in enumerate(entries):
        here = f"{path}[{number}]"
        if requests is not None:
            found += _unknown_requests(entry.get("requests"), f"{here}.requests", requests)
        if entry["opaque"]["driver"] == driver:
            found += parameter_faults(entry["opaque"]["parameters"], f"{here}.opaque.parameters")
    return found


def parameter_faults(parameters: Any, path: str) -> list[FieldFault]:
    """The faults of opaque parameters of ours, each with its own path."""
    try:
        decode(parameters)
    except InvalidConfigError as error:
        split = (fault.partition(": ") for fault in error.faults)
        dot = "." if path else ""
        return [
            FieldFault(f"{path}{dot}{field}", text)
            if not field.startswith("the parameters ")
            else FieldFault(path, f"{field}{colon}{text}")
            for field, colon, text in split
        ]
    return []


def _unknown_requests(names: Any, path: str, known: set[str]) -> list[FieldFault]:
    return [
        FieldFault(
            f"{path}[{number}]",
            f"there is no request {name!r}; there are: {', '.join(sorted(known)) or 'none'}",
        )
        for number, name in enumerate(names or ())
        if name not in known
    ]


def is_parameters(document: Any) -> bool:
    """Whether a document is opaque parameters that stand alone."""
    return (
        isinstance(document, Mapping)
        and str(document.get("apiVersion", "")).partition("/")[0] == GROUP_VERSION.partition("/")[0]
        and document.get("kind") not in _FOREIGN_KINDS
    )


def _uses_claim(value: Any) -> str | None:
    has_name = isinstance(value, dict) and isinstance(value.get("name"), str)
    return None if has_name else "must be an object with a name"


_CONTAINERS = ListField(
    Object(
        {
            "resources": Object(
                {
                    "limits": MapField(Anything()),
                    "requests": MapField(Anything()),
                    "claims": ListField(Scalar(object, _uses_claim), None),
                },
                open=True,
            )
        },
        open=True,
    ),
    None,
)
_POD = Object(
    {
        "initContainers": _CONTAINERS,
        "containers": _CONTAINERS,
        "resourceClaims": ListField(
            Object(
                {
                    "name": Scalar(str, _label),
                    "resourceClaimName": Scalar(str, _name),
                    "resourceClaimTemplateName": Scalar(str, _name),
                },
                ("name",),
                {
                    "source": "is gone since Kubernetes 1.31; write resourceClaimName or resourceClaimTemplateName here"
                },
            )
        ),
    },
    open=True,
)


def pod_faults(spec: JsonObject, path: str) -> list[FieldFault]:
    """The faults of the parts of a pod that have to do with claims."""
    found = faults(spec, _POD, path)
    if found:
        return found
    entries = spec.get("resourceClaims") or []
    for number, entry in enumerate(entries):
        given = [key for key in ("resourceClaimName", "resourceClaimTemplateName") if entry.get(key)]
        if len(given) != 1:
            text = "exactly one of `resourceClaimName` and `resourceClaimTemplateName` is required"
            found.append(FieldFault(f"{path}.resourceClaims[{number}]", text))
    names = {entry["name"] for entry in entries}
    for here, name in _used_claims(spec):
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            text = f"there is no entry {name!r} in resourceClaims; there are: {known}"
            found.append(FieldFault(f"{path}.{here}", text))
    return [*found, *_parts_of_devices(spec, path)]


def _parts_of_devices(spec: JsonObject, path: str) -> Iterator[FieldFault]:
    """Extended resources, such as nvidia.com/gpu, of which a container asks for a part."""
    for place in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(place) or ()):
            for kind in ("requests", "limits"):
                amounts = (container.get("resources") or {}).get(kind) or {}
                for name, amount in amounts.items():
                    if "/" in str(name) and not _is_whole(amount):
                        text = f"{amount!r} is not a whole number; a device cannot be asked for in parts"
                        yield FieldFault(f"{path}.{place}[{number}].resources.{kind}.{name}", text)


def _is_whole(amount: Any) -> bool:
    try:
        return parse_quantity(str(amount)).denominator == 1
    except InvalidConfigError:
        return False


def unused_claims(spec: JsonObject) -> list[str]:
    """Entries of a pod's `resourceClaims` that no container uses, so that no container sees the devices."""
    used = {name for _, name in _used_claims(spec)}
    return [entry["name"] for entry in spec.get("resourceClaims") or () if entry["name"] not in used]


def uses_mps(claim: JsonObject, classes: Mapping[str, JsonObject], driver: str) -> bool:
    """Whether the parameters of a claim without faults, or of one of its classes, share devices by MPS."""
    specs = [classes[name].get("spec") or {} for name in class_names(claim) if name in classes]
    for configured in (claim.get("devices") or {}, *specs):
        for entry in configured.get("config") or ():
            opaque = entry.get("opaque") or {}
            sharing = (opaque.get("parameters") or {}).get("sharing") or {}
            if opaque.get("driver") == driver and sharing.get("strategy") == "MPS":
                return True
    return False


def hidden_volumes(spec: JsonObject, claim: str) -> Iterator[tuple[str, str]]:
    """(container, volume) for each container of a pod without faults that uses this entry of `resourceClaims`, and
    mounts a volume at /dev/shm, where a claim with MPS puts the memory of its daemon."""
    for place in ("initContainers", "containers"):
        for container in spec.get(place) or ():
            used = [one["name"] for one in (container.get("resources") or {}).get("claims") or ()]
            for mount in container.get("volumeMounts") or ():
                place_of = str(mount.get("mountPath")) if isinstance(mount, dict) else ""
                if claim in used and place_of.rstrip("/") == "/dev/shm":  # noqa: S108
                    yield str(container.get("name")), str(mount.get("name"))


def _used_claims(spec: JsonObject) -> Iterator[tuple[str, str]]:
    """The entries of `resourceClaims` that containers of a pod without faults use: where, and the name."""
    for place in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(place) or ()):
            claims = (container.get("resources") or {}).get("claims") or ()
            for index, claim in enumerate(claims):
                yield f"{place}[{number}].resources.claims[{index}].name", claim["name"]
