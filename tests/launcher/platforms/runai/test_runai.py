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
    pvcs, projects = {"scratch": str(tmp_path)}, ["team-a", "team-a-2"]
    with runai.running(tmp_path / "runai", pvcs=pvcs, projects=projects, pods=False) as made:
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
            config = settings_of(cli=program.name, pvcs=[{"name": "scratch", "path": str(tmp_path)}], **changes)
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
        pvcs = [{"name": "scratch", "path": str(tmp_path)}]
        config = settings_of(**{"url": api.url, "api": "rest", "pvcs": pvcs, **changes})
        platform = RunaiPlatform(config, Rest(config, api.credentials(secret), pause=0))
        platform.pauses = (0, 0, 0)
        return platform

    return make


# --- by the program ---------------------------------------------------------------------------------------------------


def test_missing_program_is_found_before_submission(by_program: Make, waiting: Job) -> None:
    nowhere = RunaiPlatform(settings_of(cli="no-such-runai"))
    with pytest.raises(ConfigProblem, match=r"install Run:ai's command line .* or submit by REST: set platform\.url"):
        nowhere.render(waiting)
    shown = found(RunaiPlatform(settings_of(cli="no-such-runai", cli_version="v2")), waiting)
    assert "is on no volume that pods mount" in shown["runai.root"]
    assert "runai.no-cli" in shown
    with pytest.raises(ConfigProblem, match="so it cannot submit a PyTorch training"):
        by_program("before").render(waiting)


def test_check_finds_refusals_of_the_program(by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    assert "team-b" in found(by_program(project="team-b"), waiting)["runai.project"]
    cluster.pvcs = {}
    rehearsed = by_program("v1")
    assert 'persistentvolumeclaim "scratch" not found' in str(found(rehearsed, waiting))
    with pytest.raises(PlatformRefused, match="not found"):
        rehearsed.submit(rehearsed.render(waiting))
    assert cluster.live() == []


def test_job_is_not_absent_when_the_program_fails(by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    platform = by_program()
    submission = platform.render(waiting)
    cluster.fault = 'Get "https://10.0.0.1:6443/apis": dial tcp 10.0.0.1:6443: i/o timeout'
    with pytest.raises(PlatformUnreachable, match="i/o timeout"):
        platform.status(submission.job_id)
    cluster.fault = "unauthorized: please log in with `runai login`"
    with pytest.raises(LoginProblem, match="log in with"):
        platform.submit(submission)
    assert "runai.login" in found(platform, waiting)


@pytest.mark.parametrize(
    ("way", "instead", "made"),
    [
        *(("by_program", message, True) for message in runai.UNANSWERED),
        *(("by_rest", answer, True) for answer in runai.LOST),
        ("by_program", "EOF", False),
        ("by_rest", "502", False),
    ],
)
def test_unanswered_submission_is_never_doubled(
    way: str, instead: str, made: bool, request: pytest.FixtureRequest, cluster: runai.Cluster, waiting: Job
) -> None:
    """Nor is one after words like a refusal, which a gateway may say of a workload that was made."""
    platform = request.getfixturevalue(way)()
    cluster.lost = [(instead, made)]
    assert platform.status(platform.submit(platform.render(waiting))).state.is_live
    assert cluster.live() == [waiting.attempt_name]
    assert len(cluster.submissions) == (1 if made else 2)


def test_submission_is_unknown_when_never_answered(by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    platform = by_program()
    submission = platform.render(waiting)
    cluster.lost = [("EOF", False)] * 9
    with pytest.raises(
        PlatformUnreachable, match=r"not known whether owt-0123456789-1-000000 exists.*reattaches to it"
    ):
        platform.submit(submission)
    cluster.lost = []
    assert platform.status(platform.submit(submission)).state.is_live


@pytest.mark.parametrize(
    "message",
    [
        "unknown flag: --gpu-devices-request",
        'required flag(s) "image" not set',
        'Error from server (NotFound): namespaces "runai-team-b" not found',
        'pods "a" is forbidden: exceeded quota: team',
        'admission webhook "x.run.ai" denied the request: gpu limit',
    ],
)
def test_clear_refusals_are_final_at_once(message: str, by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    platform = by_program()
    submission = platform.render(waiting)
    cluster.lost = [(message, False)]
    with pytest.raises(PlatformRefused):
        platform.submit(submission)
    assert len(cluster.submissions) == 1


@pytest.mark.parametrize("message", ["Forbidden", "403", 'x is forbidden: User "me" cannot list resource "x"'])
def test_foreign_project_is_a_login_problem(
    message: str, by_program: Make, cluster: runai.Cluster, waiting: Job
) -> None:
    platform = by_program("v2")
    assert platform.render(waiting)
    cluster.fault = message
    with pytest.raises(LoginProblem, match="request a role in the project team-a"):
        platform.check_access()
    assert "runai.login" in found(platform, waiting)


def test_error_before_the_usage_is_reported(by_program: Make, cluster: runai.Cluster, waiting: Job) -> None:
    platform = by_program("v2")
    submission = platform.render(waiting)
    cluster.fault = "unknown flag: --new\nUsage:\n  runai submit\n\nFlags:\n  --wait duration\n  --workers int"
    with pytest.raises(PlatformRefused, match="ended with exit code 1: Error: unknown flag: --new;"):
        platform.submit(submission)


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_program_that_cannot_set_variables_is_found_beforehand(
    generation: str, by_program: Make, waiting: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLAGS, generation, FLAGS[generation].replace("-e ", "-x, --other ", 1))
    with pytest.raises(ConfigProblem, match="lacks flags: env needs -e"):
        by_program(generation).render(waiting)


def test_names_and_phases_are_found_however_the_list_is_nested() -> None:
    text = '{"items": [{"meta": {"Name": "a", "Status": "Running"}}, {"x": {"workloadName": "b", "phase": "Failed"}}]}'
    assert phases_in(text) == {"a": "Running", "b": "Failed"}
    with pytest.raises(PlatformUnreachable, match="is not JSON"):
        phases_in("A new version is available!")


# --- by REST ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant", ["client_credentials", "app_token"])
def test_training_is_posted_once_with_either_grant(
    grant: str, api: runai.Api, cluster: runai.Cluster, by_rest: Make, waiting: Job
) -> None:
    api.grant = grant
    platform = by_rest(secrets={"KEY": "wandb/key"})
    submission = platform.render(replace(waiting, exclude_nodes=("gpu-node-7",)))
    assert found(platform, waiting) == {}
    assert platform.submit(submission) == platform.submit(submission)
    assert cluster.submissions == [waiting.attempt_name]
    variables = cluster.trainings["team-a", waiting.attempt_name].environment
    assert (variables["KEY"], variables["LITGPT_HOST"]) == ("what the secret wandb has under key", "gpu-node-8")


@pytest.mark.parametrize(("project", "longer"), [("team-a", "large-"), ("team-a-2", "")])
def test_job_whose_name_contains_ours_is_left_alone(
    project: str, longer: str, cluster: runai.Cluster, by_rest: Make, waiting: Job
) -> None:
    """Run:ai's filters match more than they say, as the stand-in's do."""
    other_platform, platform = by_rest(project=project), by_rest()
    job = replace(waiting, name=f"{longer}{waiting.name}", directory=f"{waiting.directory}-theirs")
    other_job = other_platform.submit(other_platform.render(job))
    own_job = platform.render(waiting).job_id
    assert platform.status(own_job).state is JobState.ABSENT
    platform.cancel(own_job)
    assert other_platform.status(other_job).state.is_live
    platform.submit(platform.render(waiting))
    assert len(cluster.live()) == 2


@pytest.mark.parametrize("logged_in", [False, True])
def test_neither_secret_nor_token_follows_a_redirect(
    logged_in: bool, api: runai.Api, cluster: runai.Cluster, by_rest: Make, waiting: Job
) -> None:
    platform = by_rest()
    if logged_in:
        platform.check_access()
    with runai.serving(cluster) as elsewhere:
        # What was sent is in the query, as login pages have it.
        api.instead = lambda path, held: (307, b"", {"Location": f"{elsewhere.url}{path}?held={quote(held)}"})
        with pytest.raises(PlatformRefused, match=rf"redirected to {elsewhere.url} \(307\)") as caught:
            platform.submit(platform.render(waiting))
        assert elsewhere.requests == []
    assert not leaks(caught.value, *secrets_of(api))


@pytest.mark.parametrize(
    ("status", "logged_in"), [(200, False), (401, False), (401, True), (422, True), (502, False), (502, True)]
)
def test_secret_stays_unknown_when_a_proxy_repeats_it(
    status: int, logged_in: bool, api: runai.Api, by_rest: Make, waiting: Job
) -> None:
    platform = by_rest()
    if logged_in:
        platform.check_access()
    api.instead = lambda _, held: (status, json.dumps({"message": held}).encode(), {})
    with pytest.raises(TrainLitgptError) as caught:
        platform.submit(platform.render(waiting))
    assert not leaks(caught.value, *secrets_of(api))


def secrets_of(api: runai.Api) -> list[str]:
    """What only the application and the server know."""
    return [api.application[1], *api.tokens]


def test_control_plane_needs_a_trusted_certificate(
    cluster: runai.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, certificate = certificate_in(tmp_path)
    with runai.serving(cluster, tls=context) as api:
        settings = settings_of(url=api.url, api="rest")
        with pytest.raises(PlatformUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
            Rest(settings, api.credentials(), pause=0).check_access()
        assert api.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        Rest(settings, api.credentials(), pause=0).check_access()


def test_a_token_that_has_ended_is_renewed_without_a_word(api: runai.Api, by_rest: Make, waiting: Job) -> None:
    platform = by_rest()
    job_id = platform.render(waiting).job_id
    platform.status(job_id)
    api.tokens.clear()  # by the server, before its time
    assert platform.status(job_id).state is JobState.ABSENT
    api.lifetime = 30  # shorter than the time before its end that one is renewed
    api.tokens.clear()
    platform.status(job_id)
    before = len(api.requests)
    platform.status(job_id)
    assert ("POST", "/api/v1/token") in api.requests[before:]


def test_denied_application_is_a_login_problem_without_secrets(by_rest: Make, waiting: Job) -> None:
    secret = "s3cr3t-marker"
    platform = by_rest(secret=secret)
    with pytest.raises(LoginProblem, match="refuses the credentials RUNAI_CLIENT_ID, RUNAI_CLIENT_SECRET") as caught:
        platform.submit(platform.render(waiting))
    assert secret not in f"{caught.value}{platform.render(waiting)}"
    assert secret not in found(platform, waiting)["runai.login"]
    assert secret not in repr(credentials_of("A", {"A_CLIENT_ID": "me", "A_CLIENT_SECRET": secret}))


def test_missing_project_or_cluster_is_found_and_refused(cluster: runai.Cluster, by_rest: Make, waiting: Job) -> None:
    assert "platform.project=team is not a project" in found(by_rest(project="team"), waiting)["runai.project"]
    assert "there are: main" in found(by_rest(cluster="other"), waiting)["runai.project"]
    cluster.pvcs = {}
    platform = by_rest()
    submission = platform.render(waiting)
    with pytest.raises(PlatformRefused, match='persistentvolumeclaim "scratch" not found'):
        platform.submit(submission)
    assert platform.status(submission.job_id).state is JobState.ABSENT
    with pytest.raises(PlatformRefused, match="the submission has no image"):
        platform.submit(platform.render(replace(waiting, image=None)))


def test_unanswered_requests_are_repeated_a_few_times(api: runai.Api, by_rest: Make, waiting: Job) -> None:
    platform = by_rest()
    job_id = platform.render(waiting).job_id
    platform.status(job_id)
    api.silent = 2
    assert platform.status(job_id).state is JobState.ABSENT
    api.silent = 100
    with pytest.raises(PlatformUnreachable, match="GET http://127"):
        platform.status(job_id)
    assert "runai.api" in found(by_rest(), waiting)


def test_auto_chooses_rest_only_with_credentials(tmp_path: Path, waiting: Job) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    both = {"RUNAI_CLIENT_ID": "a", "RUNAI_CLIENT_SECRET_FILE": str(tmp_path / "secret")}
    settings = settings_of(url="https://my-company.run.ai", credentials="RUNAI")
    assert settings.uses_rest(both)
    assert not settings.uses_rest({"RUNAI_CLIENT_ID": "a"})
    assert not settings_of(url=settings.url, api="cli").uses_rest(both)
    without = settings_of(url=settings.url, api="rest", credentials="TEAM_A")
    message = found(RunaiPlatform(without, Rest(without, both)), waiting)["runai.login"]
    assert "export TEAM_A_CLIENT_ID and TEAM_A_CLIENT_SECRET" in message


def test_logs_and_the_outcome_outlive_the_workload(by_rest: Make, waiting: Job) -> None:
    """Run:ai deletes one some time after its end; what its nodes have left in the run's directory stays."""
    platform, folder = by_rest(), Path(waiting.directory)
    job_id = platform.render(waiting).job_id
    folder.mkdir(parents=True)
    for node in (0, 1):
        (folder / f"node-{node}.log").write_text(f"said by {node}\n")
        report = {"node": node, "exit_code": 0, "fault": None, "message": "", "ended": 1.0}
        (folder / f"node-{node}.json").write_text(json.dumps(report))
    seen = platform.status(job_id)
    assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
    assert [line.text for line in platform.logs(job_id).lines] == ["said by 0", "said by 1"]
