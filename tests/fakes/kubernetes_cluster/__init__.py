"""A Kubernetes cluster in the test's own process: a store with watches, and programs that act on it in milliseconds.

    with running_cluster(nodes=2) as cluster:
        cluster.kubeconfig                                        # how it is reached
        cluster.pods("name"), cluster.objects("jobsets"), cluster.started, cluster.traffic
        cluster.preempt(pod), cluster.hang(node), cluster.answer(429, times=3), cluster.expire_watches()

The API is kmock's server and discovery with a store of our own (store, server). Controllers of Jobs and JobSets, a
scheduler and kubelets do what those programs do, for what this project sends; what others would write into a status,
such as Kueue or a node's controller, a test writes itself (`Cluster.change`, `workload`, `hang`). Containers `node`
really run, as processes of this machine; with `running_cluster(simulate=True)` nothing does, and `cluster.finish()`
ends what is said to run.
"""

from __future__ import annotations

from .cluster import Cluster, running_cluster
from .errors import ApiError
from .kubelet import Started

__all__ = ["ApiError", "Cluster", "Started", "running_cluster"]
