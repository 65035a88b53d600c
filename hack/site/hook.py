"""Hooks of mkdocs.yml for the site: pages from outside docs/, a local copy of mermaid, and GitHub's Markdown."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))

import links
import tables

MERMAID = links.ROOT / "build/site-parts/mermaid.min.js"
_ITEM = re.compile(r"(?P<mark>- |\d+\. +)")
_CELL_CODE = re.compile(r"`[^`\n]*`")
_PICTURE = re.compile(r'(<img [^>]*?src="([^"]+\.svg)"[^>]*>)')
_VERSION = tomllib.loads((links.ROOT / "pyproject.toml").read_text())["project"]["version"]
_sources: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ to which pages link, and mermaid."""

    def lost(page: str, path: str) -> None:
        raise PluginError(f"{page} has a link to {path}, which does not exist")

    pages = [f"{links.DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    _sources.update({links.place(page): page for page in pages})
    for path in links.outside(pages, lost):
        place, text = links.place(path), links.text_of(path)
        if text is None:
            files.append(File.generated(config, place, abs_src_path=str(links.ROOT / path)))
            continue
        _sources[place] = f"{path}/README.md" if (links.ROOT / path).is_dir() else path
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text with links for the site, in the dialect of Python-Markdown."""
    text = links.on_site(_sources[page.file.src_uri], markdown)
    return "".join(_dialect(text))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the version to the footer of each page."""
    config.copyright = f"{config.site_name} {_VERSION}, {config.copyright}"
    return config


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with optional line breaks in names in tables, links on its pictures, and its source's path.

    If SITE_REPOSITORY is set, such as to `https://example.com/gpu-dra-driver/blob/main`, the path is a link.
    """
    source = _sources[page.file.src_uri]
    shown = f"<code>{source}</code>"
    if repository := os.environ.get("SITE_REPOSITORY", "").rstrip("/"):
        shown = f'<a href="{repository}/{source}">{shown}</a>'
    html = _PICTURE.sub(r'<a href="\2">\1</a>', tables.with_places_to_break(html))
    return f'{html}<p class="source">Source of this page: {shown}</p>'


def _dialect(text: str) -> list[str]:
    """Adapt to Python-Markdown: list items continue at column four, and code in tables has no backslash before `|`."""
    lines: list[str] = []
    shift = ""
    for written in text.splitlines(keepends=True):
        line = written
        if item := _ITEM.match(line):
            shift = " " * (4 - len(item["mark"]))
        elif line.strip() and not line.startswith(" "):
            shift = ""
        if line.startswith("|"):
            line = _CELL_CODE.sub(lambda code: code[0].replace("\\|", "|"), line)
        lines.append(shift + line if line.startswith(" ") and line.strip() else line)
    return lines
