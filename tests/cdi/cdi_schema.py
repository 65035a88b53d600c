"""What container runtimes take: the published CDI format as a JSON schema, and what a schema cannot say. They decode
strictly: one fault makes the whole file unusable, and the pod fails long after its claim was prepared."""

from typing import Any

import jsonschema


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT = {"type": "string"}
_PATH = {"type": "string", "minLength": 1}
_UINT32 = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
_INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_ENV = _array({"type": "string", "pattern": "^[^=]+="})

_NODE = _object(
    ("path",),
    path=_PATH,
    hostPath=_TEXT,
    type={"enum": ["", "b", "c", "u", "p"]},
    major=_INT64,
    minor=_INT64,
    fileMode=_UINT32,
    permissions={"type": "string", "pattern": "^([rwm]*|none)$"},
    uid=_UINT32,
    gid=_UINT32,
)
_MOUNT = _object(
    ("hostPath", "containerPath"), hostPath=_PATH, containerPath=_PATH, type=_TEXT, options=_array(_TEXT)
)
_HOOK = _object(
    ("hookName", "path"),
    hookName={
        "enum": ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"]
    },
    path={"type": "string", "pattern": "^/"},
    args=_array(_TEXT),
    env=_ENV,
    timeout={**_INT64, "minimum": 1},
)
_RDT = _object(
    closID=_TEXT,
    l3CacheSchema=_TEXT,
    memBwSchema=_TEXT,
    schemata=_array(_TEXT),
    enableCMT={"type": "boolean"},
    enableMBM={"type": "boolean"},
    enableMonitoring={"type": "boolean"},
)
_EDITS = _object(
    env=_ENV,
    deviceNodes=_array(_NODE),
    mounts=_array(_MOUNT),
    hooks=_array(_HOOK),
    additionalGids=_array(_UINT32),
    intelRdt=_RDT,
    netDevices=_array(_object(("hostInterfaceName", "name"), hostInterfaceName=_PATH, name=_PATH)),
)
_ANNOTATIONS = {"type": "object", "additionalProperties": _TEXT}

SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    **_object(
        ("cdiVersion", "kind", "devices"),
        cdiVersion={
            "enum": ["0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"]
        },
        kind={
            "type": "string",
            "pattern": "^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?$",
        },
        annotations=_ANNOTATIONS,
        containerEdits=_EDITS,
        devices={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ("name", "containerEdits"),
                name={"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$"},
                annotations=_ANNOTATIONS,
                containerEdits={**_EDITS, "minProperties": 1},
            ),
        },
    ),
}

VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
_VERSIONS = tuple(SCHEMA["properties"]["cdiVersion"]["enum"])
_FIRST_WITH = {"additionalGids": "0.7.0", "intelRdt": "0.7.0", "netDevices": "1.1.0"}
"""The first version that has a field of container edits; the others have been there from the start."""


def faults(spec: Any) -> list[str]:
    """Everything that a runtime refuses."""
    found = [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(spec)]
    if found:
        return found
    names = [device["name"] for device in spec["devices"]]
    found += [f"device {name} occurs twice" for name in names if names.count(name) > 1]
    found += [f"device {name} has no edits" for name in names if not any(_edits_of(spec, name).values())]
    lowest = max(_needed(spec), key=_VERSIONS.index)
    if _VERSIONS.index(spec["cdiVersion"]) < _VERSIONS.index(lowest):
        found.append(f"cdiVersion {spec['cdiVersion']} is below {lowest}")
    return found


def _edits_of(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return next(device["containerEdits"] for device in spec["devices"] if device["name"] == name)


def _needed(spec: dict[str, Any]) -> list[str]:
    """A version for each thing that is in the spec."""
    edits = [spec.get("containerEdits", {}), *(device["containerEdits"] for device in spec["devices"])]
    return [
        "0.3.0",
        *(_FIRST_WITH.get(field, "0.3.0") for edit in edits for field in edit),
        *("0.5.0" for edit in edits for node in edit.get("deviceNodes", ()) if "hostPath" in node),
        *("0.4.0" for edit in edits for mount in edit.get("mounts", ()) if "type" in mount),
        *("0.5.0" for device in spec["devices"] if device["name"][0].isdecimal()),
        *("0.6.0" for part in (spec, *spec["devices"]) if part.get("annotations")),
        *(["0.6.0"] if "." in spec["kind"].partition("/")[2] else []),
    ]
