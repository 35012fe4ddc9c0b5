"""The roles in Google Cloud: enough for every call that we make, none too many, and no message that advises another."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from bucket_emulator import bucket_emulator
from bucket_faults import faulty_bucket

from launcher.checks.access import check_access
from launcher.config import ScriptConfig
from launcher.platforms.kubernetes.access import PROJECT_ROLES, RESOURCE_MANAGER
from litgpt_demo.storage import open_storage

CHECKOUT = Path(__file__).parents[2]
IAM: dict[str, Any] = yaml.safe_load((CHECKOUT / "deployments" / "iam.yaml").read_text())
PRINCIPALS = ("launcher", "trainer", "builder", "nodes")
PACKAGES = ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo")
SOURCE = [file for package in PACKAGES for file in sorted((CHECKOUT / package).glob("**/*.py"))]


def entries(principal: str, *parts: str) -> list[dict[str, Any]]:
    """The permissions of a principal: in all, or in these parts."""
    return [one for part, listed in IAM[principal].items() if not parts or part in parts for one in listed]


def methods(*parts: str) -> set[str]:
    """The calls of the launcher that the file names in these parts."""
    return {method for one in entries("launcher", *parts) for method in one.get("methods", ())}


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


def use_of_a_bucket(folder: Path, root: str) -> None:
    """Use a root as runs do: the probe; files written, found, read, joined, moved and removed."""
    check_access(ScriptConfig(root=root, script="train.py"))
    storage: Any = open_storage(root)
    for content in (b"{}", b"{1}"):
        storage.write("config.json", content)
    storage.create("submission.json", b"{}")
    assert storage.list() == ["config.json", "submission.json"]
    assert storage.read("config.json") == b"{1}"
    (folder / "large").write_bytes(bytes(range(256)) * 4096 * 5)
    in_parts = replace(storage, part_size=1 << 20)
    in_parts.upload(folder / "large", "parts/large")
    in_parts.download("parts/large", folder / "again")
    storage.join(["config.json", "submission.json"], "joined")
    storage.move("parts", "moved")
    storage.remove("joined")
    storage.remove_unfinished()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The calls of such a use, each with its resource."""
    with bucket_emulator("roles") as address, faulty_bucket(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        requests, forward = [], proxy.forward

        def recording(request: Any) -> Any:
            requests.append(request)
            return forward(request)

        monkeypatch.setattr(proxy, "forward", recording)
        use_of_a_bucket(tmp_path, "gs://roles/team/runs")
    return {found for found in map(called, requests) if found}


def test_the_bucket_is_asked_for_what_the_file_names_and_for_nothing_else(recorded: set[tuple[str, str]]) -> None:
    used = {method for method, _ in recorded}
    assert used == methods("any") == {method for one in entries("trainer", "any") for method in one["methods"]}


def test_a_root_needs_nothing_beyond_its_prefix_but_the_list(recorded: set[tuple[str, str]]) -> None:
    allows = condition("roles", "team/runs")
    assert [name for method, name in recorded if not allows(name)] == []
    assert {method for method, name in recorded if "/objects/" not in name} == {"storage.objects.list"}
    assert not allows("projects/_/buckets/roles/objects/team/runs-of-others/x")


def condition(bucket: str, prefix: str) -> Callable[[str], bool]:
    """The file's condition, as far as it is written: comparisons and prefixes of the resource's name, joined by ||."""
    text = str(IAM["condition"]["expression"]).replace("BUCKET", bucket).replace("PREFIX", prefix)
    exact = re.compile(r'resource\.name == "([^"]+)"')
    begins = re.compile(r'resource\.name\.startsWith\("([^"]+)"\)')
    assert exact.sub("", begins.sub("", text)).split() == ["||"], text
    return lambda name: name in exact.findall(text) or any(map(name.startswith, begins.findall(text)))


def calls(files: str, *receivers: str) -> set[str]:
    """The methods that the source calls on what ends with one of these names, as Google's APIs spell them."""
    found = set()
    for file in (CHECKOUT / "launcher").glob(files):
        for node in ast.walk(ast.parse(file.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and ast.unparse(function.value).endswith(receivers):
                found.add("".join(word.capitalize() for word in function.attr.split("_")))
    return found


@pytest.mark.parametrize(
    ("part", "service", "files", "receivers"),
    [
        ("batch", "batch.BatchService", "platforms/batch/*.py", ("_clients.batch",)),
        ("batch", "logging.LoggingServiceV2", "platforms/batch/logs.py", ("client",)),
        ("gke", "container.ClusterManager", "platforms/kubernetes/connection.py", ("clusters",)),
        ("cloudbuild", "cloudbuild.CloudBuild", "images/cloudbuild.py", ("_client",)),
    ],
)
def test_a_service_is_asked_for_what_the_file_names(
    part: str, service: str, files: str, receivers: tuple[str, ...]
) -> None:
    named = {method for method in methods(part) if method.startswith(f"{service.partition('.')[0]}.")}
    assert {f"{service}.{method}" for method in calls(files, *receivers)} == named != set()


def test_no_other_service_of_google_is_called() -> None:
    """A new client, or a call by its address, has to come with its permission."""
    imported, addressed = set(), set()
    for file in SOURCE:
        text = file.read_text()
        imported |= set(re.findall(r"^\s*from google\.cloud\.(\w+)", text, re.MULTILINE))
        imported |= set(re.findall(r"^\s*from google\.cloud import (\w+)", text, re.MULTILINE))
        addressed |= set(re.findall(r"https://(\w+)\.googleapis\.com", text))
        # Another module that talks to buckets would do what nothing here records.
        assert file.name == "objects.py" or not re.search(r"^\s*from google\.cloud\.storage import", text, re.MULTILINE)
    assert imported == {"storage", "batch_v1", "logging_v2", "container_v1", "devtools"}  # the last is Cloud Build
    assert {name for name in addressed if name != "www"} == {urlsplit(RESOURCE_MANAGER).netloc.partition(".")[0]}
    assert IAM["free"] == ["cloudresourcemanager.projects.testIamPermissions"]
    listed = [(one["permission"], one["role"], one["why"]) for one in entries("launcher", "gke")]
    assert [one for one in PROJECT_ROLES if (one.permission, one.role, one.why) not in listed] == []


def test_the_trainer_may_neither_submit_nor_push_nor_act_as_anybody() -> None:
    forbidden = re.compile(r"batch\.(jobs|tasks)|actAs|uploadArtifacts|container\.|setIamPolicy")
    for principal in ("trainer", "nodes"):
        assert [one for one in entries(principal) if forbidden.search(one["permission"])] == []


def roles_in(file: Path) -> set[str]:
    return set(re.findall(r"roles/[A-Za-z]+\.[A-Za-z.]*[A-Za-z]", file.read_text()))


def test_only_roles_of_the_file_are_advised() -> None:
    pages = [*(CHECKOUT / "docs").glob("*.md"), CHECKOUT / "README.md", CHECKOUT / "deployments" / "rbac.yaml"]
    known = {one["role"] for principal in PRINCIPALS for one in entries(principal)}
    advised = {str(file): roles_in(file) - known for file in (*SOURCE, *pages)}
    assert {file: roles for file, roles in advised.items() if roles} == {}
