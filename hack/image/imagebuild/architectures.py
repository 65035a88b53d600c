"""The processor architectures that images are made for, by the names that each world has for them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from localcluster.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Architecture:
    """``name`` is that of Debian and of container images, ``machine`` that of uname and of wheels."""

    name: str
    machine: str
    elf: int
    loader: str
    variant: str | None = None

    @property
    def libraries(self) -> str:
        """Debian's folder of libraries below /usr/lib."""
        return f"{self.machine}-linux-gnu"


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64", 62, "ld-linux-x86-64.so.2"),
    "arm64": Architecture("arm64", "aarch64", 183, "ld-linux-aarch64.so.1", variant="v8"),
}


def own() -> Architecture:
    """That of this machine. Raises: ClusterError if no image is made for it."""
    machine = os.uname().machine
    for known in ARCHITECTURES.values():
        if known.machine == machine:
            return known
    raise ClusterError(f"Images are made on x86_64 and aarch64, and this machine is {machine}.")
