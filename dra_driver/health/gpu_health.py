"""The health of the node's GPUs: which GPUs are watched, what the kubelet receives, and which taints devices get.

The kubelet considers a device unknown if it has not received an update for a while, so the stream sends all devices
again at intervals. If the monitor hangs in the NVIDIA driver, devices become unknown instead of staying healthy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dra_driver.health.book import HealthBook
from dra_driver.health.monitor import Monitor
from dra_driver.health.rules.taints import (
    MadeInstance,
    TaintPolicy,
    device_reasons,
    device_taints,
    instances_by_device,
)
from dra_driver.health.rules.xids import XidPolicy
from dra_driver.health.store import HealthStore, ServicedGpus
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.rules.cleanups import Withholding
from dra_driver.kubelet.pb import dra_health_v1_pb2 as v1
from dra_driver.mig.mode import MigAction
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.health import HealthChange, PolledHealth, Reason, Severity
from dra_driver.model.ids import one_line
from dra_driver.model.inventory import OfferedDevice, VfioDevice
from dra_driver.model.mig import GpuLayout, OwnedInstance
from dra_driver.model.problems import NodeProblem
from dra_driver.nvml.health_source import HealthSource
from dra_driver.slices.rules.build import NEWEST_TAINTS, TaintLimits, Taints

_RESEND_S = 10.0
_TIMEOUT_S = 30
_MAX_MESSAGE = 1024


@dataclass(eq=False)
class HealthStream:
    """Streams the health of all `devices` to any number of subscribers, each in its own gRPC thread."""

    pool: str
    book: HealthBook
    devices: Callable[[], Iterable[OfferedDevice]]
    instances: Callable[[], Mapping[str, MadeInstance]]

    def __post_init__(self) -> None:
        self._turn = threading.Condition()
        self._changes = 0
        self._stopped = False

    def changed(self) -> None:
        with self._turn:
            self._changes += 1
            self._turn.notify_all()

    def stop(self) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def watch(self, _request: Any, context: Any) -> Iterator[v1.NodeWatchResourcesResponse]:
        """NodeWatchResources: yield all devices now, after each change, and at intervals.

        A slow subscriber may miss intermediate states, but never the last one.
        """
        context.add_callback(self._wake)
        while context.is_active() and not self._stopped:
            seen = self._changes
            yield self.snapshot()
            with self._turn:
                self._turn.wait_for(partial(self._is_due, seen, context), _RESEND_S)

    def snapshot(self) -> v1.NodeWatchResourcesResponse:
        states, instances = self.book.states(), self.instances()
        return v1.NodeWatchResourcesResponse(
            devices=[
                self._device(device, device_reasons(device, states, instances)) for device in self.devices()
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
                "the GPU is bound to vfio for a virtual machine, so its health cannot be read",
            )
        elif not self.book.is_fresh(uuid):
            health, message = v1.UNKNOWN, "the GPU has not answered recently, so its health is unknown"
            message = f"{message}; last known: {texts}" if texts else message
        elif any(reason.severity >= Severity.UNHEALTHY for reason in reasons):
            health, message = v1.UNHEALTHY, texts
        else:
            health, message = v1.HEALTHY, texts
        return v1.DeviceHealth(
            device=v1.DeviceIdentifier(pool_name=self.pool, device_name=device.name),
            health=health,
            last_updated_time=self.book.answered_at(uuid) or 0,
            health_check_timeout_seconds=_TIMEOUT_S,
            message=one_line(message, _MAX_MESSAGE),
        )


class GpuHealth:
    """`under_vfio` returns the UUIDs of the GPUs that are, or will soon be, bound to vfio. Several threads call the
    callbacks.
    """

    def __init__(
        self,
        source: HealthSource,
        *,
        node_name: str,
        plugin_directory: Path,
        boot_id: str,
        xids: XidPolicy,
        taint_policy: TaintPolicy,
        discovery: Discovery,
        host: Sysfs,
        lanes: Lanes,
        under_vfio: Callable[[], Collection[str]],
        ledger: Ledger,
        on_shown: Callable[[], object],
        on_transition: Callable[[HealthChange], None],
        on_polled: Callable[[str, PolledHealth], None],
    ) -> None:
        self._discovery, self._under_vfio, self._ledger = discovery, under_vfio, ledger
        self._on_shown = on_shown
        self.taint_policy = taint_policy
        self.book = HealthBook(
            HealthStore(plugin_directory / "health.json"),
            boot_id,
            self._health_changed,
            on_transition,
            ServicedGpus(plugin_directory, boot_id),
            xids,
        )
        self.monitor = Monitor(self.book, source, self.gpus, host.is_bound, lanes.hanging, on_polled)
        self.stream = HealthStream(node_name, self.book, self.devices, self.instances)

    def problems(self) -> Sequence[NodeProblem]:
        inventory = self._discovery.latest()
        found = self.monitor.problems({} if inventory is None else inventory.gpu_names)
        return [*found, *self.book.store.problems()]

    def devices_changed(self) -> None:
        self.monitor.devices_changed()
        self.stream.changed()

    def mig_changed(self, action: MigAction, *_: object) -> None:
        """Note that an instance may be gone, or that a new MIG mode ended NVML's event registrations."""
        if action in ("mode-on", "mode-off"):
            self.monitor.devices_changed()
        if any(target.is_instance for target in self.book.states()):
            self._health_changed()

    def instances(self) -> Mapping[str, MadeInstance]:
        return instances_by_device(self._ledger.details(OwnedInstance))

    def taints(
        self,
        pending: Callable[[OfferedDevice], Withholding | None],
        layouts: Mapping[str, GpuLayout],
        limits: TaintLimits = NEWEST_TAINTS,
    ) -> Taints:
        states, instances = self.book.states(), self.instances()
        policy = replace(self.taint_policy, limits=limits)
        return lambda device: device_taints(
            device, states, instances, policy, pending(device), layouts.get(device.gpu.uuid)
        )

    def _health_changed(self) -> None:
        self.stream.changed()
        self._on_shown()

    def gpus(self) -> Mapping[str, str | None] | None:
        """Return the GPUs to watch; None while discovery has no list of GPUs that can be trusted."""
        inventory = self._discovery.latest()
        is_unavailable = self._discovery.unavailable() is not None
        if inventory is None or (
            is_unavailable and (self._discovery.gpus_in_maintenance or not inventory.every_gpu)
        ):
            return None
        taken = self._under_vfio()
        return {gpu.uuid: gpu.pci_bus_id for gpu in inventory.every_gpu if gpu.uuid not in taken}

    def devices(self) -> Collection[OfferedDevice]:
        inventory = self._discovery.latest()
        return () if inventory is None else inventory.by_name.values()
