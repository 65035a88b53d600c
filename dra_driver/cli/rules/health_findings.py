"""The findings of `doctor` about the health of a node's GPUs and MIG devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn
from dra_driver.cli.rules.node_view import NodeView, SeenGpu, SeenReason
from dra_driver.cli.rules.prepared_claims import age_text
from dra_driver.health.rules.xids import is_program_fault, needs_reboot
from dra_driver.model.units import counted, named

_RESET = "{then}run `gpu-dra-driver detach{gpu}` and `nvidia-smi --gpu-reset -i {bus}` on the node; or reboot the node"
_WAIT = f"the taint clears by itself in about 30 seconds; if it does not: {_RESET}"
"""Only for Xids that NVIDIA's catalog attributes to programs."""
_RESET_OR_SERVICED = f"{_RESET}; if the taint stays after the reset, run `gpu-dra-driver serviced{{gpu}}`"
_REPLACE = "{then}have the GPU replaced"


def drain(node: str) -> str:
    """Return the remedy for a problem that only a reboot solves."""
    return f"`kubectl drain {node} --ignore-daemonsets --delete-emptydir-data`, then reboot the node"


_REBOOT = drain("{node}")
_RESTART = (
    "`kubectl delete pod -A -l app.kubernetes.io/name=gpu-dra-driver,app.kubernetes.io/component=node --field-selector "
    f"spec.nodeName={{node}}`; if that does not help, {_REBOOT}"
)
_FABRIC = "check `nvidia-smi -q | grep -A10 Fabric` and `systemctl status nvidia-fabricmanager` on the node"
_SLOW = "check the cooling and the power supply: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {bus}`"
_PCIE = (
    "run `nvidia-smi -q -i {bus} | grep -A9 'GPU Link Info'` on the node; check that the GPU sits firmly in its slot, "
    "and check the slot's firmware settings"
)
_REMEDIES: tuple[tuple[str, str], ...] = (
    ("gpu-lost", f"{_RESET}; `dmesg | grep -i xid` shows why it was lost"),
    ("row-remap failure", _REPLACE),
    ("reboot", _REBOOT),
    ("recovery-action reboot", _REBOOT),
    ("recovery-action system-reboot", _REBOOT),
    ("recovery-action bus-reset", _REBOOT),
    ("recovery-action drain-p2p", "delete the pods that use the GPU together with other GPUs{pods}"),
    ("recovery-action recover-imex-domain", "repair the IMEX daemons that are not READY in `nvidia-imex-ctl -N`"),
    ("recovery-action", _RESET),
    ("row-remap pending", _RESET),
    ("page-retirement", _RESET),
    ("memory", _REPLACE),
    ("sram", _REPLACE),
    ("bank-remap", _RESET),
    ("repair", _RESET),
    ("unresponsive no-answer", _RESET),
    ("unresponsive", _RESTART),
    ("xid", _RESET_OR_SERVICED),
    ("ecc", _RESET_OR_SERVICED),
    ("fabric pending", f"wait; if this lasts, {_FABRIC}"),
    ("fabric", _FABRIC),
    ("nvlink", f"{_RESET}; `nvidia-smi nvlink -s -i {{bus}}` shows the links; if they stay down, have the GPU or its "
               "board replaced"),
    ("flapping", "have the GPU tested; the health_changed log events show its history"),
    ("slowdown", _SLOW),
    ("nvlink-errors", "`nvidia-smi nvlink -e -i {bus}` shows error counts; if they keep growing, have the GPU tested"),
    ("pcie-width", _PCIE),
    ("pcie-generation", _PCIE),
    ("program", _WAIT),
    ("unmonitored", "gpu-dra-driver gets no Xids for this GPU; find them with `dmesg | grep -i xid`"),
)  # fmt: skip
"""Remedies, keyed by the first words of a reason. If a device has several reasons, the first match in this
table is used.
"""
_OTHER = "see `nvidia-smi -q -i {bus}` and `dmesg | grep -i nvrm` on the node"
_WORST_FIRST = ("lost", "unhealthy", "degraded", "information")
_FAILING = ("lost", "unhealthy")
_WITHOUT_WORK = ("unresponsive no-answer", "fabric")
"""Reasons that stop all work on the GPU, though they may clear by themselves."""


def health_findings(found: NodeView, *, has_nvml: bool) -> list[Finding]:
    """Return a finding for all unhealthy devices with the same reasons, worst first, or one if all are healthy.

    `has_nvml` is whether NVML answered. Reasons that NVML no longer shows are left out.
    """
    places = {gpu.name: gpu for gpu in found.gpus}
    ill: dict[str, list[SeenReason]] = {}
    for reason in found.health:
        if not reason.is_over:
            ill.setdefault(reason.subject, []).append(reason)
    alike: dict[tuple[tuple[str, str, str], ...], list[list[SeenReason]]] = {}
    for reasons in ill.values():
        key = tuple((reason.severity, reason.reason, reason.text) for reason in reasons)
        alike.setdefault(key, []).append(reasons)
    worst_first = sorted(alike.values(), key=lambda same: _WORST_FIRST.index(_worst(same[0])))
    lines = [_finding(places[_gpu_of(same[0])], same, found) for same in worst_first]
    lines += [*_unknown(found.gpus if has_nvml else ()), *_problems(found.notes)]
    return lines or [_all_well(found.gpus, has_nvml=has_nvml)]


def _pods_on(gpu: SeenGpu, found: NodeView) -> str:
    """Return the commands that delete the pods of claims on a GPU and its MIG devices; empty without claims."""
    pods: dict[str, dict[str, None]] = {}
    ends: dict[str, None] = {}
    for held in found.holdings:
        if held.device == gpu.name or held.device.startswith(f"{gpu.name}-"):
            namespace = held.claim.partition("/")[0]
            pods.setdefault(namespace, {}).update(dict.fromkeys(held.pods or ()))
            if not held.pods:
                ends[f"delete the pods of claim {held.claim}"] = None
    commands = (
        f"`kubectl -n {namespace} delete pod {' '.join(names)}`" for namespace, names in pods.items() if names
    )
    return " and ".join((*commands, *ends))


def _gpu_of(reasons: Sequence[SeenReason]) -> str:
    return reasons[0].subject.partition(" ")[0]


def _finding(gpu: SeenGpu, alike: Sequence[Sequence[SeenReason]], found: NodeView) -> Finding:
    """Return the finding for devices with the same reasons. `gpu` is the GPU of the first device."""
    reasons = alike[0]
    worst = _worst(reasons)
    texts = "; ".join(f"{reason.text.partition('; ')[0]}{_age(reason.since_s)}" for reason in reasons)
    name = _name(gpu, reasons[0])
    if len(alike) > 1:
        name = named(sorted(same[0].subject for same in alike))
    verb = "is" if len(alike) == 1 else "are"
    seen = f"{name}: {texts}" if worst == "information" else f"{name} {verb} {worst}: {texts}"
    remedy = _remedy(gpu, reasons, found)
    is_down = worst in _FAILING or any(one.reason.startswith(_WITHOUT_WORK) for one in reasons)
    return fail(seen, remedy) if is_down else warn(seen, remedy)


def _worst(reasons: Iterable[SeenReason]) -> str:
    return min((reason.severity for reason in reasons), key=_WORST_FIRST.index)


def _name(gpu: SeenGpu, reason: SeenReason) -> str:
    """Return a name such as `gpu-6b45fc99 (0000:1b:00.0)`; for an instance, the names of its MIG devices."""
    instance = reason.subject.partition(" ")[2]
    names = named(reason.devices) or reason.subject
    place = "" if gpu.pci_bus_id in (None, gpu.name) else f" ({gpu.pci_bus_id})"
    if reason.devices:
        place = f" ({gpu.pci_bus_id or gpu.name}, {instance})"
    return f"{names}{place}"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f" (for {age_text(seconds)})"


def _kind(reason: str) -> str:
    """Return the key of `_REMEDIES` for a reason. For an Xid it depends on the number."""
    key, _, number = reason.partition(" ")
    if key == "xid" and number.isdecimal():
        return (
            "program" if is_program_fault(int(number)) else "reboot" if needs_reboot(int(number)) else "xid"
        )
    return reason


def _remedy(gpu: SeenGpu, reasons: Sequence[SeenReason], found: NodeView) -> str:
    kinds = [_kind(reason.reason) for reason in reasons]
    remedy = next(
        (text for start, text in _REMEDIES if any(f"{one} ".startswith(f"{start} ") for one in kinds)), _OTHER
    )
    place = gpu.pci_bus_id or gpu.uuid
    pods = _pods_on(gpu, found)
    # Without a UUID, `detach` cannot find the GPU's claims; if no GPU is named, it checks all claims.
    return remedy.format(
        gpu=f" {place}" if gpu.uuid else "",
        bus=place,
        node=found.node,
        pods=pods and f": {pods}",
        then=pods and f"{pods}, then ",
    )


def _unknown(gpus: Iterable[SeenGpu]) -> Iterator[Finding]:
    unknown = [gpu.name for gpu in gpus if gpu.health == "unknown"]
    if unknown:
        yield warn(
            f"the health of {named(unknown)} is unknown",
            "run `nvidia-smi -q` on the node, then run doctor again",
        )


def _problems(problems: Iterable[str]) -> Iterator[Finding]:
    for problem in problems:
        seen, _, remedy = problem.rpartition("; ")
        yield warn(seen, remedy)


def _all_well(gpus: Sequence[SeenGpu], *, has_nvml: bool) -> Finding:
    if not has_nvml:
        return skip("not checked without NVML")
    if not gpus:
        return skip("NVML lists no GPU")
    return ok(f"{counted(len(gpus), 'GPU is', 'GPUs are')} healthy")
