"""Bad input gets one clear sentence that names object and remedy; nothing is lost and no other claim is touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.claim import ClaimRef, Failed, Prepared
from tests.fakes.waiting import eventually
from tests.integration.conftest import Node

Setup = Callable[[Node], ClaimRef]
NOBODYS = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def bystander(node: Node) -> ClaimRef:
    """A claim that is prepared beforehand and must stay so."""
    ref = node.claim("bystander")
    node.ready(ref)
    return ref


def replaced(node: Node) -> ClaimRef:
    node.claim("replaced")
    return ClaimRef("default", "replaced", NOBODYS)


def on_the_device_of_another(node: Node) -> ClaimRef:
    claims = node.server.objects("resourceclaims")
    claim = next(one for one in claims if one["metadata"]["name"] == "bystander")
    [result] = claim["status"]["allocation"]["devices"]["results"]
    return node.allocated_by_hand("thief", result["device"])


def configured(**fields: Any) -> Setup:
    body = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", **fields}
    config = [{"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": body}}]
    return lambda node: node.allocated_by_hand("configured", node.devices()[-1]["name"], config=config)


BAD: dict[str, tuple[Setup, tuple[str, ...]]] = {
    "not allocated": (lambda node: node.claim("waiting", status={}), ("default/waiting not allocated",)),
    "another of its name": (replaced, ("default/replaced got replaced",)),
    "no claim": (lambda _: ClaimRef("default", "nowhere", NOBODYS), ("default/nowhere", "does not exist")),
    "unknown device": (
        lambda node: node.allocated_by_hand("strange", "gpu-00000000"),
        ("gpu-00000000", "does not exist on this node", "delete the pod"),
    ),
    "held device": (on_the_device_of_another, ("held by claim default/bystander",)),
    "parameters with a typo": (configured(shraing={}), ("shraing",)),
    "path in a UID": (lambda _: ClaimRef("default", "claim", "../../etc/passwd"), ()),
    "path in a name": (lambda _: ClaimRef("default", "../../api", "uid-2"), ()),
}


def test_what_cannot_be_prepared_is_told_in_one_sentence(node: Node, bystander: ClaimRef) -> None:
    for make, words in BAD.values():
        node.refused(make(node), *words)
        assert node.records() == [f"{bystander.uid}.json"]
    node.ready(bystander)


def test_thousand_claims_in_one_call(node: Node, bystander: ClaimRef) -> None:
    refs = [ClaimRef("default", f"claim-{number}", f"uid-{number}") for number in range(999)]
    outcomes = node.prepare(bystander, *refs)
    assert len(outcomes) == 1000
    assert isinstance(outcomes[bystander.uid], Prepared)
    assert all("does not exist" in outcomes[ref.uid].error for ref in refs)


def test_directories_that_cannot_be_used_or_went(node: Node, bystander: ClaimRef) -> None:
    """What cannot be written is told, with its path; a directory of CDI specs that went is made again."""
    ref = node.claim("next")
    aside = node.root / "aside"
    node.cdi.rename(aside)
    node.cdi.write_text("in the way")
    assert str(node.cdi) in str(node.prepare(ref)[ref.uid])
    assert f"{ref.uid}.json" not in node.records()
    node.cdi.unlink()
    node.ready(bystander)
    assert len(node.specs()) == 1
    claims = node.plugin_dir / "claims"
    aside = claims.rename(node.plugin_dir / "claims-aside")
    outcome = node.prepare(ref)[ref.uid]
    assert isinstance(outcome, Failed), "nobody pretends that nothing is held"
    assert str(claims) in outcome.error
    aside.rename(claims)
    node.ready(ref)


def test_unreadable_record_is_set_aside_and_its_device_stays_protected(
    node: Node, bystander: ClaimRef
) -> None:
    held = node.ready(bystander).devices[0].device
    record = node.plugin_dir / "claims" / f"{bystander.uid}.json"
    record.write_bytes(b'{"version": 1, "claim"')
    thief = node.allocated_by_hand("thief", held)
    outcome = node.prepare(thief)[thief.uid]
    assert isinstance(outcome, Failed)
    assert held in outcome.error
    assert bystander.uid in outcome.error
    other = node.claim("other")
    node.ready(other)
    assert any(name.startswith(f"{bystander.uid}.json.unreadable-") for name in node.records())
    node.ready(bystander)
    node.take_back(bystander)
    assert len(node.specs()) == 1


def test_api_server_slow(node: Node, bystander: ClaimRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.claims.calls._KNOWN_CLAIMS_API_S", 0.2)
    known = [bystander, *(node.claim(f"known-{number}") for number in range(7))]
    for ref in known[1:]:
        node.ready(ref)
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
    monkeypatch.setattr("dra_driver.claims.calls._KNOWN_CLAIMS_API_S", 0.2)
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


@pytest.mark.parametrize(
    ("setting", "error", "word"),
    [
        ("kubeconfig", InvalidConfigError, "nowhere"),
        ("kubelet_registrar_directory_path", (InvalidConfigError, StateError), "registrar-directory-path"),
        ("kubelet_plugins_directory_path", StateError, "nowhere"),
        ("simulate", InvalidConfigError, "nowhere"),
    ],
)
def test_a_path_or_name_in_the_settings_that_is_nothing(
    make_node: Callable[..., Node], setting: str, error: Any, word: str
) -> None:
    made = make_node()
    (made.root / "file").write_text("")
    with pytest.raises(error, match=word):
        made.start_driver(**{setting: str(made.root / "file/nowhere")})
    assert list(made.registry.iterdir()) == []


def test_node_object_missing_is_retried_and_told(make_node: Callable[..., Node]) -> None:
    made = make_node()
    driver = made.start_driver(node_name="node-b")
    problems = eventually(lambda: [one for one in driver.problems() if "node-b" in one])
    assert "slices" in problems[0]
    made.server.add("nodes", {"metadata": {"name": "node-b"}})
    made.wait_devices(8)
