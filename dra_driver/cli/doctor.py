"""`gpu-dra-driver doctor`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial

from dra_driver.app.settings import Settings
from dra_driver.base.threads import bounded
from dra_driver.cli.checks.check import BOUND_S, Check, Shared, folded, run_checks
from dra_driver.cli.checks.cluster import ClusterChecks
from dra_driver.cli.checks.driver import DriverChecks
from dra_driver.cli.checks.kubelet import KubeletChecks
from dra_driver.cli.checks.passthrough import PassthroughChecks
from dra_driver.cli.checks.runtime import RuntimeChecks, host_directory
from dra_driver.cli.flags import of_run
from dra_driver.cli.machine import SIMULATED_S, CommandMachine
from dra_driver.cli.node import NodeSnapshot
from dra_driver.cli.output import COLOR, OUTPUT, Output, answer, colored, hanging
from dra_driver.cli.rules.findings import Outcome, verified
from dra_driver.cli.rules.node_view import NodeView, NvmlFacts, node_view
from dra_driver.cli.scratch import scratch_settings
from dra_driver.cli.state_on_disk import is_only_simulated, plugin_problems, plugin_runs, read_claims
from dra_driver.host.processes import gpu_users
from dra_driver.kube.client import ApiClient
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.model.dataclass import asdict
from dra_driver.model.inventory import Inventory
from dra_driver.model.units import counted

FLAGS = (
    OUTPUT,
    COLOR,
    *of_run("node_name", "driver_name", "config", "cdi_root", "nvidia_driver_root", "container_driver_root"),
    *of_run("host_root", "nvidia_cdi_hook_path", "kubelet_registrar_directory_path"),
    *of_run(
        "kubelet_plugins_directory_path",
        "kubeconfig",
        "simulate",
        "simulator_dir",
        "dynamic_mig",
        "passthrough",
        "device_names",
    ),
    *of_run("imex_channel", "host_devices", "http_endpoint"),
)
EXAMPLES = (
    "",
    "--simulate dgx-h100",
    "-o json",
)


def doctor(given: Namespace) -> int:
    """Check the host, the health of the GPUs, the container runtime, the plugin, the kubelet and the cluster. It
    writes a small file into each directory that the plugin needs and removes it; it changes nothing else. Run it in
    the pod of gpu-dra-driver (`kubectl exec`), where it has the right settings, or on the node with the flags of
    `run`. Exit code 0: no check fails, 1: at least one check fails.
    """
    with scratch_settings("doctor", vars(given), given.config) as settings:
        bound_s = SIMULATED_S if is_only_simulated(settings) else BOUND_S
        outcomes = run_checks(doctor_checks(settings), bound_s)
    _print(outcomes, given.output, is_colored=given.color.is_on())
    return int(any(outcome.finding.status == "FAIL" for outcome in outcomes))


_LAST = ("OK", "SKIP", "WARN", "FAIL")


def _print(outcomes: Sequence[Outcome], output: Output, *, is_colored: bool) -> None:
    found = Counter(outcome.finding.status for outcome in outcomes)
    counts = {status: found[status] for status in ("OK", "WARN", "FAIL", "SKIP")}

    def lines(width: int | None) -> Iterator[str]:
        shown = folded(outcomes)
        names = max(len(outcome.check) for outcome in shown)
        for outcome in sorted(shown, key=lambda one: _LAST.index(one.finding.status)):
            finding = outcome.finding
            line = hanging(f"{finding.status:<4}  {outcome.check:<{names}}  ", finding.seen, width)
            yield colored(finding.status, line, is_on=is_colored)
            if finding.remedy is not None:
                yield hanging(f"      {'':<{names}}  -> ", finding.remedy, width)
        bad = counts["FAIL"] + counts["WARN"]
        summary = f"{counted(bad, 'problem')}: " if bad else "no problems: "
        yield "\n" + summary + ", ".join(f"{count} {status}" for status, count in counts.items())

    checks = [{"check": outcome.check, **asdict(outcome.finding)} for outcome in outcomes]
    answer(output, lines, lambda: {"counts": counts, "verified": verified(outcomes), "checks": checks})


_API_TIMEOUT_S = 4.0
_NVML_WAIT_S = 4.0
"""Less than half the time limit of a check, so that checks can show saved state if NVML hangs."""


def doctor_checks(settings: Settings) -> list[Check]:
    """Return all checks, from the host to the cluster."""
    machine = CommandMachine(settings)
    snapshot = NodeSnapshot(machine)
    # NVML is opened only once: in one process, closing one session would shut down the other.
    nvml_wait_s = SIMULATED_S - 1 if is_only_simulated(settings) else _NVML_WAIT_S
    inventory = Shared(lambda: bounded("NVML", snapshot.read_inventory, nvml_wait_s))
    state = Shared(machine.state)

    def look() -> NvmlFacts:
        found = inventory.get()
        with closing(snapshot):  # if NVML hangs, closing it would hang too
            return snapshot.read_gpus(found)

    gpus = Shared(lambda: bounded("NVML", look, nvml_wait_s))

    def view() -> NodeView:
        facts = gpus.or_none() or NvmlFacts(inventory.or_none() or Inventory())
        node, driver, now, saved = settings.node_name, settings.driver_name, datetime.now(UTC), state.get()
        claims = read_claims(saved, settings, now).claims
        runs = plugin_runs(settings.plugin_directory)
        return node_view(node, driver, now, facts, claims, saved, notes=saved.notes, plugin_runs=runs)

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    host = host_directory(machine.paths, simulated=settings.simulate is not None, in_pod=in_pod)
    driver = DriverChecks(
        machine.paths,
        machine.nodes,
        inventory,
        Shared(view).get,
        settings,
        lambda: gpu_users(
            "/proc",
            {pod.uid for one in state.get().records for pod in one.claim.pods or ()},
            # /proc lists the host's processes, whose GPUs are not those of a simulated machine.
            None if settings.simulate is None else os.path.realpath(machine.paths.host_driver_root),
        ),
    )
    passthrough = PassthroughChecks(
        machine.vfio,
        lambda: machine.cards((inventory.or_none() or Inventory()).gpus),
        state.get,
        settings.for_virtual_machines is not None,
    )
    reported = partial(plugin_problems, settings.plugin_directory, settings.http_endpoint)
    kubelet = KubeletChecks(settings, state.get, None if is_only_simulated(settings) else reported)
    cluster = ClusterChecks(
        Shared(lambda: ApiClient(load_endpoint(settings.kubeconfig), timeout_s=_API_TIMEOUT_S)),
        settings,
        configured=settings.kubeconfig is not None or in_pod,
        claims=lambda: [record.ref for record in state.get().records],
        has_gpus=lambda: bool(machine.sysfs.gpus()),
    )
    checks = [*driver.all(), *passthrough.all()]
    return [*checks, *RuntimeChecks(settings.cdi_root, host).all(), *kubelet.all(), *cluster.all()]
