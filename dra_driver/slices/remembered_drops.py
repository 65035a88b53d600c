"""What the API server makes of our slices, remembered: fields that it dropped are not sent again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import structlog

from dra_driver.errors import ApiRejectedError, DraDriverError
from dra_driver.slices.rules.diff import same_content
from dra_driver.slices.rules.dropped_fields import could_be_dropped, dropped_fields

_log = structlog.get_logger(__name__)

JsonObject = dict[str, Any]
DryRun = Callable[[JsonObject], JsonObject]

_CONTENT = ("devices", "sharedCounters")
_ASK_AGAIN_S = 3600.0


class RememberedDrops:
    """What the API server makes of our slices: fields that it dropped are not sent again and again.

    `dry_run` answers what an update would store. So a restart learns without a write that a slice that lacks fields is
    all that the server keeps, and a feature gate that is enabled later is noticed within the hour. `lost` gets the
    feature gates of the fields that a server dropped, each time that it did. For one thread.
    """

    def __init__(self, dry_run: DryRun, lost: Callable[[AbstractSet[str]], None]) -> None:
        self._dry_run = dry_run
        self._lost = lost
        self._accepted: dict[str, tuple[JsonObject, JsonObject]] = {}  # (spec sent, spec stored) by name
        self._asked: dict[str, float] = {}  # when the server last said what it keeps of a slice, by name

    @property
    def ask_at(self) -> float:
        """When `ask_again` has something to do (time.monotonic())."""
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
        """Remember the answer to a write. What was dropped is logged once."""
        name = stored["metadata"]["name"]
        self._asked[name] = time.monotonic()
        dropped = dropped_fields(sent, stored)
        if not dropped:
            self._accepted.pop(name, None)
            return
        self._lost({gate for _, gate in dropped})
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
        """Whether one of the updates would change nothing: the slice that is there is all that the server would store.

        Only differences that dropped fields could explain are asked about, and each slice once: from then on the
        answers to our own writes tell. Raises: ApiUnavailableError; ApiRejectedError 409.
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
            if current is None or now - self._asked[name] < _ASK_AGAIN_S:
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


def _with_content(stored: JsonObject, spec: JsonObject) -> JsonObject:
    """The stored slice with the content of another spec, everything else as it is."""
    content = {key: spec[key] for key in _CONTENT if key in spec}
    rest = {key: value for key, value in stored["spec"].items() if key not in _CONTENT}
    return {**stored, "spec": rest | content}


def _same_content(one: JsonObject, other: JsonObject) -> bool:
    return all(same_content(one["spec"].get(key) or [], other["spec"].get(key) or []) for key in _CONTENT)
