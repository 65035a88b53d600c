"""Multiprocessors of whole GPUs, from cores and compute capability."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.machines import SimulatedNode
from tests.fakes.tables import tabled


@tabled("machine", "count")
def test_multiprocessors_of_the_machines_gpus(machine: str, count: int, tmp_path: Path) -> None:
    node = SimulatedNode(machine, tmp_path)
    try:
        assert {gpu.multiprocessors for gpu in node.read().gpus} == {count}
    finally:
        node.close()


def test_multiprocessors_are_unknown_for_an_unknown_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dra_driver.nvml import readings

    node = SimulatedNode("t4-4", tmp_path)
    try:
        monkeypatch.setattr(readings, "_CORES_PER_MULTIPROCESSOR", {(7, 5): 63})
        assert {gpu.multiprocessors for gpu in node.read().gpus} == {None}
        monkeypatch.setattr(readings, "_CORES_PER_MULTIPROCESSOR", {})
        assert {gpu.multiprocessors for gpu in node.read().gpus} == {None}
        assert node.read().faults == ()
    finally:
        node.close()
