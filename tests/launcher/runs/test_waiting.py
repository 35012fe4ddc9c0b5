"""Waiting for a job: every line is delivered, silence is borne for a while, and hours pass in no time."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_handles import handle_on
from strict_platform import StrictPlatform

from launcher.errors import JobCancelled, LoginProblem, PlatformUnreachable
from launcher.job import JobId, JobState, LogPage
from launcher.runs import waiting
from litgpt_demo import timeouts
from litgpt_demo.errors import NetworkError

Fate = tuple[float, Callable[[], object]]  # when something happens, and what

REFUSED = LoginProblem("the credentials are refused; log in again")


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


class Followed:
    """A job that was submitted to a strict platform and runs, and what its follower hears."""

    def __init__(self, folder: Path, platform: StrictPlatform | None = None) -> None:
        self.platform = platform or StrictPlatform()
        self.submission = self.platform.render(handle_on(self.platform, folder, "gpt-1").make_job(1))
        self.lines: list[str] = []
        self.silences: list[str] = []
        self.appear()

    def appear(self) -> None:
        self.id = self.platform.submit(self.submission)
        self.platform.start(self.id)

    def end(self) -> None:
        self.platform.end(self.id, JobState.SUCCEEDED)

    def silent(self, *options: Any) -> Callable[[], None]:
        return partial(self.platform.silence, *options)

    def follow(self, *fates: Fate, patience: float = 900) -> JobState:
        self.clock = Hours(*fates)
        following = waiting.follow(
            self.platform,
            self.id,
            on_lines=lambda lines: self.lines.extend(line.text for line in lines),
            on_silence=lambda error: self.silences.append(str(error)),
            poll=10,
        )
        clock = patch.multiple(waiting, now=self.clock.now, sleep=self.clock.sleep)
        with clock, patch.object(timeouts, "PLATFORM", patience):
            return asyncio.run(following).state


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


@settings(max_examples=40)
@given(
    # To the millisecond: what differs by less is the same time on a clock that starts at 1000.
    st.lists(st.tuples(st.floats(1, 500).map(lambda at: round(at, 3)), st.integers(0, 1)), max_size=12),
    st.lists(st.tuples(st.floats(0, 400), st.floats(1, 100)), max_size=3),
)
def test_each_log_line_is_delivered_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[float, int]], silences: list[tuple[float, float]]
) -> None:
    followed = Followed(tmp_path_factory.mktemp("run"))
    say, fates = partial(followed.platform.say, followed.id), list[Fate]()
    fates += [(at, partial(say, f"line {number}", node=node)) for number, (at, node) in enumerate(lines)]
    for at, how_long in silences:
        fates += [(at, followed.silent(True)), (at + how_long, followed.silent(False))]
    assert followed.follow(*fates, (501, followed.silent(False)), (501, followed.end)) is JobState.SUCCEEDED
    order = sorted(range(len(lines)), key=lambda number: lines[number][0])
    assert followed.lines == [f"line {number}" for number in order]


def test_last_lines_of_a_job_are_delivered(tmp_path: Path) -> None:
    class EndsBetweenTwoLooks(StrictPlatform):
        """Its job writes a last line and ends right after its log was read."""

        def logs(self, job_id: JobId, position: str = "") -> LogPage:
            page = super().logs(job_id, position)
            if self.live():
                self.say(job_id, "last words")
                self.end(job_id, JobState.FAILED)
            return page

    followed = Followed(tmp_path, EndsBetweenTwoLooks())
    assert (followed.follow(), followed.lines) == (JobState.FAILED, ["last words"])


def test_short_silence_is_reported_once_and_an_answer_resets_it(followed: Followed) -> None:
    fates: list[Fate] = [(10, followed.silent(True)), (20, followed.silent(False))]  # a moment, of which nobody is told
    for begins, why in ((1000, None), (2000, REFUSED)):  # together far longer than the patience
        fates += [(begins, followed.silent(True, why)), (begins + 850, followed.silent(False))]
    assert followed.follow(*fates, (3000, followed.end)) is JobState.SUCCEEDED
    assert followed.silences == ["connection timed out", str(REFUSED)]


def test_long_silence_ends_the_wait_and_leaves_the_job_alone(followed: Followed) -> None:
    silent = rf"{followed.id} on strict: no answer for 310 s \(connection timed out\)"
    with pytest.raises(PlatformUnreachable, match=silent):
        followed.follow((100, followed.silent(True)), patience=300)
    assert followed.platform.live() == [followed.id]
    followed.platform.silence(False)
    assert followed.follow((50, followed.end)) is JobState.SUCCEEDED


def test_wait_for_an_unknown_job_ends(followed: Followed) -> None:
    remove = partial(followed.platform.remove, followed.id)
    remove()
    with pytest.raises(PlatformUnreachable, match=r"strict has had no job strict/gpt-1-1-\w+ for \d+ s; check whether"):
        followed.follow((500, followed.appear), (600, remove), patience=550)
    assert followed.clock.now() >= 1000 + 600 + 550


def test_pause_has_its_length_and_ends_with_an_error_of_look(monkeypatch: Any) -> None:
    monkeypatch.setattr(waiting, "now", (clock := Hours()).now)
    monkeypatch.setattr(waiting, "sleep", clock.sleep)
    looks = iter([NetworkError("no answer"), *[None] * 6, JobCancelled("cancelled")])

    def look() -> None:
        if error := next(looks):
            raise error

    asyncio.run(waiting.pause(61, look=look, every=10))
    assert sum(clock.sleeps) == 61
    with pytest.raises(JobCancelled):
        asyncio.run(waiting.pause(600, look=look, every=10))
    assert sum(clock.sleeps) < 100
