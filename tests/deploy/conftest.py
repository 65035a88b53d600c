"""The image build and the release are imported as their own programs import them."""

import sys
from pathlib import Path

_HACK = Path(__file__).parents[2] / "hack"
for folder in ("cluster", "image"):
    sys.path.insert(0, str(_HACK / folder))
