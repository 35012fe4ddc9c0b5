"""Ways to a cluster, with the real clients: the GKE API over gRPC, google-auth, TLS with the cluster's authority."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from certificates import certificate_in
from google.cloud.container_v1.types import Cluster as GoogleCluster
from google_cloud import PROJECT, GoogleCloud, google_cloud
from kubernetes_cluster import Cluster
from kubernetes_jobs import job, started
from waiting import until

from launcher.errors import ConfigProblem, LoginProblem, PlatformUnreachable
from launcher.job import JobState
from launcher.platforms.kubernetes import connection as connecting
from launcher.platforms.kubernetes.cluster import PODS
from launcher.platforms.kubernetes.connection import connect
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig, KubernetesPlatformConfig
from launcher.runs.attempts import recorded_platform


@pytest.fixture
def cloud(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    connecting._gke_cluster.cache_clear()
    with google_cloud(tmp_path) as made:
        made.token = lambda: cluster.token
        address, certificate = cluster.tls()
        found = GoogleCluster(name="here", endpoint=address.removeprefix("https://"))
        made.add(found, "europe-west4-b")
        trust(made, certificate)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(made.key))
        # The client is the real one; only where it calls is changed.
        monkeypatch.setattr("google.cloud.container_v1.ClusterManagerClient", made.client)
        yield made


def trust(cloud: GoogleCloud, certificate: str) -> None:
    """The GKE API says that the cluster has this certificate."""
    (found,) = cloud.clusters.values()
    found.master_auth.cluster_ca_certificate = base64.b64encode(certificate.encode()).decode()


def settings(name: str = "here") -> GkePlatformConfig:
    section = {"cluster": name, "location": "europe-west4-b", "nodes": 2, "grace_period": 1, "network_test": 0}
    return GkePlatformConfig.model_validate({"kind": "gke", **section})


def kubeconfig(cluster: Cluster, path: Path, *, server: str | None = None, user: dict[str, Any] | None = None) -> Path:
    """The cluster's kubeconfig with another address or user, as somebody may hand it on."""
    document = yaml.safe_load(cluster.kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = server or cluster.host
    document["users"][0]["user"] = user or {"token": cluster.token}
    path.write_text(yaml.safe_dump(document))
    return path


def connected(path: Path | str) -> object:
    return connect(KubernetesPlatformConfig(kind="kubernetes", kubeconfig=str(path))).list(PODS, "default")[0]


def test_cluster_is_reached_by_name_without_a_written_file(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert connect(settings()).version() == "v1.36.2-gke.1034000"
    assert {path.name for path in tmp_path.iterdir()} == {cloud.key.name}
    assert cloud.tokens == 1


def test_cluster_with_another_certificate_is_sent_no_token(
    cloud: GoogleCloud, cluster: Cluster, tmp_path: Path
) -> None:
    """Who answers in the cluster's place could use it: it is good for all of the user's Google Cloud."""
    trust(cloud, certificate_in(tmp_path)[1].read_text())
    before = cluster.traffic.calls.total()
    with pytest.raises(PlatformUnreachable, match="certificate verify failed"):
        connect(settings()).with_deadline(0.1).version()
    assert cluster.traffic.calls.total() == before


def test_cluster_of_a_record_needs_a_project_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to the root can have a record name a cluster of theirs, which then gets Google's token."""
    section = settings().model_dump(mode="json") | {"project": "evil"}
    for known in ("", PROJECT):
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", known)
        for config in (None, settings()):
            with pytest.raises(ConfigProblem, match="export GOOGLE_CLOUD_PROJECT=evil, or give the command a config"):
                recorded_platform(section, config)
    assert recorded_platform(section, settings().model_copy(update={"project": "evil"})).name == "gke"
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "evil")
    assert recorded_platform(section).name == "gke"


def test_token_is_renewed_while_a_job_is_followed(cloud: GoogleCloud, cluster: Cluster, tmp_path: Path) -> None:
    platform = KubernetesPlatform(settings())
    job_id = started(cluster, platform, job(tmp_path))
    cluster.expire_token()
    cluster.expire_watches()
    cluster.finish("demo")
    until(lambda: platform.status(job_id).state is JobState.SUCCEEDED)
    assert cloud.tokens >= 2
    platform.cancel(job_id)


def test_endpoint_is_found_again_when_a_cluster_moves(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = cloud.clusters.values()
    endpoint, found.endpoint = found.endpoint, "127.0.0.1:1"
    now = Mock(return_value=0.0)
    monkeypatch.setattr(connecting, "time", Mock(monotonic=now))
    before = connect(settings())
    found.endpoint = endpoint
    now.return_value = 3600.0
    after = connect(settings())
    assert after.version() == "v1.36.2-gke.1034000"
    assert connect(settings()) is after is not before


def test_unknown_cluster_is_refused_with_the_existing_ones(cloud: GoogleCloud) -> None:
    message = rf"platform\.cluster=her is not in europe-west4-b of project {PROJECT}; choose one of here in"
    with pytest.raises(ConfigProblem, match=message):
        connect(settings("her"))


def test_missing_permission_is_named_with_its_role(cloud: GoogleCloud) -> None:
    cloud.permissions.clear()
    with pytest.raises(LoginProblem, match=r"container\.clusters\.get .* roles/container\.clusterViewer"):
        connect(settings())


@pytest.mark.parametrize(
    ("way", "user"),
    [
        ("exec", {"apiVersion": "client.authentication.k8s.io/v1", "command": "touch", "args": ["ran"]}),
        ("auth-provider", {"name": "gcp", "config": {"cmd-path": "/usr/bin/touch ran"}}),
        ("tokenFile", "/etc/hostname"),
    ],
)
def test_kubeconfig_of_a_config_runs_nothing_and_sends_no_file(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, user: object
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoginProblem, match=f"{way} of the user test.*run `export KUBECONFIG=.*theirs`"):
        connected(kubeconfig(cluster, tmp_path / "theirs", user={way: user}))
    assert not Path("ran").exists()


def test_kubeconfig_in_the_own_folder_may_run_a_program(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    (tmp_path / "said").write_text(json.dumps(credential | {"status": {"token": cluster.token}}))
    program = {"apiVersion": credential["apiVersion"], "command": "cat", "args": [str(tmp_path / "said")]}
    kubeconfig(cluster, tmp_path / "dotfiles", user={"exec": program})
    (tmp_path / "home/.kube").mkdir(parents=True)
    (tmp_path / "home/.kube/linked").symlink_to(tmp_path / "dotfiles")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert connected("~/.kube/linked") == []
    with pytest.raises(LoginProblem, match="exec of the user test"):
        connected("~/.kube/../../dotfiles")


def test_token_is_not_sent_to_an_unencrypted_address(cluster: Cluster, tmp_path: Path) -> None:
    plain = kubeconfig(cluster, tmp_path / "plain", server="http://127.evil.example:8080")
    with pytest.raises(LoginProblem, match=r"http://127\.evil\.example:8080, which is not encrypted.*https://"):
        connected(plain)


def test_pod_in_the_cluster_uses_its_own_account(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certificate = cluster.tls()
    for name, text, what in (("TOKEN", cluster.token, "token"), ("CERT", certificate, "ca.crt")):
        (tmp_path / what).write_text(text)
        where = f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME"
        monkeypatch.setattr(where, str(tmp_path / what))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", address.rpartition(":")[2])
    assert connect(KubernetesPlatformConfig(kind="kubernetes", in_cluster=True)).allows("list", PODS, "default")
