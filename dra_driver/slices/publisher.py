"""The only writer of ResourceSlices: one level-triggered thread, which writes only if something differs.

The thread sleeps until a refused deletion or a competing writer's change is due, or until any change wakes it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import structlog

from dra_driver.base.backoff import Backoff, TokenBucket
from dra_driver.base.installation import apply_again
from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import ApiUnavailableError, DraDriverError
from dra_driver.kube.client import FIELD_MANAGER
from dra_driver.kube.slices import SliceCache
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.problems import NodeProblem
from dra_driver.model.schema import JsonObject
from dra_driver.model.sharing import SharingPolicy
from dra_driver.model.units import named
from dra_driver.power.rules.limits import NO_POWER_POLICY, PowerPolicy
from dra_driver.slices.api_support import ApiSupport
from dra_driver.slices.refusals import RefusedEntries
from dra_driver.slices.rules.build import Pool, SliceContent, TaintLimits, Taints, build_pool
from dra_driver.slices.rules.diff import (
    TAINTS_GATE,
    Drop,
    Owner,
    SliceChanges,
    fields_of,
    slice_changes,
    slice_index,
    without_fields,
)
from dra_driver.slices.rules.other_writers import OtherWriters

_log = structlog.get_logger(__name__)


_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 30.0
_QUIET_AFTER_WRITE_S = 0.05
_PROBLEM_AFTER_S = 30.0

_NOT_YET = "slices have not been published yet"
_PROMPT_ANSWERS = 10
"""Immediate rewrites after others change our slices; a restarted kubelet, for example, deletes them."""
_ANSWER_EVERY_S = 30.0
"""The average time between later rewrites."""
_CALM_AFTER_S = 60.0
"""How long after a write more changes are expected soon."""
_CONTESTED_S = 60.0
"""Longer than our longest wait."""
_CONTESTED = "another program keeps changing the slices of this node; find it and remove it"


class PublishObserver(Protocol):
    """Called in the publisher's thread. Must not block or raise."""

    def published(self, lag_s: float) -> None:
        """Note that slices were written, `lag_s` seconds after the change that caused the write."""

    def publish_failed(self, error: Exception) -> None:
        """Note an error; the publisher retries."""


class PublishedNode(Protocol):
    """The publisher's thread calls it in each round."""

    def inventory(self) -> Inventory | None:
        """Return None while unknown."""

    def owner(self) -> Owner:
        """Return the identity with the current UID of the Node object."""

    def taints(self, limits: TaintLimits) -> Taints:
        """Return a function from a device to its current taints."""

    def left_out(self, dropped: bool) -> Callable[[OfferedDevice], bool]:
        """Return a function that returns whether to omit a device. `dropped`: the API server drops taints."""


@dataclass(eq=False)
class Publisher:
    """Other threads only call `mark_dirty`."""

    node: PublishedNode
    slices: SliceCache
    sharing: SharingPolicy
    support: ApiSupport
    observer: PublishObserver
    power: PowerPolicy = NO_POWER_POLICY

    def __post_init__(self) -> None:
        self._owner: Owner | None = None
        self._marked_at: float | None = None
        self._behind_since: float | None = None  # used only by the publisher's thread
        self._published = threading.Event()
        self._wrong: tuple[float, str] | None = (time.monotonic(), _NOT_YET)  # since when, and the problem
        self._of_pool: tuple[NodeProblem, ...] = ()
        self.has_pool = False
        """Whether this instance has written a pool, so that `problems` has those of `FOUND_WITH_POOL`."""
        self._known_notes: tuple[str, ...] = ()
        self.withheld: tuple[str, ...] = ()
        self._known_drops: set[Drop] = set()
        self._known_gates: set[str] = set()
        self._undeleted: dict[str, str] = {}  # by UID, why a slice was not deleted
        self._delete_again_at = 0.0
        self._delete_backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MOST_S)
        self._refused = RefusedEntries()
        self._answers = TokenBucket(1 / _ANSWER_EVERY_S, _PROMPT_ANSWERS)
        self._written: tuple[Pool | None, float] = None, -math.inf  # the last pool that was written, and when
        self._contested_at = -math.inf
        self._other_writers = OtherWriters(FIELD_MANAGER)
        self._existing: list[JsonObject] = []
        self._due_at = math.inf
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MOST_S)
        self._worker = BackgroundWorker("publisher", self._round, self._crashed)

    @property
    def problem(self) -> str | None:
        wrong = self._wrong
        return None if wrong is None else wrong[1]

    def problems(self) -> Sequence[NodeProblem]:
        """Return outdated slices, other writers, and what of the last pool the cluster does not support."""
        wrong, unseen, now = self._wrong, self.slices.failing, time.monotonic()
        found = list(self._of_pool)
        if now - self._contested_at < _CONTESTED_S:
            found.append(NodeProblem("slices-contested", _CONTESTED))
        altered = self.support.altered
        if altered:
            text = (
                f"the API server stores {named(altered)} differently from what the plugin sends; find the "
                "webhook or admission policy that changes ResourceSlices"
            )
            found.append(NodeProblem("slice-fields-dropped", text, "unknown"))
        writer = self._other_writers.current(now if wrong is None and unseen is None else -math.inf)
        if writer is not None and self._owner is not None:
            text = (
                f"{writer.manager!r} also writes ResourceSlices of {self._owner.driver} on this node, such as "
                f"{writer.slice_name}; find its pod with `kubectl get pods -A -o wide --field-selector "
                f"spec.nodeName={self._owner.node_name}`, and remove it"
            )
            found.append(NodeProblem("foreign-driver", text, f"ResourceSlices of {writer.manager}"))
        if unseen is not None and now - unseen[0] >= _PROBLEM_AFTER_S:
            text = f"has not been able to watch this node's ResourceSlices for {now - unseen[0]:.0f} s: {unseen[1]}"
        elif (
            wrong is not None
            and now - wrong[0] >= _PROBLEM_AFTER_S
            and not self._has_nothing_to_publish(wrong[1])
        ):
            text = f"has not been able to update this node's ResourceSlices for {now - wrong[0]:.0f} s: {wrong[1]}"
        else:
            return found
        if "(HTTP 403)" in text:
            remedy = f"{apply_again()} restores the role and the policies of the plugin"
        else:
            remedy = "`gpu-dra-driver doctor` in its pod checks the API server and the permissions"
        return [*found, NodeProblem("slices-not-published", f"The plugin {text}; {remedy}")]

    def _has_nothing_to_publish(self, problem: str) -> bool:
        return problem == _NOT_YET and self.node.inventory() is None

    def _note(self, problem: str | None) -> None:
        before, now = self._wrong, time.monotonic()
        self._wrong = None if problem is None else (now if before is None else before[0], problem)

    def start(self) -> None:
        self._wrong = time.monotonic(), _NOT_YET  # this process may have waited for another one to stop
        self.mark_dirty()
        self._worker.start()

    def stop(self) -> None:
        """Leave the slices, so that a quick restart writes nothing."""
        self._worker.stop()

    def mark_dirty(self) -> None:
        if self._marked_at is None:
            self._marked_at = time.monotonic()
        self._worker.wake()

    def wait_published(self, timeout_s: float) -> bool:
        return self._published.wait(timeout_s)

    def _round(self) -> float:
        """Return the seconds until the next round is due; after an error, wait here and return 0."""
        marked_at, self._marked_at = self._marked_at, None
        if self._behind_since is None:
            self._behind_since = marked_at
        try:
            self._publish_once()
        except DraDriverError as error:
            self._pause_after(error)
            return 0.0
        self._backoff.reset()
        return max(0.0, self._due_at - time.monotonic())

    def _pause_after(self, error: DraDriverError) -> None:
        self._note(str(error))
        self.observer.publish_failed(error)
        asked = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
        delay = self._backoff.next(asked)
        _log.warning("publish_retried", reason=str(error), retry_in_s=round(delay, 2))
        self._worker.pause(delay)  # within the round, so that changes do not shorten the wait

    def _crashed(self, error: Exception) -> float:
        self.observer.publish_failed(error)
        self._note("publishing failed unexpectedly; see the log")
        self._worker.pause(self._backoff.step())
        return 0.0

    def _again_at(self, moment: float) -> None:
        self._due_at = min(self._due_at, moment)

    def _publish_once(self) -> None:
        self._due_at = math.inf
        inventory = self.node.inventory()
        if inventory is None or not self.slices.synced.is_set():
            return
        known = self._owner
        owner = known or self.node.owner()
        pool = self._refused.publishable(self._wanted(inventory, owner))
        changes = self._changes(pool, owner)
        if changes and time.monotonic() - self._written[1] < _CALM_AFTER_S:
            self._worker.pause(_QUIET_AFTER_WRITE_S)
            changes = self._changes(pool, owner)
        if changes.creates and known is not None:
            # Slices are deleted together with the Node object that owns them, and a new Node object has
            # another UID.
            owner = self.node.owner()
            changes = self._changes(pool, owner)
        self._owner = owner
        if not changes:
            self._other_writers.settled(self._existing)
            if self._refused.stored(*pool.slices, is_complete=True):
                self.mark_dirty()
        else:
            self._other_writers.differing((*changes.updates, *changes.deletes), time.monotonic())
            if self._is_held_back(pool):
                return
            self._write(changes, pool, owner)
        self.has_pool = True
        self._settle()

    def _wanted(self, inventory: Inventory, owner: Owner) -> Pool:
        support = self.support.of(inventory, owner)
        offered = inventory if support.no_partitions is None else inventory.without_partitions()
        taints = self.node.taints(support.taints)
        withheld = self.node.left_out(TAINTS_GATE in support.missing)
        pool = build_pool(
            offered,
            owner.node_name,
            self.sharing,
            taints,
            withheld,
            compatibility_groups=support.keeps_groups,
            power=self.power if support.no_partitions is None else NO_POWER_POLICY,
        )
        self._report_deviations(pool)
        lost = {gate for gate in support.missing if without_fields(pool, {gate}) != pool}
        if TAINTS_GATE in support.missing and any(taints(device) for device in offered.devices()):
            lost.add(TAINTS_GATE)  # including devices that are withheld because the gate is off
        self._report_drops("all", fields_of(lost - self._known_gates))
        self._of_pool = tuple(_problems_of_pool(pool, lost, self.support))
        return without_fields(pool, support.missing)

    def _is_held_back(self, pool: Pool) -> bool:
        """Whether the write must wait. A write of an unchanged pool reverts a change by another writer; our own changes
        never wait.
        """
        now = time.monotonic()
        wait_s = self._answers.ready_at(now) - now if pool == self._written[0] else 0.0
        if wait_s <= 0:
            return False
        self._contested_at = now
        if self.problem != _CONTESTED:
            _log.warning("slices_contested", reason=_CONTESTED, next_write_in_s=round(wait_s, 2))
        self._note(_CONTESTED)
        self._again_at(now + wait_s)
        return True

    def _settle(self) -> None:
        left = next(iter(self._undeleted.values()), None)
        refused = self._refused.problem
        self._note(refused or (f"an obsolete slice still exists: {left}" if left else None))
        self._again_at(self._refused.due)
        if self._undeleted:
            self._again_at(self._delete_again_at)
        self._again_at(self.support.ask_at)
        self._behind_since = None
        if refused is None:
            self._published.set()

    def _changes(self, pool: Pool, owner: Owner) -> SliceChanges:
        self._existing = self.support.as_sent(self.slices.current())
        changes = slice_changes(pool, self._existing, owner, self._undeleted)
        obsolete = {entry["metadata"]["uid"]: entry for entry in changes.deletes}
        self._undeleted = {uid: reason for uid, reason in self._undeleted.items() if uid in obsolete}
        is_due = time.monotonic() >= self._delete_again_at
        due = (entry for uid, entry in obsolete.items() if is_due or uid not in self._undeleted)
        return replace(changes, deletes=tuple(due))

    def _write(self, changes: SliceChanges, pool: Pool, owner: Owner) -> None:
        """Delete first, so that removed devices disappear even if new slices are refused."""
        started = time.monotonic()
        deleted = self._delete(changes.deletes)
        if deleted < len(changes.deletes):
            changes = self._changes(pool, owner)
        updated: list[JsonObject] = []
        created: list[JsonObject] = []
        todo = [(entry, self.slices.update, updated) for entry in changes.updates]
        todo += [(entry, self.slices.create, created) for entry in changes.creates]
        for entry, write, done in todo:
            if self._worker.is_stopping:
                return  # another process may publish by now
            content = pool.slices[slice_index(entry)]
            if self._stores(entry, content, write):
                done.append(entry)
                continue
            self.mark_dirty()  # the next round writes other content
            if content.shared_counters:
                break  # devices must not be published without their counters
        written = (*updated, *created)
        if not written and not deleted:
            return
        ended = time.monotonic()
        if pool == self._written[0]:
            self._answers.take(ended)
        self._written = pool, ended
        if self._behind_since is not None:
            self.observer.published(ended - self._behind_since)
        _log.info(
            "pool_published",
            created=len(created),
            updated=len(updated),
            deleted=deleted,
            generation=max((entry["spec"]["pool"]["generation"] for entry in written), default=0),
            duration_s=round(ended - started, 4),
        )

    def _stores(
        self, entry: JsonObject, content: SliceContent, write: Callable[[JsonObject], JsonObject]
    ) -> bool:
        """Return whether the API server accepts the slice. A refused slice does not delay the others."""
        try:
            stored = write(entry)
        except DraDriverError as error:
            self.support.refused(error)
            if not self._refused.refused(content, self._existing, error):
                raise
            self.observer.publish_failed(error)
            return False
        dropped = self.support.stored(entry, stored)
        if dropped:
            self._report_drops(stored["metadata"]["name"], dropped)
        if self._refused.stored(content) or dropped:
            self.mark_dirty()  # the pool may be built differently now
        return True

    def _delete(self, obsolete: Iterable[JsonObject]) -> int:
        """Return the number of deleted slices. Failures do not delay other writes: a webhook may protect a slice that
        is not ours.
        """
        deleted, failed, asked_s = 0, False, 0.0
        for entry in obsolete:
            metadata = entry["metadata"]
            name, uid = metadata["name"], metadata["uid"]
            try:
                self.slices.delete(name, uid, metadata["resourceVersion"])
            except DraDriverError as error:
                self.observer.publish_failed(error)
                if uid not in self._undeleted:
                    _log.warning("slice_not_deleted", slice=name, reason=str(error))
                self._undeleted[uid] = str(error)
                asked = error.retry_after_s if isinstance(error, ApiUnavailableError) else None
                asked_s = max(asked_s, asked or 0.0)
                failed = True
            else:
                deleted += 1
                self._undeleted.pop(uid, None)
                _log.info("slice_deleted", slice=name)
        if failed:
            self._delete_again_at = time.monotonic() + self._delete_backoff.next(asked_s)
        elif not self._undeleted:
            self._delete_backoff.reset()
        return deleted

    def _report_drops(self, name: str, dropped: Iterable[Drop]) -> None:
        new = set(dropped) - self._known_drops
        if not new:
            return
        _log.warning(
            "slice_fields_dropped",
            slice=name,
            fields=sorted(f"{path} ({gate})" for path, gate in new),
            remedy="enable the named feature gates in the API server, or do without these fields",
        )
        self._known_drops |= new
        self._known_gates |= {gate for _, gate in new}

    def _report_deviations(self, pool: Pool) -> None:
        if pool.notes != self._known_notes:
            for note in pool.notes:
                _log.warning("device_limited", reason=note)
        self._known_notes = pool.notes
        if pool.withheld != self.withheld:
            _log.info("devices_withdrawn", devices=pool.withheld)
        self.withheld = pool.withheld


def _problems_of_pool(pool: Pool, missing: Collection[str], support: ApiSupport) -> Iterator[NodeProblem]:
    for fault in pool.faults:
        yield NodeProblem("device-not-published", f"{fault}; report this as a bug of gpu-dra-driver", fault)
    for gate in sorted(missing):
        text = f"the API server drops fields of this node's slices, because its feature gate {gate} is off"
        yield NodeProblem("slice-fields-dropped", f"{text}; enable the feature gate", gate)
    if support.problem is not None:
        lost = "MIG devices on demand and GPUs for virtual machines are not published"
        if support.has_budget:
            lost = "the power budget of the node is not published, so the scheduler may exceed it"
        yield NodeProblem("partitions-not-supported", f"{lost}: {support.problem}")
    if support.caution is not None:
        yield NodeProblem("scheduler-outdated", support.caution)
