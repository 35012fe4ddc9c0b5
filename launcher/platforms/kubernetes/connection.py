"""Ways to a cluster: by its name on GKE, by a kubeconfig, or from a pod in it. Credentials stay in memory.

On GKE neither gcloud nor its plug-in nor a kubeconfig is needed: address and certificate come from the GKE API, and
tokens from google-auth, which gets a new one whenever the last is about to end.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, NotInstalled, PlatformUnreachable
from launcher.platforms.kubernetes.cluster import Cluster
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import words_of

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.cloud.container_v1 import ClusterManagerClient
    from google.cloud.container_v1.types import Cluster as GoogleCluster
    from kubernetes.client import Configuration

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_ANSWER = 20.0
"""Seconds that the GKE API may take."""

LOG_IN = "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key"


def connect(settings: GkePlatformConfig) -> Cluster:
    """The cluster that the settings mean. Nothing is asked of the cluster itself yet.

    Raises:
        LoginProblem: there are no credentials, or they may not see the cluster.
        ConfigProblem: there is no such cluster.
        NotInstalled: the packages that speak to clusters are not there.
        PlatformUnreachable: the GKE API does not answer.
    """
    try:
        if settings.cluster is not None:
            project, location = settings.project, str(settings.location)
            return google_way(settings.cluster, location, project, dns=settings.dns_endpoint).cluster
        if settings.in_cluster:
            return _from_within()
        return _by_kubeconfig(settings.kubeconfig, settings.context)
    except ImportError as error:
        raise NotInstalled(
            f'platform.kind=gke needs packages that are not here ({error}); pip install "train-litgpt[gke]"'
        ) from error


# --- a kubeconfig, or a pod's own account -----------------------------------------------------------------------------


def _by_kubeconfig(path: str | None, context: str | None) -> Cluster:
    from kubernetes import config

    def load(into: Configuration) -> None:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, context=context, client_configuration=into, persist_config=False
        )

    where = f"the cluster of {path or 'the kubeconfig'}" + (f", context {context}" * bool(context))
    return _loaded(load, where=where, named=bool(path or context))


def _from_within() -> Cluster:
    from kubernetes import config

    def load(into: Configuration) -> None:
        config.load_incluster_config(client_configuration=into)  # type: ignore[no-untyped-call]

    return _loaded(load, where="the cluster that this runs in")


def _loaded(load: Callable[[Configuration], None], *, where: str, named: bool = False) -> Cluster:
    """Connect as `load` says.

    Args:
        named: the config names it, so that its absence is the config's mistake rather than this machine's lack.
    """
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config import ConfigException

    configuration = _configuration()

    def renew() -> None:
        """Read it again: the writer of the file, or the program it names, has newer credentials by now."""
        fresh = Configuration()
        try:
            load(fresh)
        except (ConfigException, OSError) as error:
            raise LoginProblem(f"{where} cannot be read any more: {error}; log in again") from error
        # The hook sets the token that it was made with, at every request.
        configuration.api_key, configuration.refresh_api_key_hook = fresh.api_key, fresh.refresh_api_key_hook

    try:
        load(configuration)
    except (ConfigException, OSError) as error:
        kind = LoginProblem if named else NoCredentials
        raise kind(
            f"{where} cannot be had: {error}; name a GKE cluster in platform.cluster and platform.location, or a "
            "kubeconfig in platform.kubeconfig or $KUBECONFIG"
        ) from error
    return Cluster(ApiClient(configuration), where=where, renew=renew)


def _configuration() -> Configuration:
    from kubernetes.client import Configuration

    configuration = Configuration()
    configuration.retries = False  # we try again ourselves, and say so (Cluster)
    configuration.keep_alive = True  # a watch over a dead connection would be silent forever
    configuration.connection_pool_maxsize = 16
    return configuration


# --- GKE --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GoogleWay:
    """A cluster on GKE, and what Google Cloud knows of it."""

    cluster: Cluster
    described: GoogleCluster
    credentials: Credentials
    project: str


@lru_cache(maxsize=8)
def google_way(name: str, location: str, project: str | None, *, dns: bool) -> GoogleWay:
    """Found once per process: a run asks for its platform many times.

    Raises: as `connect`.
    """
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.container_v1 import ClusterManagerClient

    try:
        credentials, own = google.auth.default(scopes=[SCOPE])
    except DefaultCredentialsError as error:
        raise NoCredentials(f"there are no Google Cloud credentials ({words_of(error)}); {LOG_IN}") from error
    if not (project or own):
        raise LoginProblem("the credentials belong to no project; name the cluster's in platform.project")
    clusters = ClusterManagerClient(credentials=credentials)
    return check_access(clusters, credentials, project=str(project or own), location=location, name=name, dns=dns)


def check_access(
    clusters: ClusterManagerClient, credentials: Credentials, *, project: str, location: str, name: str, dns: bool
) -> GoogleWay:
    """Ask the GKE API for the cluster's address and certificate.

    Raises: as `connect`.
    """
    from kubernetes.client import ApiClient

    described = describe(clusters, project=project, location=location, name=name)
    configuration = _configuration()
    configuration.host, certificate = _endpoint(described, dns=dns)
    configuration.ca_cert_data = certificate
    token = _Token(credentials)
    configuration.refresh_api_key_hook = token.hand  # type: ignore[assignment]  # the client says it is always None
    # The client asks its hook only where a key is set already.
    configuration.api_key = {"authorization": ""}
    cluster = Cluster(ApiClient(configuration), where=f"cluster {name} in {location}", renew=token.renew)
    return GoogleWay(cluster=cluster, described=described, credentials=credentials, project=project)


def describe(clusters: ClusterManagerClient, *, project: str, location: str, name: str) -> GoogleCluster:
    """The GKE API's description of the cluster.

    Raises: as `connect`.
    """
    from google.api_core import exceptions
    from google.auth.exceptions import RefreshError, TransportError

    place = f"projects/{project}/locations/{location}"
    try:
        return clusters.get_cluster(name=f"{place}/clusters/{name}", timeout=_ANSWER, retry=None)
    except exceptions.NotFound as error:
        there = _others(clusters, project)
        raise ConfigProblem(f"platform.cluster={name} is not in {location} of project {project}; {there}") from error
    except (exceptions.PermissionDenied, exceptions.Forbidden) as error:
        raise LoginProblem(
            f"cluster {name} of project {project} may not be looked at ({error.message}); the permission "
            "container.clusters.get is missing: have roles/container.clusterViewer granted"
        ) from error
    except (exceptions.Unauthenticated, exceptions.Unauthorized, RefreshError) as error:
        raise LoginProblem(f"Google Cloud refuses the credentials ({words_of(error)}); {LOG_IN}") from error
    except (exceptions.GoogleAPICallError, exceptions.RetryError, TransportError) as error:
        raise PlatformUnreachable(f"the GKE API does not answer for cluster {name}: {error}") from error


def _others(clusters: ClusterManagerClient, project: str) -> str:
    from google.api_core.exceptions import GoogleAPICallError

    try:
        listed = clusters.list_clusters(parent=f"projects/{project}/locations/-", timeout=_ANSWER, retry=None).clusters
    except GoogleAPICallError:
        return "look at `gcloud container clusters list`"
    names = ", ".join(f"{one.name} in {one.location}" for one in listed)
    return f"there is {names}" if names else "that project has no cluster"


def _endpoint(described: GoogleCluster, *, dns: bool) -> tuple[str, str | None]:
    """Address, and the cluster's own certificate authority where it has one.

    A DNS endpoint has a public certificate, and Google checks the caller's role before the cluster does.
    https://docs.cloud.google.com/kubernetes-engine/docs/concepts/network-isolation
    """
    if dns:
        found = described.control_plane_endpoints_config.dns_endpoint_config
        if not (found.endpoint and found.allow_external_traffic):
            raise ConfigProblem(
                f"platform.dns_endpoint=true, and cluster {described.name} has none that is open; turn it on with "
                f"`gcloud container clusters update {described.name} --enable-dns-access`, or leave it out"
            )
        return f"https://{found.endpoint}", None
    if not described.endpoint:
        raise PlatformUnreachable(f"cluster {described.name} has no address yet: it is {described.status.name}")
    return f"https://{described.endpoint}", base64.b64decode(described.master_auth.cluster_ca_certificate).decode()


class _Token:
    """A bearer token that is never old: a watch may go on for days, and a token lives for an hour."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials, self._lock = credentials, threading.Lock()

    def hand(self, configuration: Any) -> None:
        """Called by the client before every request."""
        with self._lock:
            if not self._credentials.valid:
                self._refresh()
        configuration.api_key["authorization"] = f"Bearer {self._credentials.token}"

    def renew(self) -> None:
        """The cluster has refused the present one."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        from google.auth.exceptions import RefreshError, TransportError
        from google.auth.transport.requests import Request

        try:
            self._credentials.refresh(Request())  # type: ignore[no-untyped-call]
        except RefreshError as error:
            raise LoginProblem(f"Google Cloud gives no new token ({words_of(error)}); {LOG_IN}") from error
        except TransportError as error:
            raise PlatformUnreachable(f"Google Cloud gives no token: {error}") from error
