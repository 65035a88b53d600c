"""Bad input gets one clear sentence that names object and remedy; nothing is lost and no other claim is touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dra_driver.app.daemon import Driver
from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.integration.conftest import Node, eventually


@pytest.fixture
def bystander(node: Node) -> ClaimRef:
    """A claim that is prepared beforehand and must stay so."""
    ref = node.claim("bystander")
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    return ref


def refused(node: Node, ref: ClaimRef, *words: str, in_a_hurry: bool = False) -> str:
    """The error of a Prepare that must fail, in one line and with these words in it."""
    outcome = (node.prepare_in_a_hurry if in_a_hurry else node.prepare)(ref)[ref.uid]
    assert isinstance(outcome, Failed), outcome
    assert "\n" not in outcome.error
    for word in words:
        assert word in outcome.error, outcome.error
    return outcome.error


def assert_untouched(node: Node, bystander: ClaimRef) -> None:
    assert node.records() == [f"{bystander.uid}.json"]
    assert len(node.specs()) == 1
    assert isinstance(node.prepare(bystander)[bystander.uid], Prepared)


def test_claim_not_allocated(node: Node, bystander: ClaimRef) -> None:
    ref = node.claim("waiting", status={})
    refused(node, ref, "default/waiting not allocated")
    assert_untouched(node, bystander)


def test_claim_replaced_by_one_of_the_same_name(node: Node, bystander: ClaimRef) -> None:
    node.claim("replaced")
    old = ClaimRef("default", "replaced", "00000000-0000-0000-0000-000000000000")
    refused(node, old, "default/replaced got replaced")
    assert_untouched(node, bystander)


def test_claim_that_does_not_exist(node: Node, bystander: ClaimRef) -> None:
    ref = ClaimRef("default", "nowhere", "00000000-0000-0000-0000-000000000000")
    refused(node, ref, "default/nowhere", "does not exist")
    assert_untouched(node, bystander)


def test_allocated_device_unknown(node: Node, bystander: ClaimRef) -> None:
    ref = node.allocated_by_hand("strange", "gpu-00000000")
    refused(node, ref, "gpu-00000000", "does not exist on this node", "delete the pod")
    assert_untouched(node, bystander)


def test_device_held_by_another_claim(node: Node, bystander: ClaimRef) -> None:
    held = node.prepare(bystander)[bystander.uid].devices[0].device
    ref = node.allocated_by_hand("thief", held)
    refused(node, ref, held, "held by claim default/bystander", bystander.uid)
    assert_untouched(node, bystander)


def parameters(**fields: object) -> list[dict]:
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", **fields}
    return [{"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": body}}]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (parameters(shraing={}), "shraing"),
        (parameters(kind="GpuConfg"), "GpuConfg"),
        (parameters(apiVersion="resource.nvidia.com/v1alpha9"), "v1alpha9"),
        (parameters(sharing={"strategy": "TimeSlicing", "mpsConfig": {}}), "sharing.mpsConfig: does not fit"),
        (parameters(sharing={"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 101}}), "100"),
        (parameters(kind="VfioDeviceConfig"), "VfioDeviceConfig"),
    ],
)
def test_opaque_parameters_that_cannot_be_carried_out(
    node: Node, bystander: ClaimRef, config: list[dict], word: str
) -> None:
    free = node.devices()[-1]["name"]
    if config[0]["opaque"]["parameters"]["kind"] == "VfioDeviceConfig":
        config[0]["requests"] = ["gpu"]
    ref = node.allocated_by_hand("configured", free, config=config)
    refused(node, ref, word)
    assert_untouched(node, bystander)


@pytest.mark.parametrize(
    "ref",
    [
        ClaimRef("default", "claim", "../../etc/passwd"),
        ClaimRef("default", "claim", "a/b"),
        ClaimRef("..", "claim", "uid-1"),
        ClaimRef("default", "../../api", "uid-2"),
        ClaimRef("default", "claim", "x" * 300),
        ClaimRef("", "", "uid-3"),
    ],
)
def test_names_that_could_lead_out_of_a_directory(node: Node, bystander: ClaimRef, ref: ClaimRef) -> None:
    refused(node, ref)
    assert isinstance(node.unprepare(ref)[ref.uid], Failed) or ref.uid.startswith("uid-")
    assert_untouched(node, bystander)


def test_empty_request_is_answered_with_nothing(node: Node) -> None:
    assert node.prepare() == {}
    assert node.unprepare() == {}


def test_thousand_claims_in_one_call(node: Node, bystander: ClaimRef) -> None:
    refs = [ClaimRef("default", f"claim-{number}", f"uid-{number}") for number in range(999)]
    outcomes = node.prepare(bystander, *refs)
    assert len(outcomes) == 1000
    assert isinstance(outcomes[bystander.uid], Prepared)
    assert all("does not exist" in outcomes[ref.uid].error for ref in refs)


def test_cdi_directory_cannot_be_written(node: Node, bystander: ClaimRef) -> None:
    aside = node.root / "cdi-aside"
    node.cdi.rename(aside)
    node.cdi.write_text("in the way")
    ref = node.claim("next")
    refused(node, ref, str(node.cdi))
    assert f"{ref.uid}.json" not in node.records()
    node.cdi.unlink()
    aside.rename(node.cdi)
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    assert isinstance(node.prepare(bystander)[bystander.uid], Prepared)


def test_cdi_directory_removed_is_made_again(node: Node, bystander: ClaimRef) -> None:
    for file in node.cdi.iterdir():
        file.unlink()
    node.cdi.rmdir()
    assert isinstance(node.prepare(bystander)[bystander.uid], Prepared)
    assert len(node.specs()) == 1


def test_records_directory_lost(node: Node, bystander: ClaimRef) -> None:
    """With the directory gone a Prepare says so; it does not pretend that nothing is held."""
    claims = node.plugin_dir / "claims"
    aside = node.plugin_dir / "claims-aside"
    claims.rename(aside)
    ref = node.claim("next")
    refused(node, ref, str(claims))
    aside.rename(claims)
    assert isinstance(node.prepare(ref)[ref.uid], Prepared)


def test_unreadable_record_is_set_aside_and_its_device_stays_protected(
    node: Node, bystander: ClaimRef
) -> None:
    held = node.prepare(bystander)[bystander.uid].devices[0].device
    record = node.plugin_dir / "claims" / f"{bystander.uid}.json"
    record.write_bytes(b'{"version": 1, "claim"')
    thief = node.allocated_by_hand("thief", held)
    refused(node, thief, held, bystander.uid)
    other = node.claim("other")
    assert isinstance(node.prepare(other)[other.uid], Prepared)
    assert any(name.startswith(f"{bystander.uid}.json.unreadable-") for name in node.records())
    assert isinstance(node.prepare(bystander)[bystander.uid], Prepared)
    assert node.unprepare(bystander) == {bystander.uid: None}
    assert len(node.specs()) == 1


def test_api_server_down(node: Node, bystander: ClaimRef) -> None:
    fresh = node.claim("fresh")
    node.server.faults.down = True
    assert isinstance(node.prepare(bystander)[bystander.uid], Prepared), "known claims need no API server"
    refused(node, fresh, "default/fresh", in_a_hurry=True)
    assert node.unprepare(bystander) == {bystander.uid: None}
    node.server.faults.clear()
    assert isinstance(node.prepare(fresh)[fresh.uid], Prepared)


def test_api_server_slow(node: Node, bystander: ClaimRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.kubelet_call._KNOWN_CLAIMS_API_S", 0.2)
    known = [bystander, *(node.claim(f"known-{number}") for number in range(7))]
    for ref in known[1:]:
        assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    node.server.faults.slow("resourceclaims", 8)
    started = time.monotonic()
    outcomes = node.prepare(*known)
    assert all(isinstance(outcomes[ref.uid], Prepared) for ref in known)
    assert time.monotonic() - started < 7, "the claims of a call share one wait"
    node.server.faults.clear()


def test_api_server_that_never_answers_a_driver_that_starts(
    node: Node, bystander: ClaimRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts, so that nothing fails at once; each of the first requests waits for it by itself."""
    monkeypatch.setattr("dra_driver.claims.kubelet_call._KNOWN_CLAIMS_API_S", 0.2)
    known = [bystander, *(node.claim(f"known-{number}") for number in range(7))]
    for ref in known[1:]:
        assert isinstance(node.prepare(ref)[ref.uid], Prepared)
    assert node.driver is not None
    node.driver.stop()
    node.server.faults.slow("/", 12)
    node.start_driver()
    for _ in range(2):
        started = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda ref: node.prepare(ref)[ref.uid], known))
        assert all(isinstance(answer, Prepared) for answer in answers)
        assert time.monotonic() - started < 9
    node.server.faults.clear()


def test_kubeconfig_wrong(make_node: Callable[..., Node], tmp_path: Path) -> None:
    made = make_node()
    with pytest.raises(InvalidConfigError, match="no-such-file"):
        made.start_driver(kubeconfig=str(tmp_path / "no-such-file"))
    assert list(made.registry.iterdir()) == []


def test_registry_directory_missing(make_node: Callable[..., Node], tmp_path: Path) -> None:
    made = make_node()
    with pytest.raises((InvalidConfigError, StateError), match="kubelet-registrar-directory-path"):
        made.start_driver(kubelet_registrar_directory_path=str(tmp_path / "nowhere"))


def test_plugin_directory_cannot_be_made(make_node: Callable[..., Node], tmp_path: Path) -> None:
    made = make_node()
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=str(tmp_path)):
        made.start_driver(kubelet_plugins_directory_path=str(tmp_path / "file"))


def test_unknown_machine(make_node: Callable[..., Node]) -> None:
    made = make_node()
    with pytest.raises(InvalidConfigError, match="dgx-h900"):
        Driver(
            made.settings.__class__(node_name="n", simulate="dgx-h900", simulator_dir=str(made.root / "x"))
        )


def test_node_object_missing_is_retried_and_told(make_node: Callable[..., Node]) -> None:
    made = make_node()
    driver = made.start_driver(node_name="node-b")
    problems = eventually(lambda: [one for one in driver.problems() if "node-b" in one])
    assert "slices" in problems[0]
    made.server.add("nodes", {"metadata": {"name": "node-b"}})
    made.wait_devices(8)
