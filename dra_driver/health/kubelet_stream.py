"""The stream of device health that the kubelet shows in the status of pods.

The kubelet takes a device for unknown when it has not heard of it for a while, so everything is sent again at
intervals. Each answer is made again from the monitor's last poll of the GPU: while the monitor hangs in the NVIDIA
driver, devices become unknown and do not stay healthy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dra_driver.health.rules.taints import device_reasons
from dra_driver.kubelet.pb import dra_health_v1_pb2 as v1
from dra_driver.model.health import Reason, Severity
from dra_driver.model.ids import one_line
from dra_driver.model.inventory import OfferedDevice, VfioDevice

if TYPE_CHECKING:
    from dra_driver.health.gpu_health import GpuHealth

_RESEND_S = 10.0
_TIMEOUT_S = 30
_MAX_MESSAGE = 1024


@dataclass(eq=False)
class HealthStream:
    """Serves any number of subscribers, each in its own gRPC thread."""

    pool: str
    health: GpuHealth

    def __post_init__(self) -> None:
        self._turn = threading.Condition()
        self._changes = 0
        self._stopped = False

    def changed(self) -> None:
        """Devices or their health may differ; every subscriber gets all of them at once."""
        with self._turn:
            self._changes += 1
            self._turn.notify_all()

    def stop(self) -> None:
        """End every stream."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def watch(self, _request: Any, context: Any) -> Iterator[v1.NodeWatchResourcesResponse]:
        """NodeWatchResources: all devices now, after each change, and at intervals; until the caller is gone.

        A subscriber that reads slowly misses states in between, but never the last one.
        """
        context.add_callback(self._wake)
        while context.is_active() and not self._stopped:
            seen = self._changes
            yield self.snapshot()
            with self._turn:
                self._turn.wait_for(partial(self._is_due, seen, context), _RESEND_S)

    def snapshot(self) -> v1.NodeWatchResourcesResponse:
        """Every published device as it is known now."""
        states, instances = self.health.book.states(), self.health.instances()
        return v1.NodeWatchResourcesResponse(
            devices=[
                self._device(device, device_reasons(device, states, instances))
                for device in self.health.devices()
            ]
        )

    def _is_due(self, seen: int, context: Any) -> bool:
        return self._changes != seen or self._stopped or not context.is_active()

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def _device(self, device: OfferedDevice, reasons: tuple[Reason, ...]) -> v1.DeviceHealth:
        uuid = device.gpu.uuid
        texts = "; ".join(dict.fromkeys(reason.text for reason in reasons))
        if isinstance(device, VfioDevice) and device.card.is_bound:
            health, message = (
                v1.UNKNOWN,
                "the GPU is under vfio for a virtual machine, so nobody on the node watches it",
            )
        elif not self.health.book.is_fresh(uuid):
            health, message = v1.UNKNOWN, "the GPU has not answered lately, so its health is not known"
            message = f"{message}; last known: {texts}" if texts else message
        elif any(reason.severity >= Severity.UNHEALTHY for reason in reasons):
            health, message = v1.UNHEALTHY, texts
        else:
            health, message = v1.HEALTHY, texts
        return v1.DeviceHealth(
            device=v1.DeviceIdentifier(pool_name=self.pool, device_name=device.name),
            health=health,
            last_updated_time=self.health.book.answered_at(uuid) or 0,
            health_check_timeout_seconds=_TIMEOUT_S,
            message=one_line(message, _MAX_MESSAGE),
        )
