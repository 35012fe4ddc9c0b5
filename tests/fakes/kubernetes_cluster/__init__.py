"""A Kubernetes cluster in the test's own process: a store with watches, and what a control plane and kubelets do to it.

    with running_cluster(nodes=2) as cluster:
        cluster.kubeconfig                                        # how it is reached
        cluster.pods("name"), cluster.objects("jobsets"), cluster.started, cluster.traffic
        cluster.preempt(pod), cluster.hang(node), cluster.answer(429, times=3), cluster.expire_watches()

After everything that clients (api) or tests (cluster) do, the controllers of JobSets and Jobs, the scheduler
(control_plane) and the kubelets do what those programs do, until nothing changes any more (`ControlPlane.settle`). What
others would write into a status, such as Kueue or a node's controller, a test writes itself (`Cluster.change`,
`workload`, `hang`). Containers `node` really run, as processes of this machine; with `running_cluster(simulate=True)`
nothing does, and `cluster.finish()` ends what is said to run.
"""

from __future__ import annotations

from .cluster import Cluster, running_cluster

__all__ = ["Cluster", "running_cluster"]
