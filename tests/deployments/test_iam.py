"""The roles in Google Cloud: enough for every call that we make, none too many, and no message that advises another."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from batch import running_batch
from batch_jobs import IMAGE
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, faulty_bucket
from cloudbuild import PROJECT as PROJECT_OF_BUILDS
from cloudbuild import running_cloud_build
from google.cloud.container_v1.types import Cluster as GoogleCluster
from google_cloud import PROJECT, google_cloud
from waiting import until

from launcher.checks.access import check_access
from launcher.config import ScriptConfig
from launcher.errors import ConfigProblem, LoginProblem
from launcher.images.build import Build, Site
from launcher.images.cloudbuild import CloudBuild
from launcher.images.context import Context
from launcher.images.oci import ImageReference, find_digest
from launcher.images.settings import CloudBuildImage
from launcher.job import Job, JobState
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.platforms.kubernetes.access import PROJECT_ROLES, RESOURCE_MANAGER
from launcher.platforms.kubernetes.connection import describe
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.gcs import BucketStorage

CHECKOUT = Path(__file__).parents[2]
IAM: dict[str, Any] = yaml.safe_load((CHECKOUT / "deployments" / "iam.yaml").read_text())
PRINCIPALS = ("launcher", "trainer", "builder", "nodes")
SOURCE = [
    file
    for package in ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo")
    for file in sorted((CHECKOUT / package).glob("**/*.py"))
]


def entries(principal: str, *parts: str) -> list[dict[str, Any]]:
    """The permissions of a principal: in all, or in these parts."""
    return [one for part, listed in IAM[principal].items() if not parts or part in parts for one in listed]


def methods(*parts: str) -> set[str]:
    """The calls of the launcher that the file names in these parts."""
    return {method for one in entries("launcher", *parts) for method in one.get("methods", ())}


def calls(files: Iterable[Path], receiver: str) -> set[str]:
    """The methods that are called on what ends with this name, from the source."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and ast.unparse(function.value).endswith(receiver):
                found.add(function.attr)
    return found


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


# --- the bucket -------------------------------------------------------------------------------------------------------

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
        return "storage.objects.insert", f"{bucket}/objects/{name}"
    if match["verb"]:
        return "storage.objects.compose", f"{bucket}/objects/{name}"
    if not name:
        return "storage.objects.list", bucket
    return f"storage.objects.{verb.lower()}", f"{bucket}/objects/{name}"


def use_of_a_bucket(folder: Path, root: str) -> None:
    """Use a root as runs do: the probe; files written, found, read, joined, moved and removed."""
    check_access(ScriptConfig(root=root, script="train.py"))
    storage = open_storage(root)
    assert isinstance(storage, BucketStorage)
    storage.write("config.json", b"{}")
    storage.write("config.json", b"{1}")
    assert storage.create("submission.json", b"{}")
    assert not storage.exists("absent.json")
    assert storage.list() == ["config.json", "submission.json"]
    assert storage.read("config.json") == b"{1}"
    large = folder / "large"
    large.write_bytes(bytes(range(256)) * 4096 * 5)
    in_parts = replace(storage, part_size=1 << 20)
    in_parts.upload(large, "parts/large")
    in_parts.download("parts/large", folder / "again")
    assert (folder / "again").read_bytes() == large.read_bytes()
    storage.join(["config.json", "submission.json"], "joined")
    storage.move("parts", "moved")
    storage.remove("joined")
    storage.remove_unfinished()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The calls of such a use, each with its resource."""
    with bucket_emulator("mine") as address, faulty_bucket(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        requests, forward = [], proxy.forward

        def recording(request: Any) -> Any:
            requests.append(request)
            return forward(request)

        monkeypatch.setattr(proxy, "forward", recording)
        use_of_a_bucket(tmp_path, "gs://mine/team/runs")
    return {found for found in map(called, requests) if found}


def test_the_bucket_is_asked_for_what_the_file_names_and_for_nothing_else(recorded: set[tuple[str, str]]) -> None:
    used = {method for method, _ in recorded}
    assert used == methods("any")
    assert used == {method for one in entries("trainer", "any") for method in one["methods"]}
    clients = [
        file for file in SOURCE if re.search(r"^\s*from google\.cloud\.storage import", file.read_text(), re.MULTILINE)
    ]
    assert [file.name for file in clients] == ["objects.py"], "another module talks to buckets, which nothing records"


def test_a_root_needs_nothing_beyond_its_prefix_but_the_list(recorded: set[tuple[str, str]]) -> None:
    allows = condition("mine", "team/runs")
    assert [name for method, name in recorded if not allows(name)] == []
    assert {method for method, name in recorded if "/objects/" not in name} == {"storage.objects.list"}
    assert not allows("projects/_/buckets/mine/objects/team/runs-of-others/x")
    assert not allows("projects/_/buckets/mine/objects/x")
    assert not allows("projects/_/buckets/mine-too")


def condition(bucket: str, prefix: str) -> Callable[[str], bool]:
    """The file's condition, as far as it is written: comparisons and prefixes of the resource's name, joined by ||."""
    text = str(IAM["condition"]["expression"]).replace("BUCKET", bucket).replace("PREFIX", prefix)
    exact = re.compile(r'resource\.name == "([^"]+)"')
    begins = re.compile(r'resource\.name\.startsWith\("([^"]+)"\)')
    assert exact.sub("", begins.sub("", text)).split() == ["||"], text
    return lambda name: name in exact.findall(text) or any(map(name.startswith, begins.findall(text)))


IN_THE_BUCKET = {
    "storage.objects.create": "upload",
    "storage.objects.get": "download",
    "storage.objects.list": "look",
    "storage.objects.delete": "delete",
}
"""The permission of a bucket, and the request that it refuses to whoever lacks it."""


def test_each_permission_on_the_root_is_one_whose_absence_is_tested() -> None:
    for who in ("launcher", "trainer"):
        assert {one["permission"] for one in entries(who, "any") if one["where"] == "root"} == set(IN_THE_BUCKET)


@pytest.mark.parametrize("lacking", IN_THE_BUCKET)
def test_without_a_permission_on_the_bucket_a_run_is_refused_with_a_role_of_the_file(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_emulator("mine") as address, faulty_bucket(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.arm(Fault(on=IN_THE_BUCKET[lacking], do="refuse", status=403, times=FOREVER))  # type: ignore[arg-type]
        with pytest.raises((TrainLitgptError, LoginProblem), match=r"403|denied|permission") as refused:
            use_of_a_bucket(tmp_path, "gs://mine/runs")
    assert set(re.findall(r"--role=(\S+)", str(refused.value))) <= {
        "roles/storage.objectUser",
        "roles/storage.objectViewer",
    }


# --- Batch, Cloud Logging and GKE -------------------------------------------------------------------------------------


def test_batch_and_cloud_logging_are_asked_for_what_the_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BatchPlatformConfig.model_validate(
        {
            "kind": "batch", "project": "my-project", "location": "us-central1", "machine": "n2-standard-8", "gpus": 0,
            "service_account": "trainer@my-project.iam.gserviceaccount.com",
        }
    )  # fmt: skip
    with running_batch(tmp_path / "cloud", shared=[tmp_path]) as cloud:
        for name, value in cloud.environment.items():
            monkeypatch.setenv(name, value)
        cloud.options.recorded[IMAGE] = {}
        cloud.options.boot = 0.01
        platform = BatchPlatform(settings, grace=0.5, settle=0, patience=20)
        platform.check_access()
        submission = platform.render(
            Job(
                name="owt-0123456789", attempt=1, nodes=1, processes=1, program=("-m", "litgpt_demo"),
                directory="gs://bucket/runs/owt-0123456789/attempts/1", image=IMAGE,
            )
        )  # fmt: skip
        job_id = platform.submit(submission)
        until(lambda: platform.status(job_id).state is JobState.RUNNING)
        platform.logs(job_id)
        platform.cancel(job_id)
        used = set(cloud.calls)
    assert {method.rpartition(".")[2] for method in methods("batch")} == used
    folder = CHECKOUT / "launcher" / "platforms" / "batch"
    written = calls(folder.glob("*.py"), "_clients.batch") | calls([folder / "logs.py"], "client")
    assert set(map(camel, written)) == used
    account = submission.body["job"]["allocationPolicy"]["serviceAccount"]
    assert account == {"email": settings.service_account}, "which is why iam.serviceAccounts.actAs is needed"


def test_the_gke_api_is_asked_for_what_the_file_names(tmp_path: Path) -> None:
    with google_cloud(tmp_path) as cloud:
        cloud.add(GoogleCluster(name="here"), "europe-west4")
        describe(cloud.client(), project=PROJECT, location="europe-west4", name="here")
        with pytest.raises(ConfigProblem, match="there is here in europe-west4"):
            describe(cloud.client(), project=PROJECT, location="europe-west4", name="elsewhere")
        used = {f"container.ClusterManager.{method}" for method in cloud.calls}
    assert used == methods("gke")
    connection = CHECKOUT / "launcher" / "platforms" / "kubernetes" / "connection.py"
    assert {f"container.ClusterManager.{camel(name)}" for name in calls([connection], "clusters")} == used


def test_what_is_checked_beforehand_on_gke_is_in_the_file() -> None:
    listed = [(one["permission"], one["role"], one["why"]) for one in entries("launcher", "gke")]
    assert [one for one in PROJECT_ROLES if (one.permission, one.role, one.why) not in listed] == []


def test_no_other_service_of_google_is_called() -> None:
    """A new client, or a call by its address, has to come with its permission."""
    imported, addressed = set(), set()
    for file in SOURCE:
        imported |= set(re.findall(r"^\s*from (google\.cloud\.\w+)", file.read_text(), re.MULTILINE))
        imported |= {
            f"google.cloud.{name}"
            for name in re.findall(r"^\s*from google\.cloud import (\w+)", file.read_text(), re.MULTILINE)
        }
        addressed |= set(re.findall(r"https://(\w+)\.googleapis\.com", file.read_text()))
    services = {"google.cloud.storage", "google.cloud.batch_v1", "google.cloud.logging_v2", "google.cloud.container_v1"}
    services.add("google.cloud.devtools")  # Cloud Build
    assert imported == services
    assert {name for name in addressed if name != "www"} == {urlsplit(RESOURCE_MANAGER).netloc.partition(".")[0]}
    assert IAM["free"] == ["cloudresourcemanager.projects.testIamPermissions"]


BUILDS = {method for method in methods("cloudbuild") if method.startswith("cloudbuild.")}


def test_cloud_build_is_asked_for_what_the_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with bucket_emulator("mine") as bucket, running_cloud_build() as cloud:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        monkeypatch.setenv("CLOUDBUILD_EMULATOR_HOST", f"127.0.0.1:{cloud.port}")
        image = CloudBuildImage(kind="cloudbuild", repository="127.0.0.1:1/train", project=PROJECT_OF_BUILDS)
        context = Context.of(tmp_path / "context", tmp_path / "Dockerfile")
        build = Build(tag="127.0.0.1:1/train:1", context=context, platform="linux/amd64")
        cloud.pushes = lambda tag: "sha256:" + "0" * 64
        CloudBuild(image, Site(root="gs://mine", pause=lambda _: None)).build(build, log=print)
        cloud.held.clear()

        def stop(seconds: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            CloudBuild(image, Site(root="gs://mine", pause=stop)).build(build, log=print)
        used = {f"cloudbuild.CloudBuild.{method}" for method in cloud.calls}
    assert used == BUILDS
    client = CHECKOUT / "launcher" / "images" / "cloudbuild.py"
    assert {f"cloudbuild.CloudBuild.{camel(name)}" for name in calls([client], "_client")} == used


def test_registries_are_asked_for_manifests_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import httpx

    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path.split("/")[-2])
        return httpx.Response(200, content=b"{}")

    client = httpx.Client
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(httpx, "Client", lambda **_: client(transport=httpx.MockTransport(answer)))
    find_digest(ImageReference.parse("europe-west4-docker.pkg.dev/my-project/litgpt/train:1"))
    assert (
        set(asked) == methods("docker") == methods("prebuilt") == methods("cluster") == methods("cloudbuild") - BUILDS
    )
    engine = (CHECKOUT / "launcher" / "images" / "docker.py").read_text()
    assert set(re.findall(r'(?:_run\(|return )\["(\w+)"', engine)) == {"build", "push", "image", "images"}


# --- the file and what else names roles -------------------------------------------------------------------------------


def test_each_entry_says_who_needs_it_and_where_to_grant_it() -> None:
    header = (CHECKOUT / "deployments" / "iam.yaml").read_text()
    for principal in PRINCIPALS:
        for one in entries(principal):
            assert set(one) in ({"permission", "role", "where", "why", kind} for kind in ("methods", "by")), one
            assert re.search(rf"^# {one['where']} ", header, re.MULTILINE), one
    assert sorted(set(IAM) - {"condition", "free"}) == sorted(PRINCIPALS)


def test_the_trainer_may_neither_submit_nor_push_nor_act_as_anybody() -> None:
    forbidden = re.compile(r"batch\.(jobs|tasks)|actAs|uploadArtifacts|container\.|setIamPolicy")
    for principal in ("trainer", "nodes"):
        assert [one for one in entries(principal) if forbidden.search(one["permission"])] == []


ROLES = {one["role"] for principal in PRINCIPALS for one in entries(principal)}
PAGES = [*sorted((CHECKOUT / "docs").glob("*.md")), CHECKOUT / "README.md", CHECKOUT / "deployments" / "rbac.yaml"]


def roles_in(file: Path) -> set[str]:
    return set(re.findall(r"roles/[A-Za-z]+\.[A-Za-z.]*[A-Za-z]", file.read_text()))


def test_only_roles_of_the_file_are_advised() -> None:
    advised = {file: roles_in(file) - ROLES for file in (*SOURCE, *PAGES)}
    assert {str(file): roles for file, roles in advised.items() if roles} == {}


@pytest.mark.parametrize("platform", ["gke", "batch"])
def test_a_platforms_page_names_all_of_its_roles(platform: str) -> None:
    wanted = {
        one["role"]
        for principal in PRINCIPALS
        for one in entries(principal, "any", "docker", platform)
        if one["where"] != "corpus"
    }
    page = CHECKOUT / "docs" / f"{platform}.md"
    assert wanted - roles_in(page) == set()
    assert "iam.yaml" in page.read_text()
