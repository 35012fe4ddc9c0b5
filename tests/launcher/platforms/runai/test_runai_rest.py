"""Run:ai by its REST API: tokens, ids, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import runai
from certificates import certificate_in
from leaking import leaks
from runai.api import LOST

from launcher.errors import LoginProblem, PlatformRefused, PlatformUnreachable
from launcher.job import Job, JobState
from launcher.platforms.runai.cli import Cli
from launcher.platforms.runai.platform import RunaiPlatform, chosen_api
from launcher.platforms.runai.rest import Rest, credentials_of
from launcher.platforms.runai.settings import RunaiPlatformConfig
from litgpt_demo.errors import TrainLitgptError

Make = Callable[..., RunaiPlatformConfig]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    settings = {"claims": {"scratch": str(tmp_path)}, "projects": ["team-a", "team-a-2"], "grace": 0.2}
    with runai.running(tmp_path / "runai", **settings) as made:
        yield made


@pytest.fixture
def api(cluster: runai.Cluster) -> Iterator[runai.Api]:
    with runai.serving(cluster) as made:
        yield made


@pytest.fixture
def platform(api: runai.Api, tmp_path: Path, configured: Make) -> Callable[..., RunaiPlatform]:
    def make(*, secret: str | None = None, **changes: Any) -> RunaiPlatform:
        given = {"RUNAI_CLIENT_ID": api.application[0], "RUNAI_CLIENT_SECRET": secret or api.application[1]}
        claims = [{"name": "scratch", "path": str(tmp_path)}]
        config = configured(**{"url": api.url, "api": "rest", "claims": claims, "interactive": True, **changes})
        return RunaiPlatform(config, Rest(config, given, pause=0.01), leave=20, pauses=(0, 0, 0))

    return make


@pytest.fixture
def waiting(tmp_path: Path, job: Callable[..., Job]) -> Job:
    return job(processes=1, directory=str(tmp_path / "attempts/1"), stage=())


def errors(platform: RunaiPlatform, job: Job) -> list[tuple[str, str]]:
    found = platform.check(platform.render(job))
    return [(one.code, str(one)) for one in found if one.severity == "error"]


def unknown(platform: RunaiPlatform, job: Job) -> dict[str, str]:
    """What a plan goes on without."""
    found = platform.check(platform.render(job))
    return {one.code: str(one) for one in found if one.severity == "unknown"}


@pytest.mark.parametrize("grant", ["client_credentials", "app_token"])
def test_a_training_is_posted_found_and_deleted_whichever_grant_the_version_knows(
    grant: str, api: runai.Api, cluster: runai.Cluster, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    api.grant = grant
    here = platform(secrets={"KEY": "wandb/key"}, uid=1000, priority="train", preemptible=True, node_pools=["a", "b"])
    submission = here.render(waiting)
    assert errors(here, waiting) == []
    job_id = here.submit(submission)
    assert here.submit(submission) == job_id
    assert [path for method, path in api.asked if method == "POST" and "token" not in path] == [
        "/api/v1/workloads/distributed"
    ]
    asked = cluster.training("team-a", waiting.attempt_name)
    assert asked["environment"]["KEY"] == "what the secret wandb has under key"
    assert asked["environment"]["LITGPT_HOST"] == "gpu-node-7"
    assert asked["extra"]["security"] == {
        "uidGidSource": "custom", "runAsUid": 1000, "runAsNonRoot": True,
        "allowPrivilegeEscalation": False, "seccompProfileType": "RuntimeDefault",
    }  # fmt: skip
    assert asked["extra"]["nodePools"] == ["a", "b"]
    assert here.status(job_id).state.live
    here.cancel(job_id)
    assert here.status(job_id).state is JobState.CANCELLED
    assert cluster.live() == []


def test_a_training_avoids_machines_by_their_host_names(
    cluster: runai.Cluster, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here = platform()
    assert here.avoidable(waiting).most is None
    here.submit(here.render(replace(waiting, exclude_nodes=("gpu-node-7",))))
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["gpu-node-7"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    asked = cluster.training("team-a", waiting.attempt_name)
    assert asked["extra"]["nodeAffinityRequired"] == required
    assert asked["environment"]["LITGPT_HOST"] == "gpu-node-8"


@pytest.mark.parametrize("theirs", [("team-a", 11), ("team-a-2", 1)], ids=["attempt 11", "another project"])
def test_a_job_whose_name_or_project_only_begins_alike_is_neither_adopted_nor_deleted(
    theirs: tuple[str, int], cluster: runai.Cluster, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    """Run:ai's filters match more than they say, as the stand-in's do."""
    project, attempt = theirs
    there, here = platform(project=project), platform()
    other = there.submit(there.render(replace(waiting, attempt=attempt, directory=f"{waiting.directory}-theirs")))
    ours = here.render(waiting).job_id
    assert here.status(ours).state is JobState.ABSENT
    here.cancel(ours)
    assert there.status(other).state.live
    here.submit(here.render(waiting))
    assert len(cluster.live()) == 2


@pytest.mark.parametrize("logged_in", [False, True])
def test_neither_secret_nor_token_follows_a_redirect(
    logged_in: bool, api: runai.Api, cluster: runai.Cluster, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here = platform()
    if logged_in:
        here.check_access()
    with runai.serving(cluster) as elsewhere:
        api.moved_to = elsewhere.url
        with pytest.raises(PlatformRefused, match=rf"redirected to {elsewhere.url} \(307\).*platform\.url") as told:
            here.submit(here.render(waiting))
        assert elsewhere.asked == []
    assert not leaks(told.value, *secrets_of(api))


@pytest.mark.parametrize("logged_in", [False, True])
@pytest.mark.parametrize("status", [400, 401, 403, 422, 502])
def test_a_proxy_that_repeats_what_it_was_sent_makes_no_secret_known(
    status: int, logged_in: bool, api: runai.Api, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here = platform()
    if logged_in:
        here.check_access()
    api.echoing = status
    with pytest.raises(TrainLitgptError) as told:
        here.submit(here.render(waiting))
    assert not leaks(told.value, *secrets_of(api))
    assert str(status) in str(told.value)


def test_an_answer_that_is_no_token_is_a_login_problem_without_its_text(
    api: runai.Api, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    api.echoing = 200
    here = platform()
    with pytest.raises(LoginProblem, match=r"answers without a token; see .*platform\.url") as told:
        here.submit(here.render(waiting))
    assert not leaks(told.value, *secrets_of(api))


def test_a_control_plane_is_reached_by_https_alone_and_only_where_its_certificate_is_trusted(
    cluster: runai.Cluster, tmp_path: Path, configured: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, certificate = certificate_in(tmp_path)
    with runai.serving(cluster, tls=context) as api:
        given = {"RUNAI_CLIENT_ID": api.application[0], "RUNAI_CLIENT_SECRET": api.application[1]}
        settings = configured(url=api.url, api="rest")
        with pytest.raises(PlatformUnreachable, match="CERTIFICATE_VERIFY_FAILED") as told:
            Rest(settings, given, pause=0.01).check_access()
        assert api.asked == []
        assert not leaks(told.value, *secrets_of(api))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        Rest(settings, given, pause=0.01).check_access()


def secrets_of(api: runai.Api) -> list[str]:
    """What only the application and the server know."""
    return [api.application[1], *api.tokens]


def test_a_token_that_has_ended_is_renewed_without_a_word(
    api: runai.Api, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here = platform()
    job_id = here.render(waiting).job_id
    here.status(job_id)
    api.tokens.clear()  # by the server, before its time
    assert here.status(job_id).state is JobState.ABSENT
    api.lifetime = 30.0  # shorter than the time before its end that one is renewed
    api.tokens.clear()
    before = len(api.asked)
    here.status(job_id)
    here.status(job_id)
    assert [path for _, path in api.asked[before:]].count("/api/v1/token") >= 2


def test_what_the_application_may_not_do_is_a_login_problem_and_no_secret_is_told(
    platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    secret = "s3cr3t-marker"
    here = platform(secret=secret)
    with pytest.raises(LoginProblem, match="refuses the credentials RUNAI_CLIENT_ID, RUNAI_CLIENT_SECRET") as told:
        here.submit(here.render(waiting))
    with pytest.raises(LoginProblem, match="refuses the credentials"):
        here.check_access()
    assert secret not in str(told.value)
    assert secret not in str(here.render(waiting))
    ((code, words),) = errors(here, waiting)
    assert (code, secret in words) == ("runai.login", False)
    assert secret not in repr(credentials_of("A", {"A_CLIENT_ID": "me", "A_CLIENT_SECRET": secret}))


def test_projects_and_clusters_that_are_not_there_are_found_beforehand(
    platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    ((code, words),) = errors(platform(project="team"), waiting)
    assert code == "runai.project"
    assert "platform.project=team is no project that this application may see" in words
    ((code, words),) = errors(platform(cluster="other"), waiting)
    assert "platform.cluster=other is no cluster of" in words
    assert "there are: main" in words
    assert errors(platform(cluster="main"), waiting) == []


def test_a_body_that_is_refused_leaves_nothing_behind(
    cluster: runai.Cluster, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    cluster.change(claims={})
    here = platform()
    submission = here.render(waiting)
    with pytest.raises(PlatformRefused, match='persistentvolumeclaim "scratch" not found'):
        here.submit(submission)
    assert here.status(submission.job_id).state is JobState.ABSENT


@pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize("instead", sorted(LOST))
def test_a_submission_without_a_clear_answer_is_looked_for_and_never_doubled(
    instead: str, made: bool, cluster: runai.Cluster, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here = platform()
    cluster.lose_answers(instead, made=made)
    job_id = here.submit(here.render(waiting))
    assert here.status(job_id).state.live
    assert cluster.live() == [waiting.attempt_name]
    assert len(cluster.submissions()) == (1 if made else 2)


def test_the_server_takes_documented_fields_only(api: runai.Api, cluster: runai.Cluster) -> None:
    """Of the stand-in itself: it would not notice a misspelt field otherwise."""
    token = httpx.post(
        f"{api.url}/api/v1/token",
        json={"grantType": "client_credentials", "clientId": api.application[0], "clientSecret": api.application[1]},
    ).json()["accessToken"]
    spec = {"image": "a", "numWorkers": 1, "distributedFramework": "PyTorch", "nodePool": ["h100"]}
    body = {"name": "a", "projectId": api.project_id("team-a"), "clusterId": api.cluster_ids["main"], "spec": spec}
    bearer = {"Authorization": f"Bearer {token}"}
    answer = httpx.post(f"{api.url}/api/v1/workloads/distributed", json=body, headers=bearer)
    assert (answer.status_code, "unknown field 'nodePool'" in answer.text) == (400, True)
    assert httpx.get(f"{api.url}/api/v1/workloads").status_code == 401
    wrong = {**body, "spec": {**spec, "nodePools": []}, "projectId": "1"}
    del wrong["spec"]["nodePool"]
    assert httpx.post(f"{api.url}/api/v1/workloads/distributed", json=wrong, headers=bearer).status_code == 403


def test_requests_that_nobody_answers_are_sent_again_and_then_given_up(
    api: runai.Api, platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here = platform()
    job_id = here.render(waiting).job_id
    here.status(job_id)
    api.silent = 2
    assert here.status(job_id).state is JobState.ABSENT
    api.silent = 100
    with pytest.raises(PlatformUnreachable, match="GET http://127"):
        here.status(job_id)


def test_a_control_plane_that_does_not_answer_is_unknown_to_a_plan(configured: Make, waiting: Job) -> None:
    config = configured(api="rest", url="http://127.0.0.1:9")
    here = RunaiPlatform(config, Rest(config, {"RUNAI_CLIENT_ID": "a", "RUNAI_CLIENT_SECRET": "b"}, pause=0.01))
    assert "runai.api" in unknown(here, waiting)


def test_auto_takes_rest_where_there_are_credentials_and_the_program_elsewhere(configured: Make) -> None:
    both = {"RUNAI_CLIENT_ID": "a", "RUNAI_CLIENT_SECRET": "b"}
    url = "https://my-company.run.ai"
    assert isinstance(chosen_api(configured(url=url), both), Rest)
    assert isinstance(chosen_api(configured(url=url), {"RUNAI_CLIENT_ID": "a"}), Cli)
    assert isinstance(chosen_api(configured(), both), Cli)
    assert isinstance(chosen_api(configured(url=url, credentials="OTHER"), both), Cli)
    assert isinstance(chosen_api(configured(url=url, api="rest"), {}), Rest)
    assert isinstance(chosen_api(configured(url=url, api="cli"), both), Cli)


def test_without_credentials_rest_says_what_to_export(configured: Make, waiting: Job) -> None:
    config = configured(api="rest", url="https://my-company.run.ai", credentials="TEAM_A")
    here = RunaiPlatform(config, Rest(config, {}))
    words = unknown(here, waiting)["runai.login"]
    assert "export TEAM_A_CLIENT_ID and TEAM_A_CLIENT_SECRET" in words
    assert "platform.api=cli" in words


def test_credentials_may_lie_in_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from a file\n")
    found = credentials_of("RUNAI", {"RUNAI_CLIENT_ID": "me", "RUNAI_CLIENT_SECRET_FILE": str(tmp_path / "secret")})
    assert found is not None
    assert found.client_secret == "from a file"
    with pytest.raises(LoginProblem, match="cannot be read"):
        credentials_of("RUNAI", {"RUNAI_CLIENT_ID": "me", "RUNAI_CLIENT_SECRET_FILE": str(tmp_path / "no")})


def test_a_refusal_is_told_where_the_file_of_the_secret_is_gone_meanwhile(
    api: runai.Api, tmp_path: Path, configured: Make
) -> None:
    (tmp_path / "secret").write_text(api.application[1])
    given = {"RUNAI_CLIENT_ID": api.application[0], "RUNAI_CLIENT_SECRET_FILE": str(tmp_path / "secret")}
    here = Rest(configured(url=api.url, api="rest"), given, pause=0.01)
    here.check_access()
    (tmp_path / "secret").unlink()
    api.echoing = 502
    with pytest.raises(PlatformUnreachable, match="502"):
        here.phase("demo-1")


def test_a_log_that_a_pod_of_the_next_life_began_anew_is_read_from_its_beginning(
    platform: Callable[..., RunaiPlatform], waiting: Job
) -> None:
    here, log = platform(), Path(waiting.directory, "node-0.log")
    job_id = here.render(waiting).job_id
    log.parent.mkdir(parents=True)
    log.write_text("a long line of the pod that was preempted\n")
    position = here.logs(job_id).position
    log.write_text("and a short one\n")
    assert [line.text for line in here.logs(job_id, position).lines] == ["and a short one"]


def test_an_image_that_is_not_built_is_not_submitted(platform: Callable[..., RunaiPlatform], waiting: Job) -> None:
    here = platform()
    with pytest.raises(PlatformRefused, match="the image is not known yet"):
        here.submit(here.render(replace(waiting, image=None)))
