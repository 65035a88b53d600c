"""Requests with devices that are used through MPS: which mix works, and what containers must name. No I/O.

CUDA looks for GPUs in one place: a process that is a client of an MPS daemon sees the devices of that daemon and no
others. A daemon has one device, or the whole GPUs of one request. A container gets all devices of each request that it
names, or of the whole claim if it names none. So a mix within a request can never work. A mix of requests works as long
as each container names its own, and only the pods say which they name: the plugin cannot refuse it, because claims for
several containers are made this way.
"""

from __future__ import annotations

from collections.abc import Sequence

from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import DeviceResult
from dra_driver.model.inventory import OfferedDevice, WholeGpu
from dra_driver.model.mps import MpsShared, SharingMode
from dra_driver.model.record import ClaimRecord


def refuse_mixed_requests(
    devices: Sequence[tuple[DeviceResult, OfferedDevice]], usages: Sequence[SharingMode]
) -> None:
    """Raises: ClaimRefusedError if a request has a device of an MPS daemon and one that the daemon does not have."""
    first: dict[str, tuple[OfferedDevice, SharingMode]] = {}
    for (result, device), usage in zip(devices, usages, strict=True):
        if result.admin_access:
            continue
        other, its_usage = first.setdefault(result.base_request, (device, usage))
        is_mps, is_other_mps = isinstance(usage, MpsShared), isinstance(its_usage, MpsShared)
        is_whole = isinstance(device, WholeGpu) and isinstance(other, WholeGpu)
        if is_mps and is_other_mps and device.name != other.name and not is_whole:
            raise ClaimRefusedError(
                f"request {result.base_request}: {other.name} and {device.name} have an MPS daemon each, because CUDA "
                "joins no MIG devices, and a container reaches only one; make a request with count 1 for each device "
                "and let each container name its own, or use the devices without MPS"
            )
        if is_mps != is_other_mps:
            shared, plain = (device, other) if is_mps else (other, device)
            raise ClaimRefusedError(
                f"request {result.base_request}: {shared.name} is used through MPS and {plain.name} is not, but a CUDA "
                f"process that uses MPS sees {shared.name} only; ask for one device a request, and let each container "
                "name its request"
            )


def advice_on_requests(record: ClaimRecord) -> str | None:
    """The sentence that says how containers must use a claim with MPS and several requests; None for other claims."""
    held = {(one.device, one.share_id): one for one in record.devices if not one.admin_access}
    through: dict[str, str | None] = {}
    for result in record.claim.results:
        one = held.get((result.device, result.share_id))
        if one is not None and not result.admin_access:
            usage = one.usage
            through[result.base_request] = (
                ", ".join(usage.spec.devices) if isinstance(usage, MpsShared) else None
            )
    with_mps = [f"{request} ({device})" for request, device in through.items() if device is not None]
    if not with_mps or len(through) == 1:
        return None
    others = [request for request, device in through.items() if device is None]
    beside = f", and {', '.join(others)} without MPS" if others else ""
    return (
        f"The claim has requests with MPS: {', '.join(with_mps)}{beside}. Let each container name one request "
        "(resources.claims[].request): a container that has several reaches one MPS daemon, and no GPU besides it"
    )
