"""Decides which IMEX channels a claim's device gets."""

from __future__ import annotations

from typing import Final

from dra_driver.errors import ClaimRefusedError, RetryableError
from dra_driver.model.claim import DeviceResult
from dra_driver.model.host import MAX_IMEX_CHANNELS, ImexChannels
from dra_driver.model.inventory import Inventory, OfferedDevice, WholeGpu
from dra_driver.model.remedies import FABRIC
from dra_driver.model.units import counted

_UNREADY: Final = {
    "pending": "is not registered with its NVLink fabric yet",
    "broken": "could not be registered with its NVLink fabric",
    "unknown": "does not report whether it is registered with an NVLink fabric",
}


def imex_of(
    result: DeviceResult, device: OfferedDevice, channels: ImexChannels | None, inventory: Inventory
) -> ImexChannels | None:
    """On a node that gives no channels, the GPU's fabric need not be ready: a program that starts too early
    fails (CUDA error 802), and works after its container restarts. A taint keeps new pods away.

    Raises: like `gets_channels`; RetryableError if the NVIDIA driver has no channels; ClaimRefusedError if it
    has too few or too many for the configuration.
    """
    if channels is None or not gets_channels(result, device):
        return None
    count = inventory.imex_channels
    if count is None:
        raise RetryableError(
            f"request {result.request}: device {device.name} is in a fabric, but the NVIDIA driver of this node has no "
            "IMEX channels; `gpu-dra-driver doctor` shows what is missing"
        )
    if channels == "all" and count > MAX_IMEX_CHANNELS:
        raise ClaimRefusedError(
            f"request {result.request}: the configuration requests all IMEX channels for device {device.name}, but the "
            f"NVIDIA driver of this node has {count}, and a container can have at most {MAX_IMEX_CHANNELS}; set "
            "imex.channel to a number, or load the module nvidia with a smaller NVreg_ImexChannelCount"
        )
    if channels != "all" and channels >= count:
        raise ClaimRefusedError(
            f"request {result.request}: the configuration requests IMEX channel {channels} for device {device.name}, "
            f"but the NVIDIA driver of this node has {counted(count, 'channel')}; set imex.channel to a number "
            f"below {count}, or load the module nvidia with a larger NVreg_ImexChannelCount"
        )
    return channels


def gets_channels(result: DeviceResult, device: OfferedDevice) -> bool:
    """Whether a device is a whole GPU that can reach GPUs of other nodes over NVLink, without adminAccess.

    Raises: RetryableError while the GPU is not registered with its fabric. Until then, the claim may need a
    channel, and a claim prepared without it would never get it.
    """
    if result.admin_access or not isinstance(device, WholeGpu):
        return False
    unready = device.gpu.unready_fabric
    if unready is not None:
        raise RetryableError(
            f"request {result.request}: GPU {device.gpu.uuid} of device {device.name} {_UNREADY[unready.state]}: "
            f"{unready.text}; the claim may need an IMEX channel, so the plugin cannot prepare it yet; the kubelet "
            f"retries; if this lasts, {FABRIC}"
        )
    return device.gpu.fabric is not None
