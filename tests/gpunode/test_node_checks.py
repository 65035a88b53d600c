"""Checks of `run` that need a machine whose settings may change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hack" / "gpunode"))

import checks

CHANGING = (checks.time_slices, checks.compute_mode, checks.mig_layout, checks.mig_on_demand)


@pytest.mark.parametrize("check", CHANGING)
def test_check_that_changes_settings_without_the_flag_is_skipped(check: Any, tmp_path: Path) -> None:
    node = checks.Node(tmp_path, None, changes=False, snapshotter="native")
    with pytest.raises(checks.SkippedError, match="needs --change-settings"):
        check(node)


def test_layouts_of_the_node_change_only_the_first_gpu() -> None:
    layouts = checks._layouts("1g.10gb")["configuration"]["mig-configs"]
    assert [entry["devices"] for entries in layouts.values() for entry in entries] == [[0], [0]]
    assert [entry["mig-enabled"] for entries in layouts.values() for entry in entries] == [True, False]
