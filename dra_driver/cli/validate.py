"""`gpu-dra-driver validate`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dra_driver.app.settings import DOCUMENT, Flag, config_values
from dra_driver.cli.flags import (
    CLUSTER_KUBECONFIG,
    CONTEXT,
    SIMULATE_SEVERAL,
    of_run,
    switch,
    usual_kubeconfig,
)
from dra_driver.cli.inspect import OwnershipUnknownError, slices_to_publish
from dra_driver.cli.machine import CommandMachine, answered
from dra_driver.cli.output import COLOR, OUTPUT, Output, answer, colored, hanging
from dra_driver.cli.scratch import scratch_settings
from dra_driver.cli.validation.cluster_objects import ClusterObjects, read_cluster, references
from dra_driver.cli.validation.documents import Document, read_documents
from dra_driver.cli.validation.machine_fit import MachineFit
from dra_driver.cli.validation.manifest_check import DEFAULT_NAMESPACE, DocumentReport, check_documents
from dra_driver.cli.validation.rules.layout_trial import MigGpu
from dra_driver.errors import DraDriverError, InvalidConfigError, NvmlUnavailableError
from dra_driver.health.rules.taints import PREFIX
from dra_driver.kube.endpoint import load_endpoint
from dra_driver.mig.rules.layouts import layout_gpus
from dra_driver.model.dataclass import asdict
from dra_driver.model.inventory import Inventory
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import counted

EXIT_NOT_READ = 3
"""No faults were found, but the cluster could not be read."""
_INDENT = " " * 9


FLAGS = (
    Flag("files", "YAML files or directories; - is standard input.", metavar="FILE", count="+"),
    SIMULATE_SEVERAL,
    switch("server", "Also use the DeviceClasses, claims and templates of the cluster."),
    CLUSTER_KUBECONFIG,
    CONTEXT,
    Flag(
        "namespace",
        "Namespace for documents without one.",
        spelled=("-n", "--namespace"),
        env=(),
        shown="that of the context",
    ),
    OUTPUT,
    COLOR,
    *of_run("driver_name", "nvidia_driver_root", "container_driver_root", "simulator_dir"),
    *of_run(
        "kubelet_plugins_directory_path",
        "config",
        "consumable_shares",
        "dynamic_mig",
        "passthrough",
        "device_names",
    ),
)
EXAMPLES = ("claims.yaml", "--simulate dgx-h100 examples/one-gpu", "--server -n ml job.yaml")


def validate(given: Namespace) -> int:
    """Check ResourceClaims, their templates, DeviceClasses, pods and workloads, and configuration files of
    gpu-dra-driver. It also checks whether each claim, and all claims of a pod together, fit a machine with all
    devices free: a simulated machine, or this node with the configuration from --config or from the files. Exit code
    0: no fault, 1: faults, 2: wrong usage, 3: no fault found, but the cluster could not be read.
    """
    documents = list(read_documents(given.files, DOCUMENT.fields))
    if not documents:
        raise InvalidConfigError(f"there are no documents in {', '.join(given.files)}")
    if not given.server and (given.kubeconfig or given.context):
        raise InvalidConfigError("--kubeconfig and --context need --server; add it, or remove them")
    configured, faults = configured_among(documents)
    tried = _machines(configured, vars(given), given.config, given.simulate)
    cluster, namespace = None, given.namespace
    if given.server:
        cluster, namespace = _cluster(documents, given.kubeconfig, given.context, namespace)
    reports = check_documents(
        documents,
        tried.driver,
        tried.machines,
        faults,
        cluster,
        namespace or DEFAULT_NAMESPACE,
        tried.evicting,
    )
    _print(reports, tried.sentence, cluster, given.output, is_colored=given.color.is_on())
    if any(report.faults for report in reports):
        return 1
    return EXIT_NOT_READ if cluster is not None and cluster.problem else 0


class _Tried(NamedTuple):
    """`evicting` has the keys of the plugin's taints with the effect NoExecute."""

    machines: Sequence[MachineFit]
    sentence: str
    driver: str
    evicting: Sequence[str]


def _machines(
    configured: JsonObject, given: Mapping[str, Any], config: Path | None, simulate: Sequence[str] | None
) -> _Tried:
    names: list[str | None] = [*dict.fromkeys(simulate or ())] or [None]
    if len(names) > 1 and given["simulator_dir"] is not None:
        raise InvalidConfigError("--simulator-dir is the directory of one machine; use --simulate once")
    stated = {name: value for name, value in given.items() if value is not None and name != "simulate"}
    found: list[MachineFit] = []
    for name in names:
        own = {} if name is None else {"simulate": name}
        with scratch_settings("validate", configured | stated | own, config) as settings:
            machine, sentence = answered(settings, partial(machine_to_try, CommandMachine(settings)))
        found += [] if machine is None else [machine]
    if not found:
        sentence = f"fit not checked, because {sentence}"
    elif len(found) == 1:
        sentence = f"checked against {found[0].name} with all devices free ({sentence})"
    else:
        listed = ", ".join(f"{one.name} ({counted(len(one.devices), 'device')})" for one in found)
        sentence = f"checked against {listed}, each on its own and with all devices free"
    evicting = [PREFIX + key for key, effect in settings.taint_effects.items() if effect == "NoExecute"]
    return _Tried(found, sentence, settings.driver_name, evicting)


def _cluster(
    documents: Sequence[Document], kubeconfig: str | None, context: str | None, namespace: str | None
) -> tuple[ClusterObjects, str]:
    endpoint = load_endpoint(kubeconfig or usual_kubeconfig(), context=context)
    used = namespace or endpoint.namespace
    return read_cluster(endpoint, references(documents, used)), used


def _print(
    reports: Sequence[DocumentReport],
    machines: str,
    cluster: ClusterObjects | None,
    output: Output,
    *,
    is_colored: bool,
) -> None:
    bad = sum(1 for report in reports if report.faults)

    def lines(columns: int | None) -> Iterator[str]:
        places = max(len(report.place) for report in reports)
        verdicts = max(5, *(len(report.verdict) for report in reports))
        for report in reports:
            head = f"{report.verdict:<{verdicts}}  {report.place:<{places}}  "
            yield colored(report.verdict, hanging(head, report.name, columns), is_on=is_colored)
            for label, texts in (("fault: ", report.faults), ("hint: ", report.hints), ("", report.notes)):
                yield from (hanging(_INDENT + label, text, columns) for text in texts)
        open_ones = sum(1 for report in reports if report.verdict == "not judged")
        unjudged = f", {open_ones} not judged" if open_ones else ""
        summary = f"{counted(len(reports), 'document')}, {bad} with faults{unjudged}; {machines}"
        yield "\n" + hanging("", summary, columns)
        if cluster is not None:
            read = f"not read: {cluster.problem}" if cluster.problem else "DeviceClasses and claims were read"
            yield hanging("", f"the cluster {cluster.server}: {read}", columns)

    found: dict[str, Any] = {"machine": machines, "faulty": bad}
    if cluster is not None:
        found["server"] = {"url": cluster.server, "problem": cluster.problem}
    answer(output, lines, lambda: {**found, "documents": [asdict(report) for report in reports]})


def machine_to_try(machine: CommandMachine) -> tuple[MachineFit | None, str]:
    """Return the machine, if any, and a sentence about it.

    Raises: NvmlUnavailableError if a simulated machine has no NVML.
    """
    settings = machine.settings
    name = settings.simulate or "this node"
    try:
        slices, _, inventory = slices_to_publish(machine, is_empty=True)
    except NvmlUnavailableError as error:
        if settings.simulate is not None:
            raise
        reason = str(error).partition(";")[0]
        return None, f"this node has no usable GPU ({reason}); choose a machine with --simulate"
    except OwnershipUnknownError as error:
        return None, f"{error}; run this as root"
    fit = MachineFit(
        name,
        settings.driver_name,
        slices,
        inventory,
        settings.sharing,
        settings.extra_devices,
        settings.power,
        gpus_for_layouts(machine, inventory),
    )
    if settings.simulate is None and not fit.devices:
        return (
            None,
            "this node has no device (no GPU, or no MIG device in MIG mode); choose a machine with --simulate",
        )
    return fit, counted(len(fit.devices), "device")


def gpus_for_layouts(machine: CommandMachine, inventory: Inventory) -> list[MigGpu]:
    from dra_driver.nvml.mig_changes import MigHardware

    found = []
    with ExitStack() as session, suppress(NvmlUnavailableError):
        machine.open_nvml(session)
        hardware = MigHardware(nullcontext)
        for index, gpu in layout_gpus(inventory):
            try:
                pci_id, profiles = hardware.cuts(gpu)
            except DraDriverError:
                continue
            name = f"GPU {index} ({gpu.product_name or gpu.uuid})"
            found.append(MigGpu(index, name, pci_id, profiles, machine.is_on_demand(gpu)))
    return found


def configured_among(documents: Sequence[Document]) -> tuple[JsonObject, Mapping[int, tuple[str, ...]]]:
    values: JsonObject = {}
    faults: dict[int, tuple[str, ...]] = {}
    for number, document in enumerate(documents):
        if document.is_configuration:
            try:
                values |= config_values(document.content, Path(document.file))
            except InvalidConfigError as error:
                faults[number] = error.faults or (str(error),)
    return values, faults
