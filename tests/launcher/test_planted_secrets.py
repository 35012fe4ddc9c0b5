"""A secret is planted in every client, and the far side repeats what it was sent: nobody reads it anywhere.

What is searched is all that an error can tell: its words, its causes, the local variables of its traceback, and logs.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
import yaml
from console_script import Cli
from echoing_server import Echo, echoing_server, echoing_service
from google.cloud.batch_v1 import BatchServiceClient
from google.cloud.container_v1 import ClusterManagerClient
from google.cloud.logging_v2.services.logging_service_v2 import LoggingServiceV2Client
from leaking import leaks
from refusing_proxy import refusing_proxy

from flows.server import require_server
from launcher.config import ScriptConfig
from launcher.images.docker import run_engine
from launcher.images.oci import resolve, stored_login
from launcher.platforms.batch import logs
from launcher.platforms.batch.clients import errors_as_ours
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.platforms.kubernetes import cluster as cluster_module
from launcher.platforms.kubernetes.cluster import PODS
from launcher.platforms.kubernetes.connection import SCOPE, connect, describe
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.runai.cli import Cli as RunaiProgram
from launcher.platforms.runai.rest import TOKEN
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.attempts import claim_of
from litgpt_demo.config import HubCorpus, HubTokenizer
from litgpt_demo.data.corpus import sources
from litgpt_demo.data.tokens import load_tokenizer
from litgpt_demo.errors import TrainLitgptError, UserError
from litgpt_demo.storage import Storage, objects, open_storage

SECRET = "S3cret-marker-0123456789"
GRANTED = "granted-s3cret-marker"
ANSWERS = [401, 200, 500]


@pytest.fixture
def echo() -> Iterator[Echo]:
    with echoing_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO), caplog.at_level(logging.DEBUG, "train_litgpt"):
        yield
    lines = map(logging.Formatter().format, caplog.get_records("call"))  # `caplog.text` is of the phase at hand
    assert leaks("\n".join(lines), SECRET, GRANTED) == []


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.images.oci._PAUSES", ())
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.0,))


def error_of(ask: Callable[[], object]) -> Exception:
    with pytest.raises(TrainLitgptError) as told:
        ask()
    assert leaks(told.value, SECRET, GRANTED) == []
    return told.value


# --- registries -------------------------------------------------------------------------------------------------------


def log_in(monkeypatch: pytest.MonkeyPatch, folder: Path, host: str, *, identity: bool) -> None:
    entry = {"identitytoken": SECRET} if identity else {"auth": base64.b64encode(f"me:{SECRET}".encode()).decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


@pytest.mark.parametrize("identity", [False, True], ids=["password", "identity token"])
@pytest.mark.parametrize("status", ANSWERS)
def test_a_registry_whose_token_service_repeats_the_request(
    status: int, identity: bool, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, tmp_path, echo.host, identity=identity)
    echo.status, echo.challenge = status, f'Bearer realm="{echo.address}/token",service="s",scope="pull"'
    error_of(lambda: resolve(f"{echo.host}/team/train:1"))


@pytest.mark.parametrize("identity", [False, True], ids=["password", "identity token"])
def test_a_token_service_that_sends_elsewhere_is_not_followed(
    identity: bool, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, tmp_path, echo.host, identity=identity)
    echo.challenge = f'Bearer realm="{echo.address}/token",service="s",scope="pull"'
    with echoing_server() as elsewhere:
        echo.moved_to = elsewhere.address
        error_of(lambda: resolve(f"{echo.host}/team/train:1"))
        assert elsewhere.asked == []


def test_a_registry_that_sends_elsewhere_takes_no_token_along(
    echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, tmp_path, echo.host, identity=False)
    echo.challenge, echo.granted = f'Bearer realm="{echo.address}/token",service="s",scope="pull"', "/token"
    with echoing_server() as elsewhere:
        echo.moved_to = elsewhere.address
        error_of(lambda: resolve(f"{echo.host}/team/train:1"))
        assert GRANTED in echo.asked[-1]
        assert [line for said in elsewhere.asked for line in said.splitlines() if "uthorization:" in line] == []


# --- the Hub ----------------------------------------------------------------------------------------------------------

HUB = [
    lambda: sources(HubCorpus(kind="hub", name="owner/texts")),
    lambda: load_tokenizer(HubTokenizer(kind="hub", name="owner/model")),
]


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._http._DEFAULT_RETRY_ON_STATUS_CODES", ())


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("ask", HUB, ids=["dataset", "tokenizer"])
@pytest.mark.parametrize("status", [400, 401])
def test_a_hub_that_repeats_the_request(
    status: int, ask: Callable[[], object], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", echo.address)
    echo.status = status
    error_of(ask)
    assert SECRET in echo.asked[0]


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("ask", HUB, ids=["dataset", "tokenizer"])
def test_the_hubs_token_is_not_for_a_plain_address_though_it_begins_as_this_machines(
    ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_proxy() as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.evil.example")
        refused = error_of(ask)
        assert proxy.asked == []
    assert isinstance(refused, UserError)
    assert "HF_ENDPOINT=http://127.evil.example is not encrypted" in str(refused)
    assert "write https://, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1" in str(refused)


# --- clusters and Google ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 500])
def test_a_cluster_behind_a_proxy_that_repeats_the_request(
    status: int, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo.status = status
    error_of(lambda: cluster_at(echo, tmp_path).list(PODS, "default"))
    assert SECRET in echo.asked[0]


def test_a_cluster_that_sends_elsewhere_is_not_followed(echo: Echo, tmp_path: Path) -> None:
    with echoing_server() as elsewhere:
        echo.moved_to = elsewhere.address
        told = error_of(lambda: cluster_at(echo, tmp_path).list(PODS, "default"))
        assert elsewhere.asked == []
        assert f"a redirect to {elsewhere.address}, where the token is not sent" in str(told)


def cluster_at(echo: Echo, folder: Path) -> cluster_module.Cluster:
    (folder / "kubeconfig").write_text(yaml.safe_dump({
        "clusters": [{"name": "a", "cluster": {"server": echo.address}}],
        "users": [{"name": "a", "user": {"token": SECRET}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a",
    }))  # fmt: skip
    return connect(GkePlatformConfig(kind="gke", kubeconfig=str(folder / "kubeconfig")))


@pytest.fixture
def google(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A login that is renewed, and a bucket that is reached, at the server that repeats."""
    from google.oauth2.credentials import Credentials

    credentials = Credentials(
        SECRET, refresh_token=SECRET, client_id="me", client_secret=SECRET, token_uri=echo.address, scopes=[SCOPE]
    )  # type: ignore[no-untyped-call]
    monkeypatch.setattr("google.auth.default", lambda **_: (credentials, "my-project"))
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _: None)
    monkeypatch.setenv("API_ENDPOINT_OVERRIDE", echo.address)
    echo.form = lambda said: {"error": {"message": said}}
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    objects._client.cache_clear()
    yield
    objects._client.cache_clear()  # it has these credentials, with which a later test would wait for Google's servers


BUCKET: dict[str, Callable[[Storage], object]] = {
    "read": lambda storage: storage.read("a.json"),
    "write": lambda storage: storage.write("a.json", b"{}"),
}


@pytest.mark.usefixtures("google")
@pytest.mark.parametrize("verb", BUCKET)
@pytest.mark.parametrize("status", [401, 500])
def test_a_bucket_that_repeats_the_request(status: int, verb: str, echo: Echo) -> None:
    echo.status = status
    storage = replace(open_storage("gs://bucket/runs"), patience=0.2)
    error_of(lambda: BUCKET[verb](storage))
    assert SECRET in echo.asked[0]


def batch_at(channel: grpc.Channel) -> BatchPlatform:
    platform = BatchPlatform(
        BatchPlatformConfig(kind="batch", project="my-project", location="us-central1", machine="n2-standard-8")
    )
    transport = BatchServiceClient.get_transport_class("grpc")(channel=channel)
    platform._clients.batch = BatchServiceClient(transport=transport)
    return platform


def read_log(channel: grpc.Channel) -> object:
    client = LoggingServiceV2Client(transport=LoggingServiceV2Client.get_transport_class("grpc")(channel=channel))
    with errors_as_ours("reading the log"):
        return logs.read(client, project="my-project", uid="j-1", created=datetime.now(UTC), position="")


def cluster_of_gke(channel: grpc.Channel) -> object:
    client = ClusterManagerClient(transport=ClusterManagerClient.get_transport_class("grpc")(channel=channel))
    return describe(client, project="my-project", location="us-central1", name="a")


JOB = "projects/my-project/locations/us-central1/jobs/a"
GRPC: dict[str, Callable[[grpc.Channel], object]] = {
    "batch": lambda channel: batch_at(channel).status(JOB),
    "logging": read_log,
    "gke": cluster_of_gke,
}


@pytest.mark.parametrize("ask", GRPC.values(), ids=list(GRPC))
def test_a_service_of_google_that_repeats_the_request(ask: Callable[[grpc.Channel], object]) -> None:
    with echoing_service(grpc.StatusCode.PERMISSION_DENIED) as address:
        token = grpc.access_token_call_credentials(SECRET)
        login = grpc.composite_channel_credentials(grpc.local_channel_credentials(), token)
        with grpc.secure_channel(address, login) as channel:
            assert "[secure]" in str(error_of(lambda: ask(channel)))


# --- programs ---------------------------------------------------------------------------------------------------------


def program(folder: Path, name: str, said: str) -> None:
    """A program that says this and fails."""
    (folder / "said").write_text(said)
    (folder / name).write_text(f"#!/bin/sh\ncat '{folder}/said' >&2\ncat '{folder}/said'\nexit 1\n")
    (folder / name).chmod(0o755)


SAID = f'POST /jobs\nAuthorization: Bearer {SECRET}\n{{"Username":"me","Secret":"{SECRET}"}}\n'


def push(folder: Path) -> None:
    said: list[str] = []
    try:
        run_engine("docker", ["push", "a.example/b"], subject="a.example/b", log=said.append)
    finally:
        assert said
        assert leaks("\n".join(said), SECRET) == []


def ask_helper(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"credsStore": "planted"}))
    stored_login("a.example")


def ask_runai(folder: Path) -> None:
    settings = RunaiPlatformConfig(kind="runai", project="a", claims=[{"name": "a", "path": "/a"}])  # type: ignore[list-item]
    RunaiProgram(settings)._run("list")


PROGRAMS = {"docker": push, "docker-credential-planted": ask_helper, "runai": ask_runai}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_repeats_a_request(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, name, SAID)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert "[secure]" in str(error_of(lambda: PROGRAMS[name](tmp_path)))


# --- Prefect -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 500])
def test_a_prefect_server_that_repeats_the_request(status: int, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    echo.status = status
    monkeypatch.setenv("PREFECT_API_URL", f"{echo.address}/api")
    with temporary_settings({PREFECT_API_URL: f"{echo.address}/api", PREFECT_API_AUTH_STRING: f"admin:{SECRET}"}):
        error_of(require_server)
    assert leaks("".join(echo.asked), SECRET)


# --- Run:ai and the command line --------------------------------------------------------------------------------------


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


@pytest.fixture
def forged(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A root whose index names another control plane, as whoever may write to the bucket can have it; its run."""
    monkeypatch.setenv("RUNAI_CLIENT_ID", "me")
    monkeypatch.setenv("RUNAI_CLIENT_SECRET", SECRET)
    monkeypatch.delenv("RUNAI_URL", raising=False)
    echo.granted = TOKEN
    script = ScriptConfig.model_validate({
        "name": "pi", "root": str(tmp_path), "script": "/pi.py",
        "platform": {"kind": "runai", "project": "team-a", "url": echo.address},
    })  # fmt: skip
    return claim_of(script).take().run


def test_the_record_of_a_job_does_not_say_where_credentials_are_sent(
    forged: str, echo: Echo, console: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f"names the control plane {echo.address} for the credentials RUNAI, and RUNAI_URL is"
    for found in ("", "https://my-company.run.ai"):
        monkeypatch.setenv("RUNAI_URL", found)
        listed, shown = console("runs", str(tmp_path)), console("status", forged, "--root", str(tmp_path))
        for said in (listed.out + listed.err, shown.out + shown.err):
            assert why in " ".join(said.split())
            assert f"export RUNAI_URL={echo.address}" in " ".join(said.split())
    assert echo.asked == []


def test_nothing_that_is_printed_or_written_has_a_secret(
    echo: Echo, console: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAI_CLIENT_ID", "me")
    monkeypatch.setenv("RUNAI_CLIENT_SECRET", SECRET)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{SECRET}@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config = tmp_path / "config.yaml"
    platform = {"kind": "runai", "project": "team-a", "url": echo.address, "claims": [{"name": "a", "path": "/a"}]}
    config.write_text(yaml.safe_dump({"root": str(tmp_path), "script": "examples/pi.py", "platform": platform}))
    for words in (["render", str(config)], ["render", "--explain", str(config)], ["plan", str(config)]):
        said = console(*words)
        assert leaks(said.out + said.err, SECRET) == []
    assert SECRET in "".join(echo.asked)
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert leaks("".join(written), SECRET) == []
