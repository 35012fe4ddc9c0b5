"""Images without an engine: what may be written, keys, digests from a registry, and what a run's code was."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import packages_distributions, version
from pathlib import Path

import httpx
import pytest
from distributions import closure, requirements
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import TypeAdapter, ValidationError

from deployments.lock import constraints
from launcher.errors import ImageProblem, ImageUnreachable
from launcher.images import oci
from launcher.images.builders import build_key, pin_base, prepare_image, recipes
from launcher.images.context import read_ignore_file, write_context
from launcher.images.docker import run_engine
from launcher.images.identity import SoftwareIdentity, software_identity
from launcher.images.oci import ImageReference, Login, resolve, stored_login
from launcher.images.settings import DockerImage, Image, NoImage, PrebuiltImage
from launcher.images.stacks import LABELS, STACKS, Contents, Stack
from litgpt_demo.errors import Fault
from litgpt_demo.proxies import settle_proxies
from litgpt_demo.stacks.installed import differences

sys.path.append(str(Path(__file__).parents[2] / "fakes"))
from refusing_proxy import refusing_proxy
from registry_server import OCI_INDEX, Running, registry

CHECKOUT = Path(__file__).parents[3]
DIGEST = "sha256:" + "ab" * 32
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


# --- references -------------------------------------------------------------------------------------------------------

words = st.from_regex(r"[a-z0-9]{1,8}((\.|_|__|-{1,3})[a-z0-9]{1,8}){0,2}", fullmatch=True)
hosts = st.sampled_from(
    ["localhost", "localhost:5000", "127.0.0.1:5000", "[::1]:5000", "gcr.io", "Reg.Example.com:443"]
)
tags = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(
    host=st.none() | hosts,
    path=st.lists(words, min_size=1, max_size=3),
    tag=st.none() | tags,
    digest=st.none() | st.just(DIGEST),
)
def test_a_reference_is_taken_apart_into_what_it_was_made_of(
    host: str | None, path: list[str], tag: str | None, digest: str | None
) -> None:
    if host is None and len(path) > 1 and ("." in path[0] or path[0] == "localhost"):
        path = ["team", *path]
    repository = "/".join(([host] if host else []) + path)
    text = repository + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    reference = ImageReference.parse(text)
    assert str(reference) == text
    assert (reference.host, reference.path) == (host or "docker.io", "/".join(path))
    assert (reference.repository, reference.tag, reference.digest) == (repository, tag, digest)


@given(st.text(alphabet="ab/:@.-_A[] \n0", max_size=14))
def test_what_is_accepted_as_a_reference_is_kept_as_it_was_written(text: str) -> None:
    with suppress(ValueError):
        reference = ImageReference.parse(text)
        assert str(reference) == text
        assert httpx.URL(reference.manifest_url).path.startswith("/v2/")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("gcr.io/team/train", "neither a tag nor a digest"),
        ("localhost:5000/train", "neither a tag nor a digest"),
        ("gcr.io/team/train:latest", "the tag latest"),
        ("gcr.io/Team/train:1", "lower case"),
        ("gcr.io/team/train@sha256:abc", "64 hex digits"),
    ],
)
def test_a_prebuilt_image_that_may_change_overnight_is_refused_with_the_reason(reference: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        PrebuiltImage(kind="prebuilt", reference=reference)
    with pytest.raises(ImageProblem, match=reason):
        resolve(reference)


def test_a_digest_outweighs_the_tag_latest() -> None:
    assert (
        ImageReference.parse_fixed(f"gcr.io/team/train:latest@{DIGEST}").pinned(DIGEST) == f"gcr.io/team/train@{DIGEST}"
    )


def test_docker_hubs_short_names_are_asked_for_where_docker_hub_keeps_them() -> None:
    assert (
        ImageReference.parse("python:3.11").manifest_url
        == "https://registry-1.docker.io/v2/library/python/manifests/3.11"
    )


def test_a_built_image_takes_no_tag_and_one_base_only() -> None:
    with pytest.raises(ValidationError, match=r"write gcr\.io/team/train"):
        DockerImage(kind="docker", repository="gcr.io/team/train:1")
    with pytest.raises(ValidationError, match="leave one out"):
        DockerImage(kind="docker", repository="gcr.io/train", base="a:1", build_args={"BASE": "b:1"})


def test_pips_configuration_is_for_the_products_own_dockerfile() -> None:
    with pytest.raises(ValidationError, match="leave one out"):
        DockerImage(kind="docker", repository="gcr.io/train", dockerfile="Dockerfile", pip_config="pip.conf")


def test_an_image_is_chosen_by_its_kind() -> None:
    read = TypeAdapter(Image).validate_python
    assert isinstance(read({"kind": "none"}), NoImage)
    assert isinstance(read({"kind": "docker", "repository": "gcr.io/team/train"}), DockerImage)
    with pytest.raises(ValidationError, match="kind"):
        read({})


# --- the registry -----------------------------------------------------------------------------------------------------


def log_in(monkeypatch: pytest.MonkeyPatch, folder: Path, config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "no-podman"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that is away is asked once more, after half a second."""
    monkeypatch.setattr(oci, "PATIENCE", 0.7)


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("public")) as running:
        yield running


@pytest.mark.parametrize("kind", [OCI_INDEX, DOCKER_MANIFEST])
def test_a_tag_is_resolved_to_the_digest_it_has_now(public: Running, kind: str) -> None:
    name = f"team/train-{kind[-4]}"
    first = public.push(name, "1", kind)
    assert resolve(f"{public.host}/{name}:1") == f"{public.host}/{name}@{first}"
    second = public.push(f"{name}-2", "1", kind)
    assert first != second
    assert resolve(f"{public.host}/{name}-2:1") == f"{public.host}/{name}-2@{second}"


def test_resolving_a_digest_proves_that_the_registry_has_it(public: Running) -> None:
    digest = public.push("team/pinned", "1")
    assert resolve(f"{public.host}/team/pinned@{digest}") == f"{public.host}/team/pinned@{digest}"
    with pytest.raises(ImageProblem, match="no such image; check repository and digest"):
        resolve(f"{public.host}/team/pinned@{DIGEST}")


@pytest.mark.parametrize("header", [[], ["--no-digest-header"]], ids=["digest header", "no digest header"])
def test_a_registry_that_answers_with_another_image_than_the_pinned_one_is_not_believed(
    tmp_path: Path, header: list[str]
) -> None:
    with registry(tmp_path, "--swapped", *header) as running:
        running.push("team/train", "old")
        wanted = running.push("team/train", "new")
        with pytest.raises(ImageProblem, match="another image"):
            resolve(f"{running.host}/team/train@{wanted}")


def test_a_missing_tag_is_reported_with_what_to_check(public: Running) -> None:
    with pytest.raises(ImageProblem, match=r"team/none:1: .* has no such image; check repository and tag"):
        resolve(f"{public.host}/team/none:1")


def test_without_a_digest_header_the_manifest_itself_is_hashed(tmp_path: Path) -> None:
    with registry(tmp_path, "--no-digest-header") as running:
        digest = running.push("train", "1")
        assert resolve(f"{running.host}/train:1") == f"{running.host}/train@{digest}"
        assert running.requests()[-1].startswith("GET ")


def test_an_anonymous_token_is_fetched_where_the_registry_wants_one(tmp_path: Path) -> None:
    with registry(tmp_path, "--anonymous-tokens") as running:
        digest = running.push("team/train", "1")
        assert resolve(f"{running.host}/team/train:1").endswith(digest)
        assert [line.split("?")[0] for line in running.requests()[1:]] == [
            "HEAD /v2/team/train/manifests/1",
            "GET /token",
            "HEAD /v2/team/train/manifests/1",
        ]


@pytest.mark.parametrize("scheme", [[], ["--basic"]], ids=["token", "basic"])
def test_a_private_registry_takes_the_login_that_docker_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: list[str]
) -> None:
    with registry(tmp_path, "--account", "ada:pass:word", *scheme) as running:
        digest = running.push("team/train", "1")
        auth = base64.b64encode(b"ada:pass:word").decode()
        log_in(monkeypatch, tmp_path, {"auths": {f"https://{running.host}/v2/": {"auth": auth}}})
        assert resolve(f"{running.host}/team/train:1").endswith(digest)


def test_an_identity_token_is_changed_for_an_access_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with registry(tmp_path, "--account", "ada:secret") as running:
        digest = running.push("team/train", "1")
        log_in(monkeypatch, tmp_path, {"auths": {running.host: {"identitytoken": "an-identity-token"}}})
        assert resolve(f"{running.host}/team/train:1").endswith(digest)


@pytest.mark.parametrize(
    "stored", [{"auth": base64.b64encode(b"ada:secret").decode()}, {"identitytoken": "an-identity-token"}]
)
def test_no_password_is_sent_to_a_token_service_that_is_elsewhere_and_not_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, str]
) -> None:
    """0.0.0.0 leads to this machine, and is no name of it."""
    with registry(tmp_path, "--account", "ada:secret", "--token-host", "0.0.0.0") as running:
        running.push("team/train", "1")
        log_in(monkeypatch, tmp_path, {"auths": {running.host: stored}})
        with pytest.raises(ImageProblem, match="not encrypted"):
            resolve(f"{running.host}/team/train:1")
        assert [line for line in running.requests() if "/token" in line] == []


@pytest.mark.parametrize("scheme", [[], ["--basic"]], ids=["token", "basic"])
@pytest.mark.parametrize("auth", [None, b"ada:wrong"], ids=["no login", "wrong login"])
def test_a_refusal_names_the_command_that_logs_in_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: list[str], auth: bytes | None
) -> None:
    with registry(tmp_path, "--account", "ada:secret", *scheme) as running:
        running.push("team/train", "1")
        if auth:
            log_in(monkeypatch, tmp_path, {"auths": {running.host: {"auth": base64.b64encode(auth).decode()}}})
        with pytest.raises(ImageProblem, match=f"log in with `docker login {running.host}`") as caught:
            resolve(f"{running.host}/team/train:1")
        assert "wrong" not in str(caught.value)


def test_a_registry_in_trouble_is_told_apart_from_a_missing_image(tmp_path: Path) -> None:
    with (
        registry(tmp_path, "--broken") as running,
        pytest.raises(ImageProblem, match="does not answer: 503; wait, then try again"),
    ):
        resolve(f"{running.host}/team/train:1")


@pytest.mark.parametrize("how", ["429", "500", "503", "cut", "429,cut"])
def test_a_registry_that_is_busy_for_a_moment_is_asked_again(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "PATIENCE", 5.0)
    with registry(tmp_path, "--first", how) as running:
        digest = running.push("team/train", "1")
        assert resolve(f"{running.host}/team/train:1").endswith(digest)


def test_a_registry_is_given_the_time_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "PATIENCE", 5.0)
    with registry(tmp_path, "--first", "429", "--retry-after", "2") as running:
        running.push("team/train", "1")
        began = time.monotonic()
        resolve(f"{running.host}/team/train:1")
        assert time.monotonic() - began >= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--first", "429", "--retry-after", "3600"], "does not answer: 429"),
        (["--first", "cut,cut,cut,cut"], "cannot be reached"),
        (["--broken"], "does not answer: 503"),
    ],
)
def test_a_registry_that_stays_away_ends_the_step_as_one_that_may_be_back(
    tmp_path: Path, options: list[str], words: str
) -> None:
    began = time.monotonic()
    with registry(tmp_path, *options) as running, pytest.raises(ImageUnreachable, match=words) as caught:
        resolve(f"{running.host}/team/train:1")
    assert caught.value.fault is Fault.UNREACHABLE
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("status", ["403", "418"])
def test_a_registrys_no_ends_the_step_at_once(tmp_path: Path, status: str) -> None:
    with registry(tmp_path, "--first", status) as running, pytest.raises(ImageProblem, match=status) as caught:
        resolve(f"{running.host}/team/train:1")
    assert caught.value.fault is Fault.USER
    assert len(running.requests()) == 1


def test_a_registry_without_a_name_server_entry_is_a_mistake_and_not_an_outage() -> None:
    with pytest.raises(ImageProblem, match="check its name") as caught:
        resolve("no-such-registry.invalid/team/train:1")
    # Where no name server answers at all, it is an outage.
    assert caught.value.fault is (Fault.UNREACHABLE if "[Errno -3]" in str(caught.value) else Fault.USER)


def test_podmans_login_counts_as_dockers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = base64.b64encode(b"ada:secret").decode()
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "auth.json").write_text(json.dumps({"auths": {"reg.example.com": {"auth": auth}}}))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert stored_login("reg.example.com") == Login(username="ada", secret="secret")
    log_in(monkeypatch, tmp_path, {"auths": {"reg.example.com": {}, "other.example.com": {"auth": auth}}})
    assert stored_login("other.example.com") == Login(username="ada", secret="secret")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none"))
    assert stored_login("reg.example.com") is None


def test_an_unreachable_registry_is_named(tmp_path: Path) -> None:
    with registry(tmp_path) as running:
        gone = running.host
    with pytest.raises(ImageProblem, match=f"{gone} cannot be reached .* check its name, the network"):
        resolve(f"{gone}/train:1")


def test_only_registries_elsewhere_are_asked_through_a_proxy(public: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = public.push("team/near", "1")
    with refusing_proxy() as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        settle_proxies(os.environ)
        assert resolve(f"{public.host}/team/near:1").endswith(digest)
        assert proxy.asked == []
        with pytest.raises(ImageProblem, match="HTTPS_PROXY"):
            resolve("registry.example.com/team/far:1")
    assert "registry.example.com:443" in proxy.asked[0]


# --- stored logins ----------------------------------------------------------------------------------------------------


def credential_helper(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "docker-credential-fake"
    program.write_text(f"#!/bin/sh\nread address\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_credential_helper_is_asked_for_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credential_helper(tmp_path, monkeypatch, """echo "{\\"Username\\": \\"at $address\\", \\"Secret\\": \\"s\\"}" """)
    log_in(monkeypatch, tmp_path, {"credHelpers": {"gcr.io": "fake"}, "auths": {"ghcr.io": {}}})
    assert stored_login("gcr.io") == Login(username="at gcr.io", secret="s")
    assert stored_login("ghcr.io") is None
    log_in(monkeypatch, tmp_path, {"credsStore": "fake"})
    assert stored_login("docker.io") == Login(username="at https://index.docker.io/v1/", secret="s")


def test_a_helper_that_knows_no_login_is_no_problem_but_a_failing_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, tmp_path, {"credsStore": "fake"})
    with pytest.raises(ImageProblem, match="docker-credential-fake"):
        stored_login("gcr.io")
    credential_helper(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    assert stored_login("gcr.io") is None
    credential_helper(tmp_path, monkeypatch, "echo please log in again >&2; exit 1")
    with pytest.raises(ImageProblem, match=r"please log in again; run `gcloud auth configure-docker gcr\.io`"):
        stored_login("gcr.io")


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": {"gcr.io": {"auth": "YQ"}}}', '{"auths": {"gcr.io": 1}}'])
def test_a_damaged_docker_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(ImageProblem, match=f"{tmp_path}/config.json cannot be read"):
        stored_login("gcr.io")


def test_a_helper_that_answers_nonsense_does_not_leak_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credential_helper(tmp_path, monkeypatch, """echo '{"Secret": "hunter2"}' """)
    log_in(monkeypatch, tmp_path, {"credsStore": "fake"})
    with pytest.raises(ImageProblem, match="update it") as caught:
        stored_login("gcr.io")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_login_does_not_show_its_secret() -> None:
    assert "hunter2" not in repr(Login(username="ada", secret="hunter2"))


# --- the build context ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "out", "kept"),
    [
        ("*.log", ["a.log"], ["b/a.log", "a.log.txt"]),
        ("**/*.log", ["a.log", "b/c/a.log"], ["alog"]),
        ("build", ["build", "build/x/y"], ["src/build", "builds"]),
        ("/build/", ["build/x"], ["a/build/x"]),
        ("a/**/z", ["a/z", "a/b/c/z"], ["z", "a/zz"]),
        ("data?.b[io]n", ["data1.bin", "data2.bon"], ["data.bin", "data1.ban"]),
        ("# *", [], ["a", "# *"]),
        ("  spaced  ", ["spaced"], ["a"]),
        ("**", ["a", "a/b"], []),
        (r"\*star", ["*star"], ["a-star"]),
        (".", [], ["a"]),
        ("Data", ["Data"], ["data"]),
        ("**/build", ["build", "a/b/build/x"], ["a/builds"]),
        ("\ufeffa", ["a"], ["b"]),
    ],
)
def test_a_line_of_dockerignore_means_what_docker_says(
    tmp_path: Path, line: str, out: list[str], kept: list[str]
) -> None:
    (tmp_path / ".dockerignore").write_text(line)
    rules = read_ignore_file(tmp_path)
    assert [path for path in out + kept if rules.matches(path)] == out


def context_files(context: Path) -> list[str]:
    """The files that the engine gets, without the Dockerfile."""
    with tempfile.TemporaryFile() as file:
        write_context(context, "FROM scratch\n", to=file)
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            return tar.getnames()[:-1]


def test_the_last_matching_line_decides(tmp_path: Path) -> None:
    files = dict.fromkeys(["README", "src/a.py", "src/b.pyc", "src/keep.pyc"], b"")
    context = write_files(tmp_path, {**files, ".dockerignore": b"*\n!src\nsrc/*.pyc\n!src/keep.pyc\n"})
    assert context_files(context) == ["src/a.py", "src/keep.pyc"]


def test_a_file_is_taken_back_in_by_name_wherever_it_is(tmp_path: Path) -> None:
    files = dict.fromkeys(["a/b/keep.txt", "a/b/other.txt"], b"")
    assert context_files(write_files(tmp_path, {**files, ".dockerignore": b"a\n!**/keep.txt\n"})) == ["a/b/keep.txt"]


@pytest.mark.parametrize("line", ["data[", "!"])
def test_a_line_of_dockerignore_that_docker_refuses_is_refused(tmp_path: Path, line: str) -> None:
    context = write_files(tmp_path / "context", {"a": b"x", ".dockerignore": line.encode()})
    with pytest.raises(ImageProblem, match=f"{re.escape(repr(line))}.*fix .* the pattern"):
        build_key(docker_image(context))


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def docker_image(context: Path, **changes: object) -> DockerImage:
    dockerfile = context.parent / f"{context.name}.Dockerfile"
    if not dockerfile.exists():
        dockerfile.write_text("ARG BASE\nFROM ${BASE}\nCOPY . /\n")
    given = {"kind": "docker", "repository": "gcr.io/train", "context": str(context), "dockerfile": str(dockerfile)}
    return DockerImage.model_validate(given | changes)


contents = st.dictionaries(st.sampled_from(["a", "b.py", "c/d", "c/e f", "é/g"]), st.binary(max_size=20), min_size=1)


@given(files=contents, extra=st.binary(max_size=20))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_content_elsewhere_has_the_same_key(tmp_path: Path, files: dict[str, bytes], extra: bytes) -> None:
    here, there = (write_files(fresh(tmp_path / name), files) for name in ("here", "there"))
    write_files(there, {".dockerignore": b"*.log\ntmp\n", "x.log": extra, "tmp/y": extra})
    for path in there.rglob("*"):
        os.utime(path, (1, 1))
    (there / next(iter(files))).chmod(0o600)
    assert build_key(docker_image(here)) == build_key(docker_image(there))


@given(files=contents, data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_byte_that_can_be_copied_changes_the_key(
    tmp_path: Path, files: dict[str, bytes], data: st.DataObject
) -> None:
    context = write_files(fresh(tmp_path / "context"), files)
    before = build_key(docker_image(context))
    file = context / data.draw(st.sampled_from(sorted(files)))
    old = file.read_bytes()
    place = data.draw(st.integers(0, len(old)))
    file.write_bytes(old[:place] + b"!" + old[place:])
    assert build_key(docker_image(context)) != before


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda context: (context / "run").chmod(0o755),
        lambda context: (context / "run").rename(context / "ran"),
        lambda context: (context / "link").symlink_to("run"),
        lambda context: (context.parent / "context.Dockerfile").write_text("FROM scratch\n"),
    ],
    ids=["executable", "renamed", "linked", "Dockerfile"],
)
def test_what_the_image_would_hold_otherwise_changes_the_key(tmp_path: Path, change: Callable[[Path], None]) -> None:
    context = write_files(tmp_path / "context", {"run": b"x"})
    before = build_key(docker_image(context))
    change(context)
    assert build_key(docker_image(context)) != before


def test_base_arguments_and_platform_count_but_not_where_the_image_goes(tmp_path: Path) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})
    changes = ({}, {"base": f"python@{DIGEST}"}, {"build_args": {"A": "1"}}, {"platform": "linux/arm64"})
    keys = [build_key(docker_image(context, **change)) for change in changes]
    assert len(set(keys)) == len(keys)
    assert build_key(docker_image(context, repository="gcr.io/other")) == keys[0]
    assert re.fullmatch(r"[0-9a-f]{16}", keys[0])


def test_a_base_counts_as_the_digest_that_its_tag_has_now(tmp_path: Path, public: Running) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})
    image = docker_image(context, base=f"{public.host}/team/base:1")
    first = public.push("team/base", "1")
    assert pin_base(image).base == f"{public.host}/team/base@{first}"
    before = build_key(image)
    assert before == build_key(docker_image(context, base=f"{public.host}/team/base@{first}"))
    name = f"{public.host}/team/base"
    content = json.dumps({"mediaType": OCI_INDEX, "annotations": {"for": "somebody else"}})
    url = f"http://{public.host}/v2/team/base/manifests/1"
    httpx.put(url, content=content, headers={"Content-Type": OCI_INDEX}, trust_env=False).raise_for_status()
    assert pin_base(image).base != f"{name}@{first}"
    assert build_key(image) != before


def test_a_base_that_nobody_has_is_refused(tmp_path: Path, public: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker here
    with pytest.raises(ImageProblem, match=r"team/none:1: .* has no such image"):
        build_key(docker_image(context, base=f"{public.host}/team/none:1"))
    with pytest.raises(ImageProblem, match=r"image\.base: .*lower case"):
        build_key(docker_image(context, base="Team/base:1"))


def test_a_base_of_this_machine_counts_by_its_engines_id(
    tmp_path: Path, public: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})
    image = docker_image(context, base=f"{public.host}/here/base:1")
    keys = []
    for number in range(2):
        answer = f"#!/bin/sh\necho sha256:{number:064}\n".encode()
        (write_files(tmp_path / "bin", {"docker": answer}) / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        assert pin_base(image).base == f"{public.host}/here/base:1"
        keys.append(build_key(image))
    assert keys[0] != keys[1]


def test_the_engine_gets_exactly_what_dockerignore_leaves(tmp_path: Path) -> None:
    files = {"a.py": b"a", "sub/b.py": b"b", "sub/c.log": b"c", "data/deep/d": b"d", "data/deep/e": b"e"}
    context = write_files(tmp_path / "context", files | {".dockerignore": b"**/*.log\ndata\n!data/deep/d\n"})
    (context / "link").symlink_to("a.py")
    sent = tmp_path / "context.tar"
    with sent.open("wb") as file:
        digest = write_context(context, "FROM scratch\n", to=file)
    assert sha256(sent.read_bytes()).hexdigest() == digest
    with tarfile.open(sent) as tar:
        members = list(tar)
    assert {(member.uid, member.gid, time.gmtime(member.mtime).tm_year) for member in members} == {(0, 0, 1980)}
    names = [member.name for member in members]
    assert names == ["a.py", "data/deep/d", "link", "sub/b.py", "Dockerfile.train-litgpt"]


def test_the_products_own_dockerfile_sees_the_package_and_nothing_of_the_rest(tmp_path: Path) -> None:
    context = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(".git", ".venv", "output", ".*_cache", "*.egg-info", "shared")
    shutil.copytree(CHECKOUT, context, ignore=ignore)
    image = DockerImage(kind="docker", repository="gcr.io/train", context=str(context))
    before = build_key(image)
    write_files(
        context,
        {"launcher/new.py": b"", "constraints.txt": b"", "litgpt_demo/__pycache__/x.pyc": b"", "README.md": b"new"},
    )
    assert build_key(image) == before
    write_files(context, {"litgpt_demo/new.py": b""})
    assert build_key(image) != before


def test_a_context_that_cannot_serve_is_refused_before_docker_is_asked(tmp_path: Path) -> None:
    outside = DockerImage(kind="docker", repository="gcr.io/train", context=str(tmp_path))
    with pytest.raises(ImageProblem, match=r"not a checkout of train-litgpt.*set image.context"):
        build_key(outside)
    with pytest.raises(ImageProblem, match="cannot be read"):
        build_key(docker_image(tmp_path / "nowhere"))


# --- the docker command -----------------------------------------------------------------------------------------------


def docker_says(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> str:
    """The error message of a docker command that prints `output` and fails."""
    program = (
        write_files(folder, {"docker": f"#!/bin/sh\ncat <<'END' >&2\n{output}\nEND\nexit 1\n".encode()}) / "docker"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(ImageProblem) as caught:
        run_engine("docker", ["build"], subject="registry.example.com/train:1", log=lambda line: None)
    return str(caught.value)


# What the docker 20.10, 28 and BuildKit commands print, word for word.
@pytest.mark.parametrize(
    ("output", "fix"),
    [
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            "start the engine",
        ),
        (
            "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
            'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.50/info": dial unix /var/run/docker.sock: '
            "connect: permission denied",
            "group docker",
        ),
        ("denied: requested access to the resource is denied", "log in with `docker login registry.example.com`"),
        ("unauthorized: authentication required", "log in with `docker login registry.example.com`"),
        ("write /var/lib/docker/tmp/docker-builder1/x: no space left on device", "docker system prune"),
        (
            "cp: /opt/x: Permission denied\nThe command '/bin/sh -c cp x /opt' returned a non-zero code: 1",
            "fix that step",
        ),
        (
            'ERROR: failed to solve: process "/bin/sh -c false" did not complete successfully: exit code: 1',
            "fix that step",
        ),
        (
            "pull access denied for team/base, repository does not exist or may require 'docker login': "
            "denied: requested access to the resource is denied",
            "check image.base",
        ),
        (
            "COPY failed: file not found in build context or excluded by .dockerignore: stat x: file does not exist",
            "not in image.context",
        ),
        ("something new", "see the lines above"),
    ],
)
def test_a_failing_docker_command_is_reported_with_its_words_and_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, fix: str
) -> None:
    message = docker_says(tmp_path, monkeypatch, output)
    assert output in message
    assert fix in message.rpartition("\n-> ")[2]


def test_only_the_last_lines_of_a_long_failure_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = docker_says(tmp_path, monkeypatch, "\n".join(f"line {number}" for number in range(1, 100)))
    assert "line 99" in message
    assert "line 80\n" not in message


def test_an_interrupted_build_does_not_wait_for_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = b"#!/bin/sh\n[ $1 = build ] || exit 1\necho Step 1\nexec sleep 60\n"
    program = write_files(tmp_path, {"docker": script}) / "docker"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def interrupt(line: str) -> None:
        raise TimeoutError(line)  # as Prefect does to a task that is cancelled or too late

    started = time.monotonic()
    with pytest.raises(TimeoutError, match="Step 1"):
        run_engine("docker", ["build"], subject="gcr.io/train:1", log=interrupt)
    assert time.monotonic() - started < 30


def test_a_file_that_changes_during_the_build_stops_it(public: Running, tmp_path: Path) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})

    def change(line: str) -> None:
        (context / "a").write_bytes(line.encode())

    with pytest.raises(ImageProblem, match=r"change while .* wait, then build again"):
        prepare_image(docker_image(context, repository=f"{public.host}/team/restless"), log=change)


def test_without_a_docker_command_the_ways_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageProblem, match=r"(?s)install Docker.* or build the image elsewhere .* prebuilt"):
        prepare_image(docker_image(context, push=False), log=print)


def test_an_image_that_the_registry_has_under_its_key_is_not_built_again(
    public: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = docker_image(write_files(tmp_path / "context", {"a": b"x"}), repository=f"{public.host}/team/built")
    digest = public.push("team/built", build_key(image))
    lines: list[str] = []
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker here: a build would fail
    assert prepare_image(image, log=lines.append).image == f"{public.host}/team/built@{digest}"
    assert "built before" in lines[0]


# --- what a run's code was --------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = write_files(tmp_path / "repository", {"train.py": b"print()\n", ".gitignore": b".venv\n"})
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "First")
    return folder


def test_a_clean_checkout_is_known_by_its_commit(repository: Path) -> None:
    write_files(repository, {"notes.txt": b"untracked files are no change"})
    found = software_identity(checkout=repository)
    assert (found.commit, found.dirty) == (git(repository, "rev-parse", "HEAD"), False)


def test_an_uncommitted_change_makes_it_dirty(repository: Path) -> None:
    write_files(repository, {"train.py": b"print(1)\n"})
    found = software_identity(checkout=repository)
    assert (found.commit, found.dirty) == (git(repository, "rev-parse", "HEAD"), True)


def test_outside_a_repository_or_before_its_first_commit_there_is_no_commit(tmp_path: Path) -> None:
    assert software_identity(checkout=tmp_path).commit is None
    git(write_files(tmp_path, {"a": b""}), "init", "--quiet")
    git(tmp_path, "add", ".")
    assert (software_identity(checkout=tmp_path).commit, software_identity(checkout=tmp_path).dirty) == (None, False)


def test_an_environment_inside_somebody_elses_repository_does_not_take_its_commit(repository: Path) -> None:
    installed = write_files(repository / ".venv" / "site-packages", {"litgpt_demo/__init__.py": b""})
    assert software_identity(checkout=installed).commit is None


def test_without_an_image_the_versions_are_recorded_and_nothing_heavy_is_imported() -> None:
    script = (
        "import json, sys; from dataclasses import asdict; from launcher.images.builders import prepare_image\n"
        "from launcher.images.settings import NoImage\n"
        "found = prepare_image(NoImage(kind='none'), log=print)\n"
        "print(json.dumps([asdict(found), [name for name in ('torch', 'litgpt', 'prefect') if name in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    assert found["image"] is None
    assert found["packages"]["torch"] == version("torch")
    assert found["packages"]["train-litgpt"] == version("train-litgpt")
    assert found["packages"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_with_an_image_its_digest_says_it_all(public: Running) -> None:
    digest = public.push("team/ready", "1")
    image = PrebuiltImage(kind="prebuilt", reference=f"{public.host}/team/ready:1")
    found = prepare_image(image, log=print)
    assert (found.image, found.packages) == (f"{public.host}/team/ready@{digest}", {})
    assert SoftwareIdentity(**asdict(found)) == found


# --- the product's own image ------------------------------------------------------------------------------------------


def test_the_nodes_requirements_are_the_projects_less_what_orchestrates() -> None:
    project = (CHECKOUT / "pyproject.toml").read_text()
    node_part = project.partition("# What the nodes run")[2].partition("# What orchestrates")[0]
    listed = requirements((CHECKOUT / "litgpt_demo" / "requirements.txt").read_text())
    assert listed == re.findall(r'^ *"(.+)",', node_part, re.MULTILINE)
    assert set(listed) < set(tomllib.loads(project)["project"]["dependencies"])


def test_whatever_the_nodes_import_comes_with_their_requirements() -> None:
    listed = requirements((CHECKOUT / "litgpt_demo" / "requirements.txt").read_text())
    installed = closure(Requirement(line) for line in listed)
    owners = packages_distributions()
    for file in sorted((CHECKOUT / "litgpt_demo").glob("**/*.py")):
        for name in imported(file) - sys.stdlib_module_names - {"litgpt_demo", "_typeshed"}:
            assert installed & {canonicalize_name(owner) for owner in owners.get(name, [])}, f"{file.name}: {name}"
    assert "prefect" not in installed


def imported(file: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
    return found


def instructions(dockerfile: Path) -> list[str]:
    return dockerfile.read_text().replace("\\\n", " ").splitlines()


PACKAGES = instructions(CHECKOUT / "litgpt_demo" / "stacks" / "Dockerfile")
OURS = instructions(CHECKOUT / "litgpt_demo" / "Dockerfile")
PIP_INSTALL = re.compile(r"python -m pip --python=\S+ install (.*?)(?: &&|$)")


def test_the_products_image_is_pinned_by_digest_and_unprivileged() -> None:
    bases = [line.removeprefix("ARG BASE=") for line in PACKAGES if line.startswith("ARG BASE=")]
    assert [bool(ImageReference.parse_fixed(base).digest) for base in bases] == [True]
    for dockerfile in (PACKAGES, OURS):
        assert {line.partition(" AS ")[0] for line in dockerfile if line.startswith("FROM")} == {"FROM ${BASE}"}
    assert [line for line in PACKAGES if line.startswith(("USER", "ENTRYPOINT"))] == ["USER 1000:1000"]
    last = OURS[max(number for number, line in enumerate(OURS) if line.startswith("FROM")) :]
    assert not [line for line in last if line.startswith(("USER", "ENTRYPOINT", "RUN"))]


def pip_arguments() -> list[str]:
    """What the Dockerfile tells pip, once."""
    [arguments] = [found for line in PACKAGES for found in PIP_INSTALL.findall(line)]
    return str(arguments).replace("${STACK}.lock", "requirements.lock").split()


def locked(stack: Stack) -> dict[str, tuple[Requirement, list[str]]]:
    """The requirement of each distribution in a stack's lock, and its hashes."""
    text = (CHECKOUT / stack.lock).read_text()
    entries = re.findall(r"^(\S.*?)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    found = [(Requirement(entry), re.findall(r"sha256:\w+", hashes)) for entry, hashes in entries]
    assert len(found) == len(re.findall(r"^[^\s#]", text, re.MULTILINE)), "an entry has no hash"
    return {canonicalize_name(entry.name): (entry, hashes) for entry, hashes in found}


each_stack = pytest.mark.parametrize("stack", STACKS.values(), ids=lambda stack: stack.name)


@each_stack
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_lock_has_a_hash_of_every_package_of_the_image(stack: Stack, machine: str) -> None:
    """By what the installed packages need; what torch adds for CUDA is in no CPU build's metadata."""
    python = {"python_version": "3.11", "python_full_version": "3.11.15", "sys_platform": "linux", "extra": ""}
    image = {**python, "platform_system": "Linux", "platform_machine": machine}
    there = {name for name, (entry, _) in locked(stack).items() if not entry.marker or entry.marker.evaluate(image)}
    needed = closure(
        Requirement(line) for line in requirements((CHECKOUT / "litgpt_demo" / "requirements.txt").read_text())
    )
    assert needed - there == set()
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "triton"} <= there


@each_stack
def test_the_lock_has_the_versions_of_the_constraints_and_of_its_stack(stack: Stack) -> None:
    pins = constraints(stack, requirements((CHECKOUT / "constraints.txt").read_text()))
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in pins)}
    versions = {name: str(entry.specifier).removeprefix("==") for name, (entry, _) in locked(stack).items()}
    differing = {
        name: (version, pinned[name]) for name, version in versions.items() if pinned.get(name, version) != version
    }
    assert differing == {}, "run `make lock`"
    assert (versions["torch"], versions["nvidia-nccl-cu13"]) == (stack.torch, stack.nccl)
    assert versions["cuda-toolkit"].startswith(f"{stack.cuda}."), "the CUDA that torch's wheel asks for"


def test_every_lock_belongs_to_a_stack() -> None:
    there = {str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "litgpt_demo" / "stacks").glob("*.lock")}
    assert there == {stack.lock for stack in STACKS.values()}


@each_stack
def test_an_image_of_a_stack_gets_its_lock_and_says_what_it_holds(stack: Stack) -> None:
    image = DockerImage(kind="docker", repository="gcr.io/train", context=str(CHECKOUT), stack=stack.name)
    assert any(line.startswith("COPY litgpt_demo/stacks/${STACK}.lock ") for line in PACKAGES)
    packages, ours = recipes(image)
    assert packages.tag.startswith(f"gcr.io/train:{stack.name}-")
    assert packages.args["STACK"] == stack.name
    assert Contents.of_labels(packages.labels) == stack.contents("amd64")
    assert packages.labels["io.github.train-litgpt.nccl"] == stack.nccl
    assert packages.args["LABELS"].split() == [
        f"{name.removeprefix(LABELS)}={value}" for name, value in packages.labels.items()
    ]
    assert ours.labels == {}, "an image has the labels of its base"
    upon_another, _ = recipes(image.model_copy(update={"base": f"python@{DIGEST}"}))
    unknown = {name.removeprefix(LABELS) for name in packages.labels.keys() - upon_another.labels.keys()}
    assert unknown == {"python", "glibc"}, "another base brings its own"


def test_the_build_compares_the_glibc_of_another_base_with_what_the_network_needs() -> None:
    image = DockerImage(kind="docker", repository="gcr.io/train", stack="tcpxo")
    assert "least-glibc" not in recipes(image)[0].args["LABELS"], "its own base is known"
    packages, _ = recipes(image.model_copy(update={"base": f"python@{DIGEST}"}))
    assert "least-glibc=2.35" in packages.args["LABELS"].split()
    assert not [name for name in packages.labels if "least" in name]


@pytest.mark.parametrize(("glibc", "fits"), [("2.36", True), ("2.35", True), ("2.31", False), ("", False)])
def test_an_image_on_an_old_base_is_not_built(glibc: str, fits: bool) -> None:
    assert (differences({"least-glibc": "2.35"}, {"glibc": glibc}) == []) is fits


def test_labels_are_given_to_no_dockerfile_of_the_users(tmp_path: Path) -> None:
    """What it installs is compared with nothing."""
    context = write_files(tmp_path / "context", {"Dockerfile": b"FROM scratch\n"})
    (recipe,) = recipes(docker_image(context, dockerfile=str(context / "Dockerfile"), stack="tcpxo"))
    assert (recipe.args["STACK"], recipe.labels) == ("tcpxo", {})


@pytest.mark.parametrize(
    "image",
    [
        {"build_args": {"STACK": "tcpxo"}},
        {"build_args": {"LABELS": "x=y"}},
        {"dockerfile": "mine", "stack": "tcpxo", "build_args": {"STACK": "default"}},
    ],
)
def test_a_build_argument_that_would_be_overwritten_is_refused(image: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="would be overwritten"):
        DockerImage.model_validate({"kind": "docker", "repository": "gcr.io/train", **image})
    free = {"kind": "docker", "repository": "gcr.io/train", "dockerfile": "mine", "build_args": {"STACK": "1"}}
    assert DockerImage.model_validate(free)


def test_only_its_own_stack_changes_the_key_of_an_image(tmp_path: Path) -> None:
    locks = {stack.lock: b"torch\n" for stack in STACKS.values()}
    context = write_files(tmp_path / "context", {**locks, "litgpt_demo/main.py": b""})
    first, second = [
        DockerImage(kind="docker", repository="gcr.io/train", context=str(context), stack=name) for name in STACKS
    ]
    before = build_key(first), build_key(second)
    assert len(set(before)) == 2
    assert build_key(first.model_copy(update={"stack": None})) == before[0], "the default, named or not"
    (context / STACKS["tcpxo"].lock).write_text("another torch\n")
    assert build_key(first) == before[0]
    assert build_key(second) != before[1]


def test_pips_configuration_reaches_the_build_of_the_packages_and_counts_in_no_key(tmp_path: Path) -> None:
    image = DockerImage(kind="docker", repository="gcr.io/train", context=str(CHECKOUT))
    pip = tmp_path / "pip.conf"
    pip.write_text("[global]\nindex-url = https://ada:secret@mirror.example.com/\n")
    configured = image.model_copy(update={"pip_config": str(pip)})
    assert build_key(configured) == build_key(image)
    packages, ours = recipes(configured)
    with packages.context.tar() as tar, tarfile.open(fileobj=tar) as opened:
        assert opened.extractfile("pip.conf").read() == pip.read_bytes()  # type: ignore[union-attr]
    with ours.context.tar() as tar, tarfile.open(fileobj=tar) as opened:
        assert "pip.conf" not in opened.getnames()
    pip.unlink()
    with pytest.raises(ImageProblem, match=r"image\.pip_config=.* cannot be read"), packages.context.tar():
        pass


def test_a_dockerfile_of_the_users_says_for_itself_what_it_holds(tmp_path: Path) -> None:
    image = docker_image(write_files(tmp_path / "context", {"a": b"x"}))
    [recipe] = recipes(image)
    assert recipe.labels == recipe.args == {}
    named = docker_image(tmp_path / "context", stack="tcpxo")
    assert [recipe.args for recipe in recipes(named)] == [{"STACK": "tcpxo"}]
    assert build_key(named) != build_key(image)


def test_a_stack_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"'tcpy' is no stack; there are default, tcpxo"):
        docker_image(tmp_path, stack="tcpy")


@pytest.mark.long
def test_a_package_without_its_hash_is_not_installed(tmp_path: Path) -> None:
    """The very options of the Dockerfile, with a lock of our own."""
    wheel = tmp_path / "sound-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sound.py", "")
        archive.writestr("sound-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sound\nVersion: 1.0\n")
        archive.writestr("sound-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("sound-1.0.dist-info/RECORD", "")

    def install(line: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "requirements.lock").write_text(f"{line}\n")
        elsewhere = ["--no-index", f"--find-links={tmp_path}", f"--target={tmp_path / 'installed'}"]
        command = [sys.executable, "-m", "pip", "install", *elsewhere, *pip_arguments()]
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**bare, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            check=False,
        )

    digest = sha256(wheel.read_bytes()).hexdigest()
    changed = install(f"sound==1.0 --hash=sha256:{'0' * 64}")
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in changed.stderr
    assert "Hashes are required in --require-hashes mode" in install("sound==1.0").stderr
    assert not (tmp_path / "installed").exists()
    assert install(f"sound==1.0 --hash=sha256:{digest}").returncode == 0
    assert (tmp_path / "installed" / "sound.py").exists()
