"""Claims for virtual machines: what else they may have."""

from __future__ import annotations

from collections.abc import Sequence

from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import DeviceResult
from dra_driver.model.record import DeviceKind


def is_for_virtual_machine(devices: Sequence[tuple[DeviceResult, DeviceKind]]) -> bool:
    """Whether a claim's devices go to a virtual machine.

    Raises: ClaimRefusedError if only some of them do, since the NVIDIA driver's files would reach the virtual machine's
    pod; or if the claim would only look at one.
    """
    passed = [result for result, kind in devices if kind == "vfio"]
    others = [result for result, kind in devices if kind != "vfio"]
    for result in passed:
        if others:
            raise ClaimRefusedError(
                f"requests {result.request} and {others[0].request}: device {result.device} is for a virtual machine, "
                f"and device {others[0].device} is for containers, so one claim cannot have both; use two claims"
            )
        if result.admin_access:
            raise ClaimRefusedError(
                f"request {result.request}: device {result.device} is for a virtual machine, so adminAccess has "
                "nothing to look at; request a device of type gpu or mig"
            )
    return bool(passed)
