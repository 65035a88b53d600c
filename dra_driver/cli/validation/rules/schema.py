"""Fields and types of API objects, from the models of Kubernetes' official client, with more rules of Kubernetes
1.37.

The client is imported when the first object is checked, so only `validate` pays for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from dra_driver.cli.validation.rules.cel import NotJudgedError
from dra_driver.cli.validation.rules.selectors import compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.model import schema
from dra_driver.model.ids import is_dns_label, is_subdomain
from dra_driver.model.schema import Anything, ListField, MapField, Object, Scalar, Shape
from dra_driver.model.units import parse_quantity

GROUP: Final = "resource.k8s.io"
SERVED: Final = ("v1", "v1beta2", "v1beta1")

_VERSION = re.compile(r"^(?:Core|Resource)?V\d+(?:(?:alpha|beta)\d+)?")
QUALIFIED: Final = re.compile(r"^(?:[a-z0-9][-a-z0-9.]*/)?[A-Za-z_][A-Za-z0-9_]{0,31}\Z")
"""A name with or without domain."""
_LABEL = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")


def faults(value: Any, shape: Shape, path: str) -> list[str]:
    return [str(fault) for fault in schema.faults(value, shape, path)]


def dns_label(value: str) -> str | None:
    if is_dns_label(value):
        return None
    return f"{value!r} is not a DNS label (lower-case letters, digits and -, at most 63)"


def dns_name(value: str) -> str | None:
    return None if is_subdomain(value) else f"{value!r} is not a lower-case DNS name"


def _one_of(*values: str) -> Scalar:
    return Scalar(str, lambda value: None if value in values else f"{value!r} must be {' or '.join(values)}")


def _cel(value: str) -> str | None:
    try:
        compiled(value)
    except InvalidConfigError as error:
        return str(error)
    except NotJudgedError:
        return None  # not known to be wrong; the report says that it is not judged
    return None


def _attribute(value: str) -> str | None:
    if "/" in value and QUALIFIED.match(value):
        return None
    domain = "; put its domain before it, such as gpu.nvidia.com/" + value if QUALIFIED.match(value) else ""
    return f"{value!r} is not a qualified attribute name{domain}"


def _driver(value: str) -> str | None:
    return dns_name(value.lower()) if len(value) <= 63 else "has more than 63 characters"


def _label(value: str) -> str | None:
    if not value or _LABEL.match(value):
        return None
    return (
        f"{value!r} is not a valid label value (letters, digits, -, _ and .; a letter or digit at both ends)"
    )


def _label_key(value: str) -> str | None:
    domain, slash, name = value.rpartition("/")
    is_right = _LABEL.match(name) and (not slash or dns_name(domain) is None)
    return None if is_right else f"{value!r} is not a valid key; write it like gpu.nvidia.com/xid"


def _extended_resource(value: str) -> str | None:
    domain = value.rpartition("/")[0]
    is_ours = domain and not domain.startswith("requests.") and not f".{domain}".endswith(".kubernetes.io")
    return (
        None
        if is_ours and _label_key(value) is None
        else f"{value!r} is not a valid name; write it like nvidia.com/gpu"
    )


def amount(value: Any) -> str | None:
    try:
        return None if parse_quantity(str(value)) >= 0 else f"{value!r} must not be negative"
    except InvalidConfigError as error:
        return str(error)


def distinct(items: Sequence[Any]) -> str | None:
    """Return what is wrong with a list of names, or of objects with names, that has duplicates."""
    keys = [(one.get("name"), one.get("request")) if isinstance(one, dict) else (one, None) for one in items]
    twice = next((name for name, request in keys if name and keys.count((name, request)) > 1), None)
    return None if twice is None else f"{twice!r} appears twice"


def _text(test: Callable[[str], str | None]) -> Scalar:
    return Scalar(str, test)


_VALUES: Mapping[str, Shape] = {
    "DeviceRequest.name": _text(dns_label),
    "DeviceRequest.deviceClassName": _text(dns_name),
    "ExactDeviceRequest.deviceClassName": _text(dns_name),
    "DeviceSubRequest.deviceClassName": _text(dns_name),
    "DeviceSubRequest.name": _text(dns_label),
    "CELDeviceSelector.expression": _text(_cel),
    "DeviceToleration.key": _text(lambda value: _label_key(value) if value else None),
    "DeviceToleration.value": _text(_label),
    "DeviceToleration.operator": _one_of("Exists", "Equal"),
    "DeviceToleration.effect": _text(
        lambda value: (
            None if value in ("", "NoSchedule", "NoExecute") else f"{value!r} must be NoSchedule or NoExecute"
        )
    ),
    "DeviceConstraint.matchAttribute": _text(_attribute),
    "DeviceConstraint.distinctAttribute": _text(_attribute),
    "OpaqueDeviceConfiguration.driver": _text(_driver),
    "CapacityRequirements.requests": MapField(Scalar(object, amount)),
    "PodResourceClaim.name": _text(dns_label),
    "PodResourceClaim.resourceClaimName": _text(dns_name),
    "PodResourceClaim.resourceClaimTemplateName": _text(dns_name),
    "ResourceClaimTemplateSpec.metadata": Object(
        {"labels": MapField(_text(_label)), "annotations": MapField(Scalar(str))}
    ),
    "DeviceClassSpec.extendedResourceName": _text(_extended_resource),
    "ResourceClaim.request": _text(lambda value: dns_label(value) if value else None),
    "DeviceTaintSelector.driver": _text(_driver),
    "DeviceTaintSelector.pool": _text(
        lambda value: next((text for part in value.split("/") if (text := dns_name(part))), None)
    ),
    "DeviceTaintSelector.device": _text(dns_label),
    "DeviceTaint.key": _text(_label_key),
    "DeviceTaint.value": _text(_label),
    "DeviceTaint.effect": _one_of("None", "NoSchedule", "NoExecute"),
}
"""What the models lack, by model (without its version) and field."""
_MODES: Final = _one_of("ExactCount", "All")
_MOST: Mapping[str, int | None] = {
    "DeviceRequest.firstAvailable": 8, "ExactDeviceRequest.tolerations": 16, "DeviceSubRequest.tolerations": 16,
    "DeviceRequest.tolerations": 16, "ResourceRequirements.claims": None,
}  # fmt: skip
"""The maximum length of a list; None for no limit. Other lists may have 32 items."""
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "DeviceSelector": ("cel",), "DeviceClaimConfiguration": ("opaque",), "DeviceClassConfiguration": ("opaque",),
    "ResourceClaimSpec": ("devices",), "ResourceClaimTemplateSpec": ("spec",),
}  # fmt: skip
_OLD_CLAIM = {
    **dict.fromkeys(
        ("resourceClassName", "parametersRef", "allocationMode"),
        f"belongs to {GROUP}/v1alpha2, which was removed; describe the devices under spec.devices.requests",
    ),
    "controller": f"belongs to an early form of {GROUP}/v1alpha3, and was removed; delete it: the scheduler allocates "
    "the devices",
}
_BODY = ("deviceClassName", "selectors", "allocationMode", "count", "tolerations", "capacity", "adminAccess")
IN_REQUEST: Final = "spec.devices.requests[].exactly."
_ABOVE = {name: f"belongs in a request of a claim: {IN_REQUEST}{name}" for name in _BODY}
_MISTAKES: Mapping[str, Mapping[str, str]] = {
    "DeviceSelector": {"expression": "belongs under `cel`: cel.expression"},
    "DeviceClaim": _ABOVE,
    "ResourceClaimSpec": {**_ABOVE, **_OLD_CLAIM, "requests": "belongs under `devices`: devices.requests"},
    "ResourceClaimTemplateSpec": {
        **_ABOVE,
        "devices": "a template contains a claim, so this belongs one `spec` deeper: spec.spec.devices",
    },
    "DeviceClassSpec": {
        **_ABOVE,
        "suitableNodes": f"belongs to an alpha version of {GROUP}, which was removed; delete the field",
    },
    "DeviceRequest": {name: f"belongs under `exactly` in {GROUP}/v1: exactly.{name}" for name in _BODY},
    "V1beta1DeviceRequest": {"exactly": f"does not exist in {GROUP}/v1beta1; write apiVersion: {GROUP}/v1"},
    "PodResourceClaim": {
        "source": "was removed in Kubernetes 1.31; write resourceClaimName or resourceClaimTemplateName here"
    },
}
"""Misplaced fields, and the right place."""


def object_shape(kind: str, version: str) -> Object:
    prefix = version[0].upper() + version[1:]
    name = f"Resource{prefix}{kind}" if (kind, version) == ("ResourceClaim", "v1") else f"{prefix}{kind}"
    whole = model_shape(name)
    unchecked = {"metadata": Anything(), "status": Anything()}
    fields = {name: unchecked.get(name, shape) for name, shape in whole.fields.items()}
    return Object(fields, ("spec",), whole.mistakes)


@cache
def model_shape(name: str) -> Object:
    from kubernetes.client import models

    model, base = getattr(models, name), _VERSION.sub("", name)
    names: Mapping[str, str] = model.attribute_map
    fields = {
        field: _field(f"{base}.{field}", str(model.openapi_types[attribute]))
        for attribute, field in names.items()
        if model.openapi_types[attribute] != "V1ObjectMeta"
    }
    others = names.values() - fields.keys()
    fields |= {field: _VALUES.get(f"{base}.{field}", Anything()) for field in others}
    given = tuple(names[attribute] for attribute, one in model.model_fields.items() if one.is_required())
    mistakes = _MISTAKES.get(name, _MISTAKES.get(base, {}))
    return Object(fields, (*given, *_REQUIRED.get(base, ())), mistakes)


def _field(where: str, kind: str) -> Shape:
    if where.endswith(".allocationMode"):
        return _MODES
    listed = re.fullmatch(r"List\[(.+)\]", kind)
    if listed is not None:
        return ListField(_field(f"{where}[]", listed[1]), _MOST.get(where, 32), test=distinct)
    if where in _VALUES:
        return _VALUES[where]
    if kind.startswith("Dict["):
        return MapField(Scalar(str))
    simple: Mapping[str, type[Any]] = {"str": str, "int": int, "bool": bool}
    if kind in simple:
        return Scalar(simple[kind])
    return model_shape(kind) if kind.startswith(("V1", "Core", "Resource")) else Anything()
