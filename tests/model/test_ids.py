import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.model.ids import (
    gpu_device_names,
    gpu_minor_names,
    gpu_of_device,
    is_dns_label,
    mig_device_name,
    names_gpus_by,
    pci_bus_id,
)
from dra_driver.model.mig import Placement
from tests.fakes.samples import ONE_G, THREE_G, mig
from tests.fakes.tables import tabled

uuids = st.uuids().map(lambda value: f"GPU-{value}")
same_start = st.text("0123456789abcdef", min_size=12, max_size=12)


@tabled("text", "expected")
def test_bus_id_has_the_form_of_sysfs(text: str, expected: str) -> None:
    assert pci_bus_id(text) == expected


@pytest.mark.parametrize(
    "text", ["", "N/A", "0000:65:00", "0000:65:00.g", "000:65:00.0", "0000:65:00.0/../x"]
)
def test_bus_id_is_refused_when_it_has_another_form(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{text!r} is not a PCI bus ID; expected the form 0000:1b:00.0")
    ):
        pci_bus_id(text)


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_bus_id_in_the_form_of_sysfs_stays_as_it_is(
    domain: int, bus: int, device: int, function: int
) -> None:
    sysfs = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    assert pci_bus_id(sysfs) == sysfs
    assert pci_bus_id(f"{domain:08X}:{bus:02X}:{device:02X}.{function}") == sysfs


def test_device_name_has_eight_digits_when_nothing_collides() -> None:
    assert gpu_device_names(["GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"]) == {
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c": "gpu-4cf8db2d"
    }


def test_device_names_are_longer_only_where_they_collide() -> None:
    one, two, three = (
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
        "GPU-4cf8db2d-06c1-7d70-1a51-e59b25b2c16c",
        "GPU-5cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
    )
    assert gpu_device_names([one, two, three]) == {
        one: "gpu-4cf8db2d06c0",
        two: "gpu-4cf8db2d06c1",
        three: "gpu-5cf8db2d",
    }


def test_device_names_differ_when_one_uuid_is_the_start_of_another() -> None:
    assert gpu_device_names(["GPU-4cf8db2d", "GPU-4cf8db2d-06c0"]) == {
        "GPU-4cf8db2d": "gpu-4cf8db2d",
        "GPU-4cf8db2d-06c0": "gpu-4cf8db2d06c0",
    }


@given(
    st.lists(uuids | same_start.map(lambda start: f"GPU-aaaaaaaa-{start}"), unique=True, max_size=20),
    st.randoms(),
)
def test_device_names_are_unique_labels_whatever_the_order(found: list[str], random: object) -> None:
    names = gpu_device_names(found)
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert gpu_device_names(shuffled) == names
    assert len(set(names.values())) == len(found)
    assert all(is_dns_label(name) for name in names.values())


@given(st.lists(uuids, unique=True, min_size=1, max_size=8))
def test_device_name_does_not_depend_on_gpus_that_do_not_collide(found: list[str]) -> None:
    alone = {uuid: name for one in found for uuid, name in gpu_device_names([one]).items()}
    if len(set(alone.values())) == len(found):
        assert gpu_device_names(found) == alone


A, B, C = (f"GPU-{digit * 8}-06c0-7d70-1a51-e59b25b2c16c" for digit in "abc")
WHOLE = {
    uuid: f"gpu-{digit * 8}06c07d701a51e59b25b2c16c" for digit, uuid in zip("abc", (A, B, C), strict=True)
}


@pytest.mark.parametrize(
    ("minors", "kept", "expected"),
    [
        ({A: 0, B: 7}, {}, {A: "gpu-0", B: "gpu-7"}),
        ({A: None, B: 0}, {}, {A: WHOLE[A], B: "gpu-0"}),
        ({A: 1, B: 0}, {A: "gpu-0"}, {A: "gpu-0", B: WHOLE[B]}),
        ({A: 0, B: 1}, {C: "gpu-0"}, {A: WHOLE[A], B: "gpu-1"}),
        ({A: 0, B: 1}, {A: "gpu-2", B: "gpu-2"}, {A: "gpu-2", B: WHOLE[B]}),
        ({A: 0, B: 0}, {}, {A: "gpu-0", B: WHOLE[B]}),
    ],
    ids=["numbers", "unknown", "kept", "kept for one that is gone", "kept twice", "the same number twice"],
)
def test_names_by_minor_number_are_unique(
    minors: dict[str, int | None], kept: dict[str, str], expected: dict[str, str]
) -> None:
    assert gpu_minor_names(minors, kept) == expected


@tabled("device", "gpu", "how")
def test_a_name_says_how_its_gpu_is_named(device: str, gpu: str, how: str | None) -> None:
    assert (gpu_of_device(device), names_gpus_by(device)) == (gpu, how)


@tabled("profile_name", "expected")
def test_mig_name_is_a_label_with_profile_and_placement(profile_name: str, expected: str) -> None:
    from dataclasses import replace

    device = mig(0, replace(ONE_G, name=profile_name), 2, 1, 7)
    assert mig_device_name("gpu-4cf8db2d", device) == expected
    assert is_dns_label(expected)


def test_mig_name_has_the_compute_instance_when_several_share_a_gpu_instance() -> None:
    from dataclasses import replace

    profile = replace(THREE_G, name="1c.3g.40gb")
    device = mig(0, profile, 4, 4, 2, shares_gpu_instance=True, compute_instance_id=1)
    assert mig_device_name("gpu-4cf8db2d", device) == "gpu-4cf8db2d-mig-1c3g40gb-9-4-1"


@pytest.mark.parametrize("text", ["a", "a-b", "0", "a" * 63])
def test_label_is_taken(text: str) -> None:
    assert is_dns_label(text)


@pytest.mark.parametrize("text", ["", "A", "-a", "a-", "a.b", "a_b", "a" * 64, "a\n", "ä"])
def test_label_is_refused(text: str) -> None:
    assert not is_dns_label(text)


@given(st.text(string.printable, max_size=70))
def test_label_rule_is_that_of_dns(text: str) -> None:
    allowed = set(string.ascii_lowercase + string.digits + "-")
    expected = 0 < len(text) <= 63 and set(text) <= allowed and text[0] != "-" and text[-1] != "-"
    assert is_dns_label(text) == expected


@given(st.integers(0, 7), st.integers(1, 8), st.integers(0, 7), st.integers(1, 8))
def test_placements_overlap_exactly_when_they_share_a_memory_slice(a: int, b: int, c: int, d: int) -> None:
    one, other = Placement(a, b), Placement(c, d)
    shared = bool(set(one.memory_slices) & set(other.memory_slices))
    assert (one.overlaps(other), other.overlaps(one)) == (shared, shared)
