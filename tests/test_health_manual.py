"""docs/health.md describes the health model; its tables are generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import get_args

import pynvml
import pytest
import yaml

from dra_driver.app.settings import config_values
from dra_driver.cli.validation.rules.manifests import object_faults
from dra_driver.health import book, poller
from dra_driver.health import gpu_health as healthstream
from dra_driver.health.gpu_health import HealthStream
from dra_driver.health.rules import state as rules
from dra_driver.health.rules.state import observe
from dra_driver.health.rules.taints import PREFIX, TaintPolicy, taints_of
from dra_driver.health.rules.xids import CATALOG
from dra_driver.kubelet.pb import dra_health_v1_pb2 as pb
from dra_driver.model.claim import HeldDevice
from dra_driver.model.health import (
    TAINTED_KEYS,
    DoubleBitError,
    FabricState,
    Hanging,
    HealthChange,
    HealthState,
    HealthStates,
    HealthTarget,
    MonitoringState,
    NoAnswer,
    NvLinks,
    Observation,
    PolledHealth,
    PollResult,
    Reason,
    Severity,
    Unreachable,
    Xid,
)
from dra_driver.model.inventory import WholeGpu
from dra_driver.model.remedies import OF_REASONS
from dra_driver.reporting.claim_status import ClaimHealthReporter
from tests.fakes.samples import DRIVER, GPU_0, h100, record, uuid
from tests.fakes.tables import IsGenerated

MANUAL = Path(__file__).parents[1] / "docs/health.md"
NOW = 1_800_000_000
GPU = HealthState(HealthTarget(uuid(0)))
ACTIONS = [value for name, value in vars(pynvml).items() if name.startswith("NVML_GPU_RECOVERY_ACTION_")]
HEADERS = {"signals": "| Reason | Meaning |\n|---|---|\n", "xids": "| Xid | Meaning |\n|---|---|\n"}
NO_TAINT = ("", "Healthy")
GROUPS = {
    ("NoSchedule", "Unhealthy"): "Taint with `NoSchedule`; devices of pods become `Unhealthy`:",
    ("NoSchedule", "Healthy"): "Taint with `NoSchedule`:",
    ("None", "Healthy"): "Taint with `None`:",
    NO_TAINT: "No taint:",
}
"""By the effect of the taint and what the kubelet shows for pods, the worst first."""


@pytest.mark.parametrize("name", ["signals", "xids"])
def test_manual_says_what_the_model_makes_of_each_observation(name: str, is_generated: IsGenerated) -> None:
    rows = [*MAKERS[name]()]
    assert {group for group, _ in rows} == {*GROUPS}
    made = "\n".join(
        f"{title}\n\n{HEADERS[name]}" + "".join(text for found, text in rows if found == group)
        for group, title in GROUPS.items()
        if (name, group) != ("xids", NO_TAINT)
    )
    is_generated(MANUAL, name, made + harmless() if name == "xids" else made)


def harmless() -> str:
    """Xids without a taint; NVIDIA's catalog says what they mean."""
    numbers = sorted(number for number in CATALOG if not reported(Xid(number)))
    return f"\nNo taint: {', '.join(ranges(numbers))}.\n"


Row = tuple[tuple[str, str], str]
"""The key in `GROUPS`, and the line of the table."""


def signal_rows() -> Iterator[Row]:
    """Everything that the model can say but Xids."""
    looks = [PolledHealth(recovery_action=action) for action in sorted(ACTIONS)]
    looks += [PolledHealth(fabric=state) for state in get_args(FabricState)]
    looks += [PolledHealth(slowdowns=frozenset({cause})) for cause in ("hardware", "power", "thermal")]
    looks += [
        PolledHealth(accepts_work=False),
        PolledHealth(remap_failed=True),
        PolledHealth(remap_pending=True),
        PolledHealth(pages_pending=True),
        PolledHealth(sram_exceeded=True),
        PolledHealth(memory_unrepairable=True),
        PolledHealth(bank_remap_pending=True),
        PolledHealth(repairs_pending=frozenset({"channel", "tpc"})),
        PolledHealth(pcie_narrow=True, pcie_slow=True),
    ]
    links = [NvLinks(tuple(range(18)), to_switches=to_switches) for to_switches in (False, True)]
    stories: list[list[Observation]] = [[PollResult(signals)] for signals in looks]
    stories += [
        [DoubleBitError()],
        [Unreachable()],
        [MonitoringState("NVML sends no events for the GPU: …")],
        [Hanging("an operation of gpu-dra-driver", rules.UNRESPONSIVE_AFTER_S)],
        [PollResult(PolledHealth(answered=False))] * rules.SILENT_POLLS,
        [NoAnswer(40.0)],
    ]
    stories += [
        [PollResult(PolledHealth(nvlinks=all_up)), PollResult(PolledHealth(nvlinks=replace(all_up, up=(0,))))]
        for all_up in links
    ]
    stories += [[PollResult(PolledHealth(nvlinks=all_up, equal_nvlinks=99))] for all_up in links]
    stories += [
        [PollResult(PolledHealth(nvlink_errors={kind: count})) for count in (0, 1)]
        for kind in ("crc", "recovery", "replay")
    ]
    stories += [[PollResult(PolledHealth(ecc_uncorrected=0)), PollResult(PolledHealth(ecc_uncorrected=2))]]
    stories += [
        [PollResult(PolledHealth(fabric="broken")), PollResult(PolledHealth(fabric="ready"))] * rules.FLAPS
    ]
    reasons = {(reason.name, reason.severity): reason for story in stories for reason in reported(*story)}
    tainted = {reason.key for reason in reasons.values() if taints_of([reason], TaintPolicy())}
    assert tainted | {"xid"} == set(TAINTED_KEYS)
    for _, reason in sorted(reasons.items()):
        text = re.sub(r"^2 uncorr", "N uncorr", reason.text)
        text = re.sub(r"\d+(, \d+)*( and \d+ more)?", "N", text) if reason.key == "nvlink" else text
        shown = f"{reason.key}={reason.value}" if reason.value else reason.key
        yield group_of(reason), f"| `{shown}` | {text} |\n"


def xid_rows() -> Iterator[Row]:
    """One row for numbers with the same meaning and action, the worst first, and those without meaning last."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for number, entry in CATALOG.items():
        reasons = reported(Xid(number))
        severity = reasons[0].severity if reasons else 0
        rows.setdefault((f"{9 - severity}", entry.text, entry.action.name), []).append(number)
    for (_, text, bucket), numbers in sorted(rows.items(), key=lambda item: (item[0][0], min(item[1]))):
        [number, *_] = numbers
        reasons = reported(Xid(number))
        shown = ", ".join(ranges(numbers))
        notes = [f"`{bucket}`"] if bucket else []
        notes += ["NVML"] if CATALOG[number].action.severity == "undecided" else []
        in_brackets = f" ({', '.join(notes)})" if notes else ""
        group = group_of(reasons[0]) if reasons else ("", "Healthy")
        yield group, f"| {shown} | {text}{in_brackets} |\n"


def ranges(numbers: Sequence[int]) -> Iterator[str]:
    """
    >>> [*ranges([1, 2, 5, 6, 7])]
    ['1', '2', '5-7']
    """
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        found = [str(number) for _, number in run]
        yield from [f"{found[0]}-{found[-1]}"] if len(found) > 2 else found


MAKERS: Mapping[str, Callable[[], Iterator[Row]]] = {"signals": signal_rows, "xids": xid_rows}


def reported(*observations: Observation) -> tuple[Reason, ...]:
    state = GPU
    for observation in observations:
        state = observe(state, observation, NOW)
    return state.reasons


def group_of(reason: Reason) -> tuple[str, str]:
    taints = taints_of([reason], TaintPolicy())
    assert [taint["key"] for taint in taints] in ([], [PREFIX + reason.key])
    return taints[0]["effect"] if taints else "", pods(reason)


class OneReason:
    """A book of health that knows one reason."""

    def __init__(self, reason: Reason) -> None:
        self._reason = reason

    def states(self) -> HealthStates:
        return {GPU.target: HealthState(GPU.target, (self._reason,))}

    def answered_at(self, _gpu_uuid: str) -> int:
        return NOW

    def is_fresh(self, _gpu_uuid: str) -> bool:
        return True


def pods(reason: Reason) -> str:
    """What the kubelet shows for pods on a GPU with the reason."""
    stream = HealthStream("node-a", OneReason(reason), lambda: [WholeGpu(GPU_0, h100(0))], dict)
    [device] = stream.snapshot().devices
    return pb.HealthStatus.Name(device.health).title()


KINDS = {
    "reboot-xid": "`xid` with the action `RESTART_BM` or `RESTART_VM`",
    "mechanical-xid": "`xid` with the action `CHECK_MECHANICALS`",
    "program-xid": "`xid` that a program caused",
    "information-xid": "`xid` with the effect `None`",
    "information-nvlink": "`nvlink` with the effect `None`",
}


def test_manual_has_the_remedies_of_doctor(is_generated: IsGenerated) -> None:
    starts = [start for start, _ in OF_REASONS]
    assert {*TAINTED_KEYS} <= {start.partition(" ")[0] for start in starts}
    rows: dict[str, list[str]] = {}
    for start, remedy in OF_REASONS:
        name = KINDS.get(start, f"`{start.replace(' ', '=')}`")
        has_exact = any(other.startswith(f"{start} ") or other.endswith(f"-{start}") for other in starts)
        do = remedy.format(
            gpu="GPU",
            pods="",
            reset="[reset the GPU](#reset-a-gpu)",
            reboot="drain the node and reboot it",
        )
        rows.setdefault(do.replace("|", "\\|"), []).append(f"other {name}" if has_exact else name)
    lines = [f"| {', '.join(names)} | {do} |\n" for do, names in rows.items()]
    is_generated(MANUAL, "remedies", "".join(["| Reason | What to do |\n|---|---|\n", *lines]))


def test_health_changes_write_four_events() -> None:
    written: set[str] = set()

    class Listener:
        def node_event(self, reason: str, message: str, *, warning: bool) -> None:
            written.add(reason)

        def claim_event(self, ref: object, reason: str, message: str, *, warning: bool) -> None:
            written.add(reason)

    claim = record(HeldDevice("gpu-0", "gpu", GPU.target.gpu_uuid, GPU.target.gpu_uuid))
    news = ClaimHealthReporter(
        recorder=Listener(),
        statuses=None,
        records=lambda: {claim.ref.uid: claim},
        inventory=lambda: None,
        created_instance=lambda device: None,
    )
    for before, after in product(Severity, Severity):
        news.health_changed(HealthChange(GPU.target, NOW, before, after, "text"))
    news.health_changed(HealthChange(GPU.target, NOW, Severity.LOST, Severity.OK, "text", is_gone=True))
    assert written == {"GPUUnhealthy", "GPULost", "GPURecovered", "GPUGone"}


def test_examples_of_the_manuals_are_right() -> None:
    texts = [path.read_text() for path in (MANUAL, MANUAL.with_name("configuration.md"))]
    found = [
        yaml.safe_load(block) for text in texts for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    ]
    settings = [config_values(block, MANUAL) for block in found if "health" in block]
    assert settings == [
        {
            "ignored_xids": {94},
            "fatal_xids": {31},
            "taint_effects": {"gpu-lost": "NoExecute", "unmonitored": "NoSchedule"},
        }
    ]
    [claim] = [block for block in found if "kind" in block]
    assert object_faults(claim, DRIVER) == []


def test_times_in_the_manual_are_those_of_the_driver() -> None:
    text = " ".join(MANUAL.read_text().split())
    for sentence in (
        f"polls every GPU every {poller._POLL_EVERY_S:.0f} s",
        f"the PCIe link every {poller._RARE_EVERY_S:.0f} s",
        f"last answer is older than {book.FRESH_S:.0f} s",
        f"has not returned for {book.OVERDUE_S:.0f} s",
        f"kept as information for {rules.REMEMBER_S // 60} minutes",
        f"{rules.SETTLE_S} s have passed since the last such event",
        f"{rules.SETTLE_UNSURE_S // 60} minutes have passed since the last such Xid",
        f"went bad {rules.FLAPS} times within an hour keeps this taint for {rules.HOLD_S // 60} minutes",
        f"at most {rules.HOLD_MAX_S // 3600} hours",
    ):
        assert sentence in text
    assert (rules.FLAP_WINDOW_S, healthstream._TIMEOUT_S) == (3600, book.FRESH_S)
