"""In which order the functions of a card change drivers."""

from __future__ import annotations

import pytest

from dra_driver.passthrough.rules.moves import Move, are_bound, back, to_vfio

GPU, AUDIO = "0000:1b:00.0", "0000:1b:00.1"
VFIO = ("nvgrace-gpu-vfio-pci", "vfio-pci")
BEFORE = {GPU: "nvidia", AUDIO: "snd_hda_intel"}


def words(moves: object) -> list[tuple[str, str, str | None]]:
    return [(move.action, move.bus_id[-1:], move.driver) for move in moves]  # type: ignore[attr-defined]


def test_all_functions_leave_their_drivers_before_one_goes_to_vfio() -> None:
    assert words(to_vfio(BEFORE, GPU, "nvgrace-gpu-vfio-pci")) == [
        ("override", "0", "nvgrace-gpu-vfio-pci"),
        ("override", "1", "vfio-pci"),
        ("unbind", "0", None),
        ("unbind", "1", None),
        ("probe", "0", None),
        ("probe", "1", None),
    ]


def test_moves_of_a_killed_bind_are_not_repeated() -> None:
    half = {GPU: None, AUDIO: "vfio-pci"}
    assert words(to_vfio(half, GPU, "vfio-pci")) == [
        ("override", "0", "vfio-pci"),
        ("unbind", "0", None),
        ("probe", "0", None),
    ]
    assert list(to_vfio({GPU: "vfio-pci", AUDIO: "vfio-pci"}, GPU, "vfio-pci")) == []


def test_each_function_goes_back_to_the_driver_that_it_had() -> None:
    assert words(back({GPU: "nvgrace-gpu-vfio-pci", AUDIO: "vfio-pci"}, BEFORE, {}, VFIO)) == [
        ("override", "0", None),
        ("override", "1", None),
        ("unbind", "0", None),
        ("unbind", "1", None),
        ("bind", "0", "nvidia"),
        ("bind", "1", "snd_hda_intel"),
    ]


def test_override_of_an_administrator_is_restored_after_all_drivers() -> None:
    """The earlier driver of a function may differ from the driver in the override."""
    assert words(back({GPU: "vfio-pci", AUDIO: "vfio-pci"}, BEFORE, {GPU: None, AUDIO: "none"}, VFIO)) == [
        ("override", "0", None),
        ("override", "1", None),
        ("unbind", "0", None),
        ("unbind", "1", None),
        ("bind", "0", "nvidia"),
        ("bind", "1", "snd_hda_intel"),
        ("override", "1", "none"),
    ]


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        pytest.param({GPU: "nvidia"}, {GPU: "nvidia"}, [], id="it never left"),
        pytest.param({GPU: None}, {GPU: "nvidia"}, [("bind", "0", "nvidia")], id="it has no driver"),
        pytest.param(
            {GPU: "vfio-pci", AUDIO: "vfio-pci"},
            {GPU: "nvidia", AUDIO: None},
            [("unbind", "0", None), ("unbind", "1", None), ("bind", "0", "nvidia")],
            id="a function had no driver",
        ),
        pytest.param(
            {GPU: "vfio-pci", AUDIO: "vfio-pci"},
            {GPU: "nvidia", AUDIO: "vfio-pci"},
            [("unbind", "0", None), ("bind", "0", "nvidia")],
            id="a function was under vfio before",
        ),
        pytest.param(
            {GPU: "vfio-pci", AUDIO: "vfio-pci"},
            {GPU: "nvidia"},
            [("unbind", "0", None), ("unbind", "1", None), ("bind", "0", "nvidia"), ("probe", "1", None)],
            id="what a function had is not known",
        ),
        pytest.param({AUDIO: "xhci_hcd"}, {AUDIO: None}, [], id="somebody else gave it a driver"),
    ],
)
def test_back(now: dict[str, str | None], before: dict[str, str | None], expected: object) -> None:
    moves = [move for move in back(now, before, {}, VFIO) if move.action != "override"]
    assert words(moves) == expected
    assert [move for move in back(now, before, {}, VFIO) if move not in moves] == [
        Move("override", bus_id) for bus_id in now
    ]


def test_bound() -> None:
    assert are_bound({GPU: "nvgrace-gpu-vfio-pci", AUDIO: "vfio-pci"}, VFIO)
    assert not are_bound({GPU: "nvgrace-gpu-vfio-pci", AUDIO: "snd_hda_intel"}, VFIO)
    assert not are_bound({GPU: None}, VFIO)
