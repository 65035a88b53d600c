"""The tutorials of docs/, as they are printed: each on a playground of its own, in the order of the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.waiting import eventually
from tests.playground.test_playground import Playground, start, temporary

__all__ = ["start", "temporary"]

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"
EVENTS = {"mig-on-demand": "MigDeviceCreated", "mig-layouts": "MigLayoutWaits"}
"""The reason that an event of the page has, where it is not that of a lost GPU."""
PAGES = sorted(page.stem for page in TUTORIALS.glob("*.md") if page.stem != "index")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (TUTORIALS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )


def first_terminal(page: str) -> tuple[str, ...]:
    """The arguments of the playground that the page starts."""
    [command] = blocks(page, "sh")
    make, target, *variables = shlex.split(command)
    assert (make, target) == ("make", "playground")
    given = dict(one.split("=") for one in variables)
    configuration = given.pop("CONFIG", None)
    assert given == {}
    return ("--config", configuration) if configuration else ()


def _kubectl() -> Path:
    """That of hack/cluster: these tests run beside those of the cluster because it is built there."""
    sys.path.insert(0, str(ROOT / "hack" / "cluster"))
    import localcluster

    return localcluster.kubectl()


@pytest.fixture
def second_terminal(tmp_path: Path) -> Callable[[Playground, str], str]:
    """A shell as the pages describe it; what a block prints comes back."""

    def run(playground: Playground, block: str) -> str:
        path = f"{ROOT}/.venv/bin:{_kubectl().parent}:{os.environ['PATH']}"
        environment = os.environ | playground.variables | {"HOME": str(tmp_path), "PATH": path}
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", block],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        return done.stdout

    return run


@pytest.mark.cluster
@pytest.mark.parametrize("page", PAGES)
def test_every_block_works_as_printed(
    page: str, start: Callable[..., Playground], second_terminal: Callable[[Playground, str], str]
) -> None:
    playground = start("dgx-h100", *first_terminal(page))
    eventually(playground.devices)
    for block in blocks(page, "bash"):
        said = second_terminal(playground, block)
        if "simulate lose" in block:
            tainted = eventually(lambda: [one["name"] for one in playground.devices() if one.get("taints")])
        elif ".taints[*].key" in block:
            assert said.split()[0] == tainted[0]
            assert "gpu.nvidia.com/gpu-lost" in said
        elif "MESSAGE:.message" in block:
            expected = EVENTS.get(page, "GPULost")
            eventually(lambda block=block, word=expected: word in second_terminal(playground, block))
        elif "consumedCapacity" in block:
            [one, other] = said.splitlines()
            assert one == other
            assert one.endswith("  1")
    assert playground.claims() == []
    eventually(lambda: "gpu.nvidia.com/gpu-lost" not in str(playground.devices()))


@pytest.mark.cluster
def test_kubectl_shows_states_and_why_a_pod_waits(
    start: Callable[..., Playground], second_terminal: Callable[[Playground, str], str]
) -> None:
    playground = start("gb10")
    eventually(playground.devices)
    playground.apply("one-gpu")
    eventually(lambda: playground.phase("one-gpu") == "Running")
    playground.apply("extended-resource")
    eventually(lambda: playground.lines("pod default/extended-resource waits: "))
    said = second_terminal(playground, "kubectl get pods; kubectl get nodes; kubectl get resourceclaims")
    assert [line.split()[:4] for line in said.splitlines()[:3]] == [
        ["NAME", "READY", "STATUS", "RESTARTS"],
        ["extended-resource", "0/1", "Pending", "0"],
        ["one-gpu", "1/1", "Running", "0"],
    ]
    assert re.search(r"^playground-node +Ready ", said, re.MULTILINE)
    assert "allocated,reserved" in said
    described = second_terminal(playground, "kubectl describe pod extended-resource")
    assert re.search(r"FailedScheduling .* default-scheduler +0/1 nodes are available: 1 ", described)
    second_terminal(playground, f"gpu-dra-driver simulate lose {playground.devices()[0]['name']}")
    eventually(lambda: "GPULost" in second_terminal(playground, "kubectl describe node playground-node"))


def test_first_hour_calls_the_command_only_where_it_is_there() -> None:
    # `make demo` installs what the driver needs, `make playground` the command too.
    before, playground, after = (ROOT / "docs/first-hour.md").read_text().partition("make playground")
    assert playground
    assert ".venv/bin/gpu-dra-driver" not in before
    assert ".venv/bin/gpu-dra-driver" in after


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_the_configuration_with_which_it_starts(page: str) -> None:
    arguments = first_terminal(page)
    shown = blocks(page, "yaml")
    if not arguments:
        assert shown == []
        return
    [text] = shown
    without_comments = re.sub(r"^#.*\n", "", (ROOT / arguments[1]).read_text(), flags=re.MULTILINE)
    assert text == without_comments
