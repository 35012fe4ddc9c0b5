"""A Kubernetes cluster in the test's own process, as strict as a real one, that runs what it is given.

    @pytest.fixture
    def cluster(tmp_path):
        with running_cluster(shared=[tmp_path], nodes=2) as cluster:
            yield cluster

    cluster.host, cluster.token      # or cluster.kubeconfig, a file
    cluster.add_nodes(2, gpus=8, labels={"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"})
    cluster.add_queue("research", quota={"nvidia.com/gpu": 16})      # running_cluster(kueue=True)
    cluster.options.image_environment["STORAGE_EMULATOR_HOST"] = "http://" + cluster.check_access(port)
    cluster.kill(pod), preempt(pod), evict(pod), run_out(pod), delete_pod(pod)
    cluster.lose(node), hang(node), recover(node), remove_node(node), shut_down(node), outage()
    cluster.secure("restricted"), apply("limitranges", …), apply("resourcequotas", …)
    cluster.break_image(image), suspend(job), answer(429, times=3), expire_watches(), break_streams(), expire_token()
    cluster.cut_logs(100), tell(pod, reason, message, source=...), tls()
    cluster.allow(rules)                                             # RBAC, also behind SelfSubjectAccessReview
    cluster.pods("name"), objects("jobsets"), started, traffic, wait(lambda: ...)

The API is kmock's server and discovery with a store of our own (store, server); admission refuses what the real one
refuses; jobs, jobsets, kueue, scheduler and kubelet do what those programs do, in milliseconds; isolation gives each
pod its namespaces. The container `node` (and those with its image) really runs, the others are recorded (see kubelet).
`running_cluster(simulate=True, nodes=1000)` runs nothing: `cluster.finish()` ends what is said to run.
"""

from __future__ import annotations

from .cluster import Cluster, running_cluster
from .controllers import Timing
from .errors import ApiError
from .kubelet import Started

__all__ = ["ApiError", "Cluster", "Started", "Timing", "running_cluster"]
