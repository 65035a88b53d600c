"""The findings of `doctor` about health."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dra_driver.cli.rules.findings import Finding, fail, ok, skip, warn
from dra_driver.cli.rules.node_view import NodeView, SeenGpu, SeenReason
from dra_driver.cli.rules.prepared_claims import age_text
from dra_driver.health.rules.taints import DEFAULT_POLICY, TaintPolicy, keeps_claims_away
from dra_driver.health.rules.xids import remedy_of_xid
from dra_driver.model.health import Severity
from dra_driver.model.remedies import OF_REASONS, reboot, reset
from dra_driver.model.units import counted, named

_OTHER = "see `nvidia-smi -q -i {gpu}` and `dmesg | grep -i nvrm` on the node"
_WORST_FIRST = ("lost", "unhealthy", "degraded", "information")


def health_findings(
    found: NodeView, *, has_nvml: bool, policy: TaintPolicy = DEFAULT_POLICY
) -> list[Finding]:
    """Return a finding for all unhealthy devices with the same reasons, worst first.

    A reason that may be over, because the plugin is not running, is only a warning.
    """
    places = {gpu.name: gpu for gpu in found.gpus}
    ill: dict[tuple[str, float | None], list[SeenReason]] = {}
    for reason in found.health:
        ill.setdefault((reason.subject, reason.saved_s), []).append(reason)
    alike: dict[tuple[tuple[str, str, str], ...], list[list[SeenReason]]] = {}
    for reasons in ill.values():
        key = tuple((reason.severity, reason.reason, reason.text) for reason in reasons)
        alike.setdefault(key, []).append(reasons)
    worst_first = sorted(alike.values(), key=lambda same: _WORST_FIRST.index(_worst(same[0])))
    lines = [_finding(places[_gpu_of(same[0])], same, found, policy) for same in worst_first]
    lines += [*_unknown(found, has_nvml=has_nvml), *_problems(found.notes)]
    return lines or [_all_well(found.gpus, has_nvml=has_nvml)]


def _pods_on(gpu: SeenGpu, found: NodeView) -> str:
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


def _finding(
    gpu: SeenGpu, alike: Sequence[Sequence[SeenReason]], found: NodeView, policy: TaintPolicy
) -> Finding:
    reasons = alike[0]
    worst = _worst(reasons)
    texts = "; ".join(f"{reason.text.partition('; ')[0]}{_age(reason.since_s)}" for reason in reasons)
    name = _name(gpu, reasons[0])
    if len(alike) > 1:
        name = named(sorted(same[0].subject for same in alike))
    saved_s = reasons[0].saved_s
    if saved_s is not None:
        seen = f"gpu-dra-driver saved for {name} {age_text(saved_s)} ago: {texts}"
        return warn(seen, "start gpu-dra-driver, which reads the health of the GPUs again")
    verb = "is" if len(alike) == 1 else "are"
    seen = f"{name}: {texts}" if worst == "information" else f"{name} {verb} {worst}: {texts}"
    remedy = _remedy(gpu, reasons, found)
    keeps_away = any(
        keeps_claims_away(one.reason.partition(" ")[0], Severity[one.severity.upper()], policy)
        for one in reasons
    )
    return fail(seen, remedy) if keeps_away else warn(seen, remedy)


def _worst(reasons: Iterable[SeenReason]) -> str:
    return min((reason.severity for reason in reasons), key=_WORST_FIRST.index)


def _name(gpu: SeenGpu, reason: SeenReason) -> str:
    instance = reason.subject.partition(" ")[2]
    names = named(reason.devices) or reason.subject
    place = "" if gpu.pci_bus_id in (None, gpu.name) else f" ({gpu.pci_bus_id})"
    if reason.devices:
        place = f" ({gpu.pci_bus_id or gpu.name}, {instance})"
    return f"{names}{place}"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f" (for {age_text(seconds)})"


def _kind(reason: SeenReason) -> str:
    """Return what a key of `OF_REASONS` begins with. For an Xid it depends on the severity, then on the number."""
    key, _, value = reason.reason.partition(" ")
    if reason.severity == "information" and key in ("xid", "nvlink"):
        return f"information-{key}"
    if key == "xid" and value.isdecimal():
        return remedy_of_xid(int(value))
    return reason.reason


def _remedy(gpu: SeenGpu, reasons: Sequence[SeenReason], found: NodeView) -> str:
    kinds = [_kind(reason) for reason in reasons]
    remedy = next(
        (text for start, text in OF_REASONS if any(f"{one} ".startswith(f"{start} ") for one in kinds)),
        _OTHER,
    )
    place = gpu.pci_bus_id or gpu.uuid
    pods = _pods_on(gpu, found)
    return remedy.format(
        gpu=place,
        pods=pods and f": {pods}",
        reset=f"{pods and f'{pods}, then '}{reset(place)}",
        reboot=reboot(found.node),
    )


def _unknown(found: NodeView, *, has_nvml: bool) -> Iterator[Finding]:
    unknown = [gpu.name for gpu in found.gpus if gpu.health == "unknown"] if has_nvml else []
    if unknown and found.unwatched is not None:
        seen = f"the health of {named(unknown)} is unknown: {found.unwatched}"
        yield warn(seen, "start gpu-dra-driver, then run doctor again")
    elif unknown:
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
