"""A Kubernetes cluster in the test's own process: a store with watches, and what a control plane and kubelets do to it.

After everything that clients (api) or tests (cluster) do, the controllers of JobSets and Jobs, the scheduler
(control_plane) and the kubelets do what those programs do, until nothing changes any more (`ControlPlane.settle`). What
others would write into a status, such as Kueue or a node's controller, a test writes itself (`Cluster.change`,
`workload`, `hang`). Nodes really run, as processes of this machine; with `running_cluster(simulate=True)` nothing does,
and `Cluster.finish` ends what is said to run.
"""

from .cluster import Cluster, running_cluster

__all__ = ["Cluster", "running_cluster"]
