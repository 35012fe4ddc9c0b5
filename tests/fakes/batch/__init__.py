"""GCP Batch and Cloud Logging in the test's own process: gRPC servers of their clients' own protos, and as strict.

    with running_batch(tmp_path) as cloud:           # sets nothing; give cloud.environment to whoever is to use it
        cloud.export("10.0.0.2", "/data", folder)     # an NFS server that VMs can mount
        cloud.options.vms = 1                         # a quota; jobs that need more stay QUEUED, with an event
        cloud.refuse("CreateJob", grpc.StatusCode.UNAVAILABLE, times=2, after=True)
        cloud.preempt(job, 1), cloud.lose(job, 1, 50002)

Jobs are admitted by Google's rules (admission), kept with their states and events (cloud), and run (vm): every task has
a VM, a folder with stand-ins for the VM's own programs, which write down how they were called. Scripts run among them
as they are; containers run as processes of this machine, or are only said to run.
"""

from __future__ import annotations

from .cloud import Cloud, running_batch
from .vm import Started

__all__ = ["Cloud", "Started", "running_batch"]
