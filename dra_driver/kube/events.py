"""Writes Events for claims, pods and nodes, as `kubectl describe` shows them. Equal events are counted.

They use core/v1, the only version in which `count` and `lastTimestamp` can be changed.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from dra_driver.errors import ApiRejectedError
from dra_driver.kube.client import MERGE_PATCH, ApiClient, is_not_found, path_segment
from dra_driver.model.dataclass import KW_ONLY, dataclass
from dra_driver.model.ids import one_line
from dra_driver.model.problems import EventObject

REPORT_S: Final = 5.0
"""The time limit of a request that only reports something."""
_AGGREGATED_S: Final = 600.0
_REMEMBERED = 1024
_MESSAGE_BYTES: Final = 1024
_NAME_PREFIX = 200  # of 253 characters; the rest makes the name unique
_CONFLICT = 409
_API_VERSION = {
    "ResourceClaim": "resource.k8s.io/v1",
    "ResourceSlice": "resource.k8s.io/v1",
    "Pod": "v1",
    "Node": "v1",
}

_Key = tuple[EventObject, bool, str, str]


@dataclass(slots=True)
class _Known:
    name: str
    count: int
    touched: float
    stored: bool = False


@dataclass(eq=False)
class EventWriter:
    """Writes events for one driver on one node. Not thread-safe.

    Raises: ApiRejectedError; ApiUnavailableError: repeat the call; the event is not created twice.
    """

    client: ApiClient
    driver: str
    node: str
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def __post_init__(self) -> None:
        self._known: OrderedDict[_Key, _Known] = OrderedDict()

    def write(
        self,
        about: EventObject,
        reason: str,
        message: str,
        *,
        warning: bool,
        times: int = 1,
    ) -> None:
        """Report an event that happened `times` times since the last report. Within ten minutes, this only increases
        its count.

        `message` is cut at 1 KiB.
        """
        text = one_line(message, _MESSAGE_BYTES)
        key = (about, warning, reason, text)
        known = self._known_event(key)
        if known.stored and self._count_up(about, known, times):
            return
        try:
            self._create(key, known.name, times)
        except ApiRejectedError as error:
            if error.status != _CONFLICT:
                raise
            # An earlier attempt created the event, but its response was lost; `times` includes that attempt.
            self._count_up(about, known, times)
        known.stored, known.count = True, times

    def _known_event(self, key: _Key) -> _Known:
        moment = self.clock()
        known = self._known.pop(key, None)
        if known is None or moment - known.touched >= _AGGREGATED_S:
            known = _Known(_event_name(key[0].name), 0, moment)
        known.touched = moment
        self._known[key] = known
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    def _count_up(self, about: EventObject, known: _Known, times: int) -> bool:
        """Return False, with a new name, if the event no longer exists."""
        patch = {"count": known.count + times, "lastTimestamp": self._moment()}
        try:
            self.client.request(
                "PATCH",
                f"{_collection(about)}/{path_segment(known.name)}",
                body=patch,
                content_type=MERGE_PATCH,
                action=f"update event {known.name}",
                timeout_s=REPORT_S,
            )
        except ApiRejectedError as error:
            if not is_not_found(error):
                raise
            known.name, known.count, known.stored = _event_name(about.name), 0, False
            return False
        known.count += times
        return True

    def _create(self, key: _Key, name: str, times: int) -> None:
        about, warning, reason, message = key
        moment = self._moment()
        involved = {
            "apiVersion": _API_VERSION[about.kind],
            "kind": about.kind,
            "name": about.name,
            "uid": about.uid,
        }
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": _namespace(about)},
            "involvedObject": involved | ({"namespace": about.namespace} if about.namespace else {}),
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "source": {"component": self.driver, "host": self.node},
            "reportingComponent": self.driver,
            "reportingInstance": self.node,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": times,
        }
        self.client.request(
            "POST",
            _collection(about),
            body=body,
            action=f"create event {reason} for {about.kind} {about.name}",
            timeout_s=REPORT_S,
        )

    def _moment(self) -> str:
        return self.now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _namespace(about: EventObject) -> str:
    return about.namespace or "default"


def _collection(about: EventObject) -> str:
    return f"/api/v1/namespaces/{path_segment(_namespace(about))}/events"


def _event_name(of: str) -> str:
    return f"{of[:_NAME_PREFIX].rstrip('.-')}.{secrets.token_hex(8)}"
