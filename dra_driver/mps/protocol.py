"""What the plugin and the MPS host say to each other: one JSON object a line, one request a reply.

    request  {"v": 1, "verb": "ping" | "status" | "ensure" | "stop", "spec": {…}, "device": "…", "timeout_s": 10,
              "gpu_uuid": "…", "kind": "gpu" | "mig"}
    reply    {"v": 1, "statuses": [{…}]}  or  {"v": 1, "error": {"kind": "…", "text": "…"}}

Decoding is strict: a key too much, a key too few or a value of another type is an error; only the last two keys of
`stop` may be left out, and `others` of a spec, which only a daemon of several GPUs has: an older host refuses that one.
What is new needs a new version; the host is updated rarely, so a client must be able to tell that it speaks to an older
one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from dra_driver.errors import DraDriverError, NotSupportedError, PermanentError, RetryableError
from dra_driver.model.mps import MPS_STATES, MpsDaemonSpec, MpsDaemonStatus, MpsKind, MpsMember

VERSION = 1
LARGEST_MESSAGE = 256 * 1024
"""A status of the 56 MIG devices of eight GPUs is 40 KiB."""
LONGEST_TIMEOUT_S = 600.0
LATEST_TIME = 1e12

JsonObject = dict[str, Any]
Item = TypeVar("Item", int, str)
ErrorKind = Literal["retryable", "refused", "unsupported"]


@dataclass(frozen=True, slots=True)
class Ping:
    """Is anybody there?"""


@dataclass(frozen=True, slots=True)
class Status:
    """How are all daemons?"""


@dataclass(frozen=True, slots=True)
class Ensure:
    """The daemon of this spec shall run; the answer comes when it is ready."""

    spec: MpsDaemonSpec
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The daemon of this device, and everything of it, shall be gone.

    `gpu_uuid` and `kind` say what its record would, should that be lost.
    """

    device: str
    timeout_s: float
    gpu_uuid: str | None = None
    kind: MpsKind | None = None


Request = Ping | Status | Ensure | Stop


class ProtocolError(PermanentError):
    """A message that does not follow the protocol."""


def encode_request(request: Request) -> bytes:
    """The line that carries it."""
    match request:
        case Ping():
            body: JsonObject = {"verb": "ping"}
        case Status():
            body = {"verb": "status"}
        case Ensure(spec, timeout_s):
            body = {"verb": "ensure", "spec": encode_spec(spec), "timeout_s": timeout_s}
        case Stop(device, timeout_s, gpu_uuid, kind):
            optional = {"gpu_uuid": gpu_uuid, "kind": kind}
            body = {"verb": "stop", "device": device, "timeout_s": timeout_s}
            body |= {key: value for key, value in optional.items() if value is not None}
    return _line({"v": VERSION, **body})


def decode_request(line: bytes) -> Request:
    """The request in a line. Raises: ProtocolError that names the fault."""
    body = _versioned(line)
    verb = _take(body, "verb", str)
    match verb:
        case "ping":
            request: Request = Ping()
        case "status":
            request = Status()
        case "ensure":
            request = Ensure(decode_spec(_take(body, "spec", dict)), _timeout(body))
        case "stop":
            uuid = _take(body, "gpu_uuid", str) if "gpu_uuid" in body else None
            kind = _kind(body, "kind") if "kind" in body else None
            request = Stop(_take(body, "device", str), _timeout(body), uuid, kind)
        case _:
            raise ProtocolError(f"unknown verb {verb!r}; known are ping, status, ensure and stop")
    _nothing_left(body, f"the verb {verb}")
    return request


def encode_reply(statuses: tuple[MpsDaemonStatus, ...]) -> bytes:
    """The line of a good answer."""
    entries = [asdict(status) | {"spec": encode_spec(status.spec)} for status in statuses]
    return _line({"v": VERSION, "statuses": entries})


def encode_error(error: DraDriverError) -> bytes:
    """The line of a refusal or failure; only its kind and its one sentence travel."""
    kind: ErrorKind = "refused"
    if isinstance(error, RetryableError):
        kind = "retryable"
    elif isinstance(error, NotSupportedError):
        kind = "unsupported"
    return _line({"v": VERSION, "error": {"kind": kind, "text": " ".join(str(error).split())[:8192]}})


def decode_reply(line: bytes) -> tuple[MpsDaemonStatus, ...]:
    """The statuses in a reply. Raises: the error that the reply carries, or ProtocolError."""
    body = _versioned(line)
    if "error" in body:
        raise _carried_error(_take(body, "error", dict))
    statuses = tuple(decode_status(entry) for entry in _take(body, "statuses", list))
    _nothing_left(body, "a reply")
    return statuses


def encode_spec(spec: MpsDaemonSpec) -> JsonObject:
    """A spec as a JSON object."""
    entry = asdict(spec)
    if spec.others:
        entry["others"] = list(entry["others"])
    else:
        del entry["others"]
    return entry


def decode_spec(body: Any) -> MpsDaemonSpec:
    """Raises: ProtocolError."""
    body = dict(_object(body, "spec"))
    kind = _kind(body, "spec.kind")
    spec = MpsDaemonSpec(
        device=_take(body, "device", str),
        uuid=_take(body, "uuid", str),
        kind=kind,
        gpu_uuid=_take(body, "gpu_uuid", str),
        multi_user=_take(body, "multi_user", bool),
        default_active_thread_percentage=_take(body, "default_active_thread_percentage", int, None),
        default_memory_limit_mib=_take(body, "default_memory_limit_mib", int, None),
        others=tuple(map(_decode_member, _take(body, "others", list) if "others" in body else [])),
    )
    _nothing_left(body, "a spec")
    return spec


def _decode_member(body: Any) -> MpsMember:
    body = dict(_object(body, "a member of others"))
    member = MpsMember(
        _take(body, "device", str),
        _take(body, "gpu_uuid", str),
        _take(body, "default_memory_limit_mib", int, None),
    )
    _nothing_left(body, "a member of others")
    return member


def decode_status(body: Any) -> MpsDaemonStatus:
    """Raises: ProtocolError."""
    body = dict(_object(body, "status"))
    state = _take(body, "state", str)
    if state not in MPS_STATES:
        raise ProtocolError(f"status.state is {state!r}; it must be one of {', '.join(MPS_STATES)}")
    status = MpsDaemonStatus(
        device=_take(body, "device", str),
        state=state,
        spec=decode_spec(_take(body, "spec", dict)),
        pid=_take(body, "pid", int, None),
        since=_since(body),
        clients=_take(body, "clients", int, None),
        problem=_take(body, "problem", str, None),
        users=_items(body, "users", int),
        not_exclusive=_items(body, "not_exclusive", str),
    )
    _nothing_left(body, "a status")
    return status


def _line(body: JsonObject) -> bytes:
    line = json.dumps(body, separators=(",", ":")).encode()
    if len(line) >= LARGEST_MESSAGE:
        raise ProtocolError(f"a message of {len(line)} bytes is larger than {LARGEST_MESSAGE}")
    return line + b"\n"


def _versioned(line: bytes) -> JsonObject:
    try:
        body = _object(json.loads(line, parse_constant=_no_constant), "the message")
    except (ValueError, RecursionError) as error:
        raise ProtocolError("the message is not a JSON object on one line") from error
    version = body.pop("v", None)
    if version != VERSION or isinstance(version, bool):
        raise ProtocolError(
            f"the message has version {version!r}, this side speaks {VERSION}: "
            "update the DaemonSets of the driver and of mps-host to the same version"
        )
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _object(value: Any, what: str) -> JsonObject:
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} must be a JSON object")
    return value


def _take(body: JsonObject, key: str, *types: Any) -> Any:
    """Remove a value of one of the types; None stands for a null. A bool is no number here."""
    if key not in body:
        raise ProtocolError(f"{key} is missing")
    value = body.pop(key)
    if value is None and None in types:
        return None
    allowed = tuple(kind for kind in types if kind is not None)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if kind is None else kind.__name__ for kind in types)
        raise ProtocolError(f"{key} must be {names}, not {type(value).__name__}")
    return value


def _items(body: JsonObject, key: str, kind: type[Item]) -> tuple[Item, ...]:
    items = _take(body, key, list)
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise ProtocolError(f"{key} must be a list of {kind.__name__}")
    return tuple(items)


def _nothing_left(body: JsonObject, what: str) -> None:
    if body:
        raise ProtocolError(f"{what} has no {', '.join(sorted(map(repr, body)))}")


def _kind(body: JsonObject, what: str) -> MpsKind:
    kind = _take(body, "kind", str)
    if kind == "gpu":
        return "gpu"
    if kind == "mig":
        return "mig"
    raise ProtocolError(f"{what} is {kind!r}; it must be gpu or mig")


def _timeout(body: JsonObject) -> float:
    value = _take(body, "timeout_s", float, int)
    if not 0 < value <= LONGEST_TIMEOUT_S:
        raise ProtocolError(f"timeout_s must be above 0 and at most {LONGEST_TIMEOUT_S:g}")
    return float(value)


def _since(body: JsonObject) -> float:
    value = _take(body, "since", float, int)
    if not 0 <= value < LATEST_TIME:
        raise ProtocolError("status.since must be seconds since the epoch")
    return float(value)


def _carried_error(body: JsonObject) -> DraDriverError:
    kind, text = _take(body, "kind", str), _take(body, "text", str)
    if kind == "retryable":
        return RetryableError(text)
    return NotSupportedError(text) if kind == "unsupported" else PermanentError(text)
