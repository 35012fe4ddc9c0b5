"""Ways to a cluster: by its name on GKE, by a kubeconfig, or from a pod in it. Credentials stay in memory.

On GKE address and certificate come from the GKE API, and tokens from google-auth, which renews them. Errors of clients
are not chained: a traceback may show the headers that were sent, and the token is one of them.
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
from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, NotInstalled, PlatformUnreachable
from launcher.google import google_errors
from launcher.platforms.kubernetes.cluster import Cluster
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import one_line
from litgpt_demo.secrets import is_protected, origin_of

if TYPE_CHECKING:
    from google.cloud.container_v1.types import Cluster as GoogleCluster
    from kubernetes.client import Configuration

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_ANSWER = 20.0  # seconds that the GKE API may take
_KEPT = 600.0  # seconds for which its answer is
GKE = google.Service(
    extra="gke", denied_error=LoginProblem, unavailable_error=PlatformUnreachable, emulator="",
    roles="the permission container.clusters.get is missing: have roles/container.clusterViewer granted",
)  # fmt: skip


def connect(settings: GkePlatformConfig) -> Cluster:
    """The cluster that the settings mean. Nothing is asked of the cluster itself yet."""
    try:
        from kubernetes import config
        from kubernetes.client import ApiClient
        from kubernetes.config import ConfigException

        if settings.cluster is not None:
            return google_way(settings)[0]
    except ImportError as error:
        what = f"platform.kind=gke needs packages that are not here ({error})"
        raise NotInstalled(what, fix='pip install "train-litgpt[gke]"') from error
    path, context = settings.kubeconfig, settings.context
    where = f"the cluster of {path or 'the kubeconfig'}" + (f", context {context}" * bool(context))
    if settings.in_cluster:
        where = "the cluster that this runs in"

    def load() -> Configuration:
        into = _configuration()
        chosen: Any = {"context": context, "client_configuration": into, "persist_config": False}
        try:
            if settings.in_cluster:
                config.load_incluster_config(client_configuration=into)  # type: ignore[no-untyped-call]
            elif path is None or _is_own(path):
                config.load_kube_config(path, **chosen)  # type: ignore[no-untyped-call]
            else:
                document = _without_programs(path, context)
                config.load_kube_config_from_dict(document, **chosen)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            # Where the config names it, its absence is the config's mistake rather than this machine's lack.
            kind = LoginProblem if path or context else NoCredentials
            fix = "name a GKE cluster in platform.cluster and location, or a kubeconfig in platform.kubeconfig"
            raise kind(f"{where} cannot be had: {one_line(error)}", fix=f"{fix} or $KUBECONFIG") from None
        return into

    configuration = load()

    def renew() -> None:
        """Read it again: the writer of the file, or the program it names, has newer credentials by now."""
        fresh = load()
        # The hook sets the token that it was made with, at every request.
        configuration.api_key, configuration.refresh_api_key_hook = fresh.api_key, fresh.refresh_api_key_hook

    if configuration.api_key and not is_protected(configuration.host):
        at, fix = origin_of(configuration.host), "write https:// in the kubeconfig"
        raise LoginProblem(f"{where} is at {at}, which is not encrypted, and your token would be sent there", fix=fix)
    return Cluster(ApiClient(configuration), where=where, renew=renew)


def _is_own(path: str) -> bool:
    """Return True if a kubeconfig is the user's own choice, whoever wrote the config that names it too."""
    chosen = {Path(one).expanduser().resolve() for one in os.environ.get("KUBECONFIG", "").split(os.pathsep) if one}
    given, folder = Path(path).expanduser().absolute(), Path.home() / ".kube"
    if ".." not in given.parts and given.is_relative_to(folder):
        return True  # a link in the folder is the user's too: to Windows' file, or to where dotfiles are kept
    return given.resolve() in chosen or given.resolve().is_relative_to(folder.resolve())


def _without_programs(path: str, context: str | None) -> Any:
    """Return what a kubeconfig of somebody's choice holds, if using it neither runs a program nor sends a file away."""
    from kubernetes.config import ConfigException
    from kubernetes.config.kube_config import KubeConfigMerger

    file = Path(path).expanduser()
    if not file.is_file():  # a device would be read for ever
        raise ConfigException(f"{file} is no file")
    document = KubeConfigMerger(str(file)).config  # type: ignore[no-untyped-call]
    user = document["contexts"].get_with_name(context or document["current-context"])["context"].safe_get("user")
    known = document["users"].get_with_name(user, safe=True) if user else None
    for key, does in {"exec": "runs a program", "auth-provider": "runs a program", "tokenFile": "sends a file"}.items():
        if known and key in known["user"]:
            what = f"platform.kubeconfig={path} {does} to log in ({key} of the user {user}), which no config may decide"
            fix = f"read the file, and if you trust it run `export KUBECONFIG={file.resolve()}`"
            raise LoginProblem(what, fix=fix)
    return document


def _configuration() -> Configuration:
    from kubernetes.client import Configuration

    configuration = Configuration()
    configuration.retries = False  # we try again ourselves, and say so (Cluster)
    configuration.keep_alive = True  # a watch over a dead connection would be silent forever
    configuration.connection_pool_maxsize = 16
    return configuration


def google_way(settings: GkePlatformConfig) -> tuple[Cluster, GoogleCluster]:
    """Return a cluster on GKE, and what Google Cloud knows of it.

    Found anew every ten minutes: a run asks for its platform many times, and an endpoint may move.
    """
    name, place, period = str(settings.cluster), str(settings.location), int(time.monotonic() // _KEPT)
    return _google_way(name, place, settings.project, settings.dns_endpoint, period)


@lru_cache(maxsize=8)
def _google_way(name: str, location: str, project: str | None, dns: bool, period: int) -> tuple[Cluster, GoogleCluster]:
    with google_errors(GKE, "signing in to Google Cloud"):
        from google.api_core.exceptions import GoogleAPICallError, NotFound
        from google.auth import default
        from google.auth.transport.requests import Request
        from google.cloud.container_v1 import ClusterManagerClient

        credentials, own = default(scopes=[SCOPE])
    from kubernetes.client import ApiClient

    if not (project := project or own):
        raise LoginProblem("the credentials belong to no project", fix="name the cluster's in platform.project")
    clusters, place = ClusterManagerClient(credentials=credentials), f"projects/{project}/locations"
    with google_errors(GKE, f"looking at cluster {name} of project {project}"):
        try:
            full = f"{place}/{location}/clusters/{name}"
            described = clusters.get_cluster(name=full, timeout=_ANSWER, retry=None)
        except NotFound:
            there = "look at `gcloud container clusters list`"
            with suppress(GoogleAPICallError):
                listed = clusters.list_clusters(parent=f"{place}/-", timeout=_ANSWER, retry=None).clusters
                names = ", ".join(f"{one.name} in {one.location}" for one in listed)
                there = f"there is {names}" if names else "that project has no cluster"
            raise ConfigProblem(f"platform.cluster={name} is not in {location} of project {project}; {there}") from None
    configuration = _configuration()
    if dns:
        # A DNS endpoint has a public certificate, and Google checks the caller's role before the cluster does.
        # https://docs.cloud.google.com/kubernetes-engine/docs/concepts/network-isolation
        found = described.control_plane_endpoints_config.dns_endpoint_config
        if not (found.endpoint and found.allow_external_traffic):
            fix = f"`gcloud container clusters update {name} --enable-dns-access`, or leave it out"
            raise ConfigProblem(f"platform.dns_endpoint=true, and cluster {name} has none that is open", fix=fix)
        configuration.host = f"https://{found.endpoint}"
    elif not described.endpoint:
        raise PlatformUnreachable(f"cluster {name} has no address yet: it is {described.status.name}")
    else:
        configuration.host = f"https://{described.endpoint}"
        configuration.ca_cert_data = base64.b64decode(described.master_auth.cluster_ca_certificate).decode()
    lock = threading.Lock()

    def renew(*, unless_valid: bool = False) -> None:
        """Get another token: the cluster has refused the present one, unless that is only old."""
        with lock, google_errors(GKE, "asking Google Cloud for a new token"):
            if not (unless_valid and credentials.valid):
                credentials.refresh(Request())  # type: ignore[no-untyped-call]

    def hand(configuration: Any) -> None:
        """Called by the client before every request: a watch may go on for days, and a token lives for an hour."""
        renew(unless_valid=True)
        configuration.api_key["authorization"] = f"Bearer {credentials.token}"

    configuration.refresh_api_key_hook = hand  # type: ignore[assignment]  # the client says it is always None
    # The client asks its hook only where a key is set already.
    configuration.api_key = {"authorization": ""}
    return Cluster(ApiClient(configuration), where=f"cluster {name} in {location}", renew=renew), described
