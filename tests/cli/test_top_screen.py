"""The drawing of a node: what it says, and that nothing can make it too wide or move a cursor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.rules.node_view import (
    Holding,
    NodeView,
    SeenDaemon,
    SeenGpu,
    SeenInstance,
    SeenProcess,
    SeenReason,
)
from dra_driver.cli.rules.top_screen import NARROWEST, Order, node_lines
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
    domains=(("nvlink-222f6340", ("gpu-cbe0e302", "gpu-fe441430")),),
    holdings=(
        Holding("ml/training", "1", "prepared", 7200.0, "gpu-fe441430", "gpu", "GPU-3", trouble="lost"),
        Holding(
            "ml/notebook", "2", "preparing", None, "gpu-cbe0e302", "gpu", "GPU-2",
            usage="MPS, at most 10240 MiB", share_id="0123456789", admin_access=True, boot="earlier",
        ),
        Holding("ml/small", "3", "prepared", 5.0, MIG, "mig", "", mig="1g.10gb at 0, created GI 7 CI 0"),
    ),
    instances=(
        SeenInstance("gpu-6b45fc99", "1g.10gb", 0, 1, 7, (0,), "claim ml/small"),
        SeenInstance("gpu-6b45fc99", "3g.40gb", 4, 4, None, (), "claim ml/large"),
        SeenInstance("gpu-6b45fc99", "2g.20gb", 2, 2, 3, (), "not ours"),
    ),
    health=(
        SeenReason("gpu-fe441430", "lost", "gpu-lost", 720.0, "the GPU does not answer"),
        SeenReason("gpu-cbe0e302", "information", "slowdown thermal", None, "the GPU is too hot and slows down"),
    ),
    processes=(SeenProcess("gpu-6b45fc99", 4711, "python3 train.py", 512 << 20, 7, "ml/small-0"),),
    mps=(SeenDaemon("gpu-cbe0e302", "failed", 60.0, None, None, "it did not start"),),
    notes=("NVML index 2 does not answer",),
)  # fmt: skip


def draw_node(view: NodeView, width: int = 120, order: Order = "index") -> str:
    """The lines without their styles."""
    return "".join(
        "".join(span.text for span in line).rstrip() + "\n" for line in node_lines(view, width, order)
    )


def test_everything_is_said(is_golden: Callable[[Path, str], None]) -> None:
    is_golden(GOLDEN / "node.txt", draw_node(VIEW, 100))


def with_pods(*pods: tuple[str, ...] | None) -> NodeView:
    return replace(
        VIEW, holdings=tuple(replace(held, pods=mine) for held, mine in zip(VIEW.holdings, pods, strict=True))
    )


LONG = "training-7d9c5b8f64-x2k9q"
PODS = (LONG, *(f"other-{number}" for number in range(9))), (), ("small-0",)


def test_pods_are_shown_where_there_is_room_for_them() -> None:
    def claims(width: int) -> list[str]:
        [part] = [
            part for part in draw_node(with_pods(*PODS), width).split("\n\n") if part.startswith("CLAIM")
        ]
        return part.splitlines()

    assert [line.split()[1] for line in claims(150)] == ["POD", LONG, "none", "small-0"]
    assert f"{LONG} +9 " in claims(150)[1]
    assert "POD" in claims(100)[0].split()
    assert "POD" not in claims(60)[0].split(), "names of claims and devices stay"
    assert claims(50)[1].split() == ["ml/training", "gpu-fe441430", "LOST"]


def test_pods_that_nobody_knows_take_no_room() -> None:
    assert "POD" not in draw_node(VIEW, 200).partition("\n\nCLAIM ")[2].splitlines()[0]
    [part] = [
        part
        for part in draw_node(with_pods(None, None, ("small-0",)), 200).split("\n\n")
        if part[:5] == "CLAIM"
    ]
    assert [line.split()[1] for line in part.splitlines()] == ["POD", "-", "-", "small-0"]


def test_at_80_columns_each_gpu_shows_memory_load_and_health() -> None:
    head, *rows = draw_node(VIEW, 80).split("\n\n")[1].splitlines()
    assert head.split() == ["#", "GPU", "MIG", "MEMORY", "USED", "MiB", "%", "TEMP", "POWER", "W", "HEALTH"]
    assert rows[-1].endswith("LOST")
    assert "PRODUCT" in draw_node(VIEW, 140)


@pytest.mark.parametrize(("order", "first"), [("index", 0), ("memory", 0), ("utilisation", 1), ("health", 2)])
def test_orders(order: Order, first: int) -> None:
    rows = draw_node(VIEW, 140, order).split("\n\n")[1].splitlines()[1:]
    assert VIEW.gpus[first].name in rows[0]


def test_styles_say_what_the_text_says() -> None:
    spans = [span for line in node_lines(VIEW, 120) for span in line]
    styles = {span.text.strip(): span.style for span in spans}
    assert (styles["LOST"], styles["information"], styles["ok"]) == ("bad", "notice", "good")
    assert styles["FAILED"] == "bad"
    assert "[||||      ]" in styles


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((), "Health unknown: NVML did not report it."),
        ((SeenGpu("gpu-1", "GPU-1", health="ok"),), "All GPUs are well."),
        (
            (SeenGpu("gpu-1", "GPU-1", health="ok"), SeenGpu("gpu-2", "GPU-2")),
            "Health of gpu-2 unknown: NVML did not report it.",
        ),
    ],
)
def test_health_is_not_claimed_where_nobody_looked(gpus: tuple[SeenGpu, ...], said: str) -> None:
    drawn = draw_node(NodeView("n", "d", "now", gpus=gpus))
    assert f"\nHEALTH\n{said}\n" in drawn
    assert "\nCLAIM\nno claim is prepared\n" in drawn
    assert "NVIDIA driver unknown" in drawn


ANYTHING = st.text(max_size=90)


@given(
    ANYTHING, ANYTHING, ANYTHING, st.integers(1, 250),
    st.sampled_from(["gpus", "holdings", "instances", "health", "mps", "processes", "domains", "notes"]),
)  # fmt: skip
def test_no_text_breaks_the_frame(one: str, two: str, three: str, width: int, field: str) -> None:
    odd = {
        "gpus": (SeenGpu(one, "u", two, three, None, one),),
        "holdings": (
            Holding(one, "u", two, 1e9, three, "gpu", "", two, three, True, one, pods=(two, three, one)),
        ),
        "instances": (SeenInstance(one, two, 10**9, 10**9, 10**9, (10**9,), three),),
        "health": (SeenReason(one, two, three, 1e12, one * 3),),
        "mps": (SeenDaemon(one, two, 1e12, 10**12, 10**12, three),),
        "processes": (SeenProcess(one, 10**12, two, 10**18, 10**9, three),),
        "domains": ((one, (two, three) * 9),),
        "notes": (one, two * 5),
    }
    drawn = draw_node(replace(VIEW, node=one, taken_at=two, **{field: odd[field]}), width)
    assert max(len(line) for line in drawn.splitlines()) <= max(width, NARROWEST)
    assert all(line == line.rstrip() for line in drawn.splitlines())
    assert set(drawn) <= {"\n", *map(chr, range(32, 127))}
    assert drawn.count("\nMPS DAEMON ") == 1
