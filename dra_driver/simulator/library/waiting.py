"""Events: sets, registration, and the wait, which sees events that other processes raise."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pynvml

from dra_driver.simulator.library.core import KIND_GPU, Core
from dra_driver.simulator.library.refs import address, as_handle, number, put, put_handle, target
from dra_driver.simulator.mig import Refusal
from dra_driver.simulator.state import Event, State

_SET_BASE = 0x7E10_0000_0000
_POLL_S = 0.2


@dataclass(slots=True)
class _EventSet:
    """`masks` holds, for each GPU, the event types, the last event before its registration, and how often the GPU had
    been reset then. `checked` is the version of the machine that was looked at last."""

    masks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    seen: int = 0
    checked: int = -1
    reported_lost: set[str] = field(default_factory=set)


class Waiting(Core):
    """nvmlEventSet*, nvmlDeviceRegisterEvents.

    A reset of a GPU, and a change of its MIG mode, which resets it, ends its registrations without a word. A lost GPU
    makes the wait answer GPU_IS_LOST once for each set and GPU, after the events before it.
    """

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        self._sets: dict[int, _EventSet] = {}
        self._set_numbers = itertools.count(1)
        self._sets_lock = threading.Lock()

    def _set(self, handle: Any) -> _EventSet:
        found = self._sets.get(address(handle))
        if found is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def nvmlEventSetCreate(self, out: Any) -> None:  # noqa: N802
        self.state()
        key = _SET_BASE | next(self._set_numbers) << 4
        self._sets[key] = _EventSet()
        put_handle(out, key)

    def nvmlEventSetFree(self, handle: Any) -> None:  # noqa: N802
        self._set(handle)
        self._sets.pop(address(handle), None)

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        put(out, 0 if parsed.is_mig else state.model_of(gpu).events)

    def nvmlDeviceRegisterEvents(self, handle: Any, mask: Any, event_set: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        wanted = number(mask)
        if not wanted or wanted & ~state.model_of(gpu).events:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        events = self._set(event_set)
        with self._sets_lock:
            before, since, resets = events.masks.get(gpu.uuid, (0, state.event_seq, gpu.resets))
            if resets != gpu.resets:
                before, since = 0, state.event_seq
            events.masks[gpu.uuid] = (before | wanted, since, gpu.resets)
            events.checked = -1

    def nvmlEventSetWait_v2(self, handle: Any, out: Any, timeout: Any) -> int:  # noqa: N802
        deadline = time.monotonic() + number(timeout) / 1000
        while True:
            events = self._set(handle)
            state = self.state()
            if state.version != events.checked:
                found = self._next(state, events)
                if found is not None:
                    self._fill(target(out), found)
                    return int(pynvml.NVML_SUCCESS)
                self._report_lost(state, events)
                events.checked = state.version
            left = deadline - time.monotonic()
            if left <= 0:
                return int(pynvml.NVML_ERROR_TIMEOUT)
            time.sleep(min(_POLL_S, left))

    def _next(self, state: State, events: _EventSet) -> Event | None:
        with self._sets_lock:
            for event in state.events:
                if event.seq <= events.seen:
                    continue
                mask, since, resets = events.masks.get(event.gpu, (0, 0, 0))
                gpu = state.by_uuid.get(event.gpu)
                if gpu is None or gpu.resets != resets:
                    continue
                if event.seq > since and event.type & mask:
                    events.seen = event.seq
                    return event
        return None

    def _report_lost(self, state: State, events: _EventSet) -> None:
        lost = {
            uuid
            for uuid in events.masks
            if (gpu := state.by_uuid.get(uuid)) is None or gpu.lost or not gpu.present
        }
        news = lost - events.reported_lost
        events.reported_lost = lost
        if news:
            raise Refusal(pynvml.NVML_ERROR_GPU_IS_LOST)

    def _fill(self, data: Any, event: Event) -> None:
        data.device = as_handle(self.make(KIND_GPU, event.gpu), pynvml.c_nvmlDevice_t)
        data.eventType, data.eventData = event.type, event.data
        data.gpuInstanceId, data.computeInstanceId = event.gpu_instance, event.compute_instance
