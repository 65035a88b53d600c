"""`pip install` installs the driver, but none of the playground."""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]


def test_wheel_holds_the_driver_and_no_stand_ins() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_packages(str(ROOT), **settings["packages"]["find"])
    assert {name.partition(".")[0] for name in packages} == {"dra_driver"}
    assert not [name for name in packages if "playground" in name or "embedded" in name]
    data = [pattern for patterns in settings["package-data"].values() for pattern in patterns]
    assert not [pattern for pattern in data if ".." in pattern or pattern.startswith("/")]
