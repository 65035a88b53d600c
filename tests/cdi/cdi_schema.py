"""What container runtimes accept: the published CDI format as a JSON schema, and rules that a schema cannot
express. Runtimes decode strictly: one fault makes the whole file unusable, and the pod fails long after its
claim was prepared.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("cdi-schema.json").read_text())
_VERSIONS = tuple(SCHEMA["properties"]["cdiVersion"]["enum"])
_FIRST_WITH = {"additionalGids": "0.7.0", "intelRdt": "0.7.0", "netDevices": "1.1.0"}
"""The first version that has a field of container edits; the others have been there from the start."""


@cache
def _validator() -> Any:
    import jsonschema  # takes a second, and every worker imports this module

    return jsonschema.Draft7Validator(SCHEMA)


def faults(spec: Any) -> list[str]:
    """Everything that a runtime refuses."""
    found = [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(spec)]
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
