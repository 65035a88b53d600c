"""The programs of the cluster, which Go builds."""

from __future__ import annotations

from pathlib import Path

import localcluster
import pytest


def test_a_test_that_needs_a_program_that_is_not_built_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(localcluster.ClusterError, match="metadata is not built; run: python3 hack/cluster"):
        localcluster.metadata_reader()
