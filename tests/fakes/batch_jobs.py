"""Settings, and jobs that tests of Batch share."""

from typing import Any

from golden_files import training_job

from launcher.job import Job
from launcher.platforms.batch.settings import BatchPlatformConfig


def settings_of(**changes: Any) -> BatchPlatformConfig:
    """Two machines with CPUs alone, or with these changes."""
    cpus = {} if "machine" in changes else {"machine": "n2-standard-8", "gpus": 0}
    base = {"kind": "batch", "project": "my-project", "location": "us-central1", "nodes": 2, **cpus}
    return BatchPlatformConfig.model_validate({**base, **changes})


def job_of(settings: BatchPlatformConfig, **changes: Any) -> Job:
    """A training on the machines of these settings."""
    root = settings.nfs_path if settings.nfs else "gs://bucket/pretraining"
    return training_job(root, **{"nodes": settings.nodes, "processes": settings.processes_per_node, **changes})
