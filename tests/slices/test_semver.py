import re

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.slices.rules.attributes import semver
from tests.fakes.tables import tabled

# The pattern of semver.org, which the API server's library follows.
OFFICIAL = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?",
    re.ASCII,
)


@tabled("text", "expected")
def test_version_is_made_semantic(text: str | None, expected: str | None) -> None:
    assert semver(text) == expected


@given(st.lists(st.text("0123456789", min_size=1, max_size=9), min_size=1, max_size=6).map(".".join))
def test_version_is_always_one_that_the_api_server_takes(text: str) -> None:
    version = semver(text)
    assert version is not None
    assert OFFICIAL.fullmatch(version)


@given(st.text(max_size=20))
def test_any_text_gives_a_version_or_none(text: str) -> None:
    version = semver(text)
    assert version is None or OFFICIAL.fullmatch(version)


@given(st.tuples(*[st.integers(0, 10**6)] * 3))
def test_semantic_version_stays_as_it_is(numbers: tuple[int, int, int]) -> None:
    text = ".".join(map(str, numbers))
    assert semver(text) == text
