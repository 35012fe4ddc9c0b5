"""Run:ai by its program: found, asked what it understands, and spoken to accordingly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import runai
from runai_jobs import found, settings_of

from launcher.errors import ConfigProblem, LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import Job
from launcher.platforms.runai.cli import phases_in
from launcher.platforms.runai.platform import RunaiPlatform

Make = Callable[..., RunaiPlatform]


def test_without_a_program_that_submits_the_fix_is_told_before_anything_is_sent(by_program: Make, waiting: Job) -> None:
    nowhere = RunaiPlatform(settings_of(cli="no-such-runai"))
    with pytest.raises(ConfigProblem, match=r"install Run:ai's command line .* or submit by REST: set platform\.url"):
        nowhere.render(waiting)
    shown = found(RunaiPlatform(settings_of(cli="no-such-runai", cli_version="v2")), waiting)
    assert "is on no volume that pods mount" in shown["runai.root"]
    assert "runai.no-cli" in shown
    with pytest.raises(ConfigProblem, match="so it cannot submit a PyTorch training"):
        by_program("before").render(waiting)


def test_what_the_program_would_refuse_is_found_beforehand(
    by_program: Make, cluster: runai.Cluster, waiting: Job
) -> None:
    assert "team-b" in found(by_program(project="team-b"), waiting)["runai.project"]
    cluster.claims = {}
    rehearsed = by_program("v1")
    assert 'persistentvolumeclaim "scratch" not found' in str(found(rehearsed, waiting))
    with pytest.raises(PlatformRefused, match="not found"):
        rehearsed.submit(rehearsed.render(waiting))
    assert cluster.live() == []


def test_a_program_that_reaches_nobody_or_is_logged_out_is_no_absent_job(
    by_program: Make, cluster: runai.Cluster, waiting: Job
) -> None:
    here = by_program()
    submission = here.render(waiting)
    cluster.fault = 'Get "https://10.0.0.1:6443/apis": dial tcp 10.0.0.1:6443: i/o timeout'
    with pytest.raises(PlatformUnreachable, match="i/o timeout"):
        here.status(submission.job_id)
    cluster.fault = "unauthorized: please log in with `runai login`"
    with pytest.raises(LoginProblem, match="log in with"):
        here.submit(submission)
    assert "runai.login" in found(here, waiting)


@pytest.mark.parametrize(
    ("way", "instead", "made"),
    [
        *(("by_program", words, True) for words in runai.UNANSWERED),
        *(("by_rest", answer, True) for answer in runai.LOST),
        ("by_program", "EOF", False),
        ("by_rest", "502", False),
    ],
)
def test_a_submission_without_a_clear_answer_is_looked_for_and_never_doubled(
    way: str, instead: str, made: bool, request: pytest.FixtureRequest, cluster: runai.Cluster, waiting: Job
) -> None:
    """Nor is one after words like a refusal, which a gateway may say of a workload that was made."""
    here = request.getfixturevalue(way)()
    cluster.lost = [(instead, made)]
    assert here.status(here.submit(here.render(waiting))).state.live
    assert cluster.live() == [waiting.attempt_name]
    assert len(cluster.submissions) == (1 if made else 2)


def test_a_submission_that_is_never_answered_is_given_up_as_unknown(
    by_program: Make, cluster: runai.Cluster, waiting: Job
) -> None:
    here = by_program()
    submission = here.render(waiting)
    cluster.lost = [("EOF", False)] * 9
    with pytest.raises(PlatformUnreachable, match=r"whether owt-0123456789-1 is made is not known.*takes it up"):
        here.submit(submission)
    cluster.lost = []
    assert here.status(here.submit(submission)).state.live


@pytest.mark.parametrize(
    "words",
    [
        "unknown flag: --gpu-devices-request",
        'required flag(s) "image" not set',
        'Error from server (NotFound): namespaces "runai-team-b" not found',
        'pods "a" is forbidden: exceeded quota: team',
        'admission webhook "x.run.ai" denied the request: gpu limit',
    ],
)
def test_clear_refusals_are_final_at_once(words: str, by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    here = by_program()
    submission = here.render(waiting)
    cluster.refusal = words
    with pytest.raises(PlatformRefused):
        here.submit(submission)
    assert len(cluster.submissions) == 1


def test_names_and_phases_are_found_however_the_list_is_nested() -> None:
    text = '{"items": [{"meta": {"Name": "a", "Status": "Running"}}, {"x": {"workloadName": "b", "phase": "Failed"}}]}'
    assert phases_in(text) == {"a": "Running", "b": "Failed"}
    with pytest.raises(PlatformUnreachable, match="no JSON"):
        phases_in("A new version is available!")
