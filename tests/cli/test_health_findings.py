"""The lines of `doctor` on GPUs and MIG devices that are not well."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dra_driver.cli.rules.findings import Finding
from dra_driver.cli.rules.health_findings import health_findings
from dra_driver.cli.rules.node_state import NodeState, SavedHealth
from dra_driver.cli.rules.node_view import (
    Holding,
    NodeView,
    NvmlFacts,
    SeenGpu,
    SeenReason,
    node_view,
)
from dra_driver.health.rules.state import observe
from dra_driver.health.rules.taints import TaintPolicy
from dra_driver.health.rules.xids import CATALOG
from dra_driver.model.gpu import Gpu
from dra_driver.model.health import HealthState, HealthTarget, NoAnswer, Severity, Xid
from dra_driver.model.inventory import Inventory
from dra_driver.model.remedies import reboot, reset
from tests.fakes.tables import tabled

ONE = SeenGpu("gpu-1", "GPU-1", health="ok", pci_bus_id="0000:1b:00.0")
TWO = SeenGpu("gpu-2", "GPU-2", health="ok", pci_bus_id="0000:43:00.0")
RESET = reset("0000:1b:00.0")


def seen(severity: str, reason: str, subject: str = "gpu-1", **more: Any) -> SeenReason:
    return SeenReason(subject, severity, reason, more.pop("since_s", 720.0), f"text of {reason}", **more)


def of(*reasons: SeenReason, gpus: tuple[SeenGpu, ...] = (ONE, TWO), **more: Any) -> list[Finding]:
    view = NodeView("node", "driver", "", gpus=gpus, health=reasons, notes=more.pop("problems", ()))
    return health_findings(view, has_nvml=more.pop("has_nvml", True), **more)


def test_healthy_gpus_are_one_line() -> None:
    assert of() == [Finding("OK", "2 GPUs are healthy")]
    assert of(gpus=(ONE,)) == [Finding("OK", "1 GPU is healthy")]
    assert of(gpus=()) == [Finding("SKIP", "NVML lists no GPU")]
    assert of(has_nvml=False) == [Finding("SKIP", "not checked without NVML")]


def test_each_device_has_a_line_with_its_reasons_when_several_are_ill(
    is_golden: Callable[[Path, str], None],
) -> None:
    found = of(
        seen("information", "slowdown thermal", since_s=None),
        seen("unhealthy", "xid 95", "gpu-2"),
        seen("degraded", "row-remap pending", "gpu-2", since_s=5.0),
        seen("unhealthy", "xid 62", "gpu-2 GI 7 CI 0", devices=("gpu-2-mig-1g10gb-19-0",)),
        seen("degraded", "xid 94", "gpu-2 GI 1"),
    )
    lines = [f"{one.status} {one.seen}\n  {one.remedy}\n" for one in found]
    is_golden(Path(__file__).with_name("golden") / "several-ill.txt", "".join(lines))


def test_a_reason_that_the_plugin_saved_before_it_ended_is_a_warning() -> None:
    saved = seen("unhealthy", "xid 95", saved_s=300.0)
    found, current = of(saved, seen("degraded", "row-remap pending"))
    assert (found.status, found.seen, found.remedy) == (
        "WARN",
        "gpu-dra-driver saved for gpu-1 (0000:1b:00.0) 5m ago: text of xid 95 (for 12m)",
        "start gpu-dra-driver, which reads the health of the GPUs again",
    )
    assert current.seen.startswith("gpu-1 (0000:1b:00.0) is degraded: text of row-remap pending")


@tabled("reasons", "status", "part")
def test_the_remedy_is_that_of_the_reason_that_weighs_most(
    reasons: list[str], status: str, part: str
) -> None:
    (found,) = of(*(seen(*reason.split(" ", 1)) for reason in reasons))
    assert found.status == status
    assert part in str(found.remedy)
    assert (part == RESET) <= (found.remedy == RESET)
    assert "{" not in str(found.remedy)


def test_a_reason_fails_if_it_keeps_claims_away() -> None:
    """The taints that the node is configured to have decide, but a lost or silent GPU serves no claim."""
    policy = TaintPolicy(
        {"nvlink": "None", "gpu-lost": "None", "unresponsive": "None", "unmonitored": "NoSchedule"}
    )
    found = {
        reason: of(seen(severity, reason), policy=policy)[0].status
        for severity, reason in (
            ("degraded", "nvlink down"),
            ("degraded", "row-remap pending"),
            ("lost", "gpu-lost"),
            ("degraded", "unresponsive"),
            ("information", "unmonitored"),
            ("information", "xid 63"),
        )
    }
    assert found == {
        "nvlink down": "WARN", "row-remap pending": "FAIL", "gpu-lost": "FAIL", "unresponsive": "FAIL",
        "unmonitored": "FAIL", "xid 63": "WARN",
    }  # fmt: skip


@pytest.mark.parametrize("number", [*CATALOG, 999])
def test_informational_xid_gives_no_reason_for_a_reset_or_a_reboot(number: int) -> None:
    state = observe(HealthState(HealthTarget("GPU-1")), Xid(number), 0)
    for reason in state.reasons:
        if reason.severity == Severity.INFORMATION:
            (found,) = of(SeenReason("gpu-1", "information", f"xid {number}", 1.0, reason.text))
            assert found.status == "WARN"
            assert not re.search("reset|reboot|serviced", f"{reason.text} {found.remedy}")


@pytest.mark.parametrize("reason", ["unresponsive", "unresponsive no-answer", "unresponsive nvml-hangs"])
def test_hang_is_no_reason_to_stop_the_plugin(reason: str) -> None:
    (found,) = of(seen("degraded", reason))
    assert "delete pod" not in str(found.remedy)
    assert "reboot the node" in str(found.remedy)


def test_gpu_whose_nvml_call_hangs_is_not_reset() -> None:
    """detach cannot close NVML then, and nvidia-smi would hang too."""
    for reason in observe(HealthState(HealthTarget("GPU-1")), NoAnswer(40.0), 0).reasons:
        (found,) = of(SeenReason("gpu-1", "degraded", " ".join(reason.name), 40.0, reason.text))
        assert not re.search("detach|nvidia-smi|reset", f"{reason.text} {found.remedy}")
        assert reboot("node") in str(found.remedy)


@pytest.mark.parametrize(("hanging", "reason"), [(0, "gpu-lost"), (1, "unresponsive nvml-hangs")])
def test_gpu_that_nvml_has_not_read_is_lost_only_if_no_call_hangs(hanging: int, reason: str) -> None:
    facts = NvmlFacts(Inventory(hanging=hanging), hidden={"0000:1b:00.0": "GPU-1"})
    known = NodeState(health=SavedHealth((HealthState(HealthTarget("GPU-1", 3, 0)),)))
    now = datetime(2026, 8, 7, tzinfo=UTC)
    view = node_view("node", "driver", now, facts, state=known, plugin_runs=True)
    assert [(one.subject, one.reason) for one in view.health] == [("gpu-1", reason)]


@pytest.mark.parametrize(("indexes", "lost"), [((0, 2), 1), ((0, 1), None)], ids=["kept", "given to another"])
def test_lost_gpu_stays_in_its_place_and_has_an_index_that_no_other_gpu_has(
    indexes: tuple[int, int], lost: int | None
) -> None:
    gpus = tuple(
        Gpu(f"GPU-{number}", index, pci_bus_id=f"0000:{number}b:00.0")
        for number, index in zip((1, 3), indexes, strict=True)
    )
    facts = NvmlFacts(Inventory(gpus=gpus), hidden={"0000:2b:00.0": "GPU-2"})
    now = datetime(2026, 8, 7, tzinfo=UTC)
    view = node_view("node", "driver", now, facts, plugin_runs=True)
    assert [(one.uuid, one.index) for one in view.gpus] == [
        ("GPU-1", indexes[0]),
        ("GPU-2", lost),
        ("GPU-3", indexes[1]),
    ]


def test_pods_on_a_bad_gpu_and_its_mig_devices_are_named_in_the_command_that_ends_them() -> None:
    holdings = tuple(
        Holding(device, "gpu", "", "", claim=f"{namespace}/c", uid="u", pods=pods)
        for namespace, device, pods in (
            ("ml", "gpu-1", ("a", "b")),
            ("web", "gpu-1-mig-1g10gb-19-0", ("c",)),
            ("ml", "gpu-2", ("other",)),
            ("ml", "gpu-1", None),
        )
    )
    view = NodeView(
        "n", "d", "now", gpus=(ONE, TWO), holdings=holdings, health=(seen("unhealthy", "ecc double-bit"),)
    )
    (found,) = health_findings(view, has_nvml=True)
    assert str(found.remedy).startswith(
        "`kubectl -n ml delete pod a b` and `kubectl -n web delete pod c` and delete the pods of claim ml/c, then run "
        "`gpu-dra-driver detach 0000:1b:00.0`"
    )


def test_wait_is_the_first_advice_only_for_the_fault_of_a_program() -> None:
    for number, waits in (
        (48, False),
        (79, False),
        (95, False),
        (62, False),
        (13, True),
        (31, True),
        (43, True),
    ):
        (found,) = of(seen("degraded", f"xid {number}"))
        assert ("clears by itself" in str(found.remedy)) == waits, number


def test_unknown_health_is_a_warning() -> None:
    unread = SeenGpu("gpu-3", "GPU-3", pci_bus_id="0000:52:00.0")
    assert of(gpus=(ONE, unread), problems=("the file cannot be read: x; y; do it",)) == [
        Finding(
            "WARN", "the health of gpu-3 is unknown", "run `nvidia-smi -q` on the node, then run doctor again"
        ),
        Finding("WARN", "the file cannot be read: x; y", "do it"),
    ]
    assert of(gpus=(unread,), has_nvml=False) == [Finding("SKIP", "not checked without NVML")]
    unwatched = NodeView("node", "driver", "", gpus=(unread,), unwatched="gpu-dra-driver is not running")
    assert health_findings(unwatched, has_nvml=True) == [
        Finding(
            "WARN",
            "the health of gpu-3 is unknown: gpu-dra-driver is not running",
            "start gpu-dra-driver, then run doctor again",
        )
    ]


def test_devices_with_the_same_reasons_share_a_line() -> None:
    (found,) = of(seen("degraded", "fabric pending"), seen("degraded", "fabric pending", "gpu-2"))
    assert (found.status, found.seen) == (
        "FAIL",
        "gpu-1, gpu-2 are degraded: text of fabric pending (for 12m)",
    )
