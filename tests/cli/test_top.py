"""The drawing of a node: its content, and that no value makes it too wide or moves the cursor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dra_driver.cli.output import drawn
from dra_driver.cli.rules.node_view import (
    Holding,
    NodeView,
    SeenDaemon,
    SeenGpu,
    SeenProblem,
    SeenProcess,
    SeenReason,
    searched,
)
from dra_driver.cli.top import Order, Screen, node_picture
from dra_driver.model.gpu import GpuLoad

GOLDEN = Path(__file__).with_name("golden")
H100 = "NVIDIA H100 80GB HBM3"
MIG = "gpu-6b45fc99-mig-1g10gb-19-0"
VIEW = NodeView(
    node="node-a",
    driver="gpu.nvidia.com",
    taken_at="2026-01-05 09:30:00 UTC",
    nvidia_version="580.95.05",
    cuda_version="13.0",
    gpus=(
        SeenGpu("gpu-6b45fc99", "GPU-1", H100, "on", GpuLoad(512 << 20, 81559 << 20, None, 30, 70.4, 700), "ok",
                index=0, pci_bus_id="0000:1b:00.0"),
        SeenGpu("gpu-cbe0e302", "GPU-2", H100, "off", GpuLoad(None, None, 40, None, 120.0, None), "information", 1),
        SeenGpu("gpu-fe441430", "GPU-3", health="lost"),
    ),
    holdings=(
        Holding("gpu-fe441430", "gpu", "GPU-3", "GPU-3", claim="ml/training", uid="1", since_s=7200.0, trouble="lost"),
        Holding(
            "gpu-cbe0e302", "gpu", "GPU-2", "GPU-2", True, "0123456789", "MPS, at most 10240 MiB",
            claim="ml/notebook", uid="2", phase="preparing", boot="earlier",
        ),
        Holding(MIG, "mig", "", "GPU-1", mig="1g.10gb at 0, created GI 7 CI 0", claim="ml/small", uid="3", since_s=5.0),
    ),
    health=(
        SeenReason("gpu-fe441430", "lost", "gpu-lost", 720.0, "the GPU does not answer"),
        SeenReason("gpu-cbe0e302", "information", "slowdown thermal", None, "the GPU is too hot and has slowed down"),
    ),
    processes=(SeenProcess("gpu-6b45fc99", 4711, "python3 train.py", 512 << 20, 7, "ml/small-0"),),
    mps=(SeenDaemon("gpu-cbe0e302", "failed", 60.0, None, None, "it did not start"),),
    notes=("NVML index 2 does not answer",),
)  # fmt: skip


def draw_node(view: NodeView, width: int = 120, order: Order = "index", text: str = "") -> str:
    picture = node_picture(searched(view, text), width, order, text)
    return "".join(f"{line}\n" for line in drawn(picture, width, is_colored=False))


def test_everything_is_said(is_golden: Callable[[Path, str], None]) -> None:
    is_golden(GOLDEN / "node.txt", draw_node(VIEW, 100))


def with_pods(*pods: tuple[str, ...] | None) -> NodeView:
    return replace(
        VIEW, holdings=tuple(replace(held, pods=mine) for held, mine in zip(VIEW.holdings, pods, strict=True))
    )


LONG = "training-7d9c5b8f64-x2k9q"
PODS = (LONG, *(f"other-{number}" for number in range(9))), (), ("small-0",)


def claims(view: NodeView, width: int) -> list[list[str]]:
    [part] = [part for part in draw_node(view, width).split("\n\n") if part.startswith("CLAIM")]
    return [line.split() for line in part.splitlines()]


def test_pods_are_shown_where_there_is_room_and_they_are_known() -> None:
    shown = claims(with_pods(*PODS), 180)
    assert [line[1] for line in shown] == ["POD", LONG, "none", "small-0"]
    assert shown[1][2] == "+9"
    assert "POD" not in claims(with_pods(*PODS), 60)[0], "names of claims and devices stay"
    assert "POD" not in claims(VIEW, 200)[0]
    assert [line[1] for line in claims(with_pods(None, None, ("small-0",)), 200)] == [
        "POD",
        "-",
        "-",
        "small-0",
    ]


def test_use_is_added_up_for_each_pod_and_a_process_without_claim_has_its_own_row() -> None:
    mine = [
        SeenProcess("gpu-cbe0e302", 1, "rank1", 1 << 20, None, "ml/training-0", False, 30),
        SeenProcess("gpu-cbe0e302", 2, "rank2", 2 << 20, None, "ml/training-0", False, 50),
        SeenProcess("gpu-fe441430", 4, "rank4", 0, None, "ml/training-0", False, 20),
    ]
    other = SeenProcess("gpu-fe441430", 3, "stray", 7 << 20, is_unclaimed=True)
    part = draw_node(replace(VIEW, processes=(*mine, other))).partition("\n\nPOD ")[2].split("\n\n")[0]
    assert [line.split() for line in part.splitlines()[1:]] == [
        [
            "ml/training-0",
            "3",
            "50",
            "gpu-cbe0e302,",
            "gpu-fe441430",
            "1",
            "rank1,",
            "2",
            "rank2,",
            "4",
            "rank4",
        ],
        ["NO", "CLAIM", "7", "-", "gpu-fe441430", "3", "stray"],
    ]


def test_at_80_columns_each_gpu_shows_memory_load_and_health() -> None:
    head, *rows = draw_node(VIEW, 80).split("\n\n")[1].splitlines()
    assert head.split() == ["#", "GPU", "MEMORY", "MiB", "UTIL", "%", "TEMP", "POWER", "W", "HEALTH", "CLAIM"]
    assert rows[-1].split()[-2:] == ["LOST", "ml/training"]
    assert "PRODUCT" in draw_node(VIEW, 140)


def test_row_of_a_gpu_names_its_claims_and_pods_and_the_title_fits() -> None:
    title, gpus, *_ = draw_node(with_pods(("train-0", "train-1"), (), ("small-0",)), 80).split("\n\n")
    head, small, _, training = gpus.splitlines()
    assert head.split()[-3:] == ["HEALTH", "CLAIM", "POD"]
    assert small.split()[-3:] == ["ok", "ml/small", "small-0"]
    assert training.split()[-4:] == ["LOST", "ml/training", "train-0", "+1"]
    assert title == "node-a  NVIDIA driver 580.95.05  CUDA 13.0  2026-01-05 09:30:00 UTC"


@pytest.mark.parametrize(("order", "first"), [("index", 0), ("memory", 0), ("utilisation", 1), ("health", 2)])
def test_gpus_are_in_the_order_that_is_wanted(order: Order, first: int) -> None:
    rows = draw_node(VIEW, 140, order).split("\n\n")[1].splitlines()[1:]
    assert VIEW.gpus[first].name in rows[0]


def test_text_that_is_searched_leaves_a_gpu_or_a_claim_with_its_details() -> None:
    of_gpu = draw_node(VIEW, 140, text="fe441430")
    assert "gpu-fe441430  GPU-3" in of_gpu
    assert "claim ml/training  uid 1  pods: unknown" in of_gpu
    assert "gpu-cbe0e302" not in of_gpu.partition("MPS")[0]
    of_claim = draw_node(with_pods(*PODS), 140, text="ml/train")
    assert f"pods: {', '.join(PODS[0])}" in " ".join(of_claim.split())
    assert "notebook" not in of_claim


def test_trouble_is_red_in_words_too() -> None:
    text = "\n".join(drawn(node_picture(VIEW, 120), 120, is_colored=True))
    for word in ("LOST", "FAILED"):
        assert f"\x1b[1;31m{word}" in text
    assert "\x1b[32mok" in text


HUNG = SeenProblem("nvml-unavailable", "", "NVML has not answered for more than 0.3 s")


@pytest.mark.parametrize(
    ("gpus", "problems", "said"),
    [
        ((), (), "Health unknown: no GPU is listed."),
        ((SeenGpu("gpu-1", "GPU-1"),), (HUNG,), f"Health unknown: {HUNG.text}"),
        ((SeenGpu("gpu-1", "GPU-1", health="ok"),), (), "All listed GPUs are healthy."),
        (
            (SeenGpu("gpu-1", "GPU-1", health="ok"), SeenGpu("gpu-2", "GPU-2")),
            (),
            "Health of gpu-2 unknown: gpu-dra-driver has not read it recently.",
        ),
        (
            (SeenGpu("gpu-1", "GPU-1", health="ok"), SeenGpu("gpu-2", "GPU-2")),
            (SeenProblem("gpu-unresponsive", "gpu-2", "GPU gpu-2 does not answer"),),
            "Health of gpu-2 unknown: GPU gpu-2 does not answer",
        ),
    ],
)
def test_health_that_is_not_known_is_said_with_the_reason(
    gpus: tuple[SeenGpu, ...], problems: tuple[SeenProblem, ...], said: str
) -> None:
    text = draw_node(NodeView("n", "d", "now", gpus=gpus, problems=problems))
    assert f"\nHEALTH\n{said}\n" in text
    assert "\nCLAIM\nno prepared claims found\n" in text
    assert "NVIDIA driver unknown" in text


def test_saved_health_has_its_age_and_the_reason_why_it_is_not_current() -> None:
    old = replace(VIEW.health[0], saved_s=300.0)
    gpus = (SeenGpu("gpu-fe441430", "GPU-3"),)
    text = draw_node(replace(VIEW, gpus=gpus, health=(old,), unwatched="gpu-dra-driver is not running"), 160)
    assert "the GPU does not answer (saved 5m ago)\nHealth unknown: gpu-dra-driver is not running.\n" in text


ANYTHING = st.text(max_size=90)


@settings(max_examples=40)
@given(
    ANYTHING, ANYTHING, ANYTHING, st.integers(1, 250),
    st.sampled_from(["gpus", "holdings", "health", "mps", "processes", "notes"]),
)  # fmt: skip
def test_no_text_breaks_the_frame(one: str, two: str, three: str, width: int, field: str) -> None:
    odd = {
        "gpus": (SeenGpu(one, "u", two, three, None, one),),
        "holdings": (
            Holding(
                three,
                "gpu",
                "",
                "",
                True,
                two,
                one,
                three,
                claim=one,
                uid="u",
                phase=two,
                since_s=1e9,
                pods=(two, three, one),
            ),
        ),
        "health": (SeenReason(one, two, three, 1e12, one * 3),),
        "mps": (SeenDaemon(one, two, 1e12, 10**12, 10**12, three),),
        "processes": (SeenProcess(one, 10**12, two, 10**18, 10**9, three),),
        "notes": (one, two * 5),
    }
    shown = draw_node(replace(VIEW, node=one, taken_at=two, **{field: odd[field]}), width)
    assert all(cell_len(line) <= width for line in shown.splitlines())
    assert all(line.isprintable() for line in shown.split("\n"))


def test_screen_is_never_larger_than_the_terminal_and_keys_change_it() -> None:
    screen = Screen()

    def rows(columns: int, height: int) -> list[str]:
        console = Console(width=columns, height=height, color_system=None)
        with console.capture() as shown:
            console.print(screen.picture(VIEW, console, {}), end="")
        return shown.get().split("\n")

    for key, last in (
        ("", ": lines 1-9 of "), ("j", ": lines 2-10 of "), ("\x1b[A", ": lines 1-9 of "),
        (" ", ": lines 9-17 of "), ("\x1b[5~", ": lines 1-9 of "), ("m", "sort by memory"), ("u", "by utilisation"),
    ):  # fmt: skip
        assert screen.press(key, 10) if key else True
        shown = rows(90, 10)
        assert len(shown) == 10
        assert last in shown[-1]
    for key in "/notex\x7f":
        screen.press(key, 10)
    assert rows(90, 40)[-1] == "/note_"
    assert screen.press("q", 10), "letters of the text are no keys"
    for key in ("\x7f", "\r"):
        screen.press(key, 10)
    shown = rows(90, 40)
    assert shown[-1] == "/note  Esc shows all"
    assert "claim ml/notebook  uid 2  pods: unknown" in shown
    assert screen.press("\x1b", 10)
    assert screen.text == ""
    assert rows(1, 1) == ["q"]
    assert not screen.press("q", 10)
