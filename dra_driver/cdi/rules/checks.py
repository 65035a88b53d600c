"""The rules that runtimes apply when they load a CDI spec. A spec of ours that follows them is never refused.

Runtimes decode strictly: an unknown field, a wrong type or a version that is too low for the fields makes the whole
file unusable, and the pod fails long after its claim was prepared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")

Faults = Iterator[str]

_LABEL = re.compile(r"^[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?\Z")
_DEVICE = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?\Z")
_PERMISSIONS = re.compile(r"^(?:[rwm]*|none)\Z")
_ANNOTATION = re.compile(r"^(?:[a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")
_LONGEST_VENDOR = 253
_LONGEST_CLASS = 63
_MOST_ANNOTATION_BYTES = 256 * 1024
_HOOK_NAMES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_NODE_TYPES = ("", "b", "c", "u", "p")
_RDT_1_1 = frozenset({"schemata", "enableMonitoring"})
_UINT32 = 2**32
_INT64 = 2**63


def faults(spec: Any) -> list[str]:
    """Everything that a runtime would refuse, each with the path of the field; empty if the spec is valid."""
    if not isinstance(spec, dict):
        return ["spec: must be an object"]
    found = [
        *_fields("spec", spec, _SPEC_FIELDS),
        *_kind(spec.get("kind")),
        *_spec_devices(spec.get("devices")),
    ]
    if "containerEdits" in spec:
        found.extend(_edits("containerEdits", spec["containerEdits"]))
    found.extend(_annotations("annotations", spec.get("annotations", {})))
    version = spec.get("cdiVersion")
    if version not in VERSIONS:
        found.append(f"cdiVersion: {version!r} is not a released version")
    elif not found and VERSIONS.index(version) < VERSIONS.index(minimum_version(spec)):
        found.append(f"cdiVersion: {version} is below {minimum_version(spec)}, which the fields need")
    return found


def minimum_version(spec: Mapping[str, Any]) -> str:
    """The lowest version with all fields that the spec uses; older runtimes refuse higher ones."""
    devices = spec.get("devices", ())
    edits = [spec.get("containerEdits", {}), *(device.get("containerEdits", {}) for device in devices)]
    rdts = [edit["intelRdt"] for edit in edits if "intelRdt" in edit]
    if any("netDevices" in edit for edit in edits) or any(not _RDT_1_1.isdisjoint(rdt) for rdt in rdts):
        return "1.1.0"
    if rdts or any("additionalGids" in edit for edit in edits):
        return "0.7.0"
    if spec.get("annotations") or any(device.get("annotations") for device in devices):
        return "0.6.0"
    if "." in spec.get("kind", "").partition("/")[2]:
        return "0.6.0"
    if any("hostPath" in node for edit in edits for node in edit.get("deviceNodes", ())):
        return "0.5.0"
    if any(device.get("name", "")[:1].isdecimal() for device in devices):
        return "0.5.0"
    if any("type" in mount for edit in edits for mount in edit.get("mounts", ())):
        return "0.4.0"
    return "0.3.0"


def _kind(kind: Any) -> Faults:
    if not isinstance(kind, str) or kind.count("/") != 1:
        yield f"kind: {kind!r} does not have the form vendor/class"
        return
    vendor, _, cls = kind.partition("/")
    if _LABEL.match(vendor) is None or len(vendor) > _LONGEST_VENDOR:
        yield f"kind: vendor {vendor!r} is not a valid name"
    if _LABEL.match(cls) is None or len(cls) > _LONGEST_CLASS:
        yield f"kind: class {cls!r} is not a valid name"


def _spec_devices(devices: Any) -> Faults:
    if not isinstance(devices, list) or not devices:
        yield "devices: at least one device is needed"
        return
    seen = set()
    for index, device in enumerate(devices):
        path = f"devices[{index}]"
        if not isinstance(device, dict):
            yield f"{path}: must be an object"
            continue
        yield from _fields(path, device, _DEVICE_FIELDS)
        name = device.get("name")
        if not isinstance(name, str) or _DEVICE.match(name) is None:
            yield f"{path}.name: {name!r} is not a valid name"
        elif name in seen:
            yield f"{path}.name: {name!r} occurs twice"
        else:
            seen.add(name)
        yield from _annotations(f"{path}.annotations", device.get("annotations", {}))
        edits = device.get("containerEdits")
        if not isinstance(edits, dict) or not any(edits.values()):
            yield f"{path}.containerEdits: must not be empty"
        else:
            yield from _edits(f"{path}.containerEdits", edits)


def _edits(path: str, edits: Any) -> Faults:
    if not isinstance(edits, dict):
        yield f"{path}: must be an object"
        return
    yield from _fields(path, edits, _EDIT_FIELDS)
    yield from _env(f"{path}.env", edits.get("env", []))
    for field, check in _LISTS.items():
        entries = edits.get(field, [])
        if not isinstance(entries, list):
            yield f"{path}.{field}: must be a list"
            continue
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                yield from check(f"{path}.{field}[{index}]", entry)
            else:
                yield f"{path}.{field}[{index}]: must be an object"
    yield from _gids(f"{path}.additionalGids", edits.get("additionalGids", []))
    if "intelRdt" in edits:
        yield from _rdt(f"{path}.intelRdt", edits["intelRdt"])
    if edits.get("netDevices"):
        yield from _net_names(f"{path}.netDevices", edits["netDevices"])


def _env(path: str, env: Any) -> Faults:
    if not isinstance(env, list):
        yield f"{path}: must be a list"
        return
    for index, entry in enumerate(env):
        if not isinstance(entry, str) or entry.find("=") < 1:
            yield f"{path}[{index}]: {entry!r} does not have the form NAME=value"


def _node(path: str, node: dict[str, Any]) -> Faults:
    yield from _fields(path, node, _NODE_FIELDS)
    if not node.get("path"):
        yield f"{path}.path: is missing"
    if node.get("type", "") not in _NODE_TYPES:
        yield f"{path}.type: {node['type']!r} is not one of b, c, u, p"
    permissions = node.get("permissions", "")
    if isinstance(permissions, str) and _PERMISSIONS.match(permissions) is None:
        yield f"{path}.permissions: {permissions!r} has letters other than r, w, m"


def _mount(path: str, mount: dict[str, Any]) -> Faults:
    yield from _fields(path, mount, _MOUNT_FIELDS)
    for field in ("hostPath", "containerPath"):
        if not mount.get(field):
            yield f"{path}.{field}: is missing"


def _hook(path: str, hook: dict[str, Any]) -> Faults:
    yield from _fields(path, hook, _HOOK_FIELDS)
    if hook.get("hookName") not in _HOOK_NAMES:
        yield f"{path}.hookName: {hook.get('hookName')!r} is not the name of a hook"
    program = hook.get("path")
    if not isinstance(program, str) or not program.startswith("/"):
        yield f"{path}.path: {program!r} is not an absolute path"
    yield from _env(f"{path}.env", hook.get("env", []))
    timeout = hook.get("timeout", 1)
    if isinstance(timeout, int) and timeout <= 0:
        yield f"{path}.timeout: must be positive"


def _net_device(path: str, device: dict[str, Any]) -> Faults:
    yield from _fields(path, device, _NET_FIELDS)
    for field in _NET_FIELDS:
        if not device.get(field):
            yield f"{path}.{field}: is missing"


def _net_names(path: str, devices: Any) -> Faults:
    if not isinstance(devices, list):
        return
    for field in _NET_FIELDS:
        names = [device.get(field) for device in devices if isinstance(device, dict)]
        if len(set(map(repr, names))) < len(names):
            yield f"{path}: two entries have the same {field}"


def _rdt(path: str, rdt: Any) -> Faults:
    if not isinstance(rdt, dict):
        yield f"{path}: must be an object"
        return
    yield from _fields(path, rdt, _RDT_FIELDS)
    clos_id = rdt.get("closID", "")
    if isinstance(clos_id, str) and (clos_id in {".", ".."} or "/" in clos_id or "\n" in clos_id):
        yield f"{path}.closID: {clos_id!r} is not a valid name"


def _gids(path: str, gids: Any) -> Faults:
    if not isinstance(gids, list) or not all(_is_uint32(gid) for gid in gids):
        yield f"{path}: must be a list of group numbers"


def _annotations(path: str, annotations: Any) -> Faults:
    if not isinstance(annotations, dict):
        yield f"{path}: must be an object"
        return
    size = 0
    for key, value in annotations.items():
        if not isinstance(key, str) or not isinstance(value, str):
            yield f"{path}[{key!r}]: key and value must be strings"
            continue
        size += len(key.encode()) + len(value.encode())
        if _ANNOTATION.match(key.lower()) is None:
            yield f"{path}[{key!r}]: is not a valid annotation name"
    if size > _MOST_ANNOTATION_BYTES:
        yield f"{path}: {size} bytes are more than {_MOST_ANNOTATION_BYTES}"


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_uint32(value: Any) -> bool:
    return type(value) is int and 0 <= value < _UINT32


def _is_int64(value: Any) -> bool:
    return type(value) is int and -_INT64 <= value < _INT64


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_anything(_value: Any) -> bool:
    """For fields that another function checks."""
    return True


_Fields = Mapping[str, Callable[[Any], bool]]

_SPEC_FIELDS: _Fields = dict.fromkeys(
    ("cdiVersion", "kind", "annotations", "devices", "containerEdits"), _is_anything
)
_DEVICE_FIELDS: _Fields = dict.fromkeys(("name", "annotations", "containerEdits"), _is_anything)
_EDIT_FIELDS: _Fields = dict.fromkeys(
    ("env", "deviceNodes", "hooks", "mounts", "intelRdt", "additionalGids", "netDevices"), _is_anything
)
_NODE_FIELDS: _Fields = {
    **dict.fromkeys(("path", "hostPath", "type", "permissions"), _is_str),
    **dict.fromkeys(("major", "minor"), _is_int64),
    **dict.fromkeys(("fileMode", "uid", "gid"), _is_uint32),
}
_MOUNT_FIELDS: _Fields = {
    **dict.fromkeys(("hostPath", "containerPath", "type"), _is_str),
    "options": _is_strings,
}
_HOOK_FIELDS: _Fields = {
    **dict.fromkeys(("hookName", "path"), _is_str),
    **dict.fromkeys(("args", "env"), _is_strings),
    "timeout": _is_int64,
}
_NET_FIELDS: _Fields = dict.fromkeys(("hostInterfaceName", "name"), _is_str)
_RDT_FIELDS: _Fields = {
    **dict.fromkeys(("closID", "l3CacheSchema", "memBwSchema"), _is_str),
    **dict.fromkeys(("enableCMT", "enableMBM", "enableMonitoring"), _is_bool),
    "schemata": _is_strings,
}
_LISTS: Mapping[str, Callable[[str, dict[str, Any]], Faults]] = {
    "deviceNodes": _node,
    "mounts": _mount,
    "hooks": _hook,
    "netDevices": _net_device,
}


def _fields(path: str, entry: dict[str, Any], fields: _Fields) -> Faults:
    """Unknown fields and wrong types. `null` is a fault too, because the decoder would treat the field as absent."""
    for key, value in entry.items():
        check = fields.get(key)
        if check is None:
            yield f"{path}.{key}: unknown field"
        elif not check(value):
            yield f"{path}.{key}: {value!r} has the wrong type"
