"""What an API server silently left out of a slice because a feature gate is off, and the memory of that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog

from dra_driver.core.slicediff import same_content
from dra_driver.errors import ApiRejectedError, DraDriverError, InvalidConfigError
from dra_driver.model.units import parse_quantity

_log = structlog.get_logger(__name__)

JsonObject = dict[str, Any]
DroppedFields = Callable[[JsonObject, JsonObject], Sequence[tuple[str, str]]]
DryRun = Callable[[JsonObject], JsonObject]

UNKNOWN_GATE: Final = "unknown"
PARTITIONS_GATE: Final = "DRAPartitionableDevices"

_COMPARED = (
    "devices",
    "sharedCounters",
    "perDeviceNodeSelection",
    "partitionTypeAttribute",
    "skipNodeOperations",
)
_GATES: Final[Mapping[str, str]] = {
    "taints": "DRADeviceTaints",
    "perDeviceNodeSelection": PARTITIONS_GATE,
    "sharedCounters": PARTITIONS_GATE,
    "consumesCounters": PARTITIONS_GATE,
    "nodeName": PARTITIONS_GATE,
    "nodeSelector": PARTITIONS_GATE,
    "allNodes": PARTITIONS_GATE,
    "bindsToNode": "DRADeviceBindingConditions",
    "bindingConditions": "DRADeviceBindingConditions",
    "bindingFailureConditions": "DRADeviceBindingConditions",
    "allowMultipleAllocations": "DRAConsumableCapacity",
    "requestPolicy": "DRAConsumableCapacity",
    "ints": "DRAListTypeAttributes",
    "bools": "DRAListTypeAttributes",
    "strings": "DRAListTypeAttributes",
    "versions": "DRAListTypeAttributes",
    "nodeAllocatableResources": "DRANodeAllocatableResources",
    "compatibilityGroups": "DRADeviceCompatibilityGroups",
    "partitionTypeAttribute": "DRAPartitionableDevicesType",
    "skipNodeOperations": "DRAOptionalNodeOperations",
}
_CONTENT = ("devices", "sharedCounters")
_ASK_AGAIN_S = 3600.0
_QUANTITY_PARENTS = frozenset({"capacity", "counters"})


class _Loss(NamedTuple):
    path: str
    gate: str
    missing: bool  # not stored at all, as opposed to stored with another value


def dropped_fields(sent: dict[str, Any], returned: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """(path, feature gate or "unknown") of everything in `sent` that `returned` lacks or has changed.

    Both are v1 ResourceSlices. Ignored: fields that only the server sets, so a taint's `timeAdded`, unless
    both sides name different seconds; and how a quantity is written. Empty means all was stored.
    """
    return tuple((loss.path, loss.gate) for loss in _losses(sent, returned))


def could_be_dropped(wanted: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether the two differ, and only in that `stored` lacks something: a server that drops fields explains
    that, and so does one that has never been sent them."""
    losses = _losses(wanted, stored)
    return bool(losses) and all(loss.missing for loss in losses)


def same_quantity(left: Any, right: Any) -> bool:
    """Whether two Kubernetes quantities have the same value, "1Gi" and "1024Mi" for example."""
    if left == right:
        return True
    try:
        return parse_quantity(str(left)) == parse_quantity(str(right))
    except InvalidConfigError:
        return False


class DropMemory:
    """What the API server makes of our slices: fields that it dropped are not sent again and again.

    `dry_run` answers what an update would store. With it a restart learns without a write that a slice that
    lacks fields is all that the server keeps, and a feature gate enabled later is noticed within the hour.
    For one thread.
    """

    def __init__(self, dropped: DroppedFields, dry_run: DryRun | None) -> None:
        self._dropped = dropped
        self._dry_run = dry_run
        self._accepted: dict[str, tuple[JsonObject, JsonObject]] = {}  # (spec sent, spec stored) by name
        self._asked: dict[str, float] = {}  # when the server last said what it keeps of a slice, by name

    @property
    def ask_at(self) -> float:
        """When `ask_again` has something to do (time.monotonic())."""
        if self._dry_run is None:
            return math.inf
        return min((self._asked[name] + _ASK_AGAIN_S for name in self._accepted), default=math.inf)

    def as_sent(self, existing: Iterable[JsonObject]) -> list[JsonObject]:
        """All slices, with the fields that the server dropped put back where it still has what it stored.

        Slices that are not among them are forgotten.
        """
        present = {entry["metadata"]["name"]: entry for entry in existing}
        self._accepted = {name: specs for name, specs in self._accepted.items() if name in present}
        self._asked = {name: moment for name, moment in self._asked.items() if name in present}
        return [self._completed(name, entry) for name, entry in present.items()]

    def _completed(self, name: str, entry: JsonObject) -> JsonObject:
        known = self._accepted.get(name)
        return {**entry, "spec": known[0]} if known is not None and known[1] == entry["spec"] else entry

    def stored(self, sent: JsonObject, stored: JsonObject) -> None:
        """Remember the answer to a write. What was dropped is told once."""
        name = stored["metadata"]["name"]
        self._asked[name] = time.monotonic()
        dropped = self._dropped(sent, stored)
        if not dropped:
            self._accepted.pop(name, None)
            return
        known = self._accepted.get(name)
        self._accepted[name] = (sent["spec"], stored["spec"])
        if known is None or known[1] != stored["spec"]:
            _log.warning(
                "slice_fields_dropped",
                slice=name,
                fields=sorted({f"{path} ({gate})" for path, gate in dropped}),
                remedy="enable the named feature gates in the API server, or do without these fields",
            )

    def ask_before(self, updates: Iterable[JsonObject], existing: Iterable[JsonObject]) -> bool:
        """Whether an update turned out to be in vain: the slice that is there is all the server would store.

        Only what could come from dropped fields is asked about, and each slice once, since from then on
        the answers to our own writes tell. Raises: ApiUnavailableError; ApiRejectedError 409.
        """
        present = {entry["metadata"]["name"]: entry for entry in existing}
        learnt = False
        for entry in updates:
            name = entry["metadata"]["name"]
            current = present.get(name)
            if current is None or name in self._asked or not could_be_dropped(entry, current):
                continue
            wanted = _with_content(current, entry["spec"])
            kept = self._kept(wanted)
            if kept is not None and _same_content(kept, current):
                self.stored(wanted, current)
                learnt = True
        return learnt

    def ask_again(self, existing: Iterable[JsonObject]) -> None:
        """Forget what the server dropped an hour ago if it would keep more of it now."""
        present = {entry["metadata"]["name"]: entry for entry in existing}
        now = time.monotonic()
        for name, (wanted, stored) in list(self._accepted.items()):
            current = present.get(name)
            if self._dry_run is None or current is None or now - self._asked[name] < _ASK_AGAIN_S:
                continue
            if current["spec"] != stored:
                del self._accepted[name]
                continue
            self._asked[name] = now
            try:
                kept = self._kept(_with_content(current, wanted))
            except DraDriverError as error:  # nothing is wrong with the slices
                _log.debug("dry_run_failed", slice=name, reason=str(error))
                continue
            if kept is not None and not _same_content(kept, current):
                del self._accepted[name]
                _log.info("slice_fields_kept_now", slice=name)

    def _kept(self, wanted: JsonObject) -> JsonObject | None:
        """What an update would store; None if that cannot be asked, as with some admission webhooks."""
        if self._dry_run is None:
            return None
        name = wanted["metadata"]["name"]
        kept = None
        try:
            kept = self._dry_run(wanted)
        except ApiRejectedError as error:
            if error.status == 409:
                raise
            _log.debug("dry_run_refused", slice=name, reason=str(error))
        self._asked[name] = time.monotonic()
        return kept


def _losses(sent: dict[str, Any], returned: dict[str, Any]) -> list[_Loss]:
    found: list[_Loss] = []
    sent_spec, returned_spec = sent.get("spec") or {}, returned.get("spec") or {}
    for key in _COMPARED:
        _compare(sent_spec.get(key), returned_spec.get(key), f"spec.{key}", (key,), found)
    return found


def _compare(sent: Any, got: Any, path: str, names: tuple[str, ...], found: list[_Loss]) -> None:
    """Walk what was sent; `names` are the field names on the way, without list indices."""
    if _empty(sent) and _empty(got):
        return
    if isinstance(sent, dict) and isinstance(got, dict):
        for key in sorted(sent.keys() | got.keys()):
            if not (key == "timeAdded" and _same_second(sent.get(key), got.get(key))):
                _compare(sent.get(key), got.get(key), _child(path, key), (*names, key), found)
    elif isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        for index, (left, right) in enumerate(zip(sent, got, strict=True)):
            _compare(left, right, f"{path}[{index}]", names, found)
    elif not (sent == got or (_is_quantity(names) and same_quantity(sent, got))):
        found.append(_Loss(path, _gate(names), _empty(got)))


def _child(path: str, key: str) -> str:
    """Names with dots or slashes are quoted, as the API does in its own field paths."""
    return f"{path}.{key}" if key.replace("_", "").isalnum() else f"{path}[{key}]"


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ([], {})


def _same_second(sent: Any, got: Any) -> bool:
    return sent is None or (isinstance(got, str) and str(sent)[:19] == got[:19])


def _is_quantity(names: tuple[str, ...]) -> bool:
    """`capacity.<name>.value`, `counters.<name>.value` and everything inside a requestPolicy."""
    return "requestPolicy" in names or (names[-1] == "value" and bool(_QUANTITY_PARENTS & set(names[-3:])))


def _gate(names: tuple[str, ...]) -> str:
    """The gate of the innermost field that one guards."""
    return next((_GATES[name] for name in reversed(names) if name in _GATES), UNKNOWN_GATE)


def _with_content(stored: JsonObject, spec: JsonObject) -> JsonObject:
    """The stored slice with the content of another spec, everything else as it is."""
    content = {key: spec[key] for key in _CONTENT if key in spec}
    rest = {key: value for key, value in stored["spec"].items() if key not in _CONTENT}
    return {**stored, "spec": rest | content}


def _same_content(one: JsonObject, other: JsonObject) -> bool:
    return all(same_content(one["spec"].get(key) or [], other["spec"].get(key) or []) for key in _CONTENT)
