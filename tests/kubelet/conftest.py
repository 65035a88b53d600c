import shutil
import tempfile
from pathlib import Path

import pytest
import structlog

from tests.kubelet.support import made_kubelets, made_node


@pytest.fixture
def short_dir():
    """A directory with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def quiet_logs():
    """Log lines are kept, not printed."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def node():
    with made_node() as made:
        yield made


@pytest.fixture
def kubelets(node):
    with made_kubelets(node) as make:
        yield make


@pytest.fixture
def kubelet(kubelets):
    return kubelets()
