"""What must be true of objects of the API before a look at the cluster can read them.

An API server holds its objects to this. A proxy, an aggregated server or a later version may not: such an object is
reported and left out, and the look goes on. Fields that nothing reads are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from dra_driver.errors import InvalidConfigError
from dra_driver.model.schema import Anything, ListField, MapField, Object, Scalar, Shape, faults
from dra_driver.model.units import parse_quantity

_LONGEST: Final = 200
_ANY: Final = Anything()
_TEXT: Final = Scalar(str)


def _object(required: Mapping[str, Shape] | None = None, **optional: Shape) -> Object:
    required = required or {}
    return Object({**required, **optional}, tuple(required), open=True)


def _list(items: Shape) -> ListField:
    return ListField(items, None)


def _one_value(value: dict[str, Any]) -> str | None:
    return None if len(value) == 1 else f"must have one value, not {len(value)}"


@lru_cache(maxsize=4096)
def _quantity(value: str) -> str | None:
    try:
        parse_quantity(value)
    except InvalidConfigError as error:
        return str(error)
    return None


_NAME = {"name": Scalar(str, lambda value: None if value else "must not be empty")}
_NAMESPACED = {**_NAME, "namespace": _TEXT}
_COUNTERS = MapField(_object({"value": _ANY}))
_DEVICE = _object(
    _NAME,
    attributes=MapField(Scalar(dict, _one_value)),
    capacity=MapField(_object({"value": Scalar(str, _quantity)})),
    taints=_list(_object({"key": _TEXT, "effect": _TEXT}, value=_TEXT)),
    consumesCounters=_list(_object({"counterSet": _TEXT, "counters": _COUNTERS})),
    nodeName=_TEXT,
    nodeSelector=_object(),
)
_SLICE = _object(
    {
        "metadata": _object(_NAME),
        "spec": _object(
            {
                "driver": _TEXT,
                "pool": _object({**_NAME, "generation": Scalar(int), "resourceSliceCount": Scalar(int)}),
            },
            nodeName=_TEXT,
            devices=_list(_DEVICE),
            sharedCounters=_list(_object({**_NAME, "counters": _COUNTERS})),
        ),
    }
)
_SELECTORS = _list(_object(cel=_object({"expression": _TEXT})))
_BODY: Mapping[str, Shape] = {
    "selectors": _SELECTORS,
    "allocationMode": _TEXT,
    "count": Scalar(int),
    "tolerations": _list(_object(key=_TEXT, operator=_TEXT, value=_TEXT, effect=_TEXT)),
    "capacity": _object(requests=MapField(_ANY)),
}
_CLASS_NAME = {"deviceClassName": _TEXT}
_OPAQUE = _object(opaque=_object())
_WAITING_CLAIM = _object(
    {
        "metadata": _object(_NAMESPACED),
        "spec": _object(
            devices=_object(
                requests=_list(
                    _object(
                        _NAME,
                        exactly=_object(None, **_BODY),
                        firstAvailable=_list(_object({**_NAME, **_CLASS_NAME}, **_BODY)),
                    )
                ),
                constraints=_list(
                    _object(requests=_list(_TEXT), matchAttribute=_TEXT, distinctAttribute=_TEXT)
                ),
                config=_list(_object(requests=_list(_TEXT), opaque=_object())),
            )
        ),
    },
    kind=_TEXT,
    status=_object(),
)
_ALLOCATED_CLAIM = _object(
    {"metadata": _object(_NAMESPACED, uid=_TEXT)},
    kind=_TEXT,
    status=_object(
        reservedFor=_list(_object(_NAME, resource=_TEXT)),
        allocation=_object(
            devices=_object(
                results=_list(
                    _object(
                        {"driver": _TEXT, "pool": _TEXT, "device": _TEXT},
                        shareID=_TEXT,
                        consumedCapacity=MapField(_ANY),
                    )
                )
            )
        ),
    ),
)
_CLASS = _object(
    {
        "metadata": _object(_NAME),
        "spec": _object(selectors=_SELECTORS, config=_list(_OPAQUE), extendedResourceName=_TEXT),
    }
)
_POD = _object(
    {"metadata": _object(_NAMESPACED, ownerReferences=_list(_object({"kind": _TEXT, **_NAME})))},
    spec=_object(
        resourceClaims=_list(_object(_NAME, resourceClaimName=_TEXT)),
        initContainers=_list(_ANY),
        containers=_list(_ANY),
    ),
    status=_object(
        resourceClaimStatuses=_list(_object(_NAME, resourceClaimName=_TEXT)),
        conditions=_list(_object(type=_TEXT, message=_TEXT)),
    ),
)


def unreadable(kind: str, entry: Any) -> str | None:
    """Why a ResourceSlice, ResourceClaim, DeviceClass or Pod in the shape of v1 cannot be read; None if it can."""
    found = faults(entry, _shape(kind, entry), "")
    if not found:
        return None
    fault = str(found[0])
    text = fault if len(fault) <= _LONGEST else f"{fault[: _LONGEST - 1]}…"
    return f"{kind} {_called(entry)} is left out, it cannot be read: {text}"


def as_object(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _shape(kind: str, entry: Any) -> Object:
    if kind == "ResourceClaim":
        # What a claim has can be read without what it asked for.
        return _ALLOCATED_CLAIM if _allocation(entry) else _WAITING_CLAIM
    return {"ResourceSlice": _SLICE, "DeviceClass": _CLASS, "Pod": _POD}[kind]


def _allocation(entry: Any) -> Any:
    return as_object(as_object(entry).get("status")).get("allocation")


def _called(entry: Any) -> str:
    metadata = as_object(as_object(entry).get("metadata"))
    names = [metadata.get("namespace"), metadata.get("name")]
    return "/".join(name for name in names if isinstance(name, str) and name) or "without a name"
