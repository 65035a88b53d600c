"""Whether taints without an effect may be sent follows the API server."""

from __future__ import annotations

import pytest

from dra_driver.app.publishing import Informing
from dra_driver.errors import ApiRejectedError, ApiUnavailableError


class Observer:
    """What the publisher told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def published(self, lag_s: float) -> None:
        self.heard.append(lag_s)

    def publish_failed(self, error: Exception) -> None:
        self.heard.append(error)

    def contested(self, reason: str) -> None:
        self.heard.append(reason)

    def refused(self, fault: str) -> None:
        self.heard.append(fault)


def test_a_refused_slice_calls_for_a_new_answer_and_nothing_else_does() -> None:
    answers, observer = [True, False], Observer()
    informs = Informing(lambda: answers.pop(0), observer)
    others = (ApiUnavailableError("away"), ApiRejectedError("forbidden", status=403), ValueError("surprise"))
    refusal = ApiRejectedError("unsupported effect", status=422)
    assert informs()
    for error in others:
        informs.publish_failed(error)
        assert informs()
    informs.publish_failed(refusal)
    assert not informs()
    assert not informs()
    informs.published(0.5)
    informs.contested("somebody")
    informs.refused("a device")
    assert observer.heard == [*others, refusal, 0.5, "somebody", "a device"]


def test_no_answer_is_no_answer() -> None:
    asked: list[bool] = []

    def ask() -> bool:
        asked.append(True)
        if len(asked) == 1:
            raise ApiUnavailableError("away")
        return False

    informs = Informing(ask, Observer())
    with pytest.raises(ApiUnavailableError):
        informs()
    assert not informs()
