import pytest
import structlog


@pytest.fixture(autouse=True)
def logs():
    """Log lines are kept, not printed."""
    with structlog.testing.capture_logs() as lines:
        yield lines
