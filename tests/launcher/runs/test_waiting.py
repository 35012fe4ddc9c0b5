from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_platform import StrictPlatform

from launcher.errors import JobCancelled, LoginProblem, PlatformUnreachable
from launcher.job import Job, JobId, JobState, JobStatus, LogLine, LogPage
from launcher.runs.waiting import asked, follow, pause
from litgpt_demo.errors import NetworkError, was_given_up

Fate = tuple[float, Callable[[], None]]
"""When something happens, and what."""


class Hours:
    """A clock on which hours pass in no time: `sleep` lets what is due in the meantime happen."""

    def __init__(self, *fates: Fate) -> None:
        self._now = 1000.0  # the monotonic clock starts anywhere
        self._fates = sorted(((self._now + at, happen) for at, happen in fates), key=lambda fate: fate[0])
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self._now += seconds
        while self._fates and self._fates[0][0] <= self._now:
            self._fates.pop(0)[1]()


def job(folder: str) -> Job:
    return Job(name="gpt-1", attempt=1, nodes=2, processes=1, program=("x.py",), directory=f"{folder}/attempts/1")


class Followed:
    """A job that was submitted to a strict platform, and what its follower hears."""

    def __init__(self, folder: str, platform: StrictPlatform | None = None) -> None:
        self.platform = platform or StrictPlatform()
        self.id = self.platform.submit(self.platform.render(job(folder)))
        self.heard: list[LogLine] = []
        self.silences: list[Exception] = []

    def start(self) -> None:
        self.platform.start(self.id)

    def say(self, *texts: str, node: int = 0) -> Callable[[], None]:
        return lambda: self.platform.say(self.id, *texts, node=node)

    def end(self, state: JobState = JobState.SUCCEEDED) -> Callable[[], None]:
        return lambda: self.platform.end(self.id, state, {0: 0 if state is JobState.SUCCEEDED else 1})

    def silent(self, silent: bool) -> Callable[[], None]:
        return lambda: self.platform.silence(silent)

    def refuses(self, refuses: bool) -> Callable[[], None]:
        """The credentials: a token that was revoked, until somebody has logged in again."""
        return lambda: self.platform.silence(refuses, LoginProblem("the credentials are refused; log in again"))

    def follow(self, clock: Hours, *, poll: float = 10, patience: float = 900) -> JobStatus:
        def on_lines(lines: Iterable[LogLine]) -> None:
            self.heard += lines

        return asyncio.run(
            follow(
                self.platform, self.id, on_lines=on_lines, on_silence=self.silences.append, poll=poll,
                patience=patience, clock=clock,
            )
        )  # fmt: skip


@pytest.fixture
def followed(tmp_path: object) -> Followed:
    return Followed(str(tmp_path))


@pytest.mark.parametrize("end", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_waiting_ends_with_the_job_and_says_how(followed: Followed, end: JobState) -> None:
    clock = Hours((20, followed.start), (3600, followed.end(end)))
    status = followed.follow(clock)
    assert status.state is end
    assert status.exit_codes == {0: 0 if end is JobState.SUCCEEDED else 1}
    assert clock.now() == 1000 + 3600
    assert set(clock.sleeps) == {10}


def test_a_job_that_has_ended_already_is_not_waited_for(followed: Followed) -> None:
    followed.start()
    followed.say("all of it")()
    followed.end()()
    clock = Hours()
    assert followed.follow(clock).state is JobState.SUCCEEDED
    assert [line.text for line in followed.heard] == ["all of it"]
    assert clock.sleeps == []


@settings(deadline=None, max_examples=40)
@given(
    # To the millisecond: what differs by less is the same time on a clock that starts at 1000.
    st.lists(st.tuples(st.floats(1, 500).map(lambda at: round(at, 3)), st.integers(0, 1)), max_size=12),
    st.lists(st.tuples(st.floats(0, 400), st.floats(1, 100)), max_size=3),
)
def test_every_line_is_delivered_once_and_in_order_however_the_platform_falls_silent(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[float, int]], silences: list[tuple[float, float]]
) -> None:
    followed = Followed(str(tmp_path_factory.mktemp("run")))
    said = [(at, node, f"line {number}") for number, (at, node) in enumerate(lines)]
    fates: list[Fate] = [(at, followed.say(text, node=node)) for at, node, text in said]
    for at, how_long in silences:
        fates += [(at, followed.silent(True)), (at + how_long, followed.silent(False))]
    clock = Hours((0, followed.start), *fates, (501, followed.silent(False)), (501, followed.end()))
    assert followed.follow(clock).state is JobState.SUCCEEDED
    assert [line.text for line in followed.heard] == [text for _, _, text in sorted(said, key=lambda one: one[0])]


def test_what_a_job_writes_just_before_it_ends_is_delivered(tmp_path: object) -> None:
    class EndsBetweenTwoLooks(StrictPlatform):
        """Its job writes a last line and ends right after its log was read."""

        def logs(self, job_id: JobId, position: str = "") -> LogPage:
            page = super().logs(job_id, position)
            if self.live():
                self.say(job_id, "last words")
                self.end(job_id, JobState.FAILED)
            return page

    followed = Followed(str(tmp_path), EndsBetweenTwoLooks())
    followed.start()
    assert followed.follow(Hours()).state is JobState.FAILED
    assert [line.text for line in followed.heard] == ["last words"]


def test_a_silence_shorter_than_the_patience_is_borne_and_each_answer_renews_it(followed: Followed) -> None:
    followed.start()
    fates: list[Fate] = []
    for begins in (10, 1000, 2000):  # together far longer than the patience
        fates += [(begins, followed.silent(True)), (begins + 850, followed.silent(False))]
    clock = Hours(*fates, (3000, followed.end()))
    assert followed.follow(clock).state is JobState.SUCCEEDED


def test_after_the_patience_waiting_is_given_up_with_what_to_do_and_the_job_is_left_alone(followed: Followed) -> None:
    followed.start()
    clock = Hours((100, followed.silent(True)))
    with pytest.raises(PlatformUnreachable) as caught:
        followed.follow(clock, patience=300)
    said = str(caught.value)
    assert f"{followed.id} on strict: no answer for 310 s (connection timed out)" in said
    assert "run the same command again to take up" in said
    assert followed.platform.live() == [followed.id]
    followed.platform.silence(False)
    assert followed.follow(Hours((50, followed.end()))).state is JobState.SUCCEEDED


def test_refused_credentials_are_waited_for_until_somebody_logs_in(followed: Followed) -> None:
    followed.start()
    clock = Hours((100, followed.refuses(True)), (800, followed.refuses(False)), (900, followed.end()))
    assert followed.follow(clock).state is JobState.SUCCEEDED
    assert [str(one) for one in followed.silences] == ["the credentials are refused; log in again"]  # said at once


def test_credentials_that_stay_refused_end_the_waiting_and_not_the_job(followed: Followed) -> None:
    followed.start()
    with pytest.raises(
        LoginProblem, match=r"no answer for 310 s \(the credentials are refused; log in again\).*run the"
    ):
        followed.follow(Hours((100, followed.refuses(True))), patience=300)
    assert followed.platform.live() == [followed.id]


def test_a_silence_is_told_once_when_it_is_more_than_a_moment(followed: Followed) -> None:
    followed.start()
    clock = Hours(
        (100, followed.silent(True)), (110, followed.silent(False)),
        (200, followed.silent(True)), (500, followed.silent(False)), (600, followed.end()),
    )  # fmt: skip
    followed.follow(clock)
    assert [str(one) for one in followed.silences] == ["connection timed out"]


def test_a_job_that_the_platform_does_not_know_yet_is_waited_for(tmp_path: object) -> None:
    followed = Followed(str(tmp_path))
    followed.platform.remove(followed.id)

    def appear() -> None:
        followed.platform.submit(followed.platform.render(job(str(tmp_path))))
        followed.start()

    assert followed.follow(Hours((500, appear), (600, followed.end()))).state is JobState.SUCCEEDED


def test_a_job_that_was_removed_by_hand_is_not_waited_for_for_ever(followed: Followed) -> None:
    followed.start()
    clock = Hours((100, lambda: followed.platform.remove(followed.id)))
    with pytest.raises(PlatformUnreachable, match=r"strict has not known strict/gpt-1-1 for \d+ s; was it removed"):
        followed.follow(clock, patience=300)
    assert clock.now() - 1000 <= 100 + 300 + 2 * 10


def test_a_state_that_nobody_has_listed_does_not_end_the_waiting(tmp_path: object) -> None:
    class SpeaksInTongues(StrictPlatform):
        def status(self, job_id: JobId) -> JobStatus:
            seen = super().status(job_id)
            return seen if seen.state.final else JobStatus(state=JobState.UNKNOWN, native="Rebalancing")

    followed = Followed(str(tmp_path), SpeaksInTongues())
    assert followed.follow(Hours((5000, followed.end()))).state is JobState.SUCCEEDED


# --- a pause ----------------------------------------------------------------------------------------------------------


def test_a_pause_is_as_long_as_asked_for_and_looks_for_a_reason_to_end_it() -> None:
    clock, looks = Hours(), list[float]()
    asyncio.run(pause(61, look=lambda: looks.append(clock.now()), every=10, clock=clock))
    assert sum(clock.sleeps) == 61
    assert len(looks) == 7


def test_what_a_look_raises_ends_the_pause() -> None:
    def cancelled() -> None:
        if clock.now() >= 1000 + 30:
            raise JobCancelled("gpt was cancelled")

    clock = Hours()
    with pytest.raises(JobCancelled):
        asyncio.run(pause(600, look=cancelled, every=10, clock=clock))
    assert sum(clock.sleeps) == 30


def test_a_storage_that_does_not_answer_for_a_while_ends_no_pause() -> None:
    def look() -> None:
        looks.append(clock.now())
        if len(looks) < 4:
            raise NetworkError("gs://runs/team: the bucket does not answer")

    clock, looks = Hours(), list[float]()
    asyncio.run(pause(60, look=look, every=10, clock=clock))
    assert sum(clock.sleeps) == 60
    assert len(looks) == 6


# --- one question -----------------------------------------------------------------------------------------------------


def answer(followed: Followed, clock: Hours, error: PlatformUnreachable | None = None) -> JobState:
    """The job's state, asked for from time 1000 on."""
    followed.platform.silence(True, error)

    async def ask() -> JobStatus:
        return await asked(
            lambda: followed.platform.status(followed.id), platform="strict", about=followed.id,
            on_silence=followed.silences.append, clock=clock,
        )  # fmt: skip

    return asyncio.run(ask()).state


def test_a_platform_that_is_away_for_a_minute_is_asked_until_it_answers(followed: Followed) -> None:
    assert answer(followed, Hours((60, followed.silent(False)))) is JobState.PENDING
    assert [str(one) for one in followed.silences] == ["connection timed out"]


def test_a_platform_that_stays_away_is_given_up_and_nobody_further_up_tries_again(followed: Followed) -> None:
    with pytest.raises(PlatformUnreachable, match=r"on strict: no answer for \d+ s") as caught:
        answer(followed, clock := Hours())
    assert was_given_up(caught.value)
    assert 900 < clock.now() - 1000 < 930


def test_what_only_another_machine_knows_is_not_waited_for(followed: Followed) -> None:
    with pytest.raises(PlatformUnreachable):
        answer(followed, clock := Hours(), PlatformUnreachable("ask there", given_up=True))
    assert clock.sleeps == []
