"""The setting `deviceMetadata` and the flag --device-metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from dra_driver.errors import InvalidConfigError
from dra_driver.settings import resolve


@pytest.mark.parametrize(
    ("text", "given", "versions"),
    [
        ("{}", None, ()),
        ("deviceMetadata: off", None, ()),
        ("deviceMetadata: v1alpha1", None, ("v1alpha1",)),
        ("deviceMetadata: v1beta1", None, ("v1beta1",)),
        ("deviceMetadata: both", None, ("v1beta1", "v1alpha1")),
        ("deviceMetadata: both", "off", ()),
        ("{}", "both", ("v1beta1", "v1alpha1")),
    ],
)
def test_versions_are_newest_first(
    tmp_path: Path, text: str, given: str | None, versions: tuple[str, ...]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert resolve({"node_name": "n", "device_metadata": given}, path).metadata_versions == versions


def test_other_values_on_the_command_line_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="off, v1alpha1, v1beta1 or both"):
        resolve({"node_name": "n", "device_metadata": "v1"}, None)


def test_driver_name_must_be_one_that_cdi_takes() -> None:
    given = {"node_name": "n", "driver_name": "0.example.com"}
    assert resolve(given, None).metadata_versions == ()
    with pytest.raises(InvalidConfigError, match="begins with a letter"):
        resolve({**given, "device_metadata": "both"}, None)
