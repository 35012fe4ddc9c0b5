"""Several orchestrators of one run, in any order: they are moved, killed and suspended, and their jobs end."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from job_handles import handle_on
from strict_platform import StrictPlatform

from launcher.errors import PlatformRefused
from launcher.job import JobState
from launcher.runs.attempts import JobHandle
from launcher.runs.index import AttemptRecord
from launcher.runs.lease import LEASE_TIMEOUT, Lease

RUN = "gpt-0123456789"
ROOTS = ("team-a", "team-b")
"""Two roots of one config: they have the same run."""
ORCHESTRATORS = st.sampled_from(
    [("team-a", 0), ("team-a", 0), ("team-a", 1), ("team-a", 1), ("team-b", 0), ("team-b", 1)]
)


class Orchestrator:
    """One process that leads or follows a run. It has its own clock, which a suspension stops."""

    def __init__(self, platform: StrictPlatform, root: Path) -> None:
        self.handle: JobHandle = handle_on(platform, root, RUN)
        self.time = 0.0
        self.lease = Lease(self.handle.attempts.index, RUN, clock=lambda: self.time)
        self.created: AttemptRecord | None = None
        """The attempt that it is about to submit."""

    def create_attempt(self) -> None:
        """Create the next attempt as the leader does, unless the run has ended well."""
        last = self.handle.attempts.last()
        if last is not None and last.status.state is JobState.SUCCEEDED:
            return
        self.handle.attempts.cleanup_last_attempt()
        ended = last.number if last is not None and last.status.state.is_final else 0
        self.created = self.handle.reattach_or_create(ended=ended, leads=self.lease.take)

    def submit(self) -> None:
        record, platform = self.created, self.handle.platform
        assert record is not None
        self.created = None
        if platform.status(record.job_id).state.is_live or not self.lease.take():
            return
        platform.submit(platform.render(self.handle.job_of(record)))

    def die(self) -> None:
        """Stop beating, and let nothing go."""
        self.lease._drop()


class Orchestrators(RuleBasedStateMachine):
    """Two orchestrators for each of two roots, on one platform."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.platform = StrictPlatform()
        self.deleted = set[str]()
        """Jobs that ran when their root was deleted."""
        self.orchestrators = {
            (root, number): Orchestrator(self.platform, self.folder / root) for root in ROOTS for number in range(2)
        }

    def teardown(self) -> None:
        for orchestrator in self.orchestrators.values():
            orchestrator.die()
        shutil.rmtree(self.folder)

    def start_again(self, which: tuple[str, int]) -> None:
        self.orchestrators[which].die()
        self.orchestrators[which] = Orchestrator(self.platform, self.folder / which[0])

    @rule(which=ORCHESTRATORS, submits=st.booleans())
    def lead(self, which: tuple[str, int], submits: bool) -> None:
        """Take the lease if it is free, create an attempt with it, and submit that now or later."""
        orchestrator = self.orchestrators[which]
        if orchestrator.lease.take():
            orchestrator.create_attempt()
            if submits and orchestrator.created is not None:
                self.submit_created(orchestrator)

    @rule(which=ORCHESTRATORS)
    def inherit(self, which: tuple[str, int]) -> None:
        """The holder is dead or suspended: no beat comes for longer than a holder may be silent."""
        orchestrator = self.orchestrators[which]
        orchestrator.lease.take()
        orchestrator.lease.take()  # the beat may have come since
        orchestrator.time += LEASE_TIMEOUT + 1
        orchestrator.lease.take()

    @precondition(lambda self: any(orchestrator.created for orchestrator in self.orchestrators.values()))
    @rule(number=st.integers(0, 3))
    def submit(self, number: int) -> None:
        about_to = [orchestrator for orchestrator in self.orchestrators.values() if orchestrator.created]
        self.submit_created(about_to[number % len(about_to)])

    def submit_created(self, orchestrator: Orchestrator) -> None:
        try:
            orchestrator.submit()
        except PlatformRefused:
            assert self.deleted & {*self.platform.live()}, "only the job of a deleted root is in its way"

    @rule(which=ORCHESTRATORS)
    def kill(self, which: tuple[str, int]) -> None:
        self.start_again(which)

    @rule(which=ORCHESTRATORS)
    def release(self, which: tuple[str, int]) -> None:
        self.orchestrators[which].lease.release()

    @precondition(lambda self: self.platform.live())
    @rule(state=st.sampled_from([JobState.FAILED, JobState.FAILED, JobState.SUCCEEDED]), forgotten=st.booleans())
    def end_job(self, state: JobState, forgotten: bool) -> None:
        job_id = self.platform.live()[0]
        self.platform.end(job_id, state)
        records = [record for root in ROOTS for record in self.records(root) if record.job_id == job_id]
        if forgotten and records:
            self.orchestrators[Path(records[0].root).name, 0].handle.attempts.last()
            self.platform.remove(job_id)

    @rule(root=st.sampled_from(ROOTS))
    def cancel(self, root: str) -> None:
        others = {*self.platform.live()} - {record.job_id for record in self.records(root)}
        self.orchestrators[root, 0].handle.attempts.cancel()
        assert {*self.platform.live()} == others, "the jobs of other roots go on"

    @rule(root=st.sampled_from(ROOTS))
    def delete_root(self, root: str) -> None:
        self.deleted |= {*self.platform.live()} & {record.job_id for record in self.records(root)}
        shutil.rmtree(self.folder / root, ignore_errors=True)
        for number in range(2):
            self.start_again((root, number))

    def records(self, root: str) -> list[AttemptRecord]:
        return self.orchestrators[root, 0].handle.attempts.records()

    @invariant()
    def no_run_has_two_live_jobs(self) -> None:
        labels = [self.platform.run_of(job_id) for job_id in self.platform.live()]
        assert len(labels) == len({*labels})

    @invariant()
    def no_job_is_lost(self) -> None:
        known = {record.job_id for root in ROOTS for record in self.records(root)[-1:]}
        assert {*self.platform.live()} <= known | self.deleted

    @invariant()
    def no_root_sees_the_job_of_another(self) -> None:
        for root in ROOTS:
            live = self.orchestrators[root, 0].handle.attempts.live()
            assert live is None or Path(live.record.root).name == root


TestOrchestrators = Orchestrators.TestCase
TestOrchestrators.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
