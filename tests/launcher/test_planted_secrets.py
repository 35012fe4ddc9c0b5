"""A secret is planted in every client, and the far side repeats what it was sent: nobody reads it anywhere.

What is searched is all that an error can tell: its words, its causes, the local variables of its traceback, and logs.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from console_script import Cli
from echoing_server import Echo, echoing_server
from leaking import leaks
from refusing_proxy import refusing_proxy

from launcher.checks.doctor import _prefect_server
from launcher.config import ScriptConfig
from launcher.images.oci import resolve
from launcher.platforms.kubernetes import cluster as cluster_module
from launcher.platforms.kubernetes.cluster import PODS
from launcher.platforms.kubernetes.connection import SCOPE, _Token, connect
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from launcher.platforms.runai.rest import TOKEN
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.attempts import claim_of, recorded_platform
from launcher.runs.index import Index
from litgpt_demo.config import HubCorpus, HubTokenizer
from litgpt_demo.data.corpus import sources
from litgpt_demo.data.tokens import load_tokenizer
from litgpt_demo.errors import TrainLitgptError, UserError

SECRET = "S3cret-marker-0123456789"
GRANTED = "granted-s3cret-marker"
ANSWERS = [400, 401, 403, 404, 500, 200]


@pytest.fixture
def echo() -> Iterator[Echo]:
    with echoing_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG):
        yield
    assert leaks(caplog.text, SECRET, GRANTED) == []


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


def test_a_registry_that_sends_to_a_plain_address_is_not_followed(echo: Echo) -> None:
    echo.moved_to = "http://127.evil.example"
    with refusing_proxy() as proxy, pytest.MonkeyPatch.context() as patched:
        for name, value in proxy.environment.items():
            patched.setenv(name, value)
        patched.setenv("NO_PROXY", "127.0.0.1")
        patched.setenv("no_proxy", "127.0.0.1")
        assert "http://127.evil.example is not encrypted" in str(error_of(lambda: resolve(f"{echo.host}/train:1")))
        assert proxy.asked == []


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
@pytest.mark.parametrize("status", [400, 401, 403, pytest.param(500, marks=pytest.mark.long)])
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


@pytest.mark.parametrize("ask", HUB, ids=["dataset", "tokenizer"])
def test_a_mirror_that_needs_no_token_may_be_plain(
    ask: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.invalid")
    assert "not encrypted" not in str(error_of(ask))


# --- clusters and Google ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
def test_a_cluster_behind_a_proxy_that_repeats_the_request(
    status: int, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.0,))
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


@pytest.mark.parametrize("status", [400, 401, 500])
def test_googles_token_service_that_repeats_the_request(
    status: int, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.oauth2.credentials import Credentials

    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _: None)
    echo.status = status
    credentials = Credentials(
        None, refresh_token=SECRET, client_id="me", client_secret=SECRET, token_uri=echo.address, scopes=[SCOPE]
    )  # type: ignore[no-untyped-call]
    error_of(_Token(credentials).renew)
    assert SECRET in echo.asked[0]


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


def test_a_control_plane_that_the_environment_or_the_config_names_is_asked(
    forged: str, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(given: RunaiPlatformConfig | None) -> int:
        [record], before = Index.of(str(tmp_path)).records(forged), len(echo.asked)
        with suppress(TrainLitgptError):
            recorded_platform(record.platform, given).status(record.job_id)
        return len(echo.asked) - before

    config = RunaiPlatformConfig(kind="runai", project="team-a", url=echo.address)
    assert asked(config)
    assert not asked(config.model_copy(update={"url": "https://my-company.run.ai"}))
    assert not asked(config.model_copy(update={"credentials": "TEAM_A"}))
    monkeypatch.setenv("RUNAI_URL", f"{echo.address}/")
    assert asked(None)


@pytest.mark.parametrize("status", [400, 401])
def test_nothing_that_is_printed_or_written_has_a_secret(
    status: int, echo: Echo, console: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAI_CLIENT_ID", "me")
    monkeypatch.setenv("RUNAI_CLIENT_SECRET", SECRET)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{SECRET}@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    echo.status = status
    config = tmp_path / "config.yaml"
    platform = {"kind": "runai", "project": "team-a", "url": echo.address, "claims": [{"name": "a", "path": "/a"}]}
    config.write_text(yaml.safe_dump({"root": str(tmp_path), "script": "examples/pi.py", "platform": platform}))
    for words in (["render", str(config)], ["render", "--explain", str(config)], ["plan", str(config)]):
        said = console(*words)
        assert leaks(said.out + said.err, SECRET) == []
    assert SECRET in "".join(echo.asked)
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert leaks("".join(written), SECRET) == []


def test_the_password_in_the_address_of_prefects_server_is_not_shown(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:{SECRET}@{echo.host}/api")
    assert leaks("".join(map(str, _prefect_server())), SECRET) == []
