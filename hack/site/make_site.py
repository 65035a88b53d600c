"""`make site`: builds the manual as a web site in build/site.

The site loads nothing from other sites: it contains mermaid, verified by its hash, and a policy in each page forbids
other sources. Warnings of mkdocs are errors.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/site"
PARTS = ROOT / "build/site-parts"
REGISTRY = os.environ.get("NPM_REGISTRY", "https://registry.npmjs.org").rstrip("/")
MERMAID = "11.17.2"
MERMAID_HASH = (
    "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg=="  # SHA-512
)
_FROM_ELSEWHERE = re.compile(r"https?://unpkg\.com/mermaid@[^\"'`]*")


def fetch_mermaid() -> None:
    """Download mermaid to PARTS, unless it is already there."""
    script, stamp = PARTS / "mermaid.min.js", PARTS / f"mermaid-{MERMAID}"
    if stamp.exists() and script.exists():
        return
    with urllib.request.urlopen(f"{REGISTRY}/mermaid/-/mermaid-{MERMAID}.tgz", timeout=60) as answer:
        archive = answer.read()
    if base64.b64encode(hashlib.sha512(archive).digest()).decode() != MERMAID_HASH:
        raise SystemExit(
            f"site: mermaid {MERMAID} from {REGISTRY} does not have the expected hash; build/site is unchanged"
        )
    PARTS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        file = files.extractfile("package/dist/mermaid.min.js")
        assert file is not None
        script.write_bytes(file.read())
    stamp.touch()


def build() -> None:
    """Run mkdocs, without --quiet, because it would not count warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(SITE)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO ")]
    if done.returncode or said:
        raise SystemExit("\n".join(("site: mkdocs failed or printed warnings:", *said)))
    for script in SITE.glob("assets/javascripts/bundle.*.js"):
        # The theme would load mermaid from this URL if our copy were missing.
        script.write_text(_FROM_ELSEWHERE.sub("", script.read_text()))
    for map_file in SITE.rglob("*.map"):
        map_file.unlink()


def main() -> None:
    """Build the site, and print the path of its first page."""
    fetch_mermaid()
    build()
    print(f"{SITE.relative_to(ROOT)}/index.html: {len(list(SITE.rglob('*.html')))} pages")


if __name__ == "__main__":
    main()
