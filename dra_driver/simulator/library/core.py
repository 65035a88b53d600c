"""The base of all simulated functions: arguments from the binding, the session, and the checks before each call."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pynvml

from dra_driver.errors import StateError
from dra_driver.model.dataclass import dataclass
from dra_driver.simulator.machine import Machine
from dra_driver.simulator.machine_files import Session
from dra_driver.simulator.machine_state import (
    NVIDIA,
    ComputeInstance,
    Fault,
    Gpu,
    GpuInstance,
    State,
    sysfs_bus_id,
)
from dra_driver.simulator.mig import Refusal

KIND_GPU, KIND_MIG, KIND_GI, KIND_CI = range(4)
_BASE = 0x7F3A_0000_0000
_SLOTS = 0xFFF
_CHECK_S = 0.1
"""How often a hanging call checks whether its fault was cleared."""


def number(argument: Any) -> int:
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    value = getattr(argument, "value", argument)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def target(argument: Any) -> Any:
    """Return the object that an output argument points to."""
    inner = getattr(argument, "_obj", None)
    if inner is not None:
        return inner
    if isinstance(argument, ctypes._Pointer):
        return argument.contents
    return argument


def put(argument: Any, value: int) -> None:
    target(argument).value = value


def put_text(buffer: Any, size: Any, value: str) -> None:
    raw = value.encode()
    if number(size) <= len(raw):
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    target(buffer).value = raw


def address(handle: Any) -> int:
    inner = getattr(handle, "_obj", None)
    if inner is not None:
        handle = inner
    if isinstance(handle, int):
        return handle
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except (ctypes.ArgumentError, TypeError):
        return 0


def rows_for(out: Any, count: Any, needed: int) -> Any:
    """Set `count` and return the array of the caller. Refuse if it is too short."""
    room = 0 if out is None else number(target(count))
    put(count, needed)
    if room < needed:
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    return target(out) if needed else ()


def put_handle(argument: Any, value: int) -> None:
    ctypes.c_void_p.from_buffer(target(argument)).value = value


def as_handle(value: int, kind: Any) -> Any:
    return ctypes.cast(ctypes.c_void_p(value), kind)


def program() -> str:
    name = Path(sys.argv[0]).name
    return "python" if not name or name.startswith("-") else name


@dataclass(frozen=True, slots=True)
class Handle:
    kind: int
    gpu: str
    gi: int = 0
    ci: int = 0

    @property
    def is_mig(self) -> bool:
        return self.kind == KIND_MIG


class Core:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._loaded_version = machine.driver_version
        self._of_call = threading.local()
        self._handles: dict[int, Handle] = {}
        self._references = 0
        self._driver_load = 0
        self._order: list[str] = []
        self._slots: list[str] = []
        self._session_lock = threading.Lock()
        self._driver_lock = threading.Lock()
        self.session: Session | None = None

    # --- session -------------------------------------------------------------------------------

    # the names of methods are C symbols, which the binding looks up by name
    def nvmlInit_v2(self) -> None:  # noqa: N802
        state = self.machine.current()
        with self._session_lock:
            self._check_driver(state)
            if self._references == 0:
                self.session = self.machine.open_session(program())
                self._order = [gpu.uuid for gpu in state.shown if not gpu.lost]
                self._driver_load = state.driver_loads
                for uuid in self._order:
                    if uuid not in self._slots:
                        self._slots.append(uuid)
            self._references += 1

    def nvmlInitWithFlags(self, flags: Any) -> None:  # noqa: N802
        self.nvmlInit_v2()

    def nvmlShutdown(self) -> None:  # noqa: N802
        with self._session_lock:
            if self._references == 0:
                raise Refusal(pynvml.NVML_ERROR_UNINITIALIZED)
            self._references -= 1
            if self._references == 0 and self.session is not None:
                self.machine.close_session(self.session)
                self.session = None

    def state(self) -> State:
        """Return the machine's state. Refuses if this session cannot use the machine's driver."""
        if self._references == 0:
            raise Refusal(pynvml.NVML_ERROR_UNINITIALIZED)
        # The first use in a call needs no second look at the file.
        read, self._of_call.state = getattr(self._of_call, "state", None), None
        state = read or self.machine.current()
        self._check_driver(state)
        if state.driver_loads != self._driver_load:
            raise Refusal(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return state

    def _check_driver(self, state: State) -> None:
        if not state.driver_loaded:
            raise Refusal(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if state.driver_version != self._loaded_version:
            raise Refusal(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    # --- handles -------------------------------------------------------------------------------

    def make(self, kind: int, gpu: str, gi: int = 0, ci: int = 0) -> int:
        slot = self._slots.index(gpu) + 1
        return _BASE | slot << 20 | kind << 16 | gi << 8 | ci

    def parse(self, handle: Any) -> Handle:
        value = address(handle)
        known = self._handles.get(value)
        if known is None:
            slot = (value >> 20) & _SLOTS
            if value & ~0xFFF_FFFFF != _BASE or not 1 <= slot <= len(self._slots):
                raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            known = Handle((value >> 16) & 0xF, self._slots[slot - 1], (value >> 8) & 0xFF, value & 0xFF)
            self._handles[value] = known
        return known

    def gpu_of(self, state: State, uuid: str) -> Gpu:
        gpu = state.by_uuid.get(uuid)
        if gpu is None or gpu.lost or not gpu.present or gpu.driver != NVIDIA:
            raise Refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def gpu(self, handle: Any) -> tuple[State, Gpu]:
        """Return the state and the GPU of a handle; like the real library, refuse handles of MIG devices."""
        state, gpu, parsed = self.device(handle)
        if parsed.kind != KIND_GPU:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return state, gpu

    def device(self, handle: Any) -> tuple[State, Gpu, Handle]:
        state = self.state()
        parsed = self.parse(handle)
        gpu = self.gpu_of(state, parsed.gpu)
        if parsed.kind == KIND_MIG:
            self.mig_device(gpu, parsed)
        elif parsed.kind != KIND_GPU:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return state, gpu, parsed

    def mig_device(self, gpu: Gpu, parsed: Handle) -> tuple[GpuInstance, ComputeInstance]:
        instance = gpu.instance(parsed.gi)
        found = next((item for item in instance.compute if item.id == parsed.ci), None) if instance else None
        if instance is None or found is None:
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        return instance, found

    # --- entry ---------------------------------------------------------------------------------

    def entry(self, name: str, method: Callable[..., None]) -> Callable[..., int]:
        """Return the exported function, which applies faults and converts refusals to return codes."""

        def call(*arguments: Any) -> int:
            try:
                state = self._of_call.state = self.machine.current()
                if state.faults:
                    is_locked = any(fault.blocks_all for fault in state.faults)
                    with self._driver_lock if is_locked else nullcontext():
                        self._apply_fault(name, arguments)
                    self._of_call.state = None
                method(*arguments)
            except Refusal as outcome:
                return outcome.code
            except StateError:
                return int(pynvml.NVML_ERROR_UNKNOWN)
            return int(pynvml.NVML_SUCCESS)

        call.__name__ = name
        return call

    def _apply_fault(self, name: str, arguments: tuple[Any, ...]) -> None:
        fault = next(
            (item for item in self.machine.current().faults if self._hits(item, name, arguments)), None
        )
        if fault is None:
            return
        if fault.remaining is not None and not self.machine.consume_fault(fault):
            return
        until = time.monotonic() + fault.delay_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(_CHECK_S, left))
            # A counted fault is removed when its last call begins.
            if fault.remaining is None and fault not in self.machine.current().faults:
                break
        if fault.code:
            raise Refusal(fault.code)

    def _hits(self, fault: Fault, name: str, arguments: tuple[Any, ...]) -> bool:
        if not fnmatchcase(name, fault.function):
            return False
        return fault.gpu is None or fault.gpu == self._subject(name, arguments)

    def _subject(self, name: str, arguments: tuple[Any, ...]) -> str | None:
        if not arguments:
            return None
        if name.startswith("nvmlDeviceGetHandleByIndex"):
            index = number(arguments[0])
            return self._order[index] if index < len(self._order) else None
        if name == "nvmlDeviceGetHandleByUUID":
            return text(arguments[0])
        if name.startswith("nvmlDeviceGetHandleByPciBusId"):
            wanted = sysfs_bus_id(text(arguments[0]))
            return next((gpu.uuid for gpu in self.machine.current().gpus if gpu.bus_id == wanted), None)
        try:
            return self.parse(arguments[0]).gpu
        except (Refusal, TypeError, ValueError):
            return None
