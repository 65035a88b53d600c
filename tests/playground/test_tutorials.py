"""The tutorials of docs/, as they are printed: each on a playground of its own, in the order of the page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.waiting import PATIENCE_S, eventually
from tests.playground.test_examples import temporary
from tests.playground.test_playground import Playground, start

__all__ = ["start", "temporary"]

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"
PAGES = sorted(page.stem for page in TUTORIALS.glob("*.md") if page.stem != "index")
CHANGES = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", "UUID"), (r"\b[\d.]+ ?(ms|s|m)\b", "AGE"),
    (r"GI ?\d+ CI ?\d+ *", "GI CI "), (r"-[bcdfghjklmnpqrstvwxz24-9]{5}\b", "-RANDOM"), (r"  +", "  "),
)  # fmt: skip
"""What a page shows is not the same in each run."""


def steps(page: str) -> list[tuple[str, str]]:
    """The blocks of a page in order: the language, and the text."""
    text = (TUTORIALS / f"{page}.md").read_text()
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in steps(page) if kind == language]


def lines(text: str) -> list[str]:
    for pattern, shown in CHANGES:
        text = re.sub(pattern, shown, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


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
    """The kubectl of hack/cluster: these tests run with those of the cluster, because it is built there."""
    sys.path.insert(0, str(ROOT / "hack" / "cluster"))
    import localcluster

    return localcluster.kubectl()


@pytest.fixture
def second_terminal(tmp_path: Path) -> Callable[[Playground, str], str]:
    """A shell as the pages describe it; what a block prints comes back."""

    def run(playground: Playground, block: str) -> str:
        """With what the reader has and nothing else: kubectl, and the lines to paste."""
        environment = {"HOME": str(tmp_path), "PATH": f"{_kubectl().parent}:/usr/local/bin:/usr/bin:/bin"}
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", playground.paste + block],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        return done.stdout

    return run


@pytest.mark.cluster
@pytest.mark.parametrize("page", PAGES)
def test_every_block_works_and_prints_what_the_page_shows(
    page: str, start: Callable[..., Playground], second_terminal: Callable[[Playground, str], str]
) -> None:
    playground, last = start("dgx-h100", *first_terminal(page)), ""
    eventually(playground.devices)
    for kind, text in steps(page):
        if kind == "bash":
            last, said = text, second_terminal(playground, text)
        elif kind == "text":
            shown, first = set(lines(text)), [said]

            # Reading takes longer than the change that the page shows.
            def is_shown(block: str = last, shown: set[str] = shown, first: list[str] = first) -> bool:
                return shown <= set(lines(first.pop() if first else second_terminal(playground, block)))

            eventually(is_shown)
    eventually(lambda: not playground.claims())
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
    eventually(lambda: playground.lines("pod default/extended-resource is waiting: "))
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


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_the_configuration_with_which_it_starts(page: str) -> None:
    arguments = first_terminal(page)
    of_claims = ("requests:", "apiVersion: resource.k8s.io")
    shown = [block for block in blocks(page, "yaml") if not block.startswith(of_claims)]
    if not arguments:
        assert shown == []
        return
    [text] = shown
    without_comments = re.sub(r"^#.*\n", "", (ROOT / arguments[1]).read_text(), flags=re.MULTILINE)
    assert text == without_comments
