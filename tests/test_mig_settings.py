"""The section `dynamicMig`, and the flags --dynamic-mig and --adopt-mig."""

from __future__ import annotations

from pathlib import Path

import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.model.gpu import Gpu
from dra_driver.settings import Settings, resolve

GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
MIG = "MIG-4cf8db2d-06c0-5d70-aa51-e59b25b2c16c"


def settings(tmp_path: Path, text: str, **given: object) -> Settings:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return resolve({"node_name": "n", **given}, path)


def test_it_is_off_and_leaves_what_is_there_unless_told() -> None:
    plain = resolve({"node_name": "n"}, None)
    assert (plain.dynamic_mig, plain.adopt_mig) == (False, "leave")
    assert plain.dynamic_mig_gpus.matches_gpu(Gpu(GPU))


def test_section_chooses_gpus(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        f"dynamicMig:\n  enabled: true\n  adopt: destroy\n  gpus:\n    productName: '*H100*'\n    uuids: [{GPU}]\n"
        "    pciBusIDs: ['00000000:1B:00.0']\n",
    )
    assert (found.dynamic_mig, found.adopt_mig) == (True, "destroy")
    chosen = found.dynamic_mig_gpus
    assert chosen.matches_gpu(Gpu(GPU, product_name="NVIDIA H100 NVL", pci_bus_id="0000:1b:00.0"))
    assert not chosen.matches_gpu(Gpu(GPU, product_name="NVIDIA A100", pci_bus_id="0000:1b:00.0"))
    assert not chosen.matches_gpu(Gpu(GPU, product_name="NVIDIA H100 NVL", pci_bus_id="0000:1c:00.0"))


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    found = settings(
        tmp_path, "dynamicMig: {enabled: true, adopt: destroy}", dynamic_mig=False, adopt_mig="leave"
    )
    assert (found.dynamic_mig, found.adopt_mig) == (False, "leave")


def test_unknown_adoption_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="expected leave or destroy"):
        resolve({"node_name": "n", "adopt_mig": "keep"}, None)


@pytest.mark.parametrize(
    ("gates", "on"),
    [
        (None, False),
        ("", False),
        ("DynamicMIG=true", True),
        ("A=true, DynamicMIG=true", True),
        ("DynamicMIG=false", False),
    ],
)
def test_feature_gate_of_nvidias_own_driver_means_the_same(gates: str | None, on: bool) -> None:
    assert resolve({"node_name": "n", "feature_gates": gates}, None).dynamic_mig is on


def test_feature_gate_wins_over_the_file_and_the_flag_wins_over_the_gate(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("dynamicMig: {enabled: false}\n")
    given = {"node_name": "n", "feature_gates": "DynamicMIG=true"}
    assert resolve(given, file).dynamic_mig
    assert not resolve(given | {"dynamic_mig": False}, file).dynamic_mig
