"""Whether our own two sockets answer, when they are dialled as the kubelet dials them.

Liveness sees what the kubelet sees: it fails if a socket file was removed or a server is stuck. It does not fail for
bad GPUs or an API server that does not answer, because a restart would not help: the call names no claim, so it needs
neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog

from dra_driver.kubelet import dra
from dra_driver.kubelet.pb import dra_v1_pb2, registration_pb2
from dra_driver.kubelet.registration import GET_INFO
from dra_driver.kubelet.rpc import ask, error_text

DIAL_TIMEOUT_S = 2.5
CACHED_S = 1.0

_log = structlog.get_logger(__name__)
_PREPARE = dra.method_path(dra.V1, "NodePrepareResources")


def dial(registrar: Path, timeout_s: float = DIAL_TIMEOUT_S) -> str | None:
    """Asks the registration socket for our endpoint, and sends that an empty Prepare. Returns what is wrong; None if
    both answer."""
    until = time.monotonic() + timeout_s
    nothing, answer = dra_v1_pb2.NodePrepareResourcesRequest(), dra_v1_pb2.NodePrepareResourcesResponse
    name, path = "registration", registrar
    try:
        info = ask(path, GET_INFO, registration_pb2.InfoRequest(), registration_pb2.PluginInfo, timeout_s)
        name, path = "DRA", Path(info.endpoint)
        ask(path, _PREPARE, nothing, answer, until - time.monotonic())
    except grpc.RpcError as error:
        return f"the {name} socket {path} does not answer ({error.code().name}: {error_text(error.details() or '')})"
    return None


class Liveness:
    """Whether our sockets answer.

    Callers that arrive during a check or within `max_age_s` seconds after it share its answer. `dial` returns what is
    wrong, or None. The kubelet restarts nothing for one failure: it counts how many probes fail in a row.
    """

    def __init__(self, dial: Callable[[], str | None], *, max_age_s: float = CACHED_S) -> None:
        self._dial = dial
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._checked_at: float | None = None
        self._fault: str | None = None
        self._failing_since: float | None = None
        self._started = False

    def fault(self, max_age_s: float | None = None) -> str | None:
        """Why the kubelet cannot reach us, as a sentence with the remedy; None if it can. `max_age_s` takes the place
        of the usual one."""
        most_s = self._max_age_s if max_age_s is None else max_age_s
        with self._lock:
            if self._checked_at is None or time.monotonic() - self._checked_at >= most_s:
                before, self._fault = self._fault, self._check()
                self._checked_at = time.monotonic()
                self._failing_since = None if self._fault is None else self._failing_since or self._checked_at
                self._started = self._started or self._fault is None
                if before is None and self._fault is not None:
                    _log.warning("liveness_failed", reason=self._fault)
                elif before is not None and self._fault is None:
                    _log.info("liveness_restored", before=before)
            return self._fault

    def lasting_fault(self, lasting_s: float) -> str | None:
        """The fault of the last check, if no check has succeeded for `lasting_s` seconds; checks nothing itself."""
        fault, since = self._fault, self._failing_since
        return fault if since is not None and time.monotonic() - since >= lasting_s else None

    def start_fault(self) -> str | None:
        """As `fault` until the sockets have answered once; then always None."""
        return None if self._started else self.fault()

    def _check(self) -> str | None:
        try:
            fault = self._dial()
        except Exception as error:  # noqa: BLE001 - any error here is a fault
            fault = error_text(error)
        if fault is None:
            return None
        return f"{fault}; if that lasts, the kubelet restarts the plugin; SIGUSR2 shows what its threads wait for"
