"""Print what the image needs of pyproject.toml's dependencies, for `make lock`.

CEL (`cel-expr-python`) is for `validate` and `cluster`, which people run elsewhere; in the image they judge the
selectors of our own classes.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

NOT_IN_IMAGE = frozenset({"cel-expr-python"})
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def wanted() -> list[str]:
    """The requirements as pyproject.toml has them."""
    listed: list[str] = tomllib.loads(_PYPROJECT.read_text())["project"]["dependencies"]
    return [entry for entry in listed if re.split(r"[^A-Za-z0-9._-]", entry)[0] not in NOT_IN_IMAGE]


if __name__ == "__main__":
    print("\n".join(wanted()))
