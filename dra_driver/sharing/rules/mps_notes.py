"""What users of a running MPS daemon should know of it. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import MPS_NOT_EXCLUSIVE, MPS_USERS_WAIT


def notes_of(status: MpsDaemonStatus) -> Iterator[tuple[str, str]]:
    """(reason of an event, a sentence for a person) for each thing."""
    devices = ", ".join(status.spec.devices)
    if status.not_exclusive:
        yield (
            MPS_NOT_EXCLUSIVE,
            f"GPU {', '.join(status.not_exclusive)} does not support the compute mode EXCLUSIVE_PROCESS: a program "
            f"that does not reach the MPS daemon of {devices} runs on it without the limits of its claim; use another "
            "GPU where limits must hold",
        )
    if len(status.users) > 1 and not status.spec.multi_user:
        users = ", ".join(map(str, status.users))
        yield (
            MPS_USERS_WAIT,
            f"processes of the users {users} have the MPS daemon of {devices}, which serves one user at a time: CUDA "
            "calls of one user wait until all CUDA programs of the other have ended; run the pods as one user "
            "(runAsUser), or use multiUser, which needs NVIDIA driver R555 or newer",
        )
