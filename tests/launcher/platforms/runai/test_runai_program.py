"""Run:ai by its program: found, asked what it understands, and spoken to accordingly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import runai
from runai.cluster import UNANSWERED

from launcher.errors import ConfigProblem, LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobState, Submission
from launcher.platforms.runai.cli import Cli, phases_in, table_of
from launcher.platforms.runai.flags import flags_in
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.platforms.runai.states import job_state

Make = Callable[..., RunaiPlatformConfig]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    with runai.running(tmp_path / "runai", claims={"scratch": str(tmp_path)}, grace=0.2) as made:
        yield made


@pytest.fixture
def platform(
    cluster: runai.Cluster, tmp_path: Path, configured: Make, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunaiPlatform]:
    """The platform by some variant of the program."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    def make(variant: str, give_up: float = 60, **changes: Any) -> RunaiPlatform:
        program = runai.program(tmp_path, cluster, variant)
        claims = [{"name": "scratch", "path": str(tmp_path)}]
        config = configured(cli=program.name, claims=claims, **changes)
        return RunaiPlatform(config, leave=20, pauses=(0, 0, 0), give_up=give_up)

    return make


@pytest.fixture
def waiting(tmp_path: Path, job: Callable[..., Job]) -> Job:
    """A job whose pods only wait: `platform.interactive` makes it so."""
    return job(processes=1, directory=str(tmp_path / "attempts/1"), stage=())


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("v1", ["submit-dist", "pytorch", "--name"]),
        ("v1-2.9", ["submit-dist", "pytorch", "--name"]),
        ("v2", ["training", "pytorch", "submit", "owt-0123456789-1"]),
        ("v2-early", ["distributed", "submit", "owt-0123456789-1"]),
        ("v2-newest", ["training", "pytorch", "submit", "owt-0123456789-1"]),
    ],
)
def test_every_generation_is_recognised_and_takes_what_is_rendered(
    variant: str, words: list[str], platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    here = platform(variant, interactive=True)
    submission = here.render(waiting)
    assert submission.body["sent"]["argv"][1 : len(words) + 1] == words
    assert [str(finding) for finding in here.check(submission) if finding.severity == "error"] == []
    job_id = here.submit(submission)
    assert here.status(job_id).state.live
    asked = cluster.training("team-a", waiting.attempt_name)
    assert asked["workers"] == 1
    assert [name for name, _ in asked["claims"]] == ["scratch"]
    assert asked["labels"]["train-litgpt/run"] == "owt-0123456789"
    assert asked["environment"]["PYTHONUNBUFFERED"] == "1"
    assert asked["backoff_limit"] == 0
    here.cancel(job_id)
    assert here.status(job_id).state is JobState.CANCELLED
    assert cluster.live() == []


def test_flags_come_and_go_with_releases(platform: Callable[..., RunaiPlatform], waiting: Job) -> None:
    def argv(variant: str, **changes: Any) -> list[str]:
        submission: Submission = platform(variant, **changes).render(waiting)
        sent: list[str] = submission.body["sent"]["argv"]
        return sent

    assert "--pvc" in argv("v1-2.9")
    assert "--pvc-exists" in argv("v1")
    assert "--env-pod-field-ref" in argv("v2-newest")
    assert "--env-pod-field-ref" not in argv("v2")
    assert argv("v2-newest", preemptible=False)[-30:].count("non-preemptible") == 1
    assert "--preemptible" in argv("v1-2.18", preemptible=True, uid=1000)
    with pytest.raises(ConfigProblem, match=r"platform\.priority needs --priority.*install a newer runai"):
        argv("v2", priority="high")


def test_machines_are_avoided_by_the_releases_that_can_and_the_others_say_what_to_do(
    platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    avoiding = replace(waiting, exclude_nodes=("gpu-1", "gpu-2"))
    for variant, most in (("v2-newest", None), ("v2", 0), ("v1", 0)):
        here = platform(variant)
        argv: list[str] = here.render(avoiding).body["sent"]["argv"]
        named = [value for flag, value in pairwise(argv) if flag == "--exclude-node"]
        assert named == (["gpu-1", "gpu-2"] if most is None else [])
        told = here.avoidable(waiting)
        assert told.most == most
        assert ("platform.url" in told.fix) == (most == 0)


def test_without_a_program_the_fix_is_told_before_anything_is_sent(configured: Make, waiting: Job) -> None:
    nowhere = RunaiPlatform(configured(cli="no-such-runai"))
    with pytest.raises(ConfigProblem, match=r"install Run:ai's command line .* or submit by REST: set platform\.url"):
        nowhere.render(waiting)
    shown = RunaiPlatform(configured(cli="no-such-runai", cli_version="v2"))
    codes = [finding.code for finding in shown.check(shown.render(waiting))]
    assert "runai.no-cli" in codes


def test_a_program_without_distributed_trainings_is_too_old(
    platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    with pytest.raises(ConfigProblem, match="so it cannot submit a PyTorch training; install a runai that does"):
        platform("v1-before").render(waiting)


def test_what_the_program_would_refuse_is_found_beforehand(
    platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    elsewhere = platform("v2", project="team-b", interactive=True)
    (found,) = [one for one in elsewhere.check(elsewhere.render(waiting)) if one.severity == "error"]
    assert (found.code, "team-b" in found.what) == ("runai.project", True)
    cluster.change(claims={})
    rehearsed = platform("v1")
    (found,) = [one for one in rehearsed.check(rehearsed.render(waiting)) if one.severity == "error"]
    assert 'persistentvolumeclaim "scratch" not found' in found.what
    with pytest.raises(PlatformRefused, match="not found"):
        rehearsed.submit(rehearsed.render(waiting))
    assert cluster.live() == []


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_a_program_that_reaches_nobody_or_is_logged_out_is_no_absent_job(
    variant: str, platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    here = platform(variant)
    submission = here.render(waiting)
    cluster.change(fault="silent")
    with pytest.raises(PlatformUnreachable, match="i/o timeout"):
        here.status(submission.job_id)
    with pytest.raises(PlatformUnreachable, match="i/o timeout"):
        here.check_access()
    cluster.change(fault="logged out")
    with pytest.raises(LoginProblem, match="log in with"):
        here.check_access()
    with pytest.raises(LoginProblem, match="log in with"):
        here.submit(submission)
    assert [one.code for one in here.check(submission) if one.severity == "error"] == ["runai.login"]


@pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize(
    "instead",
    [pytest.param(one, marks=[] if one in ("EOF", "look-alike") else pytest.mark.long) for one in sorted(UNANSWERED)],
)
def test_a_submission_without_a_clear_answer_is_looked_for_and_never_doubled(
    instead: str, made: bool, platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    here = platform("v2", interactive=True)
    cluster.lose_answers(instead, made=made)
    job_id = here.submit(here.render(waiting))
    assert here.status(job_id).state.live
    assert cluster.live() == [waiting.attempt_name]
    assert len(cluster.submissions()) == (1 if made else 2)


def test_a_workload_that_is_listed_late_is_found_by_its_name_being_taken(
    platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    here = platform("v1", interactive=True)
    submission = here.render(waiting)
    cluster.lose_answers("EOF", made=True, behind=2)  # one of the lists comes before the submission
    here.submit(submission)
    assert cluster.live() == [waiting.attempt_name]


def test_a_refusal_for_want_of_the_room_that_the_unheard_workload_took_is_no_refusal(
    platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    here = platform("v2", interactive=True)
    submission = here.render(waiting)
    cluster.change(room=1)
    cluster.lose_answers("EOF", made=True, behind=2)
    here.submit(submission)
    assert here.status(submission.job_id).state.live
    cluster.lose_answers()
    other = here.render(replace(waiting, name="other-0123456789"))
    with pytest.raises(PlatformRefused, match="quota exceeded"):
        here.submit(other)


def test_a_submission_that_is_never_answered_is_given_up_as_unknown(
    platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    here = platform("v2", interactive=True)
    submission = here.render(waiting)
    cluster.lose_answers(*["EOF"] * 9)
    with pytest.raises(PlatformUnreachable, match=r"EOF; whether owt-0123456789-1 is made is not known.*takes it up"):
        here.submit(submission)
    assert len(cluster.submissions()) == 3
    cluster.lose_answers()
    here.submit(submission)
    assert here.status(submission.job_id).state.live


def test_nothing_is_submitted_again_when_the_time_for_it_is_over(
    platform: Callable[..., RunaiPlatform], cluster: runai.Cluster, waiting: Job
) -> None:
    """Answers that each are long in coming do not add up."""
    here = platform("v2", interactive=True, give_up=0)
    cluster.lose_answers(*["EOF"] * 9)
    with pytest.raises(PlatformUnreachable, match="whether owt-0123456789-1 is made is not known"):
        here.submit(here.render(waiting))
    assert len(cluster.submissions()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "unknown flag: --gpu-devices-request",
        'required flag(s) "image" not set',
        'Error from server (NotFound): namespaces "runai-team-b" not found',
        'pods "a" is forbidden: exceeded quota: team',
        'admission webhook "x.run.ai" denied the request: gpu limit',
        'project "team-b" was not found or you have no access to it',
    ],
)
def test_clear_refusals_are_final_at_once(
    words: str, tmp_path: Path, configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runai").write_text(f"#!/bin/sh\ncat <<'end' >&2\nError: {words}\nend\nexit 1\n")
    (tmp_path / "runai").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(PlatformRefused):
        Cli(configured(cli="runai", cli_version="v2")).submit({"argv": ["runai", "training"]})


def test_a_root_that_pods_do_not_see_is_refused(configured: Make, waiting: Job) -> None:
    here = RunaiPlatform(configured(cli="no-such-runai", cli_version="v1"))
    found = {one.code: one for one in here.check(here.render(waiting))}
    assert "is on no volume that pods mount" in found["runai.root"].what


def test_a_command_that_never_ends_is_given_up(tmp_path: Path, configured: Make, monkeypatch: Any) -> None:
    program = tmp_path / "runai"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("launcher.platforms.runai.cli.PATIENCE", 0.2)
    with pytest.raises(PlatformUnreachable, match="submitting and asking again is safe"):
        Cli(configured(cli=program.name, cli_version="v2")).phase("owt-1")


def test_flags_are_read_off_the_help_and_not_off_its_prose() -> None:
    text = """
  -e, --environment stringArray    Set variables; see --env-file of docker
      --large-shm                  Request a large /dev/shm
  --pvc-exists=claim   short for --new
Use --help for more
"""
    assert flags_in(text) == {"--environment", "--large-shm", "--pvc-exists"}


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "a", "phase": "Running"}, {"name": "b", "phase": "Failed"}]',
        '{"workloads": [{"name": "a", "status": "Running"}, {"name": "b", "status": "Failed"}], "next": 3}',
        '{"items": [{"meta": {"Name": "a", "Status": "Running"}}, {"x": {"workloadName": "b", "phase": "Failed"}}]}',
    ],
)
def test_names_and_phases_are_found_however_the_list_is_nested(text: str) -> None:
    assert phases_in(text) == {"a": "Running", "b": "Failed"}


def test_lists_that_say_nothing_are_empty_and_those_that_are_none_are_no_answer() -> None:
    assert phases_in("") == phases_in("[]") == table_of("No jobs") == {}
    with pytest.raises(PlatformUnreachable, match="no JSON"):
        phases_in("A new version is available!")


def test_words_of_run_ai_that_nobody_knows_stop_nothing() -> None:
    assert job_state("Running") is JobState.RUNNING
    assert job_state("Reticulating") is JobState.UNKNOWN
    assert job_state("Reticulating").live
