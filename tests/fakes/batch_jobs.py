"""Settings, and jobs that tests of Batch share."""

from __future__ import annotations

from typing import Any

from launcher.job import Job
from launcher.platforms.batch.settings import BatchPlatformConfig

IMAGE = f"europe-west4-docker.pkg.dev/project/litgpt/train@sha256:{64 * '0'}"


def settings_of(**changes: Any) -> BatchPlatformConfig:
    """Two machines with CPUs alone, or with these changes."""
    cpus = {} if "machine" in changes else {"machine": "n2-standard-8", "gpus": 0}
    base = {"kind": "batch", "project": "my-project", "location": "us-central1", "nodes": 2, **cpus}
    return BatchPlatformConfig.model_validate({**base, **changes})


def job_of(settings: BatchPlatformConfig, **changes: Any) -> Job:
    """A training on the machines of these settings."""
    root = settings.nfs_path if settings.nfs else "gs://bucket/pretraining"
    run = f"{root}/runs/owt-0123456789"
    asked: dict[str, Any] = {
        "name": "owt-0123456789", "attempt": 1, "nodes": settings.nodes, "processes": settings.processes,
        "program": ("-m", "litgpt_demo", "train", "--run", run), "directory": f"{run}/attempts/1", "image": IMAGE,
        "stage": (f"{root}/datasets/owt-9876543210",), "labels": {"litgpt-demo.dev/flow-run-id": "none"},
    }  # fmt: skip
    return Job(**{**asked, **changes})
