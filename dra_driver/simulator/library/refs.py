"""Arguments of C functions as they arrive from the binding: numbers, byref() objects, arrays, handles."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from dra_driver.simulator.mig import Refusal


def number(argument: Any) -> int:
    """An integer argument, plain or in a ctypes box."""
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    """A string argument: c_char_p, bytes or str."""
    value = getattr(argument, "value", argument)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def target(argument: Any) -> Any:
    """The object that an out argument points to."""
    inner = getattr(argument, "_obj", None)
    if inner is not None:
        return inner
    if isinstance(argument, ctypes._Pointer):
        return argument.contents
    return argument


def put(argument: Any, value: int) -> None:
    target(argument).value = value


def put_text(buffer: Any, size: Any, value: str) -> None:
    """Fill a char buffer, or refuse when it is too small."""
    raw = value.encode()
    if number(size) <= len(raw):
        raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    target(buffer).value = raw


def address(handle: Any) -> int:
    """The number inside an opaque handle; 0 for null."""
    inner = getattr(handle, "_obj", None)
    if inner is not None:
        handle = inner
    if isinstance(handle, int):
        return handle
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except (ctypes.ArgumentError, TypeError):
        return 0


def put_handle(argument: Any, value: int) -> None:
    ctypes.c_void_p.from_buffer(target(argument)).value = value


def as_handle(value: int, kind: Any) -> Any:
    return ctypes.cast(ctypes.c_void_p(value), kind)
