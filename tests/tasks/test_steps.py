"""What the steps have in common: what is tried again, and how a task function behaves outside a run."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.states import Failed

from launcher.errors import (
    ConfigProblem,
    ImageProblem,
    JobCancelled,
    LoginProblem,
    PlatformRefused,
    PlatformUnreachable,
)
from launcher.events import Listener, Note
from litgpt_demo.errors import DataError, DiskFull, NetworkError, UserError
from tasks.steps import emit, only_silence, worth_retrying


def retried(error: Exception) -> bool:
    nothing: Any = None
    return worth_retrying(nothing, nothing, Failed(data=error))


@pytest.mark.parametrize(
    "kind",
    [
        ConfigProblem, ImageProblem, JobCancelled, LoginProblem, PlatformRefused, DataError, DiskFull, UserError,
        ValueError,
    ],
)  # fmt: skip
def test_what_the_same_inputs_would_raise_again_is_not_tried_again(kind: type[Exception]) -> None:
    assert not retried(kind("as before"))


@pytest.mark.parametrize("kind", [PlatformUnreachable, NetworkError, ConnectionError, TimeoutError, OSError])
def test_what_may_pass_is_tried_again(kind: type[Exception]) -> None:
    assert retried(kind("busy"))


def test_a_step_that_starts_jobs_is_tried_again_where_its_platform_is_silent_alone() -> None:
    """After any other error its job may have ended, and another try would start a new attempt of it."""
    nothing: Any = None
    retried = {
        kind: only_silence(nothing, nothing, Failed(data=kind("as before")))
        for kind in (PlatformUnreachable, JobCancelled, OSError, KeyError)
    }
    assert retried == {PlatformUnreachable: True, JobCancelled: False, OSError: False, KeyError: False}


def test_an_event_reaches_a_listener_outside_of_any_run() -> None:
    heard: list[object] = []
    with Listener(heard.append):
        emit(Note(what="hello"))
    assert heard == [Note(what="hello")]
