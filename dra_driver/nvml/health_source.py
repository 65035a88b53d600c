"""NVML for the health monitor: events of all GPUs through one event set, and polls of each GPU."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pynvml

from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.health import DoubleBitError, HealthEvent, PolledHealth, Xid
from dra_driver.nvml.calls import nvml_errors, supported
from dra_driver.nvml.health_polls import read_health, read_instances
from dra_driver.nvml.mig_reading import gpu_handle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dra_driver.nvml.session import NvmlSession

_XID = pynvml.nvmlEventTypeXidCriticalError
_DOUBLE_BIT = pynvml.nvmlEventTypeDoubleBitEccError
_UNAVAILABLE = pynvml.nvmlEventTypeGpuUnavailableError
_RECOVERY_ACTION = pynvml.nvmlEventTypeGpuRecoveryAction
_WANTED = _XID | _DOUBLE_BIT | _UNAVAILABLE | _RECOVERY_ACTION
_WHOLE_GPU = 0xFFFFFFFF
_MAX_LEFT = 1000
_REOPENED = "NVML was initialised again; events have to be registered again"
_NO_DRIVER = frozenset({pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})


@dataclass(eq=False)
class _EventSet:
    """`left` are GPUs that have moved to a newer set, but may still have earlier events in this one."""

    handle: Any
    number: int
    members: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)


class HealthSource:
    """Waits for NVML's health events, and polls GPUs. Methods raise NvmlUnavailableError, RetryableError.

    One thread opens event sets and waits for events. Each GPU has its own thread, which registers and polls it. NVML
    cannot remove a GPU from a set, so each change of the monitored GPUs needs a new set. An older set is read until all
    its GPUs are registered in a newer one. A shutdown of the session frees the event sets.
    """

    def __init__(self, session: NvmlSession) -> None:
        self._session = session
        self._guard = threading.Lock()  # protects the sets and handles; never held during an NVML call
        self._sets: list[_EventSet] = []  # oldest first
        self._numbers = itertools.count(1)
        self._left: deque[HealthEvent] = deque()
        self._handles: dict[str, Any] = {}
        self._uuids: dict[int, str] = {}
        self._driver_gone = False
        self._driver_loads = 0
        session.before_shutdown.append(self._end_session)

    @property
    def driver_loads(self) -> int:
        """How often the NVIDIA driver was loaded again. May count one reload more than once."""
        return self._driver_loads + self._session.driver_loads

    def change_lasts_s(self) -> float:
        return self._session.change_lasts_s()

    def driver_version(self) -> str | None:
        with self._using():
            return supported(pynvml.nvmlSystemGetDriverVersion)

    def set_number(self) -> int | None:
        """Return the number of the newest event set; None if `open_events` must be called."""
        try:
            with self._session.kept_open(), self._guard:
                return self._sets[-1].number if self._sets else None
        except NvmlUnavailableError:
            return None

    def open_events(self) -> None:
        with self._using():
            with nvml_errors("create an event set"):
                made = _EventSet(pynvml.nvmlEventSetCreate(), next(self._numbers))
            with self._guard:
                self._sets.append(made)

    def register(self, gpu_uuid: str, pci_bus_id: str | None) -> None:
        """Register the GPU in the newest event set. The caller must poll it afterwards, because earlier events may be
        lost.
        """
        with self._using():
            with self._guard:
                if not self._sets:
                    raise NvmlUnavailableError(_REOPENED)
                newest, older = self._sets[-1], self._sets[:-1]
                newest.members.add(gpu_uuid)
            try:
                handle = self._handle(gpu_uuid, pci_bus_id)
                with self._guard:
                    self._uuids[_address(handle)] = gpu_uuid
                _register(gpu_uuid, handle, newest.handle)
            except DraDriverError:
                newest.members.discard(gpu_uuid)
                raise
            finally:
                with self._guard:
                    for one in (one for one in older if gpu_uuid in one.members):
                        one.members.discard(gpu_uuid)
                        one.left.add(gpu_uuid)

    def forget(self, gpu_uuid: str) -> None:
        with self._guard:
            self._handles.pop(gpu_uuid, None)
            for one in self._sets:
                one.members.discard(gpu_uuid)

    def wait(self, timeout_s: float) -> HealthEvent | None:
        """Return the next event, or None if none came in time.

        Also raises DeviceLostError if NVML does not say which GPU was lost.
        """
        with self._using():
            with self._guard:
                sets = list(self._sets)
            if not sets:
                raise NvmlUnavailableError(_REOPENED)
            for old in sets[:-1]:
                self._drain(old)
            if self._left:
                return self._left.popleft()
            with nvml_errors("wait for GPU events"):
                try:
                    return self._event(pynvml.nvmlEventSetWait_v2(sets[-1].handle, int(timeout_s * 1000)))
                except pynvml.NVMLError_Timeout:
                    return None

    def _drain(self, old: _EventSet) -> None:
        """Take the remaining events from an older set, and free the set if no GPU needs it.

        Some events are delivered twice, but none is lost.
        """
        with self._guard:
            is_needed = bool(old.members)
            unheard, old.left = old.members | old.left, set()
            if not is_needed:
                self._sets.remove(old)
        with suppress(pynvml.NVMLError):
            for _ in range(_MAX_LEFT):
                event = self._event(pynvml.nvmlEventSetWait_v2(old.handle, 0))
                if event.gpu_uuid is None or event.gpu_uuid in unheard:
                    self._left.append(event)
        if not is_needed:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(old.handle)

    def read(self, gpu_uuid: str, pci_bus_id: str | None, before: PolledHealth | None = None) -> PolledHealth:
        with self._using():
            return read_health(gpu_uuid, self._handle(gpu_uuid, pci_bus_id), before)

    def instances(self, gpu_uuid: str, pci_bus_id: str | None) -> Mapping[tuple[int, int], str]:
        with self._using():
            return read_instances(gpu_uuid, self._handle(gpu_uuid, pci_bus_id))

    def close(self) -> None:
        """Free the event sets. Must not be called while another call is running."""
        with suppress(NvmlUnavailableError), self._session.kept_open():
            self._end_session()

    def _end_session(self) -> None:
        with self._guard:
            sets, self._sets = self._sets, []
            self._uuids, self._handles = {}, {}
        for one in sets:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(one.handle)

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._session.kept_open():
            try:
                yield
            except NvmlUnavailableError as error:
                self._driver_gone |= getattr(error.__cause__, "value", None) in _NO_DRIVER
                raise
            if self._driver_gone:
                self._driver_gone = False
                self._driver_loads += 1

    def _handle(self, uuid: str, pci_bus_id: str | None) -> Any:
        """Prefer the PCI bus ID: a search by UUID waits for every busy GPU."""
        known = self._handles.get(uuid)
        if known is None:
            known = self._handles[uuid] = gpu_handle(uuid, pci_bus_id)
        return known

    def _event(self, data: Any) -> HealthEvent:
        whole = data.gpuInstanceId == _WHOLE_GPU
        observation = (
            Xid(int(data.eventData))
            if data.eventType & _XID
            else DoubleBitError()
            if data.eventType & _DOUBLE_BIT
            else None
        )
        return HealthEvent(
            self._uuid_of(data.device),
            observation,
            None if whole else int(data.gpuInstanceId),
            None if whole or data.computeInstanceId == _WHOLE_GPU else int(data.computeInstanceId),
        )

    def _uuid_of(self, handle: Any) -> str | None:
        """Look up the handle's address first, because a GPU that fell off the bus does not report its UUID."""
        known = self._uuids.get(_address(handle))
        if known is not None:
            return known
        try:
            return supported(pynvml.nvmlDeviceGetUUID, handle)
        except DraDriverError:
            return None


def _register(uuid: str, handle: Any, event_set: Any) -> None:
    with nvml_errors(f"register events of GPU {uuid}"):
        types = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _WANTED
        if not types & _XID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        pynvml.nvmlDeviceRegisterEvents(handle, types, event_set)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
