"""The kernel's word on hardware that came or went and on drivers that were loaded or bound: uevents by netlink.

They reach a pod too, unless it has a user namespace of its own. Some get lost (the queue of a socket is bounded), so
whoever listens looks for himself as well, at a slower pace.
"""

from __future__ import annotations

import errno
import os
import socket

_KOBJECT_UEVENT = 15
_KERNEL = 1
_MOST_BYTES = 16 * 1024
_VENDOR = b"PCI_ID=10DE:"


class Uevents:
    """The uevents of NVIDIA's devices and kernel modules, from now on."""

    def __init__(self) -> None:
        """Raises: OSError where the kernel does not let us listen."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _KOBJECT_UEVENT
        )
        try:
            self._socket.bind((0, _KERNEL))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Readable while there is something to hear."""
        return self._socket.fileno()

    def heard(self) -> bool:
        """Take what is there; whether it concerns a GPU, or may, since some was lost. Raises: OSError."""
        concerns = False
        while True:
            try:
                message, sender = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return concerns
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                concerns = True
                continue
            # Any process can send to this socket; the kernel's own port is 0.
            concerns |= sender[0] == 0 and concerns_gpus(message)

    def close(self) -> None:
        """End."""
        self._socket.close()


def concerns_gpus(message: bytes) -> bool:
    """Whether a uevent is of an NVIDIA PCI function or of NVIDIA's kernel module."""
    header, _, rest = message.partition(b"\0")
    fields = rest.split(b"\0")
    if b"SUBSYSTEM=pci" in fields:
        return any(field.startswith(_VENDOR) for field in fields)
    return b"SUBSYSTEM=module" in fields and os.path.basename(header) == b"nvidia"  # noqa: PTH119  bytes
