"""The clusters that these tests share the shape of, each test with one of its own."""

from collections.abc import Iterator

import pytest
from kubernetes_cluster import Cluster, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two machines, and JobSet."""
    with running_cluster(simulate=True) as made:
        yield made


@pytest.fixture
def bare() -> Iterator[Cluster]:
    """No machine, and Kueue beside JobSet."""
    with running_cluster(simulate=True, nodes=0, kueue=True) as made:
        yield made


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is away is away for good; a watch that opens when a test ends would ask again for 7.5 s."""
    monkeypatch.setattr("launcher.platforms.kubernetes.cluster._PAUSES", (0.01, 0.1))
