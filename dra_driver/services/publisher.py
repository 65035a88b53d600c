"""The only writer of ResourceSlices: level-triggered, one thread, no write when nothing differs.

What has to wait (our turn, a refused deletion, the next answer to somebody who fights over the slices) waits
for itself alone: the thread sleeps until the earliest of them is due, and any change wakes it before that.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from dra_driver.core.slicediff import Owner, SliceChanges, slice_changes
from dra_driver.core.slices import Pool, Taints, build_pool, untainted
from dra_driver.errors import ApiUnavailableError, DraDriverError
from dra_driver.kube.dropped import DropMemory, DroppedFields, DryRun
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import NO_SHARING, SharingPolicy

_log = structlog.get_logger(__name__)
_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security

JsonObject = dict[str, Any]

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 30.0
_QUIET_AFTER_WRITE_S = 0.05
_PROMPT_ANSWERS = 10  # to others who change our slices; a kubelet that starts anew is one
_CALM_S = 60.0
_TURN_AGAIN_S = 2.0

_NOT_YET = "slices have not been published yet"
_STANDING_BY = "standing by for another instance on this node, which publishes the slices"
_CONTESTED = "somebody else keeps changing the slices of this node; look for a second publisher of them"


class Slices(Protocol):
    """The node's slices as the API server has them, own writes included; objects in v1 shape."""

    @property
    def synced(self) -> threading.Event:
        """Set once the first list has arrived."""

    def snapshot(self) -> Sequence[JsonObject]:
        """All slices of this driver on this node."""

    def create(self, obj: JsonObject) -> JsonObject:
        """Create and answer what was stored; the name comes from `generateName`."""

    def update(self, obj: JsonObject) -> JsonObject:
        """Replace and answer what was stored. Raises: ApiRejectedError 409 for a stale resourceVersion."""

    def delete(self, name: str, uid: str, resource_version: str | None = None) -> None:
        """Delete exactly this object; one that is gone already is fine."""


class PublishObserver(Protocol):
    """Hears how publishing goes, from the publisher's thread. Must not block or raise."""

    def published(self, lag_s: float) -> None:
        """Slices were written, `lag_s` after the change that called for it."""

    def publish_failed(self, error: Exception) -> None:
        """Slices could not be brought up to date; it is tried again."""

    def contested(self, reason: str) -> None:
        """Somebody else changes our slices again and again."""

    def refused(self, fault: str) -> None:
        """A device is left out, because the API server would refuse it."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A deletion that failed, and when it is tried again."""

    reason: str
    delay_s: float
    due: float


class _Pace:
    """How soon a write may follow the one before.

    A pool that did not change but has to be written again is an answer to somebody. The first answers go out
    at once, each later one waits twice as long as the one before, until a minute went by in which nobody
    touched the slices. What changed on our side never waits for that.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._answers = 0
        self._wrote = -math.inf
        self._needed: float | None = None

    @property
    def contested(self) -> bool:
        """Whether answers are held back."""
        return self._answers >= _PROMPT_ANSWERS

    def lately(self, now: float) -> bool:
        """Whether the last write is so fresh that more may be under way."""
        return now - self._wrote < _CALM_S

    def not_needed(self) -> None:
        """The slices are as they should be."""
        self._needed = None

    def wait_s(self, pool: Pool, now: float) -> float:
        """How long the write that is needed now still has to wait."""
        if self._needed is None:
            self._needed = now
            if not self.lately(now):
                self._answers = 0
        if pool != self._pool or not self.contested:
            return 0.0
        delay = min(2.0 ** min(self._answers - _PROMPT_ANSWERS, 10), _BACKOFF_MOST_S)
        return max(0.0, self._needed + delay - now)

    def wrote(self, pool: Pool, now: float) -> None:
        """The pool was written."""
        if pool == self._pool:
            self._answers += 1
        self._pool, self._wrote, self._needed = pool, now, None


class Publisher:
    """Brings the node's slices in line with the inventory, again and again.

    Discovery, the watch and later health and MIG only call `mark_dirty`. `dropped` compares what was
    sent with what was stored and names fields (path, feature gate) that the API server did not keep; they
    are said once and not sent in vain again. `dry_run` answers what an update would store: so a restart
    learns what the server drops without a write, and a gate enabled later is noticed within the hour.
    While `may_publish` says no, nothing is written. `usable` reduces the inventory to what the server can take, and has
    to be asked again at the moment `usable_until`; `taints` answers how devices are tainted at the moment.
    """

    def __init__(
        self,
        inventory: Callable[[], Inventory | None],
        slices: Slices,
        owner: Callable[[], Owner],
        dropped: DroppedFields,
        sharing: SharingPolicy = NO_SHARING,
        *,
        may_publish: Callable[[], bool] = lambda: True,
        dry_run: DryRun | None = None,
        usable: Callable[[Inventory], Inventory] = lambda inventory: inventory,
        usable_until: Callable[[], float] = lambda: math.inf,
        taints: Callable[[], Taints] = lambda: untainted,
        observer: PublishObserver | None = None,
    ) -> None:
        self._inventory = inventory
        self._slices = slices
        self._owner_source = owner
        self._owner: Owner | None = None
        self._memory = DropMemory(dropped, dry_run)
        self._sharing = sharing
        self._may_publish = may_publish
        self._usable = usable
        self._usable_until = usable_until
        self._taints = taints
        self._observer = observer
        self._dirty = threading.Event()
        self._marked_at: float | None = None
        self._behind_since: float | None = None  # the publisher's thread's own
        self._stopping = threading.Event()
        self._published = threading.Event()
        self._problem: str | None = _NOT_YET
        self._standing_by = False
        self._told_faults: tuple[str, ...] = ()
        self._refused: dict[str, _Refusal] = {}  # by UID
        self._pace = _Pace()
        self._look_at = math.inf
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why the published slices are not what they should be; None when they are, or are not our concern."""
        return self._problem

    @property
    def standing_by(self) -> str | None:
        """Why this instance publishes nothing though nothing is wrong; None while it publishes."""
        return _STANDING_BY if self._standing_by else None

    def start(self) -> None:
        """Begin publishing in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; the slices stay, so that a quick restart writes nothing."""
        self._stopping.set()
        self._dirty.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def mark_dirty(self) -> None:
        """Something changed: devices, or slices in the API server."""
        if self._marked_at is None:
            self._marked_at = time.monotonic()
        self._dirty.set()

    def wait_published(self, timeout_s: float) -> bool:
        """Whether a complete pool has been published since the start."""
        return self._published.wait(timeout_s)

    def _run(self) -> None:
        backoff = _BACKOFF_FIRST_S
        while not self._stopping.is_set():
            sleep_s = self._look_at - time.monotonic()
            self._dirty.wait(None if math.isinf(sleep_s) else max(0.0, sleep_s))
            self._dirty.clear()
            if self._stopping.is_set():
                return
            marked_at, self._marked_at = self._marked_at, None
            if self._behind_since is None:
                self._behind_since = marked_at
            try:
                self._publish_once()
            except DraDriverError as error:
                self._pause_after(error, backoff)
                backoff = min(backoff * 2, _BACKOFF_MOST_S)
            except Exception as error:  # noqa: BLE001  a dead thread would leave the node unpublished
                _log.exception("publish_failed")
                self._tell_failed(error)
                self._problem = "publishing failed unexpectedly; see the log"
                self._pause(backoff)
                backoff = min(backoff * 2, _BACKOFF_MOST_S)
            else:
                backoff = _BACKOFF_FIRST_S

    def _pause_after(self, error: DraDriverError, backoff: float) -> None:
        self._problem = str(error)
        self._tell_failed(error)
        asked = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
        # Also what the server asks for is spread, or all nodes that it asked would be back at once.
        delay = max(backoff * _jitter.uniform(0.8, 1.2), (asked or 0.0) * _jitter.uniform(1.0, 1.2))
        _log.warning("publish_retried", reason=str(error), retry_in_s=round(delay, 2))
        self._pause(delay)

    def _pause(self, delay_s: float) -> None:
        self._stopping.wait(delay_s)
        self._dirty.set()

    def _look_again(self, moment: float) -> None:
        self._look_at = min(self._look_at, moment)

    def _publish_once(self) -> None:
        self._look_at = math.inf
        inventory = self._inventory()
        if not self._is_our_turn() or inventory is None or not self._slices.synced.is_set():
            return
        known = self._owner
        owner = known or self._owner_source()
        pool = build_pool(self._usable(inventory), owner.node_name, self._sharing, self._taints())
        self._tell_faults(pool)
        self._memory.ask_again(self._slices.snapshot())
        changes = self._changes(pool, owner)
        if changes and self._pace.lately(time.monotonic()):
            self._stopping.wait(_QUIET_AFTER_WRITE_S)
            changes = self._changes(pool, owner)
        if self._memory.ask_before(changes.updates, self._slices.snapshot()):
            changes = self._changes(pool, owner)
        if changes.creates and known is not None:
            # Slices vanish with the Node object that owns them, and its successor has another UID.
            owner = self._owner_source()
            changes = self._changes(pool, owner)
        self._owner = owner
        if not changes:
            self._pace.not_needed()
        elif self._is_held_back(pool) or not self._is_our_turn():
            return
        else:
            self._write(changes, pool, owner)
        if not self._standing_by:
            self._settle()

    def _is_our_turn(self) -> bool:
        ours = self._may_publish()
        if ours == self._standing_by:
            _log.info("publishing_resumed" if ours else "publishing_stands_by")
            self._problem = None if self._published.is_set() or not ours else _NOT_YET
        self._standing_by = not ours
        if not ours:
            self._behind_since = None
            self._look_again(time.monotonic() + _TURN_AGAIN_S)
        return ours

    def _is_held_back(self, pool: Pool) -> bool:
        """Write promptly, but not in a circle: who fights over our slices slows us down, not the API server."""
        now = time.monotonic()
        wait_s = self._pace.wait_s(pool, now)
        if wait_s <= 0:
            return False
        if self._problem != _CONTESTED:
            _log.warning("slices_contested", reason=_CONTESTED, next_write_in_s=round(wait_s, 2))
            if self._observer is not None:
                self._observer.contested(_CONTESTED)
        self._problem = _CONTESTED
        self._look_again(now + wait_s)
        return True

    def _settle(self) -> None:
        """All that is wanted is published; what may be left is a slice that does not go away."""
        left = next(iter(self._refused.values()), None)
        self._problem = f"a slice that is obsolete is still there: {left.reason}" if left else None
        for refusal in self._refused.values():
            self._look_again(refusal.due)
        self._look_again(self._memory.ask_at)
        self._look_again(self._usable_until())
        self._behind_since = None
        self._published.set()

    def _changes(self, pool: Pool, owner: Owner) -> SliceChanges:
        """What is to be written now; deletions that were refused come back when they are due."""
        existing = self._slices.snapshot()
        changes = slice_changes(pool, self._memory.as_sent(existing), owner, self._refused)
        obsolete = {entry["metadata"]["uid"]: entry for entry in changes.deletes}
        self._refused = {uid: refusal for uid, refusal in self._refused.items() if uid in obsolete}
        now = time.monotonic()
        due = (
            entry
            for uid, entry in obsolete.items()
            if uid not in self._refused or self._refused[uid].due <= now
        )
        return replace(changes, deletes=tuple(due))

    def _write(self, changes: SliceChanges, pool: Pool, owner: Owner) -> None:
        """Deletes come first, so that devices that are gone disappear even if what is new is refused."""
        started = time.monotonic()
        deleted = self._delete(changes.deletes)
        if deleted < len(changes.deletes):
            changes = self._changes(pool, owner)
        for entry in changes.updates:
            self._memory.stored(entry, self._slices.update(entry))
        for entry in changes.creates:
            if not self._is_our_turn():
                return
            self._memory.stored(entry, self._slices.create(entry))
        written = (*changes.updates, *changes.creates)
        if not written and not deleted:
            return
        now = time.monotonic()
        self._pace.wrote(pool, now)
        if self._observer is not None and self._behind_since is not None:
            self._observer.published(now - self._behind_since)
        _log.info(
            "pool_published",
            created=len(changes.creates),
            updated=len(changes.updates),
            deleted=deleted,
            generation=max((entry["spec"]["pool"]["generation"] for entry in written), default=0),
            duration_s=round(now - started, 4),
        )

    def _delete(self, obsolete: Iterable[JsonObject]) -> int:
        """How many are gone. One that stays is told once and tried again, and keeps nothing else from being
        written: an admission webhook may guard a slice that is none of ours."""
        deleted = 0
        for entry in obsolete:
            metadata = entry["metadata"]
            name, uid = metadata["name"], metadata["uid"]
            try:
                self._slices.delete(name, uid, metadata["resourceVersion"])
            except DraDriverError as error:
                self._tell_failed(error)
                known = self._refused.get(uid)
                delay = min(known.delay_s * 2, _BACKOFF_MOST_S) if known else _BACKOFF_FIRST_S
                asked = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
                due = time.monotonic() + max(delay, asked or 0.0)
                self._refused[uid] = _Refusal(str(error), delay, due)
                if known is None:
                    _log.warning("slice_not_deleted", slice=name, reason=str(error))
            else:
                deleted += 1
                self._refused.pop(uid, None)
                _log.info("slice_deleted", slice=name)
        return deleted

    def _tell_failed(self, error: Exception) -> None:
        if self._observer is not None:
            self._observer.publish_failed(error)

    def _tell_faults(self, pool: Pool) -> None:
        if pool.faults != self._told_faults:
            for fault in pool.faults:
                _log.error("device_not_publishable", reason=fault)
                if self._observer is not None:
                    self._observer.refused(fault)
        self._told_faults = pool.faults
