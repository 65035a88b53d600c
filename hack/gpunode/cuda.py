"""A program of the CUDA driver API, for a pod with one GPU: it needs only libcuda.so.1.

compute    adds two vectors on the GPU by a kernel from PTX, and compares the result with the CPU's
fault      writes to an address outside its allocations, which the driver reports as Xid 31 or 13
processors prints the number of multiprocessors that a program may use
hold MIB   allocates so much memory, keeps it, and says when memory ran out
"""

from __future__ import annotations

import ctypes
import sys
import time
from array import array
from typing import Any

_COUNT = 1 << 20
_BLOCK = 256
_PTX = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b, .param .u32 n)
{
    .reg .pred %p<2>; .reg .f32 %f<4>; .reg .b32 %r<6>; .reg .b64 %d<6>;
    ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %d3, %r5, 4;
    add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3;
    ld.global.f32 %f1, [%d4]; ld.global.f32 %f2, [%d5];
    add.f32 %f3, %f1, %f2; st.global.f32 [%d4], %f3;
DONE:
    ret;
}
\0"""
_OUT_OF_MEMORY = 2
_MULTIPROCESSORS = 16


class CudaError(Exception):
    """A call of the CUDA driver API failed."""


class Cuda:
    """One GPU with a context."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises: CudaError with its number."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise CudaError(f"{name} failed with {result}")

    def allocate(self, size: int) -> ctypes.c_uint64:
        """Return the address of `size` bytes on the GPU."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def launch(self, first: ctypes.c_uint64, second: ctypes.c_uint64) -> None:
        """Add the second vector to the first, and wait."""
        module, kernel, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint32(_COUNT)
        self.call("cuModuleLoadData", ctypes.byref(module), _PTX)
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, b"add")
        places = [ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in (first, second, count)]
        parameters = (ctypes.c_void_p * 3)(*places)
        grid = ((_COUNT + _BLOCK - 1) // _BLOCK, 1, 1)
        self.call("cuLaunchKernel", kernel, *grid, _BLOCK, 1, 1, 0, None, parameters, None)
        self.call("cuCtxSynchronize")


def compute(cuda: Cuda) -> str:
    """Return `as expected`, or the first wrong number."""
    first = array("f", (float(number % 1000) for number in range(_COUNT)))
    size = _COUNT * 4
    places = [cuda.allocate(size), cuda.allocate(size)]
    host = (ctypes.c_float * _COUNT).from_buffer(first)
    for place in places:
        cuda.call("cuMemcpyHtoD_v2", place, host, ctypes.c_size_t(size))
    cuda.launch(*places)
    result = (ctypes.c_float * _COUNT)()
    cuda.call("cuMemcpyDtoH_v2", result, places[0], ctypes.c_size_t(size))
    for number in range(_COUNT):
        if result[number] != 2.0 * (number % 1000):
            return f"element {number} is {result[number]}"
    name, total = ctypes.create_string_buffer(96), ctypes.c_size_t()
    cuda.call("cuDeviceGetName", name, 96, cuda.device)
    cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), cuda.device)
    return f"{name.value.decode()}, {total.value >> 20} MiB: {_COUNT} sums as expected"


def fault(cuda: Cuda) -> str:
    """Return `as expected` if the GPU refuses the write."""
    try:
        cuda.launch(ctypes.c_uint64(0x10), ctypes.c_uint64(0x10))
    except CudaError as error:
        return f"{error}, as expected"
    return "the write to an invalid address succeeded"


def hold(cuda: Cuda, mib: int) -> str:
    """Allocate memory in steps of 64 MiB, and return how much there was."""
    held = 0
    while held < mib:
        try:
            cuda.allocate(64 << 20)
        except CudaError as error:
            if not str(error).endswith(f" {_OUT_OF_MEMORY}"):
                raise
            return f"out of memory after {held} MiB"
        held += 64
    return f"holds {held} MiB"


def main() -> None:
    """Run one mode, print one line, and stay until the pod ends."""
    mode, *rest = sys.argv[1:]
    cuda = Cuda()
    match mode:
        case "compute":
            print(compute(cuda), flush=True)
        case "processors":
            found = ctypes.c_int()
            cuda.call("cuDeviceGetAttribute", ctypes.byref(found), _MULTIPROCESSORS, cuda.device)
            print(found.value, flush=True)
        case "fault":
            print(fault(cuda), flush=True)
        case "hold":
            print(hold(cuda, int(rest[0])), flush=True)
            time.sleep(3600)


if __name__ == "__main__":
    main()
