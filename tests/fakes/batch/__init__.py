"""GCP Batch and Cloud Logging in the test's own process: gRPC servers of their clients' own protos, and as strict.

    with running_batch(tmp_path) as cloud:           # sets nothing; give cloud.environment to whoever is to use it
        cloud.export("10.0.0.2", "/data", folder)     # an NFS server that VMs can mount
        cloud.options.vms = 1                         # a quota; jobs that need more stay QUEUED, with an event
        cloud.refuse("CreateJob", grpc.StatusCode.UNAVAILABLE, times=2, after=True)
        cloud.preempt(job, 1), reboot(job, 1), silence(job, 1), freeze(job, 1), remake(job, 1)
        cloud.log_delay = 0.5                         # entries come late, and not in order
        cloud.jobs(), vms(), started, commands

Jobs are admitted by Google's rules (admission), kept with their states and events (service), and run: every task has a
VM, which is a sandbox of kubernetes_cluster.isolation with an address and files of its own (vm). Its scripts run there
as they are, among stand-ins for the VM's own programs that write down how they were called; its containers run by what
`docker run` would make of their options (docker), as processes of this machine; barriers hold until all are there.
"""

from __future__ import annotations

from .server import Cloud, running_batch
from .vm import Started

__all__ = ["Cloud", "Started", "running_batch"]
