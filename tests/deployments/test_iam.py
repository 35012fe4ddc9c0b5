"""The roles in Google Cloud: enough for every call that we make, none too many, and no message that advises another."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from bucket_emulator import bucket_emulator
from bucket_faults import faulty_bucket

from launcher.checks.preflight import check_access
from launcher.config import ScriptConfig
from launcher.images.settings import Image
from launcher.platforms import settings_classes
from litgpt_demo.storage import open_storage

CHECKOUT = Path(__file__).parents[2]
IAM: dict[str, Any] = yaml.safe_load((CHECKOUT / "deployments" / "iam.yaml").read_text())
PRINCIPALS = ("launcher", "trainer", "builder", "nodes")
PACKAGES = ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo")
SOURCE = {file: file.read_text() for package in PACKAGES for file in sorted((CHECKOUT / package).glob("**/*.py"))}


def entries(principal: str, *parts: str) -> list[dict[str, Any]]:
    """The permissions of a principal: in all, or in these parts."""
    return [entry for part, listed in IAM[principal].items() if not parts or part in parts for entry in listed]


def methods(principal: str, part: str) -> set[str]:
    """The calls that the file names."""
    return {method for entry in entries(principal, part) for method in entry.get("methods", ())}


RESOURCE = re.compile(
    r"(?:/upload)?(?:/download)?/storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<object>[^/]+))?(?P<verb>/compose)?"
)


def called(request: tuple[str, str, bytes, dict[str, str]]) -> tuple[str, str] | None:
    """The method of Cloud Storage's API that a request is, and the resource that IAM checks; None for a later piece."""
    verb, address, body, _ = request
    url = urlsplit(address)
    match, query = RESOURCE.fullmatch(url.path), parse_qs(url.query)
    assert match is not None, address
    bucket, name = f"projects/_/buckets/{match['bucket']}", unquote(match["object"] or "")
    if url.path.startswith("/upload"):
        if verb == "PUT":
            return None
        name = query["name"][0] if "name" in query else re.search(rb'"name": *"([^"]+)"', body)[1].decode()  # type: ignore[index]
        verb = "insert"
    elif not name:
        return "storage.objects.list", bucket
    return f"storage.objects.{'compose' if match['verb'] else verb.lower()}", f"{bucket}/objects/{name}"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The calls of a use as runs have one, each with its resource."""
    requests: list[Any] = []
    with bucket_emulator("roles") as address, faulty_bucket(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        forward = proxy.forward

        def recording(request: Any) -> Any:
            requests.append(request)
            return forward(request)

        monkeypatch.setattr(proxy, "forward", recording)
        root = "gs://roles/team/runs"
        check_access(ScriptConfig(root=root, script="train.py"))
        storage: Any = open_storage(root)
        for content in (b"{}", b"{1}"):
            storage.write("config.json", content)
        storage.create("submission.json", b"{}")
        assert (storage.list(), storage.read("config.json")) == (["config.json", "submission.json"], b"{1}")
        (tmp_path / "large").write_bytes(bytes(range(256)) * 4096 * 5)
        in_parts = replace(storage, part_size=1 << 20)
        in_parts.upload(tmp_path / "large", "parts/large")
        in_parts.download("parts/large", tmp_path / "again")
        storage.join(["config.json", "submission.json"], "joined")
        storage.move("parts", "moved")
        storage.remove("joined")
        storage.remove_unfinished()
    return {found for found in map(called, requests) if found}


def test_bucket_calls_are_those_of_the_iam_file(recorded: set[tuple[str, str]]) -> None:
    assert {method for method, _ in recorded} == methods("launcher", "any") == methods("trainer", "any")


def test_a_root_needs_nothing_beyond_its_prefix_but_the_list(recorded: set[tuple[str, str]]) -> None:
    """The condition is read as far as it is written: comparisons and prefixes of the resource's name, joined by ||."""
    text = str(IAM["condition"]["expression"]).replace("BUCKET", "roles").replace("PREFIX", "team/runs")
    exact, begins = re.compile(r'resource\.name == "([^"]+)"'), re.compile(r'resource\.name\.startsWith\("([^"]+)"\)')
    assert exact.sub("", begins.sub("", text)).split() == ["||"], text
    allowed, below = exact.findall(text), tuple(begins.findall(text))
    assert [name for _, name in recorded if name not in allowed and not name.startswith(below)] == []
    assert {method for method, name in recorded if "/objects/" not in name} == {"storage.objects.list"}
    assert not "projects/_/buckets/roles/objects/team/runs-of-others/x".startswith(below)


def calls(files: str, receiver: str) -> set[str]:
    """The methods that the source calls on what ends with this name, as Google's APIs spell them."""
    nodes = [node for file in (CHECKOUT / "launcher").glob(files) for node in ast.walk(ast.parse(SOURCE[file]))]
    called = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    names = [entry.attr for entry in called if ast.unparse(entry.value).endswith(receiver)]
    return {"".join(word.capitalize() for word in name.split("_")) for name in names}


@pytest.mark.parametrize(
    ("part", "service", "files", "receiver"),
    [
        ("batch", "batch.BatchService", "platforms/batch/*.py", "_batch"),
        ("batch", "logging.LoggingServiceV2", "platforms/batch/*.py", "_logging"),
        ("gke", "container.ClusterManager", "platforms/kubernetes/connection.py", "clusters"),
        ("cloudbuild", "cloudbuild.CloudBuild", "images/cloudbuild.py", "_client"),
    ],
)
def test_a_service_is_asked_for_what_the_file_names(part: str, service: str, files: str, receiver: str) -> None:
    named = {entry for entry in methods("launcher", part) if entry.startswith(f"{service.partition('.')[0]}.")}
    assert {f"{service}.{method}" for method in calls(files, receiver)} == named != set()


def test_no_other_service_of_google_is_called() -> None:
    """A new client, or a call by its address, has to come with its permission."""

    def found(pattern: str) -> set[tuple[str, str]]:
        return {(file.name, name) for file, text in SOURCE.items() for name in re.findall(pattern, text, re.MULTILINE)}

    clients = found(r"^\s*from google\.cloud(?:\.| import )(\w+)")
    assert {name for _, name in clients} == {"storage", "batch_v1", "logging_v2", "container_v1", "devtools"}
    # Another module that talks to buckets would do what nothing here records.
    assert {file for file, _ in found(r"^\s*from (google\.cloud\.storage) import")} == {"bucket.py"}
    assert {name for _, name in found(r"https://(\w+)\.googleapis\.com")} == {"www"}


def test_roles_are_of_existing_platforms_or_images() -> None:
    classes: tuple[Any, ...] = (*settings_classes(), *get_args(get_args(Image)[0]))
    kinds = {kind for part in classes for kind in get_args(part.model_fields["kind"].annotation)}
    assert {part for principal in PRINCIPALS for part in IAM[principal]} <= kinds | {"any"}


def test_trainer_may_not_submit_push_or_impersonate() -> None:
    forbidden = re.compile(r"batch\.(jobs|tasks)|actAs|uploadArtifacts|container\.|setIamPolicy")
    allowed = [entry["permission"] for principal in ("trainer", "nodes") for entry in entries(principal)]
    assert [entry for entry in allowed if forbidden.search(entry)] == []


def test_only_roles_of_the_file_are_advised() -> None:
    pages = [*(CHECKOUT / "docs").rglob("*.md"), CHECKOUT / "README.md", CHECKOUT / "deployments" / "rbac.yaml"]
    known = {entry["role"] for principal in PRINCIPALS for entry in entries(principal)}
    texts = [*SOURCE.values(), *(page.read_text() for page in pages)]
    assert {role for text in texts for role in re.findall(r"roles/[A-Za-z]+\.[A-Za-z.]*[A-Za-z]", text)} <= known
