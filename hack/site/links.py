"""Where the links of a Markdown page of this repository lead, here and on the site.

The pages of docs/ are the site. What they link to outside docs/ comes with them, below `repository/`: a Markdown file
as a page, a directory as its README with its manifests, any other file as it is. So a link is right in both places.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
OUTSIDE = "repository"
_LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?P<after>\))")
_ELSEWHERE = re.compile(r"[a-z]+:")
_FENCE = re.compile(r" *```")
_CODE = re.compile(r"`[^`]*`")


def prose(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yields the lines of a page with their line breaks, and whether each is outside of code blocks."""
    fenced = False
    for line in markdown.splitlines(keepends=True):
        mark = _FENCE.match(line) is not None
        yield line, not (fenced or mark or line.startswith("    "))
        fenced ^= mark


def links(markdown: str) -> list[tuple[str, str]]:
    """Path and anchor (without `#`) of each link that does not lead to another server."""
    found = [
        (match["path"], (match["anchor"] or "").removeprefix("#"))
        for line, is_prose in prose(markdown)
        if is_prose
        for match in _LINK.finditer(_CODE.sub("`code`", line))
    ]
    return [link for link in found if not _ELSEWHERE.match(link[0])]


def target(page: str, path: str) -> str:
    """What a link on a page leads to; both are paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page


def place(path: str) -> str:
    """Where on the site a file or directory of the repository is, as the source of a page or as a file."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return posixpath.join(OUTSIDE, path, *(["README.md"] if (ROOT / path).is_dir() else []))


def on_site(page: str, markdown: str) -> str:
    """The text of a page with each link as it must be on the site."""
    here = posixpath.dirname(place(page)) or "."

    def changed(match: re.Match[str]) -> str:
        if not match["path"] or _ELSEWHERE.match(match["path"]):
            return match[0]
        there = posixpath.relpath(place(target(page, match["path"])), here)
        return f"{match['before']}{there}{match['anchor'] or ''}{match['after']}"

    return "".join(_LINK.sub(changed, line) if is_prose else line for line, is_prose in prose(markdown))


def directory_page(path: str) -> str:
    """A directory as a page: its README, or what is in it, and the manifests themselves."""
    folder = ROOT / path
    readme = folder / "README.md"
    children = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if readme.exists():
        text = readme.read_text()
    else:
        text = f"# {path}\n\n" + "".join(f"- [{one.name}]({one.name})\n" for one in children if one.is_dir())
    for entry in children:
        if entry.suffix == ".yaml":
            text += f"\n## `{entry.name}`\n\n```yaml\n{entry.read_text().rstrip()}\n```\n"
    return text


def text_of(path: str) -> str | None:
    """The Markdown of a page of the repository; None for a file that is none. Raises: FileNotFoundError."""
    if (ROOT / path).is_dir():
        return directory_page(path)
    if not path.endswith(".md"):
        (ROOT / path).stat()
        return None
    return (ROOT / path).read_text()


def outside(pages: list[str], lost: Callable[[str, str], None]) -> list[str]:
    """Returns the files outside docs/ that pages link to, directly or indirectly.

    `lost` is called with the page and the link for each broken link.
    """
    found: list[str] = []
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        text = text_of(page)
        # Links of a directory's README are relative to the directory.
        base = f"{page}/README.md" if (ROOT / page).is_dir() else page
        for path, _ in links(text) if text is not None else ():
            there = target(base, path).removesuffix("/README.md")
            if not os.path.lexists(ROOT / there) or there.startswith(".."):
                lost(page, path)
            elif not there.startswith(f"{DOCS}/") and there not in found:
                found.append(there)
                waiting.append(there)
    return sorted(found)
