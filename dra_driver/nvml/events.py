"""Events of all GPUs through one event set, and all that the health monitor asks of NVML."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pynvml

from dra_driver.errors import DraDriverError, NvmlUnavailableError
from dra_driver.model.health import DoubleBitError, HealthEvent, PolledHealth, Xid
from dra_driver.nvml.failures import nvml_errors, supported
from dra_driver.nvml.health import read_health, read_instances
from dra_driver.nvml.mig_instances import gpu_handle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dra_driver.nvml.session import NvmlSession

_XID = pynvml.nvmlEventTypeXidCriticalError
_DOUBLE_BIT = pynvml.nvmlEventTypeDoubleBitEccError
_UNAVAILABLE = getattr(pynvml, "nvmlEventTypeGpuUnavailableError", 0x4000)
_RECOVERY_ACTION = getattr(pynvml, "nvmlEventTypeGpuRecoveryAction", 0x8000)
_WANTED = _XID | _DOUBLE_BIT | _UNAVAILABLE | _RECOVERY_ACTION
_WHOLE_GPU = 0xFFFFFFFF
_MOST_LEFT = 1000
_NO_DRIVER = frozenset({pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})


class HealthSource:
    """NVML as the health monitor uses it; for one thread.

    No call is cut off by a shutdown of the session. An event set of an earlier session is void and was freed with that
    session; `registered` is False then, and `register` is due.
    """

    def __init__(self, session: NvmlSession) -> None:
        self._session = session
        self._set: Any = None
        self._opening = -1
        self._left: deque[HealthEvent] = deque()
        self._handles: dict[str, Any] = {}
        self._uuids: dict[int, str] = {}
        self._driver_gone = False
        self._driver_loads = 0

    @property
    def driver_loads(self) -> int:
        """How often the NVIDIA driver answered again after NVML had said that it is not loaded. Each time counts at
        least once."""
        return self._driver_loads + self._session.driver_loads

    def driver_version(self) -> str | None:
        """The driver's version. Raises: NvmlUnavailableError."""
        with self._using():
            return supported(pynvml.nvmlSystemGetDriverVersion)

    def registered(self) -> bool:
        """Whether events are waited for in the session that is open now."""
        try:
            with self._session.kept_open() as opening:
                return self._set is not None and opening == self._opening
        except NvmlUnavailableError:
            return False

    def register(self, uuids: Collection[str]) -> Mapping[str, str]:
        """Hear of these GPUs from now on, and of no others. Returns why the rest of them cannot be heard.

        Events of before are not delivered, unless they were registered for already, so a look at the GPUs is due
        afterwards. Raises: NvmlUnavailableError, RetryableError.
        """
        unheard: dict[str, str] = {}
        with self._using() as opening:
            with nvml_errors("create an event set"):
                fresh = pynvml.nvmlEventSetCreate()
            handles: dict[str, Any] = {}
            for uuid in uuids:
                try:
                    handles[uuid] = _register(uuid, fresh)
                except NvmlUnavailableError:
                    raise
                except DraDriverError as error:
                    unheard[uuid] = str(error)
            old, old_opening = self._set, self._opening
            self._set, self._opening, self._handles = fresh, opening, handles
            self._uuids = {_address(handle): uuid for uuid, handle in handles.items()}
            if old is not None and old_opening == opening:
                self._left.extend(self._rest_of(old))
                with suppress(pynvml.NVMLError):
                    pynvml.nvmlEventSetFree(old)
        return unheard

    def _rest_of(self, events: Any) -> Iterator[HealthEvent]:
        """What nobody has heard yet of a set that is given up. What comes now is in the new set too: told twice is
        better than never."""
        with suppress(pynvml.NVMLError):
            for _ in range(_MOST_LEFT):
                yield self._event(pynvml.nvmlEventSetWait_v2(events, 0))

    def wait(self, timeout_s: float) -> HealthEvent | None:
        """The next event, None if there was none in time.

        Raises: DeviceLostError if some GPU was lost, which NVML does not name; NvmlUnavailableError,
        RetryableError.
        """
        with self._using() as opening:
            if self._set is None or opening != self._opening:
                raise NvmlUnavailableError("NVML was initialised anew; events have to be registered again")
            if self._left:
                return self._left.popleft()
            try:
                with nvml_errors("wait for GPU events"):
                    return self._event(pynvml.nvmlEventSetWait_v2(self._set, int(timeout_s * 1000)))
            except DraDriverError as error:
                if isinstance(error.__cause__, pynvml.NVMLError_Timeout):
                    return None
                raise

    def read(self, gpu_uuid: str) -> PolledHealth:
        """As `read_health`."""
        with self._using() as opening:
            return read_health(gpu_uuid, self._handle(gpu_uuid, opening))

    def instances(self, gpu_uuid: str) -> Mapping[tuple[int, int], str]:
        """As `read_instances`."""
        with self._using() as opening:
            return read_instances(gpu_uuid, self._handle(gpu_uuid, opening))

    def close(self) -> None:
        """Free the event set. Not while a wait is going on."""
        events, self._set = self._set, None
        with suppress(NvmlUnavailableError, pynvml.NVMLError), self._session.kept_open() as opening:
            if events is not None and opening == self._opening:
                pynvml.nvmlEventSetFree(events)

    @contextmanager
    def _using(self) -> Iterator[int]:
        with self._session.kept_open() as opening:
            try:
                yield opening
            except NvmlUnavailableError as error:
                self._driver_gone |= getattr(error.__cause__, "value", None) in _NO_DRIVER
                raise
            if self._driver_gone:
                self._driver_gone = False
                self._driver_loads += 1

    def _handle(self, uuid: str, opening: int) -> Any | None:
        """The handle from the registration: a search by UUID waits for every GPU that is busy."""
        return self._handles.get(uuid) if opening == self._opening else None

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
        """A GPU that fell off the bus does not tell its UUID, so the handle's own value is looked up first."""
        known = self._uuids.get(_address(handle))
        if known is not None:
            return known
        try:
            return supported(pynvml.nvmlDeviceGetUUID, handle)
        except DraDriverError:
            return None


def _register(uuid: str, event_set: Any) -> Any:
    """Register one GPU; returns its handle. Raises: DraDriverError."""
    handle = gpu_handle(uuid, None)
    with nvml_errors(f"register events of GPU {uuid}"):
        types = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _WANTED
        if not types & _XID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        pynvml.nvmlDeviceRegisterEvents(handle, types, event_set)
    return handle


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
