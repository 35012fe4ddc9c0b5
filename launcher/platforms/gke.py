"""Kubernetes as a platform: GKE with its GPU networks, or any other cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from launcher.findings import Finding
from launcher.job import Job, Submission
from launcher.kubernetes.lint import lint
from launcher.kubernetes.rendering import Workload, render
from launcher.kubernetes.settings import GkePlatformConfig
from launcher.platforms.base import Capability


class GkePlatform:
    """Runs the nodes of a job as pods: a JobSet, or an Indexed Job. A job's id is `namespace/name`."""

    name: ClassVar[str] = "gke"
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.IMAGES, Capability.EXCLUDE_NODES})

    def __init__(self, settings: GkePlatformConfig) -> None:
        self._settings = settings

    @classmethod
    def configured(cls, settings: GkePlatformConfig) -> Self:
        """As a config's `platform` section says."""
        return cls(settings)

    @property
    def workload(self) -> Workload:
        """What jobs become."""
        return "job" if self._settings.workload == "job" else "jobset"

    def render(self, job: Job) -> Submission:
        """The objects that would be created.

        Raises:
            ConfigProblem: names do not fit, variables clash, or the network is not to be had.
        """
        return render(job, self._settings, self.workload)

    def check(self, submission: Submission) -> Iterator[Finding]:
        """What the objects themselves show to be wrong."""
        yield from lint(submission.body["items"], self._settings)
