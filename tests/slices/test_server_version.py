"""Which releases of Kubernetes count shares of counted devices."""

from __future__ import annotations

import pytest

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.slices.api_support import sharing_caution


class Server:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def request(self, method: str, path: str, *, action: str) -> dict:
        assert (method, path) == ("GET", "/version")
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"major": "1", "gitVersion": self.answer}


@pytest.mark.parametrize(
    "version", ["v1.35.0", "v1.35.99", "v1.36.0", "v1.36.1-gke.100", "v1.36.1+k3s1", "1.36.1"]
)
def test_older_releases_are_warned_of(version: str) -> None:
    caution = sharing_caution(Server(version))
    assert caution is not None
    assert f"Kubernetes {version} " in caution
    assert "upgrade to 1.36.2 or newer" in caution


@pytest.mark.parametrize(
    "answer",
    ["v1.36.2", "v1.36.2-eks-1", "v1.37.0", "v1.100.0", "v2.0.0", "", "custom", None,
     ApiUnavailableError("down"), ApiRejectedError("forbidden", status=403)],
)  # fmt: skip
def test_nothing_is_said_of_newer_and_unknown_ones(answer: object) -> None:
    assert sharing_caution(Server(answer)) is None
