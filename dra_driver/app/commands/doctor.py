"""The checks of `doctor`, put together for this node."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from dra_driver.app.commands.machine import CommandMachine
from dra_driver.app.commands.node import node_snapshot
from dra_driver.concurrency.bounded_call import bounded
from dra_driver.diagnostics.doctor.checks import Check, Shared
from dra_driver.diagnostics.doctor.cluster import ClusterChecks
from dra_driver.diagnostics.doctor.driver import DriverChecks
from dra_driver.diagnostics.doctor.kubelet import KubeletChecks
from dra_driver.diagnostics.doctor.passthrough import PassthroughChecks
from dra_driver.diagnostics.doctor.runtime import RuntimeChecks, host_directory
from dra_driver.diagnostics.rules.node_view import NodeView
from dra_driver.diagnostics.rules.top_data import NvmlFacts, node_view
from dra_driver.errors import DraDriverError
from dra_driver.host.processes import gpu_users
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.model.inventory import Inventory
from dra_driver.settings import Settings

_API_TIMEOUT_S = 4.0
_NVML_WAIT_S = 4.0
"""Less than a check may take: what is written down is shown also while NVML hangs."""


def doctor_checks(settings: Settings) -> list[Check]:
    """All checks of `doctor`, in the order in which it prints them."""
    machine = CommandMachine(settings)
    snapshot = node_snapshot(machine)
    # NVML is opened once: in one process, one session would shut down the other's.
    inventory = Shared(lambda: bounded("NVML", snapshot.read_inventory, _NVML_WAIT_S))
    state = Shared(machine.state)

    def look() -> NvmlFacts:
        with closing(snapshot):
            return snapshot.read_gpus(inventory.get())

    def view() -> NodeView:
        try:
            facts = bounded("NVML", look, _NVML_WAIT_S)
        except DraDriverError:
            facts = NvmlFacts(inventory.or_none() or Inventory())
        node, driver, notes = settings.node_name, settings.driver_name, state.get().notes
        now = datetime.now(UTC)
        return node_view(node, driver, now, facts, (), state.get(), (), notes, machine.is_on_demand)

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    host = host_directory(machine.paths, simulated=settings.simulate is not None, in_pod=in_pod)
    driver = DriverChecks(
        machine.paths,
        machine.nodes,
        inventory,
        Shared(view).get,
        settings.nvidia_cdi_hook_path,
        settings.dynamic_mig,
        lambda: gpu_users(
            "/proc",
            {pod.uid for one in state.get().records for pod in one.claim.pods or ()},
            # The processes are those of this host, and use other GPUs than those of a simulated machine.
            None if settings.simulate is None else os.path.realpath(machine.paths.host_driver_root),
        ),
        settings.extra_devices,
        settings.passthrough,
    )
    passthrough = PassthroughChecks(
        machine.vfio,
        lambda: machine.cards((inventory.or_none() or Inventory()).gpus),
        state.get,
        settings.for_virtual_machines is not None,
    )
    kubelet = KubeletChecks(
        settings.driver_name,
        Path(settings.kubelet_registrar_directory_path),
        Path(settings.kubelet_plugins_directory_path),
        state.get,
        Path(settings.cdi_root),
    )
    cluster = ClusterChecks(
        Shared(lambda: _api_client(settings)),
        settings.driver_name,
        settings.node_name,
        settings.dynamic_mig,
        sharing=bool(settings.sharing.entries),
        configured=settings.kubeconfig is not None or in_pod,
        claims=lambda: [record.ref for record in state.get().records],
    )
    checks = [*driver.all(), *passthrough.all()]
    return [*checks, *RuntimeChecks(settings.cdi_root, host).all(), *kubelet.all(), *cluster.all()]


def _api_client(settings: Settings) -> ApiClient:
    return ApiClient(load_endpoint(settings.kubeconfig), timeout_s=_API_TIMEOUT_S)
