import pytest

from dra_driver.reporting.metric_views import Views
from tests.fakes.fixtures import h100, logs, node
from tests.fakes.waiting import PATIENCE_S

__all__ = ["h100", "logs", "node"]


@pytest.fixture(autouse=True)
def _no_source_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Views.__init__.__kwdefaults__, "within_s", PATIENCE_S)
