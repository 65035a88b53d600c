"""The drawing of a node: what it says, and that nothing can make it too wide or move a cursor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.diagnostics.rules.top_screen import (
    NARROWEST,
    WIDTH,
    Holding,
    NodeView,
    SeenDaemon,
    SeenGpu,
    SeenInstance,
    SeenReason,
    draw_node,
)
from dra_driver.model.gpu import GpuLoad

H100 = "NVIDIA H100 80GB HBM3"
MIG = "gpu-6b45fc99-mig-1g10gb-19-0"
VIEW = NodeView(
    node="node-a",
    driver="gpu.nvidia.com",
    taken_at="2026-01-05 09:30:00 UTC",
    nvidia_version="580.95.05",
    cuda_version="13.0",
    gpus=(
        SeenGpu("gpu-6b45fc99", "GPU-1", H100, "on", GpuLoad(512 << 20, 81559 << 20, None, 30, 70.4, 700), "ok"),
        SeenGpu("gpu-cbe0e302", "GPU-2", H100, "off", GpuLoad(None, None, 40, None, 120.0, None), "information"),
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
    mps=(SeenDaemon("gpu-cbe0e302", "failed", 60.0, None, None, "it did not start"),),
    notes=("NVML index 2 does not answer",),
)  # fmt: skip


def test_everything_is_said() -> None:
    assert draw_node(VIEW) == (
        "gpu.nvidia.com  node node-a  NVIDIA driver 580.95.05  CUDA 13.0  2026-01-05 09:30:00 UTC\n"
        "\n"
        "GPUS\n"
        "  GPU           PRODUCT                MIG  MEMORY USED MiB  UTIL  TEMP  POWER W    HEALTH\n"
        "  gpu-6b45fc99  NVIDIA H100 80GB HBM3  on   512 of 81559     -     30 C  70 of 700  ok\n"
        "  gpu-cbe0e302  NVIDIA H100 80GB HBM3  off  -                40 %  -     120        information\n"
        "  gpu-fe441430  -                      -    -                -     -     -          LOST\n"
        "\n"
        "NVLINK DOMAINS\n"
        "  DOMAIN           GPUS\n"
        "  nvlink-222f6340  gpu-cbe0e302 gpu-fe441430\n"
        "\n"
        "CLAIMS\n"
        "  CLAIM        SINCE    DEVICE                        USE\n"
        "  ml/training  2h00m    gpu-fe441430                  LOST\n"
        "  ml/notebook  unknown  gpu-cbe0e302                  PREPARING; EARLIER BOOT; MPS, at most 10240\n"
        "                                                      MiB; share 01234567; admin access\n"
        "  ml/small     5s       gpu-6b45fc99-mig-1g10gb-19-0  1g.10gb at 0, created GI 7 CI 0\n"
        "\n"
        "MIG INSTANCES\n"
        "  GPU           SLICES  PROFILE  IDS        HELD BY\n"
        "  gpu-6b45fc99  0       1g.10gb  GI 7 CI 0  claim ml/small\n"
        "  gpu-6b45fc99  4-7     3g.40gb  not there  claim ml/large\n"
        "  gpu-6b45fc99  2-3     2g.20gb  GI 3       not ours\n"
        "\n"
        "HEALTH\n"
        "  DEVICE        SEVERITY     REASON            SINCE  WHAT\n"
        "  gpu-fe441430  LOST         gpu-lost          12m    the GPU does not answer\n"
        "  gpu-cbe0e302  information  slowdown thermal  now    the GPU is too hot and slows down\n"
        "\n"
        "MPS DAEMONS\n"
        "  DEVICE        STATE   SINCE  CLIENTS  PID  PROBLEM\n"
        "  gpu-cbe0e302  FAILED  1m     -        -    it did not start\n"
        "\n"
        "note: NVML index 2 does not answer\n"
    )


def with_pods(*pods: tuple[str, ...] | None) -> NodeView:
    return replace(
        VIEW, holdings=tuple(replace(held, pods=mine) for held, mine in zip(VIEW.holdings, pods, strict=True))
    )


LONG = "training-7d9c5b8f64-x2k9q"
PODS = (LONG, *(f"other-{number}" for number in range(9))), (), ("small-0",)


def test_pods_are_shown_where_there_is_room_for_them() -> None:
    def claims(width: int) -> list[str]:
        return draw_node(with_pods(*PODS), width).split("\n\n")[3].splitlines()

    assert claims(100) == [
        "CLAIMS",
        "  CLAIM        PODS              SINCE    DEVICE                        USE",
        "  ml/training  train..-x2k9q +9  2h00m    gpu-fe441430                  LOST",
        "  ml/notebook  none              unknown  gpu-cbe0e302                  PREPARING; EARLIER BOOT;",
        "                                                                        MPS, at most 10240 MiB;",
        "                                                                        share 01234567; admin access",
        "  ml/small     small-0           5s       gpu-6b45fc99-mig-1g10gb-19-0  1g.10gb at 0, created GI 7",
        "                                                                        CI 0",
    ]
    assert f"{LONG} +9" in claims(140)[2]
    for narrow in (60, 90):
        assert "PODS" not in claims(narrow)[1], "names of claims and devices go before"
        assert "small-0" not in "".join(claims(narrow))


def test_pods_that_nobody_knows_take_no_room() -> None:
    assert "PODS" not in draw_node(VIEW, 200)
    shown = draw_node(with_pods(None, None, ("small-0",)), 200).split("\n\n")[3].splitlines()
    assert [line.split()[1] for line in shown[1:]] == ["PODS", "-", "-", "small-0"]


def test_narrow_terminals_do_without_the_product() -> None:
    gpus = draw_node(VIEW, 94).split("\n\n")[1]
    assert "PRODUCT" not in gpus
    assert gpus.splitlines()[2] == "  gpu-6b45fc99  on   512 of 81559     -     30 C  70 of 700  ok"
    assert draw_node(VIEW, 95).count(f"  {H100}  ") == 2


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((), "nothing is known to be wrong"),
        ((SeenGpu("gpu-1", "GPU-1", health="ok"),), "nothing is wrong"),
        ((SeenGpu("gpu-1", "GPU-1", health="ok"), SeenGpu("gpu-2", "GPU-2")), "nothing is known to be wrong"),
    ],
)
def test_health_is_not_claimed_where_nobody_looked(gpus: tuple[SeenGpu, ...], said: str) -> None:
    drawn = draw_node(NodeView("n", "d", "now", gpus=gpus))
    assert f"\nHEALTH\n  {said}\n" in drawn
    assert "\nCLAIMS\n  none\n" in drawn
    assert "NVIDIA driver unknown" in drawn


ANYTHING = st.text(max_size=90)


@given(
    ANYTHING, ANYTHING, ANYTHING, st.integers(1, 250),
    st.sampled_from(["gpus", "holdings", "instances", "health", "mps", "domains", "notes"]),
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
        "domains": ((one, (two, three) * 9),),
        "notes": (one, two * 5),
    }
    drawn = draw_node(replace(VIEW, node=one, taken_at=two, **{field: odd[field]}), width)
    assert max(len(line) for line in drawn.splitlines()) <= max(width, NARROWEST)
    assert all(line == line.rstrip() for line in drawn.splitlines())
    assert set(drawn) <= {"\n", *map(chr, range(32, 127))}
    assert drawn.count("\nMPS DAEMONS\n") == 1
    assert WIDTH == 100
