"""The section `sharing` of the configuration file, and the flag --consumable-shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dra_driver.app.settings import Settings, consumable_shares, resolve
from dra_driver.errors import InvalidConfigError
from dra_driver.model.sharing import (
    NO_SHARING,
    GpuSelector,
    SharingEntry,
    SharingPolicy,
    SharingRule,
    share_all,
)

GPU = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
MIG = "MIG-4cf8db2d-06c0-5d70-aa51-e59b25b2c16c"


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return make


def policy(path: Path, **given: str) -> SharingPolicy:
    return resolve({"node_name": "n", **given}, path).sharing


def faults(path: Path) -> list[str]:
    with pytest.raises(InvalidConfigError) as caught:
        resolve({"node_name": "n"}, path)
    assert "\n" not in str(caught.value)
    return sorted(caught.value.faults)


def test_entries_become_rules_in_their_order(write) -> None:
    path = write(f"""
sharing:
  - selector: {{uuids: [{GPU}]}}
    mode: off
  - selector: {{productName: "NVIDIA H100*", pciBusIDs: ["00000000:1B:00.0"], devices: gpu}}
    mode: memory
    enforce: mps
    multiprocessors: true
  - selector: {{devices: mig}}
    mode: shares
    shares: 4
  - mode: unlimited
    enforce: mps
    multiUser: false
""")
    assert policy(path).entries == (
        SharingEntry(GpuSelector(uuids=frozenset({GPU})), None),
        SharingEntry(
            GpuSelector("NVIDIA H100*", frozenset(), frozenset({"0000:1b:00.0"}), "gpu"),
            SharingRule("memory", None, "mps", True),
        ),
        SharingEntry(GpuSelector(devices="mig"), SharingRule("shares", 4)),
        SharingEntry(GpuSelector(), SharingRule("unlimited", enforce="mps", multi_user=False)),
    )


@pytest.mark.parametrize("text", ["", "sharing: []", "sharing: null"])
def test_without_entries_nothing_is_shared(write, text: str) -> None:
    assert resolve({"node_name": "n"}, write(text)) == Settings("n")


@pytest.mark.parametrize("mode", ["off", '"off"', "false"])
def test_off_needs_no_quotes(write, mode: str) -> None:
    assert policy(write(f"sharing: [{{mode: {mode}}}]")).entries == (SharingEntry(GpuSelector(), None),)


def test_all_faults_are_reported_at_once(write) -> None:
    path = write("sharing: [{mode: shares}, {mode: memory, shares: 2}, {selector: {uuids: [x, y]}}]")
    assert [fault.partition(": ")[0] for fault in faults(path)] == [
        "sharing.0.shares",
        "sharing.1.shares",
        "sharing.2.mode",
        "sharing.2.selector.uuids.0",
        "sharing.2.selector.uuids.1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", NO_SHARING),
        ("disabled", NO_SHARING),
        ("memory", share_all(SharingRule("memory"))),
        ("unlimited", share_all(SharingRule("unlimited"))),
        ("1", share_all(SharingRule("shares", 1))),
        (" 10 ", share_all(SharingRule("shares", 10))),
        ("4096", share_all(SharingRule("shares", 4096))),
    ],
)
def test_flag_is_one_rule_for_all_devices(text: str, expected: SharingPolicy) -> None:
    assert consumable_shares(text) == expected
    assert resolve({"node_name": "n", "consumable_shares": text}, None).sharing == expected


@pytest.mark.parametrize("text", ["0", "-1", "4097", "1.5", "many", "Memory", "٣", "9" * 5000, "off", "4x"])
def test_wrong_flag_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="expected disabled, memory, unlimited or a number from 1"):
        resolve({"node_name": "n", "consumable_shares": text}, None)


def test_flag_and_section_contradict_each_other_unless_the_flag_is_off(write) -> None:
    path = write("sharing: [{mode: memory}]")
    assert policy(path, consumable_shares="disabled") == share_all(SharingRule("memory"))
    with pytest.raises(InvalidConfigError, match="contradict each other; remove one"):
        policy(path, consumable_shares="4")


def test_example_of_the_documentation_is_valid(write) -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    (example,) = [block for block in blocks if block.startswith("sharing:")]
    assert len(yaml.safe_load(example)["sharing"]) == len(policy(write(example)).entries)
