"""Which of several instances of the plugin speaks for the node."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dra_driver.errors import StateError
from dra_driver.state.turns import PublishingTurn

_log = structlog.get_logger(__name__)


def telling_turn(turn: PublishingTurn) -> Callable[[], bool]:
    """Whether this instance speaks for the node. Where that cannot be told, better twice than never."""

    def is_ours() -> bool:
        try:
            return turn.is_ours()
        except StateError as error:
            _log.debug("turn_unknown", reason=str(error))
            return True

    return is_ours
