"""A program that uses a card like a virtual machine: opens its group, maps memory for DMA, opens the device,
and holds it.

python vfio_user.py GROUP BUSID    prints `holds` when it has the device, and exits with its input
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys

_MAPPED = 1 << 20
_TYPE1V2 = 3
_VIABLE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _request(number: int) -> int:
    """A request of linux/vfio.h."""
    return (ord(";") << 8) | (100 + number)


GET_API_VERSION, CHECK_EXTENSION, SET_IOMMU, GROUP_GET_STATUS, GROUP_SET_CONTAINER = map(_request, range(5))
GROUP_GET_DEVICE_FD, IOMMU_MAP_DMA = _request(6), _request(13)


def _call(file: int, request: int, argument: object) -> int:
    code: int = _libc.ioctl(file, ctypes.c_ulong(request), argument)
    if code < 0:
        raise OSError(ctypes.get_errno(), f"{request:#x}: {os.strerror(ctypes.get_errno())}")
    return code


def main(group: str, bus_id: str) -> None:
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    assert fcntl.ioctl(container, CHECK_EXTENSION, _TYPE1V2) == 1
    file = os.open(f"/dev/vfio/{group}", os.O_RDWR)
    status = bytearray(struct.pack("II", 8, 0))
    fcntl.ioctl(file, GROUP_GET_STATUS, status)
    assert struct.unpack("II", status)[1] & _VIABLE, "the group is not viable"
    fcntl.ioctl(file, GROUP_SET_CONTAINER, struct.pack("i", container))
    _call(container, SET_IOMMU, ctypes.c_ulong(_TYPE1V2))
    memory = ctypes.create_string_buffer(_MAPPED * 2)
    start = ctypes.addressof(memory) + 4095 & ~4095
    _call(container, IOMMU_MAP_DMA, struct.pack("IIQQQ", 32, 3, start, 0, _MAPPED))
    _call(file, GROUP_GET_DEVICE_FD, bus_id.encode())
    print("holds", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
