"""The site of docs/: every page is in the navigation, and every link leads somewhere, here and there."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.tables import tabled

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "hack/site"))

import links  # noqa: E402
import tables  # noqa: E402

PAGES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))
MOST_WORDS = 43_500
"""Of all pages of docs/ together, counted as by `wc -w`. More, and no one reads them."""


class _Loader(yaml.SafeLoader):
    """Ignores the Python functions that mkdocs.yml names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, _suffix, _node: None)


def lost(page: str, path: str) -> None:
    raise AssertionError(f"{page} has a link to {path}, which does not exist")


@pytest.fixture(scope="module")
def everything() -> list[str]:
    """All pages and files of the site, by their paths in the repository."""
    return [*PAGES, *links.outside(PAGES, lost)]


def named(entry: Any) -> Iterator[str]:
    """The pages below an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from named(child)


def anchors(markdown: str) -> set[str]:
    """The anchors of the headings, as on GitHub and the site."""
    titles = [
        line.lstrip("#").strip() for line, is_prose in links.prose(markdown) if is_prose and line[0] == "#"
    ]
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def test_navigation_has_each_page_once_and_nothing_else(everything: list[str]) -> None:
    nav = Counter(named(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    own = {page.removeprefix("docs/") for page in PAGES}
    assert {page for page in nav if not page.startswith("repository/")} == own
    assert {page for page, times in nav.items() if times > 1} == set()
    assert nav.keys() - own <= {links.place(path) for path in everything}


def test_pages_have_no_more_words_than_anyone_reads() -> None:
    words = {page: len((ROOT / page).read_text().split()) for page in PAGES}
    longest = ", ".join(f"{page} {words[page]}" for page in sorted(words, key=lambda page: -words[page])[:5])
    assert sum(words.values()) <= MOST_WORDS, (
        f"docs/ has {sum(words.values())} words, at most {MOST_WORDS} are wanted: let each fact stand once and link to "
        f"it, remove what a command or an event says itself, and what repeats a name; the longest pages: {longest}"
    )


def test_every_anchor_of_a_link_is_a_heading(everything: list[str]) -> None:
    faults = []
    for page in everything:
        text = links.text_of(page)
        base = f"{page}/README.md" if (ROOT / page).is_dir() else page
        for path, anchor in links.links(text) if text is not None else ():
            there = links.text_of(links.target(base, path))
            if anchor and (there is None or anchor not in anchors(there)):
                faults.append(f"{page}: {path}#{anchor}")
    assert faults == []


@tabled("page", "link", "on_the_site")
def test_link_is_right_on_the_site_when_it_is_right_in_the_repository(
    page: str, link: str, on_the_site: str
) -> None:
    assert links.on_site(page, f"See [it]({link}).\n") == f"See [it]({on_the_site}).\n"
    assert links.on_site(page, f"```\n[it]({link})\n```\n") == f"```\n[it]({link})\n```\n"


def test_link_to_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("[one](../examples/gone) and [two](b.md)\n")
    found: list[tuple[str, str]] = []
    assert links.outside(["docs/a.md"], lambda *where: found.append(where)) == []
    assert found == [("docs/a.md", "../examples/gone"), ("docs/a.md", "b.md")]


def test_page_of_a_directory_has_its_manifests(everything: list[str]) -> None:
    assert "examples/one-gpu" in everything
    page = links.text_of("examples/one-gpu") or ""
    manifest = (ROOT / "examples/one-gpu/one-gpu.yaml").read_text().strip()
    assert page.startswith("# One GPU for one pod")
    assert f"## `one-gpu.yaml`\n\n```yaml\n{manifest}\n```\n" in page


def test_no_name_in_a_table_is_broken_within_a_word(everything: list[str]) -> None:
    """The style breaks names only where `tables` says, so what stays whole must not be too long for its column."""
    style = (ROOT / "hack/site/overrides/main.html").read_text()
    assert ".md-typeset td code { word-break: normal; overflow-wrap: normal; }" in style
    faults = set()
    for page in everything:
        for line, is_prose in links.prose(links.text_of(page) or ""):
            if is_prose and line.startswith("|"):
                words = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line).replace("|", " ").split()
                names = [piece for code in re.findall(r"`([^`]*)`", line) for piece in tables.pieces(code)]
                faults |= {(page, word) for word in [*words, *names] if len(word) > tables.LONGEST}
    assert faults == set()


def test_name_breaks_after_its_parts_and_only_in_tables() -> None:
    code = "<code>nvidia_dra.a/b</code>"
    shown = "<code>nvidia_<wbr>dra.<wbr>a/<wbr>b</code>"
    assert (
        tables.with_places_to_break(f"<p>{code}</p><td>{code} a_b</td>")
        == f"<p>{code}</p><td>{shown} a_b</td>"
    )
    assert tables.pieces("kubectl --a-flag=on nvidia_dra") == [
        "kubectl", "--a-", "flag=", "on", "nvidia_", "dra",
    ]  # fmt: skip


def test_a_page_says_whose_driver_it_means() -> None:
    """NVIDIA's is "the NVIDIA driver", ours is gpu-dra-driver or "the plugin". Others have driver managers."""
    alone = re.compile(r"\b(?:the|this) driver\b(?! (?:root|manager|name)\b)", re.IGNORECASE)
    faults = []
    for page in [
        *PAGES, "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "daemonset/README.md",
    ]:  # fmt: skip
        prose = "".join(line for line, is_prose in links.prose((ROOT / page).read_text()) if is_prose)
        text = " ".join(re.sub(r"`[^`]*`", "`code`", prose).split())
        faults += [
            f"{page}: …{text[max(0, one.start() - 40) : one.end() + 20]}" for one in alone.finditer(text)
        ]
    assert faults == []
