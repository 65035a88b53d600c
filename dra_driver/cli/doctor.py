"""`gpu-dra-driver doctor`: is everything there that the node needs, is every GPU well, and if not, what to do."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dra_driver.cli.flags import of_run
from dra_driver.cli.output import COLOR, OUTPUT, Output, answer, colored
from dra_driver.cli.scratch import node_settings, this_machine
from dra_driver.diagnostics.rules.tables import hanging

if TYPE_CHECKING:
    from dra_driver.diagnostics.doctor.checks import Outcome


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
    *of_run("imex_channel", "host_devices"),
)
EXAMPLES = (
    "",
    "--simulate dgx-h100",
    "-o json",
)


def doctor(given: Namespace) -> int:
    """Host, health of the GPUs, runtime, kubelet and cluster. Changes nothing. Run it in the pod of gpu-dra-driver
    (`kubectl exec`), where it has the right settings, or on the node with the flags of `run`. Exit code 0: nothing
    fails, 1: a line says FAIL.
    """
    from dra_driver.app.commands.doctor import doctor_checks
    from dra_driver.diagnostics.doctor.checks import run_checks

    outcomes = run_checks(doctor_checks(node_settings(given, this_machine())))
    _print(outcomes, given.output, is_colored=given.color.is_on())
    return int(any(outcome.finding.status == "FAIL" for outcome in outcomes))


def _print(outcomes: Sequence[Outcome], output: Output, *, is_colored: bool) -> None:
    from dra_driver.diagnostics.doctor.checks import folded
    from dra_driver.diagnostics.rules.findings import verified

    found = Counter(outcome.finding.status for outcome in outcomes)
    counts = {status: found[status] for status in ("OK", "WARN", "FAIL", "SKIP")}

    def lines(width: int | None) -> Iterator[str]:
        shown = folded(outcomes)
        names = max(len(outcome.check) for outcome in shown)
        for outcome in shown:
            finding = outcome.finding
            line = hanging(f"{finding.status:<4}  {outcome.check:<{names}}  ", finding.seen, width)
            yield colored(finding.status, line, is_on=is_colored)
            if finding.remedy is not None:
                yield hanging(f"      {'':<{names}}  -> ", finding.remedy, width)
        yield "\n" + ", ".join(f"{count} {status}" for status, count in counts.items())

    checks = [{"check": outcome.check, **asdict(outcome.finding)} for outcome in outcomes]
    verdicts = verified([(outcome.check, outcome.finding) for outcome in outcomes])
    answer(output, lines, lambda: {"counts": counts, "verified": verdicts, "checks": checks})
