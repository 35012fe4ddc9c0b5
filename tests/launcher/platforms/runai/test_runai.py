"""Run:ai by its program and by its REST API: found, asked, submitted to once, and no secret shown."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import runai
from certificates import certificate_in
from leaking import leaks
from runai.program import FLAGS
from runai_jobs import found, job_of, settings_of

from launcher.errors import ConfigProblem, LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobState
from launcher.platforms.runai.cli import phases_in
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest, credentials_of
from litgpt_demo.errors import TrainLitgptError

Make = Callable[..., RunaiPlatform]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    """Of two projects, one of which is called almost as the other."""
    claims, projects = {"scratch": str(tmp_path)}, ["team-a", "team-a-2"]
    with runai.running(tmp_path / "runai", claims=claims, projects=projects, pods=False) as made:
        yield made


@pytest.fixture
def waiting(tmp_path: Path) -> Job:
    return job_of(processes=1, directory=str(tmp_path / "attempts/1"), stage=())


@pytest.fixture
def by_program(cluster: runai.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the platform by some variant of the program."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with ExitStack() as programs:

        def make(variant: str = "v2", **changes: Any) -> RunaiPlatform:
            program = programs.enter_context(runai.program(tmp_path, cluster, variant))
            config = settings_of(cli=program.name, claims=[{"name": "scratch", "path": str(tmp_path)}], **changes)
            platform = RunaiPlatform(config)
            platform.pauses, platform.give_up_after = (0, 0, 0), 3600
            return platform

        yield make


@pytest.fixture
def api(cluster: runai.Cluster) -> Iterator[runai.Api]:
    with runai.serving(cluster) as made:
        yield made


@pytest.fixture
def by_rest(api: runai.Api, tmp_path: Path) -> Make:
    """Makes the platform by the API."""

    def make(*, secret: str | None = None, **changes: Any) -> RunaiPlatform:
        claims = [{"name": "scratch", "path": str(tmp_path)}]
        config = settings_of(**{"url": api.url, "api": "rest", "claims": claims, **changes})
        platform = RunaiPlatform(config, Rest(config, api.credentials(secret), pause=0))
        platform.pauses = (0, 0, 0)
        return platform

    return make


# --- by the program ---------------------------------------------------------------------------------------------------


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
    assert here.status(here.submit(here.render(waiting))).state.is_live
    assert cluster.live() == [waiting.attempt_name]
    assert len(cluster.submissions) == (1 if made else 2)


def test_a_submission_that_is_never_answered_is_given_up_as_unknown(
    by_program: Make, cluster: runai.Cluster, waiting: Job
) -> None:
    here = by_program()
    submission = here.render(waiting)
    cluster.lost = [("EOF", False)] * 9
    with pytest.raises(
        PlatformUnreachable, match=r"not known whether owt-0123456789-1-000000 exists.*reattaches to it"
    ):
        here.submit(submission)
    cluster.lost = []
    assert here.status(here.submit(submission)).state.is_live


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
    cluster.lost = [(words, False)]
    with pytest.raises(PlatformRefused):
        here.submit(submission)
    assert len(cluster.submissions) == 1


@pytest.mark.parametrize("words", ["Forbidden", "403", 'x is forbidden: User "me" cannot list resource "x"'])
def test_foreign_project_is_a_login_problem(words: str, by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    here = by_program("v2")
    assert here.render(waiting)
    cluster.fault = words
    with pytest.raises(LoginProblem, match="ask for a role in the project team-a"):
        here.check_access()
    assert "runai.login" in found(here, waiting)


def test_error_before_the_usage_is_reported(by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    here = by_program("v2")
    submission = here.render(waiting)
    cluster.fault = "unknown flag: --new\nUsage:\n  runai submit\n\nFlags:\n  --wait duration\n  --workers int"
    with pytest.raises(PlatformRefused, match="ended with 1: Error: unknown flag: --new;"):
        here.submit(submission)


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_program_that_cannot_set_variables_is_found_beforehand(
    generation: str, by_program: Make, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLAGS, generation, FLAGS[generation].replace("-e ", "-x, --other ", 1))
    with pytest.raises(ConfigProblem, match="has not got every flag: env needs -e"):
        by_program(generation).render(waiting)


def test_names_and_phases_are_found_however_the_list_is_nested() -> None:
    text = '{"items": [{"meta": {"Name": "a", "Status": "Running"}}, {"x": {"workloadName": "b", "phase": "Failed"}}]}'
    assert phases_in(text) == {"a": "Running", "b": "Failed"}
    with pytest.raises(PlatformUnreachable, match="is not JSON"):
        phases_in("A new version is available!")


# --- by REST ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant", ["client_credentials", "app_token"])
def test_a_training_is_posted_once_with_what_it_asks_for_whichever_grant_the_version_knows(
    grant: str, api: runai.Api, cluster: runai.Cluster, by_rest: Make, waiting: Job
) -> None:
    api.grant = grant
    here = by_rest(secrets={"KEY": "wandb/key"})
    submission = here.render(replace(waiting, exclude_nodes=("gpu-node-7",)))
    assert found(here, waiting) == {}
    assert here.submit(submission) == here.submit(submission)
    assert cluster.submissions == [waiting.attempt_name]
    told = cluster.trainings["team-a", waiting.attempt_name].environment
    assert (told["KEY"], told["LITGPT_HOST"]) == ("what the secret wandb has under key", "gpu-node-8")


@pytest.mark.parametrize(("project", "longer"), [("team-a", "large-"), ("team-a-2", "")])
def test_job_whose_name_contains_ours_is_left_alone(
    project: str, longer: str, cluster: runai.Cluster, by_rest: Make, waiting: Job
) -> None:
    """Run:ai's filters match more than they say, as the stand-in's do."""
    there, here = by_rest(project=project), by_rest()
    job = replace(waiting, name=f"{longer}{waiting.name}", directory=f"{waiting.directory}-theirs")
    other = there.submit(there.render(job))
    ours = here.render(waiting).job_id
    assert here.status(ours).state is JobState.ABSENT
    here.cancel(ours)
    assert there.status(other).state.is_live
    here.submit(here.render(waiting))
    assert len(cluster.live()) == 2


@pytest.mark.parametrize("logged_in", [False, True])
def test_neither_secret_nor_token_follows_a_redirect(
    logged_in: bool, api: runai.Api, cluster: runai.Cluster, by_rest: Make, waiting: Job
) -> None:
    here = by_rest()
    if logged_in:
        here.check_access()
    with runai.serving(cluster) as elsewhere:
        # What was sent is in the query, as login pages have it.
        api.instead = lambda path, held: (307, b"", {"Location": f"{elsewhere.url}{path}?held={quote(held)}"})
        with pytest.raises(PlatformRefused, match=rf"redirected to {elsewhere.url} \(307\)") as told:
            here.submit(here.render(waiting))
        assert elsewhere.asked == []
    assert not leaks(told.value, *secrets_of(api))


@pytest.mark.parametrize(
    ("status", "logged_in"), [(200, False), (401, False), (401, True), (422, True), (502, False), (502, True)]
)
def test_a_proxy_that_repeats_what_it_was_sent_makes_no_secret_known(
    status: int, logged_in: bool, api: runai.Api, by_rest: Make, waiting: Job
) -> None:
    here = by_rest()
    if logged_in:
        here.check_access()
    api.instead = lambda _, held: (status, json.dumps({"message": held}).encode(), {})
    with pytest.raises(TrainLitgptError) as told:
        here.submit(here.render(waiting))
    assert not leaks(told.value, *secrets_of(api))


def secrets_of(api: runai.Api) -> list[str]:
    """What only the application and the server know."""
    return [api.application[1], *api.tokens]


def test_a_control_plane_is_reached_only_where_its_certificate_is_trusted(
    cluster: runai.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, certificate = certificate_in(tmp_path)
    with runai.serving(cluster, tls=context) as api:
        settings = settings_of(url=api.url, api="rest")
        with pytest.raises(PlatformUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            Rest(settings, api.credentials(), pause=0).check_access()
        assert api.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        Rest(settings, api.credentials(), pause=0).check_access()


def test_a_token_that_has_ended_is_renewed_without_a_word(api: runai.Api, by_rest: Make, waiting: Job) -> None:
    here = by_rest()
    job_id = here.render(waiting).job_id
    here.status(job_id)
    api.tokens.clear()  # by the server, before its time
    assert here.status(job_id).state is JobState.ABSENT
    api.lifetime = 30  # shorter than the time before its end that one is renewed
    api.tokens.clear()
    here.status(job_id)
    before = len(api.asked)
    here.status(job_id)
    assert ("POST", "/api/v1/token") in api.asked[before:]


def test_what_the_application_may_not_do_is_a_login_problem_and_no_secret_is_told(by_rest: Make, waiting: Job) -> None:
    secret = "s3cr3t-marker"
    here = by_rest(secret=secret)
    with pytest.raises(LoginProblem, match="refuses the credentials RUNAI_CLIENT_ID, RUNAI_CLIENT_SECRET") as told:
        here.submit(here.render(waiting))
    assert secret not in f"{told.value}{here.render(waiting)}"
    assert secret not in found(here, waiting)["runai.login"]
    assert secret not in repr(credentials_of("A", {"A_CLIENT_ID": "me", "A_CLIENT_SECRET": secret}))


def test_what_is_not_there_is_found_beforehand_and_refused(cluster: runai.Cluster, by_rest: Make, waiting: Job) -> None:
    assert "platform.project=team is not a project" in found(by_rest(project="team"), waiting)["runai.project"]
    assert "there are: main" in found(by_rest(cluster="other"), waiting)["runai.project"]
    cluster.claims = {}
    here = by_rest()
    submission = here.render(waiting)
    with pytest.raises(PlatformRefused, match='persistentvolumeclaim "scratch" not found'):
        here.submit(submission)
    assert here.status(submission.job_id).state is JobState.ABSENT
    with pytest.raises(PlatformRefused, match="the image is not known yet"):
        here.submit(here.render(replace(waiting, image=None)))


def test_requests_that_nobody_answers_are_sent_again_and_then_given_up(
    api: runai.Api, by_rest: Make, waiting: Job
) -> None:
    here = by_rest()
    job_id = here.render(waiting).job_id
    here.status(job_id)
    api.silent = 2
    assert here.status(job_id).state is JobState.ABSENT
    api.silent = 100
    with pytest.raises(PlatformUnreachable, match="GET http://127"):
        here.status(job_id)
    assert "runai.api" in found(by_rest(), waiting)


def test_auto_takes_rest_where_there_are_credentials_and_the_program_elsewhere(tmp_path: Path, waiting: Job) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    both = {"RUNAI_CLIENT_ID": "a", "RUNAI_CLIENT_SECRET_FILE": str(tmp_path / "secret")}
    given = settings_of(url="https://my-company.run.ai", credentials="RUNAI")
    assert given.uses_rest(both)
    assert not given.uses_rest({"RUNAI_CLIENT_ID": "a"})
    assert not settings_of(url=given.url, api="cli").uses_rest(both)
    without = settings_of(url=given.url, api="rest", credentials="TEAM_A")
    words = found(RunaiPlatform(without, Rest(without, both)), waiting)["runai.login"]
    assert "export TEAM_A_CLIENT_ID and TEAM_A_CLIENT_SECRET" in words


def test_logs_and_the_outcome_outlive_the_workload(by_rest: Make, waiting: Job) -> None:
    """Run:ai deletes one some time after its end; what its nodes have left in the run's directory stays."""
    here, folder = by_rest(), Path(waiting.directory)
    job_id = here.render(waiting).job_id
    folder.mkdir(parents=True)
    for node in (0, 1):
        (folder / f"node-{node}.log").write_text(f"said by {node}\n")
        report = {"node": node, "exit_code": 0, "fault": None, "message": "", "ended": 1.0}
        (folder / f"node-{node}.json").write_text(json.dumps(report))
    seen = here.status(job_id)
    assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
    assert [line.text for line in here.logs(job_id).lines] == ["said by 0", "said by 1"]
