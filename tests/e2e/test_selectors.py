"""What `validate` says of a selector is what the API server says: its compiler is built and asked."""

from pathlib import Path

import pytest
from celcheck.compare import build, compare, fixed
from celcheck.grammar import Grammar

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def compiler() -> Path:
    return build()


def test_expressions_that_are_easily_got_wrong(compiler: Path) -> None:
    found = compare(compiler, fixed())
    assert found.differences == ()
    assert found.taken > 50
    assert found.refused > 30


@pytest.mark.parametrize("seed", [1, 2])
def test_expressions_of_a_grammar(compiler: Path, seed: int) -> None:
    grammar = Grammar(seed)
    found = compare(compiler, [grammar.expression() for _ in range(1000)])
    assert found.differences == ()
    assert found.taken > 100
    assert found.refused > 200
