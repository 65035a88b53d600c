"""The only writer of ResourceSlices: level-triggered, one thread, no write when nothing differs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from dra_driver.core.slicediff import Owner, SliceChanges, slice_changes
from dra_driver.core.slices import Pool, build_pool
from dra_driver.errors import ApiUnavailableError, DraDriverError
from dra_driver.model.inventory import Inventory

_log = structlog.get_logger(__name__)

JsonObject = dict[str, Any]

_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 30.0
_QUIET_AFTER_WRITE_S = 0.05
_BURST = 10
_BURST_WINDOW_S = 10.0


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


DroppedFields = Callable[[JsonObject, JsonObject], Sequence[tuple[str, str]]]


class Publisher:
    """Brings the node's slices in line with the inventory, again and again.

    Discovery, the watch and later health and MIG only call `mark_dirty`. `dropped` compares what was
    sent with what was stored and names fields (path, feature gate) that the API server did not keep; they
    are said once and not sent in vain again.
    """

    def __init__(
        self,
        inventory: Callable[[], Inventory | None],
        slices: Slices,
        owner: Callable[[], Owner],
        dropped: DroppedFields,
    ) -> None:
        self._inventory = inventory
        self._slices = slices
        self._owner_source = owner
        self._owner: Owner | None = None
        self._dropped_fields = dropped
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._published = threading.Event()
        self._problem: str | None = "slices have not been published yet"
        self._told_faults: tuple[str, ...] = ()
        self._accepted: dict[str, tuple[JsonObject, JsonObject]] = {}
        self._writes: list[float] = []
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    @property
    def problem(self) -> str | None:
        """Why the published slices are not what they should be; None when they are."""
        return self._problem

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
        self._dirty.set()

    def wait_published(self, timeout_s: float) -> bool:
        """Whether a complete pool has been published since the start."""
        return self._published.wait(timeout_s)

    def _run(self) -> None:
        backoff = _BACKOFF_FIRST_S
        while not self._stopping.is_set():
            self._dirty.wait()
            self._dirty.clear()
            if self._stopping.is_set():
                return
            try:
                self._publish_once()
            except DraDriverError as error:
                self._pause_after(error, backoff)
                backoff = min(backoff * 2, _BACKOFF_MOST_S)
            except Exception:  # noqa: BLE001  a dead thread would leave the node unpublished
                _log.exception("publish_failed")
                self._problem = "publishing failed unexpectedly; see the log"
                self._pause(backoff)
                backoff = min(backoff * 2, _BACKOFF_MOST_S)
            else:
                backoff = _BACKOFF_FIRST_S

    def _pause_after(self, error: DraDriverError, backoff: float) -> None:
        self._problem = str(error)
        asked = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
        delay = max(backoff * random.uniform(0.8, 1.2), asked or 0.0)  # noqa: S311
        _log.warning("publish_retried", reason=str(error), retry_in_s=round(delay, 2))
        self._pause(delay)

    def _pause(self, delay_s: float) -> None:
        self._stopping.wait(delay_s)
        self._dirty.set()

    def _publish_once(self) -> None:
        inventory = self._inventory()
        if inventory is None or not self._slices.synced.is_set():
            return
        known = self._owner
        owner = known or self._owner_source()
        pool = build_pool(inventory, owner.node_name)
        self._tell_faults(pool)
        changes = self._changes(pool, owner)
        if changes and self._hold_back():
            changes = self._changes(pool, owner)
        if changes.creates and known is not None:
            # Slices vanish with the Node object that owns them, and its successor has another UID.
            owner = self._owner_source()
            changes = self._changes(pool, owner)
        self._owner = owner
        if changes:
            self._write(changes)
        self._problem = None
        self._published.set()

    def _changes(self, pool: Pool, owner: Owner) -> SliceChanges:
        existing = self._slices.snapshot()
        names = {entry["metadata"]["name"] for entry in existing}
        self._accepted = {name: specs for name, specs in self._accepted.items() if name in names}
        return slice_changes(pool, [self._as_sent(entry) for entry in existing], owner)

    def _write(self, changes: SliceChanges) -> None:
        """Deletes come first, so that devices that are gone disappear even if what is new is refused."""
        started = time.monotonic()
        for entry in changes.deletes:
            metadata = entry["metadata"]
            self._slices.delete(metadata["name"], metadata["uid"], metadata["resourceVersion"])
            _log.info("slice_deleted", slice=metadata["name"])
        for entry in changes.updates:
            self._accept(entry, self._slices.update(entry))
        for entry in changes.creates:
            self._accept(entry, self._slices.create(entry))
        self._writes.append(time.monotonic())
        generation = max(
            (entry["spec"]["pool"]["generation"] for entry in (*changes.updates, *changes.creates)), default=0
        )
        _log.info(
            "pool_published",
            created=len(changes.creates),
            updated=len(changes.updates),
            deleted=len(changes.deletes),
            generation=generation,
            duration_s=round(time.monotonic() - started, 4),
        )

    def _accept(self, sent: JsonObject, stored: JsonObject) -> None:
        """Remember what the server made of a slice whose fields it dropped, or each sync would write again."""
        name = stored["metadata"]["name"]
        dropped = self._dropped_fields(sent, stored)
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

    def _as_sent(self, entry: JsonObject) -> JsonObject:
        """The slice with the fields that the server dropped put back, as long as it is still what it stored."""
        known = self._accepted.get(entry["metadata"]["name"])
        if known is None or known[1] != entry["spec"]:
            return entry
        return {**entry, "spec": known[0]}

    def _hold_back(self) -> bool:
        """Write promptly, but not in a circle: who fights over our slices slows us down, not the API server.

        Returns whether time went by, in which the slices may have changed again.
        """
        now = time.monotonic()
        self._writes = [moment for moment in self._writes if now - moment < _BURST_WINDOW_S]
        excess = len(self._writes) - _BURST
        if self._writes:
            self._stopping.wait(_QUIET_AFTER_WRITE_S if excess < 0 else min(2.0**excess, _BACKOFF_MOST_S))
        return bool(self._writes)

    def _tell_faults(self, pool: Pool) -> None:
        if pool.faults != self._told_faults:
            for fault in pool.faults:
                _log.error("device_not_publishable", reason=fault)
        self._told_faults = pool.faults
