"""Ways to a cluster: by its name on GKE, by a kubeconfig, or from a pod in it. Credentials stay in memory.

On GKE, the GKE API returns the address and the certificate, and google-auth gets and renews tokens. Errors of clients
are not chained: a traceback may show the headers that were sent, and with them the token.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import google
from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, NotInstalled, PlatformUnreachable, install_extra
from launcher.google import google_errors
from launcher.platforms.kubernetes.cluster import Cluster
from launcher.platforms.kubernetes.settings import GkePlatformConfig, KubernetesPlatformConfig
from litgpt_demo.errors import one_line
from litgpt_demo.secrets import is_protected, origin_of

if TYPE_CHECKING:
    from google.cloud.container_v1.types import Cluster as GoogleCluster
    from kubernetes.client import Configuration

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_ANSWER = 20.0  # seconds that the GKE API may take
_KEPT = 600.0  # seconds for which its answer is kept
GKE = google.Service(
    extra="gke", denied_error=LoginProblem, unavailable_error=PlatformUnreachable, emulator="",
    roles="the permission container.clusters.get is missing: have roles/container.clusterViewer granted",
)  # fmt: skip


def connect(settings: GkePlatformConfig | KubernetesPlatformConfig) -> Cluster:
    """Return the cluster of the settings, without a request to it."""
    try:
        from kubernetes import config
        from kubernetes.client import ApiClient
        from kubernetes.config import ConfigException

        if isinstance(settings, GkePlatformConfig):
            return gke_cluster(settings)[0]
    except ImportError as error:
        what = f"platform.kind={settings.kind} needs packages that are not installed ({error})"
        raise NotInstalled(what, fix=install_extra("gke")) from error
    path, context = settings.kubeconfig, settings.context
    where = f"the cluster of {path or 'the kubeconfig'}"
    if context:
        where = f"{where}, context {context}"
    if settings.in_cluster:
        where = "the cluster that this runs in"

    def load() -> Configuration:
        loaded = _configuration()
        chosen: Any = {"context": context, "client_configuration": loaded, "persist_config": False}
        try:
            if settings.in_cluster:
                config.load_incluster_config(client_configuration=loaded)  # type: ignore[no-untyped-call]
            elif path is None or _is_own(path):
                config.load_kube_config(path, **chosen)  # type: ignore[no-untyped-call]
            else:
                document = _without_programs(path, context)
                config.load_kube_config_from_dict(document, **chosen)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            # If the config names it, the mistake is in the config and not on this machine.
            kind = LoginProblem if path or context else NoCredentials
            fix = "name a kubeconfig in platform.kubeconfig"
            raise kind(f"{where} cannot be read: {one_line(error)}", fix=f"{fix} or $KUBECONFIG") from None
        return loaded

    configuration = load()

    def renew() -> None:
        """Read it again: by now the file, or the program that it names, has newer credentials."""
        fresh = load()
        # At each request the hook sets the token that it was created with.
        configuration.api_key, configuration.refresh_api_key_hook = fresh.api_key, fresh.refresh_api_key_hook

    if configuration.api_key and not is_protected(configuration.host):
        what = f"{where} is at {origin_of(configuration.host)}, which is not encrypted"
        raise LoginProblem(f"{what}, and your token would be sent there", fix="write https:// in the kubeconfig")
    return Cluster(ApiClient(configuration), where=where, renew=renew)


def _is_own(path: str) -> bool:
    """Return whether a kubeconfig is the user's own choice, even if another person wrote the config that names it."""
    names = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    chosen = {Path(name).expanduser().resolve() for name in names if name}
    file, folder = Path(path).expanduser().absolute(), Path.home() / ".kube"
    if ".." not in file.parts and file.is_relative_to(folder):
        return True  # a link in the folder is the user's too: to Windows' file, or to a folder of dotfiles
    return file.resolve() in chosen or file.resolve().is_relative_to(folder.resolve())


def _without_programs(path: str, context: str | None) -> Any:
    """Return the content of a kubeconfig that the user has not chosen. It may neither run a program nor send a file."""
    from kubernetes.config import ConfigException
    from kubernetes.config.kube_config import KubeConfigMerger

    file = Path(path).expanduser()
    if not file.is_file():  # reading a device would never end
        raise ConfigException(f"{file} is not a file")
    document = KubeConfigMerger(str(file)).config  # type: ignore[no-untyped-call]
    user = document["contexts"].get_with_name(context or document["current-context"])["context"].safe_get("user")
    known = document["users"].get_with_name(user, safe=True) if user else None
    for key, does in {"exec": "runs a program", "auth-provider": "runs a program", "tokenFile": "sends a file"}.items():
        if known and key in known["user"]:
            what = f"platform.kubeconfig={path} {does} to log in ({key} of the user {user}), which a config must not"
            fix = f"read the file, and if you trust it run `export KUBECONFIG={file.resolve()}`"
            raise LoginProblem(what, fix=fix)
    return document


def _configuration() -> Configuration:
    from kubernetes.client import Configuration

    configuration = Configuration()
    configuration.retries = False  # Cluster repeats requests itself
    configuration.keep_alive = True  # a watch would never notice that its connection is dead
    configuration.connection_pool_maxsize = 16
    return configuration


def gke_cluster(settings: GkePlatformConfig) -> tuple[Cluster, GoogleCluster]:
    """Return a cluster on GKE, and Google Cloud's description of it. Both are kept for ten minutes: an endpoint may
    move."""
    name, place, period = settings.cluster, settings.location, int(time.monotonic() // _KEPT)
    return _gke_cluster(name, place, settings.project, settings.dns_endpoint, period)


@lru_cache(maxsize=8)
def _gke_cluster(
    name: str, location: str, project: str | None, dns: bool, period: int
) -> tuple[Cluster, GoogleCluster]:
    with google_errors(GKE, "signing in to Google Cloud"):
        from google.api_core.exceptions import GoogleAPICallError, NotFound
        from google.auth import default
        from google.auth.transport.requests import Request
        from google.cloud.container_v1 import ClusterManagerClient

        credentials, own = default(scopes=[SCOPE])
    from kubernetes.client import ApiClient

    project = project or own
    if not project:
        raise LoginProblem("the credentials do not name a project", fix="set platform.project to that of the cluster")
    clusters, place = ClusterManagerClient(credentials=credentials), f"projects/{project}/locations"
    with google_errors(GKE, f"reading cluster {name} of project {project}"):
        try:
            full = f"{place}/{location}/clusters/{name}"
            described = clusters.get_cluster(name=full, timeout=_ANSWER, retry=None)
        except NotFound:
            hint = "see `gcloud container clusters list`"
            with suppress(GoogleAPICallError):
                listed = clusters.list_clusters(parent=f"{place}/-", timeout=_ANSWER, retry=None).clusters
                names = ", ".join(f"{cluster.name} in {cluster.location}" for cluster in listed)
                hint = f"choose one of {names}" if names else "that project has no cluster"
            raise ConfigProblem(f"platform.cluster={name} is not in {location} of project {project}; {hint}") from None
    configuration = _configuration()
    if dns:
        # A DNS endpoint has a public certificate, and Google checks the caller's role before the cluster does.
        # https://docs.cloud.google.com/kubernetes-engine/docs/concepts/network-isolation
        found = described.control_plane_endpoints_config.dns_endpoint_config
        if not (found.endpoint and found.allow_external_traffic):
            fix = f"run `gcloud container clusters update {name} --enable-dns-access`, or leave it out"
            raise ConfigProblem(f"platform.dns_endpoint=true, but the DNS endpoint of cluster {name} is off", fix=fix)
        configuration.host = f"https://{found.endpoint}"
    elif not described.endpoint:
        raise PlatformUnreachable(f"cluster {name} has no address yet: it is {described.status.name}")
    else:
        configuration.host = f"https://{described.endpoint}"
        configuration.ca_cert_data = base64.b64decode(described.master_auth.cluster_ca_certificate).decode()
    lock = threading.Lock()

    def renew(*, unless_valid: bool = False) -> None:
        """Get another token: the cluster has rejected the present one, or it has expired."""
        with lock, google_errors(GKE, "requesting a new token from Google Cloud"):
            if not (unless_valid and credentials.valid):
                credentials.refresh(Request())  # type: ignore[no-untyped-call]

    def set_token(configuration: Any) -> None:
        """Set a valid token before each request: a job runs for days, but a token is valid for an hour."""
        renew(unless_valid=True)
        configuration.api_key["authorization"] = f"Bearer {credentials.token}"

    configuration.refresh_api_key_hook = set_token  # type: ignore[assignment]  # the client declares it as always None
    # The client calls its hook only if a key is set already.
    configuration.api_key = {"authorization": ""}
    return Cluster(ApiClient(configuration), where=f"cluster {name} in {location}", renew=renew), described
