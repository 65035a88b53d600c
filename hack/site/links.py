"""Resolves the links of Markdown pages, in this repository and on the site.

The site has the pages of docs/. It also has the files outside docs/ to which they link, below `repository/`: a Markdown
file as a page, a directory as its README with its manifests, any other file unchanged. So a link works in both places.
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
    """Yield each line of a page with its line break, and whether it is outside of code blocks."""
    fenced = False
    for line in markdown.splitlines(keepends=True):
        mark = _FENCE.match(line) is not None
        yield line, not (fenced or mark or line.startswith("    "))
        fenced ^= mark


def links(markdown: str) -> list[tuple[str, str]]:
    """Return path and anchor (without `#`) of each link that does not lead to another server."""
    found = [
        (match["path"], (match["anchor"] or "").removeprefix("#"))
        for line, is_prose in prose(markdown)
        if is_prose
        for match in _LINK.finditer(_CODE.sub("`code`", line))
    ]
    return [link for link in found if not _ELSEWHERE.match(link[0])]


def target(page: str, path: str) -> str:
    """Return the path in the repository to which the link `path` on `page` leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page


def place(path: str) -> str:
    """Return the path on the site of a file or directory of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    return posixpath.join(OUTSIDE, path, *(["README.md"] if (ROOT / path).is_dir() else []))


def on_site(page: str, markdown: str) -> str:
    """Return the text of a page with its links changed for the site."""
    here = posixpath.dirname(place(page)) or "."

    def changed(match: re.Match[str]) -> str:
        if not match["path"] or _ELSEWHERE.match(match["path"]):
            return match[0]
        there = posixpath.relpath(place(target(page, match["path"])), here)
        return f"{match['before']}{there}{match['anchor'] or ''}{match['after']}"

    return "".join(_LINK.sub(changed, line) if is_prose else line for line, is_prose in prose(markdown))


def directory_page(path: str) -> str:
    """Return a page for a directory: its README, or else a list of its subdirectories, and its manifests."""
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
    """Return the Markdown of a page or directory; None for any other file. Raises: FileNotFoundError."""
    if (ROOT / path).is_dir():
        return directory_page(path)
    if not path.endswith(".md"):
        (ROOT / path).stat()
        return None
    return (ROOT / path).read_text()


def outside(pages: list[str], lost: Callable[[str, str], None]) -> list[str]:
    """Return the files outside docs/ to which the pages link, directly or indirectly.

    For each broken link, call `lost` with the page and the link.
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
