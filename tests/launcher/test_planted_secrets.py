"""A secret is planted in every client, and the far side repeats what it was sent: nobody reads it anywhere.

What is searched is all that an error can tell: its words, its causes, the local variables of its traceback, and logs.
"""

import base64
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from console_script import Cli
from echoing_server import Echo, echoing_server
from job_handles import handle_of
from leaking import leaks
from refusing_proxy import refusing_proxy

from flows.server import require_server
from launcher.config import ScriptConfig
from launcher.google import google_errors
from launcher.images.docker import run_engine
from launcher.images.oci import resolve
from launcher.platforms.batch.platform import BATCH
from launcher.platforms.kubernetes import cluster as cluster_module
from launcher.platforms.kubernetes.cluster import PODS
from launcher.platforms.kubernetes.connection import SCOPE, connect
from launcher.platforms.kubernetes.settings import KubernetesPlatformConfig
from launcher.platforms.runai.rest import TOKEN
from litgpt_demo.config import HubCorpus, HubTokenizer
from litgpt_demo.data.corpus import kind_of
from litgpt_demo.data.tokens import load_tokenizer
from litgpt_demo.errors import TrainLitgptError, UserError
from litgpt_demo.storage import bucket, open_storage

SECRET = "S3cret-marker-0123456789"
GRANTED = "granted-s3cret-marker"


@pytest.fixture
def echo() -> Iterator[Echo]:
    with echoing_server() as running:
        yield running


@pytest.fixture
def elsewhere() -> Iterator[Echo]:
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
    monkeypatch.setattr("huggingface_hub.utils._http._DEFAULT_RETRY_ON_STATUS_CODES", ())


def error_of(ask: Callable[[], object]) -> Exception:
    with pytest.raises(TrainLitgptError) as caught:
        ask()
    assert leaks(caught.value, SECRET, GRANTED) == []
    return caught.value


@pytest.fixture
def hub(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", echo.address)


@pytest.fixture
def kubeconfig(echo: Echo, tmp_path: Path) -> str:
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({
        "clusters": [{"name": "a", "cluster": {"server": echo.address}}],
        "users": [{"name": "a", "user": {"token": SECRET}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a",
    }))  # fmt: skip
    return str(tmp_path / "kubeconfig")


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
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    bucket._client.cache_clear()
    yield
    bucket._client.cache_clear()  # it has these credentials, with which a later test would wait for Google's servers


@pytest.fixture(params=["password", "identity token"])
def image(request: pytest.FixtureRequest, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an image whose registry asks for a token of the server that repeats, with a login that is stored."""
    password = {"auth": base64.b64encode(f"me:{SECRET}".encode()).decode()}
    entry = password if request.param == "password" else {"identitytoken": SECRET}
    (tmp_path / "config.json").write_text(json.dumps({"auths": {echo.host: entry}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    echo.challenge = f'Bearer realm="{echo.address}/token",service="s",scope="pull"'
    return f"{echo.host}/team/train:1"


def pods_of(kubeconfig: str) -> object:
    return connect(KubernetesPlatformConfig(kind="kubernetes", kubeconfig=kubeconfig)).list(PODS, "default")


@pytest.mark.parametrize("status", [401, 200, 500])
def test_a_registry_whose_token_service_repeats_the_request(status: int, image: str, echo: Echo) -> None:
    echo.status = status
    error_of(lambda: resolve(image))


@pytest.mark.usefixtures("hub", "google")
@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_hub_a_cluster_or_a_bucket_that_repeats_the_request(status: int, echo: Echo, kubeconfig: str) -> None:
    echo.status = status
    bucket = replace(open_storage("gs://bucket/runs"), patience=0.2)
    for ask in (
        lambda: kind_of(HubCorpus(kind="hub", name="owner/texts")).list_files([]),
        lambda: load_tokenizer(HubTokenizer(kind="hub", name="owner/model")),
        lambda: pods_of(kubeconfig),
        lambda: bucket.write("a.json", b"{}"),
    ):
        echo.requests.clear()
        error_of(ask)
        assert SECRET in echo.requests[0]


def test_a_service_of_google_that_repeats_the_request() -> None:
    from google.api_core.exceptions import PermissionDenied

    def ask() -> None:
        with google_errors(BATCH, "asking after a job"):
            raise PermissionDenied(f"refused\nauthorization: Bearer {SECRET}")

    assert "[secure]" in str(error_of(ask))


def test_a_program_that_repeats_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = f'POST /jobs\nAuthorization: Bearer {SECRET}\n{{"Username":"me","Secret":"{SECRET}"}}\n'
    (tmp_path / "said").write_text(answer)
    (tmp_path / "docker").write_text(f"#!/bin/sh\ncat '{tmp_path}/said' >&2\ncat '{tmp_path}/said'\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lines: list[str] = []
    refused = error_of(lambda: run_engine("docker", ["push", "x/b"], subject="x/b", log=lines.append, pause=print))
    assert "[secure]" in str(refused)
    assert lines
    assert leaks("\n".join(lines), SECRET) == []


def test_a_prefect_server_that_repeats_the_request(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    echo.status = 401
    monkeypatch.setenv("PREFECT_API_URL", f"{echo.address}/api")
    with temporary_settings({PREFECT_API_URL: f"{echo.address}/api", PREFECT_API_AUTH_STRING: f"admin:{SECRET}"}):
        error_of(require_server)
    assert leaks("".join(echo.requests), SECRET)


def test_no_credential_follows_a_registrys_redirect(image: str, echo: Echo, elsewhere: Echo) -> None:
    echo.moved_to = elsewhere.address
    error_of(lambda: resolve(image))
    assert elsewhere.requests == [], "the token service sends elsewhere"
    echo.granted = "/token"
    error_of(lambda: resolve(image))
    assert GRANTED in echo.requests[-1]
    assert [line for request in elsewhere.requests for line in request.splitlines() if "uthorization:" in line] == []


def test_a_cluster_that_sends_elsewhere_is_not_followed(echo: Echo, elsewhere: Echo, kubeconfig: str) -> None:
    echo.moved_to = elsewhere.address
    error = error_of(lambda: pods_of(kubeconfig))
    assert elsewhere.requests == []
    assert f"a redirect to {elsewhere.address}, where the token is not sent" in str(error)


@pytest.mark.usefixtures("hub")
def test_hub_token_is_never_sent_to_a_plain_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even one that begins as this machine's."""
    with refusing_proxy() as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.evil.example")
        refused = error_of(lambda: kind_of(HubCorpus(kind="hub", name="owner/texts")).list_files([]))
        assert proxy.requests == []
    assert isinstance(refused, UserError)
    assert "HF_ENDPOINT=http://127.evil.example is not encrypted" in str(refused)


@pytest.fixture
def runai(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A platform whose control plane repeats what it is sent, and a login there."""
    monkeypatch.setenv("RUNAI_CLIENT_ID", "me")
    monkeypatch.setenv("RUNAI_CLIENT_SECRET", SECRET)
    return {"kind": "runai", "project": "team-a", "url": echo.address, "pvcs": [{"name": "a", "path": "/a"}]}


def test_record_of_a_job_does_not_redirect_credentials(
    echo: Echo, runai: dict[str, object], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the bucket can have its index name another control plane."""
    script = {"name": "pi", "root": str(tmp_path), "script": "/pi.py", "platform": runai}
    echo.granted = TOKEN
    forged = handle_of(ScriptConfig.model_validate(script)).reattach_or_create().run
    for known in ("", "https://my-company.run.ai"):
        monkeypatch.setenv("RUNAI_URL", known)
        for result in (cli("runs", str(tmp_path)), cli("status", forged, "--root", str(tmp_path))):
            assert f"export RUNAI_URL={echo.address}" in " ".join(f"{result.out}{result.err}".split())
    assert echo.requests == []


def test_nothing_that_is_printed_or_written_has_a_secret(
    echo: Echo, runai: dict[str, object], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{SECRET}@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"root": str(tmp_path), "script": "examples/pi.py", "platform": runai}))
    for arguments in (["render", str(config)], ["render", "--explain", str(config)], ["plan", str(config)]):
        result = cli(*arguments)
        assert leaks(result.out + result.err, SECRET) == []
    assert SECRET in "".join(echo.requests)
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert leaks("".join(written), SECRET) == []
