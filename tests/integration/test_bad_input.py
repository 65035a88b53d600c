"""Bad input gets one clear sentence that names object and remedy; nothing is lost and no other claim is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dra_driver.errors import InvalidConfigError, StateError
from dra_driver.model.claim import ClaimRef, Failed
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


BAD: dict[str, tuple[Setup, tuple[str, ...]]] = {
    "not allocated": (lambda node: node.claim("waiting", status={}), ("default/waiting not allocated",)),
    "another of its name": (replaced, ("default/replaced got replaced",)),
    "no claim": (lambda _: ClaimRef("default", "nowhere", NOBODYS), ("default/nowhere", "does not exist")),
    "path in a name": (lambda _: ClaimRef("default", "../../api", "uid-2"), ()),
}


def test_failed_prepare_is_reported_in_one_sentence(node: Node, bystander: ClaimRef) -> None:
    for make, words in BAD.values():
        node.refused(make(node), *words)
        assert node.records() == [f"{bystander.uid}.json"]
    node.ready(bystander)


def test_directories_that_cannot_be_used_or_went(node: Node, bystander: ClaimRef) -> None:
    """Unwritable directories are reported with their path; a missing directory of CDI specs is created again."""
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


def test_node_object_missing_is_retried_and_reported(make_node: Callable[..., Node]) -> None:
    made = make_node()
    driver = made.start_driver(node_name="node-b")
    problems = eventually(lambda: [one for one in driver.problems() if "node-b" in one])
    assert "slices" in problems[0]
    made.server.add("nodes", {"metadata": {"name": "node-b"}})
    made.wait_devices(8)
