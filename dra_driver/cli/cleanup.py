"""`gpu-dra-driver cleanup`."""

from __future__ import annotations

from argparse import Namespace

from dra_driver.cli.flags import OF_NODE, switch
from dra_driver.cli.node import pending_cleanup
from dra_driver.cli.output import OUTPUT, answer, hanging
from dra_driver.cli.rules.prepared_claims import shown
from dra_driver.cli.scratch import node_settings
from dra_driver.model.dataclass import asdict

FLAGS = (
    switch("now", "Retry all pending cleanup now; run this as root on the node.", "--now"),
    OUTPUT,
    *OF_NODE,
)
EXAMPLES = ("", "--now")


def cleanup(given: Namespace) -> int:
    """Cleanup is pending when an Unprepare or a failed Prepare could not undo something, for example because
    nvidia-smi failed. gpu-dra-driver retries by itself. `--now` retries at once, even if gpu-dra-driver is not
    running. Exit code 0: no cleanup is pending, 1: cleanup is pending, or a file cannot be read.
    """
    left, problems = pending_cleanup(node_settings(given), now=given.now)

    def lines(width: int | None) -> list[str]:
        pending = [hanging("", one.text, width) for one in left] or ["no pending cleanup found"]
        return [*pending, *(hanging("problem: ", problem, width) for problem in problems)]

    cleanups = [asdict(shown(one)) for one in left]
    answer(given.output, lines, lambda: {"cleanups": cleanups, "problems": list(problems)})
    return 1 if left or problems else 0
