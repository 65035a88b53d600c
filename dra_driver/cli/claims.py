"""`gpu-dra-driver claims`."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from dra_driver.cli.flags import OF_NODE, switch
from dra_driver.cli.node import prepared_claims
from dra_driver.cli.output import OUTPUT, answer, hanging
from dra_driver.cli.rules.prepared_claims import ClaimDevice, NodeClaims, PreparedClaim, age_text
from dra_driver.cli.scratch import node_settings
from dra_driver.model.claim import Pods
from dra_driver.model.dataclass import asdict
from dra_driver.model.problems import FailingClaim
from dra_driver.model.steps import STEPS
from dra_driver.model.units import named
from dra_driver.reporting.receipts import ended_receipts, kept_advice, read_kept
from dra_driver.reporting.rules.advice import Advice
from dra_driver.reporting.rules.receipts import Receipt, ended, line

FLAGS = (
    switch("ended", "Show what the last 1,000 ended claims used, newest first."),
    switch("advise", "Show which claims were idle, or need only a smaller MIG device or a share."),
    OUTPUT,
    *OF_NODE,
)
EXAMPLES = ("", "-o yaml", "--ended -o json", "--advise")
_SHOWN = {step.tag: step.shown for step in STEPS}


def claims(given: Namespace) -> None:
    """Show their devices and pods, from the records on this node. Works without the API server and NVML, even if
    gpu-dra-driver is not running, and changes nothing. Use the same directory flags as for `run`. The pods of a
    shared claim are recorded every ten minutes; -o json and -o yaml list all pods. With --ended it shows the
    receipts of ended claims instead: GPU-hours, busy time, peak of memory, energy. gpu-dra-driver writes them once a
    minute. With --advise it shows what to change about claims that ran for ten minutes or more, also those that
    still run.
    """
    settings = node_settings(given)
    if given.advise:
        kept = read_kept(settings.plugin_directory)
        found = [("", one) for one in kept_advice(kept, settings.driver_name)]
        objects = [asdict(one) for _, one in found]
        answer(given.output, partial(advice_lines, found), lambda: {"advice": objects})
        return
    if given.ended:
        receipts = ended_receipts(read_kept(settings.plugin_directory))
        shown = {"ended": [asdict(ended(one)) for one in receipts]}
        answer(given.output, partial(_ended_lines, receipts), lambda: shown)
        return
    prepared = prepared_claims(settings)
    answer(given.output, partial(_lines, prepared, settings.plugin_directory), lambda: asdict(prepared))


def _lines(found: NodeClaims, directory: Path, width: int | None) -> list[str]:
    is_empty = not found.claims and not found.failing
    lines = [f"no prepared claims found (records: {directory / 'claims'})"] if is_empty else []
    lines += [_failing(one, width) for one in found.failing]
    for claim in found.claims:
        set_up = ", ".join(_SHOWN[step] for step in reversed(claim.undo))
        state = ", ".join(_state(claim, found.running.get(claim.uid)))
        lines.append(hanging(f"{claim.namespace}/{claim.name}  {state}  ", pods_text(claim.pods), width))
        lines.append(hanging(f"    uid {claim.uid}; ", f"set up: {set_up or 'nothing'}", width))
        lines += [_device(device, width) for device in claim.devices]
    lines += [hanging("", one.text, width) for one in found.cleanups]
    lines += [hanging("problem: ", problem, width) for problem in found.problems]
    return lines


def _ended_lines(receipts: Sequence[Receipt], width: int | None) -> list[str]:
    lines = [] if receipts else ["no claim has ended since gpu-dra-driver began to write receipts"]
    for one in receipts:
        at = datetime.fromtimestamp(one.until, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        when = f"ended {at}" if one.end == "ended" else f"ENDED AFTER {at}, while gpu-dra-driver did not run"
        lasted = age_text(max(0.0, one.until - one.began))
        lines.append(hanging(f"{one.claim.namespace}/{one.claim.name}  ", f"{when}, ran for {lasted}", width))
        lines += [hanging("    ", line(part), width) for part in one.parts]
    return lines


def advice_lines(found: Sequence[tuple[str, Advice]], width: int | None) -> Iterator[str]:
    """Yield the advice for each claim, then why others have none. `found` has its node, or "" for this node."""
    known = [(node, one) for node, one in found if one.advice != "unknown"]
    if not known:
        yield hanging("", "no receipt shows a claim of ten minutes or more that was idle or too large", width)
    for node, one in known:
        claim = f"{node}  {one.namespace}/{one.name}".lstrip()
        lasted = f"{'running' if one.end == 'running' else 'ran'} for {age_text(one.seconds)}"
        yield hanging(f"{claim}  ", lasted, width)
        yield hanging("    ", one.text, width)
        yield from (hanging("        ", line, width) for line in one.change)
    without = {(one.uid, one.text): None for _, one in found if one.advice == "unknown"}
    for text, count in Counter(text for _, text in without).items():
        yield hanging("", f"no advice for {count} claim{'s' * (count > 1)}: {text}", width)


def _failing(one: FailingClaim, width: int | None) -> str:
    tries = "1 try" if one.count == 1 else f"{one.count} tries"
    lasted = age_text(max(0.0, time.time() - one.since))
    head = f"{one.ref.namespace}/{one.ref.name}  {one.operation.upper()} FAILING for {lasted}, {tries}: "
    return hanging(head, one.error, width)


def _state(claim: PreparedClaim, busy_gpu: str | None) -> Iterator[str]:
    if claim.phase == "prepared":
        yield "Prepared" if claim.age_s is None else f"Prepared {age_text(claim.age_s)} ago"
    elif busy_gpu is not None:
        yield f"Preparing: an operation is running on {busy_gpu}"
    else:
        yield "NOT PREPARED SINCE THE LAST BOOT" if claim.boot == "earlier" else "Preparing"
    if claim.maintenance is not None:
        yield f"maintenance: {claim.maintenance}"
    if claim.boot == "unknown":
        yield "BOOT UNKNOWN"
    if claim.cdi_spec != "present" and claim.phase == "prepared":
        yield f"CDI SPEC {claim.cdi_spec.upper()}"


def pods_text(pods: Pods) -> str:
    if pods is None:
        return "pods unknown"
    if not pods:
        return "no pod"
    return f"{'pod' if len(pods) == 1 else 'pods'} {named([pod.name for pod in pods])}"


def _device(device: ClaimDevice, width: int | None) -> str:
    rest = [
        device.mig,
        device.usage,
        f"limits: {', '.join(device.limits)}" if device.limits else None,
        f"share {device.share_id}" if device.share_id else None,
        "admin access" if device.admin_access else None,
        f"on {device.gpu_uuid}" if device.gpu_uuid != device.uuid else None,
    ]
    name = f"    {device.device}  {device.kind}  {device.uuid or '-'}  "
    return hanging(name, "; ".join(filter(None, rest)), width)
