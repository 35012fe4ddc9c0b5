"""Attempts of a run or script: which there are, and which comes next. What lies on disk decides, nothing remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig
from launcher.images import Image, PrebuiltImage
from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms import open_platform
from launcher.platforms.base import Platform
from launcher.runs import Run, plan_run, script_job, training_job
from litgpt_demo.runs import ATTEMPTS
from litgpt_demo.storage import Storage, open_storage

MakeJob: TypeAlias = Callable[[int], Job]
"""Attempt number to the job of that attempt."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One life of a job, as its platform knows it."""

    number: int
    job_id: JobId
    status: JobStatus


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """All lives of one job."""

    platform: Platform
    make_job: MakeJob

    @property
    def run(self) -> Storage:
        """The folder of the run."""
        return open_storage(self.make_job(1).directory.rsplit(f"/{ATTEMPTS}/", 1)[0])

    def numbers(self) -> list[int]:
        """Of the attempts that left something, in order."""
        names = {path.split("/")[0] for path in self.run.within(ATTEMPTS).list()}
        return sorted(int(name) for name in names if name.isdigit())

    def all(self) -> list[Attempt]:
        """Every attempt that its platform knows, oldest first."""
        return [found for number in self.numbers() if (found := self._at(number)).status.state is not JobState.ABSENT]

    def live(self) -> Attempt | None:
        """The one that runs, if one does; only the last can."""
        numbers = self.numbers()
        last = self._at(numbers[-1]) if numbers else None
        return last if last is not None and last.status.state.live else None

    def next(self) -> int:
        """The number of the one that runs, or of the one to start."""
        live, numbers = self.live(), self.numbers()
        return live.number if live else (numbers[-1] + 1 if numbers else 1)

    def sweep(self) -> None:
        """Remove what the last attempt may have left although it ended: it must not compete with the next one."""
        if (numbers := self.numbers()) and self.live() is None:
            self.platform.cancel(self._at(numbers[-1]).job_id)

    def cancel(self) -> list[JobId]:
        """Cancel what lives, and prove it; returns what was cancelled."""
        live = self.live()
        self.sweep()
        if live is None:
            return []
        self.platform.cancel(live.job_id)
        return [live.job_id]

    def _at(self, number: int) -> Attempt:
        job_id = self.platform.render(self.make_job(number)).job_id
        return Attempt(number=number, job_id=job_id, status=self.platform.status(job_id))


def attempts_of(config: RunConfig | ScriptConfig | BenchmarkConfig) -> Attempts:
    """The attempts at what this config means."""
    if isinstance(config, RunConfig):
        return attempts_at(plan_run(config))
    script = config.job() if isinstance(config, BenchmarkConfig) else config
    return Attempts(
        platform=open_platform(config.platform),
        make_job=lambda number: script_job(script, attempt=number, image=known_image(script.image)),
    )


def attempts_at(run: Run) -> Attempts:
    """The attempts at a run that is planned already: planning looks at every file of the corpus."""
    return Attempts(
        platform=open_platform(run.config.platform),
        make_job=lambda number: training_job(run, attempt=number, image=known_image(run.config.image)),
    )


def known_image(image: Image) -> str | None:
    """What is known of an image before the image step: the reference of one that is there already."""
    return image.reference if isinstance(image, PrebuiltImage) else None
