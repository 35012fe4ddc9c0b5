"""A cluster's API, over the official client: plain objects in and out, and errors in our words.

Answers are kept as JSON. A custom resource has no class in the client, and a field that a class does not know would be
lost without a word.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.errors import LauncherError, LoginProblem, PlatformRefused, PlatformUnreachable
from litgpt_demo.errors import one_line
from litgpt_demo.secrets import origin_of, redacted

if TYPE_CHECKING:
    import urllib3
    from kubernetes.client import ApiClient

ApiObject = dict[str, Any]

_LONGEST = 4 << 20
"""Bytes of a line of an answer; the largest object that a cluster keeps has 1.5 MB."""


@dataclass(frozen=True)
class Resource:
    """A kind of objects, as the API's paths name it."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str = "") -> str:
        """Without a namespace, of all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        space = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{space}/{self.plural}" + (f"/{name}" if name else "")

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets")
JOBS = Resource("batch", "v1", "jobs")
PODS = Resource("", "v1", "pods")
LOGS = Resource("", "v1", "pods/log")
SERVICES = Resource("", "v1", "services")
EVENTS = Resource("", "v1", "events")
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
NODES = Resource("", "v1", "nodes", namespaced=False)
QUOTAS = Resource("", "v1", "resourcequotas")
SECRETS = Resource("", "v1", "secrets")
CLAIMS = Resource("", "v1", "persistentvolumeclaims")
CLAIM_TEMPLATES = Resource("resource.k8s.io", "v1", "resourceclaimtemplates")
COMPUTE_DOMAINS = Resource("resource.nvidia.com", "v1beta1", "computedomains")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies")
DAEMON_SETS = Resource("apps", "v1", "daemonsets")
NETWORKS = Resource("networking.gke.io", "v1", "networks", namespaced=False)
ATTACHMENTS = Resource("k8s.cni.cncf.io", "v1", "network-attachment-definitions")
NETWORK_PARAMETERS = Resource("networking.gke.io", "v1", "gkenetworkparamsets", namespaced=False)
REVIEWS = Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False)

# Kueue 0.19 serves v1beta1 and v1beta2; clusters before it only the former.
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "localqueues")
CLUSTER_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "clusterqueues", namespaced=False)
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta1", "workloads")
WORKLOAD_PRIORITIES = Resource("kueue.x-k8s.io", "v1beta1", "workloadpriorityclasses", namespaced=False)
TOPOLOGIES = Resource("kueue.x-k8s.io", "v1beta1", "topologies", namespaced=False)

# What a submission may hold, by kind.
SENT: Mapping[str, Resource] = {
    "JobSet": JOBSETS,
    "Job": JOBS,
    "Service": SERVICES,
    "ResourceClaimTemplate": CLAIM_TEMPLATES,
    "ComputeDomain": COMPUTE_DOMAINS,
    "NetworkPolicy": NETWORK_POLICIES,
}


class ApiRefused(PlatformRefused):
    """The API server's no, with its own words."""

    def __init__(self, where: str, status: int, message: str) -> None:
        super().__init__(f"{where} says no: {message}")
        self.status, self.message = status, message


class NotThere(ApiRefused):
    """404: the object, or the whole kind, does not exist."""


class AlreadyThere(ApiRefused):
    """409, because an object of that name exists."""


class Forbidden(ApiRefused):
    """403."""


class Expired(ApiRefused):
    """410: what was asked from is too long ago; list again."""


_BY_STATUS: Mapping[int, type[ApiRefused]] = {403: Forbidden, 404: NotThere, 410: Expired}

_DELETE = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
_TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"
_CONNECT = 10.0
_ANSWER = 60.0
"""Seconds that the API server may take for an answer; its own limit is 60."""
_WATCH = 300
"""Seconds after which a watch is opened again. With TCP keepalive a dead connection is found earlier than that."""
_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between tries. What lasts longer is an outage, which waiting and retrying above the platform is for."""
_LONGEST_PAUSE = 15.0


class Cluster:
    """One cluster, as one identity.

    Every call raises ApiRefused (of it Forbidden) where the server says no, LoginProblem where credentials were refused
    and new ones too, and PlatformUnreachable where there is no answer after several tries.

    Args:
        client: set up with an address and credentials.
        where: what to call the cluster in messages.
        renew: gets new credentials after the present ones were refused.
    """

    def __init__(self, client: ApiClient, *, where: str, renew: Callable[[], None] | None = None) -> None:
        self.where = where
        self._client, self._renew = client, renew
        self._renewing = threading.Lock()
        self._ends = math.inf

    def within(self, seconds: float) -> Cluster:
        """Return the same cluster for calls that have so many seconds for all of them together, from now on."""
        limited = copy(self)
        limited._ends = time.monotonic() + seconds
        return limited

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Raise PlatformUnreachable where an answer lacks what was asked for: a proxy's {} is no list without a job."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise PlatformUnreachable(f"{self.where} answers without what it was asked for: {error!r}") from error

    def get(self, resource: Resource, namespace: str | None, name: str) -> ApiObject | None:
        """The object, or None where there is none."""
        return self.ask("GET", resource.path(namespace, name), missing={}) or None

    def has_secret(self, namespace: str, name: str) -> bool:
        """Return whether it is there. It comes as `kubectl get` has it, without the values.

        https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables
        """
        path = SECRETS.path(namespace, name)
        return bool(self.ask("GET", path, {"includeObject": "None"}, missing={}, accept=_TABLE))

    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[ApiObject], str]:
        """The objects, and the version to watch from. NotThere says that the cluster has no such kind."""
        page = self.ask("GET", resource.path(namespace), {"labelSelector": labels, "fieldSelector": fields})
        with self._understood():
            version = str((page.get("metadata") or {}).get("resourceVersion") or "")
            return [one for one in page["items"] or () if isinstance(one, dict)], version

    def create(self, resource: Resource, namespace: str | None, body: ApiObject, *, dry_run: bool = False) -> ApiObject:
        """The object as the cluster has stored it. A field that the cluster does not know is refused, not dropped."""
        query = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self.ask("POST", resource.path(namespace), query, body)

    def delete(self, resource: Resource, namespace: str, *, labels: str) -> None:
        """Delete whatever has the labels, and what it owns; nothing or no such kind is success."""
        self.ask("DELETE", resource.path(namespace), {"labelSelector": labels}, _DELETE, missing={})

    def delete_one(self, resource: Resource, thing: ApiObject) -> None:
        """Delete this very object, and no other of its name."""
        meta = thing["metadata"]
        body = {**_DELETE, "preconditions": {"uid": meta["uid"]}}
        try:
            self.ask("DELETE", resource.path(meta.get("namespace"), meta["name"]), None, body, missing={})
        except ApiRefused as error:
            if error.status != 409:  # another has its name by now, so this one is gone
                raise

    def serves(self, resource: Resource) -> bool:
        """Return True if the cluster knows this kind."""
        listed = self.ask("GET", f"/apis/{resource.group}/{resource.version}", missing={"resources": []})
        with self._understood():
            return any(one["name"] == resource.plural for one in listed["resources"])

    def version(self) -> str:
        """The version of the control plane, such as v1.33.5-gke.1080000."""
        told = self.ask("GET", "/version")
        with self._understood():
            return str(told["gitVersion"])

    def allows(self, verb: str, resource: Resource, namespace: str) -> bool:
        """Return True if we may. The cluster is asked, which knows roles of both Kubernetes and Google Cloud."""
        plural, _, part = resource.plural.partition("/")
        asked = {"verb": verb, "group": resource.group, "resource": plural, "subresource": part, "namespace": namespace}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        told = self.ask("POST", REVIEWS.path(None), None, {**review, "spec": {"resourceAttributes": asked}})
        with self._understood():
            return bool(told["status"]["allowed"])

    def watch(self, resource: Resource, namespace: str, version: str, *, labels: str) -> Stream:
        """The changes after that version, an event per line; the stream ends after some minutes."""
        query = {
            "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH),
            "labelSelector": labels,
        }  # fmt: skip
        return Stream(self, self._send("GET", resource.path(namespace), query, read=_WATCH + 30))

    def log(self, namespace: str, pod: str, container: str, *, since: str = "", follow: bool) -> Stream:
        """A container's log with the time before each line; `since` is a moment, which counts in whole seconds.

        NotThere says that there is no such pod, another ApiRefused that the container has not started.
        """
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower(), "sinceTime": since}
        # A rank may be silent for long; an hour of silence costs one more call.
        return Stream(self, self._send("GET", f"{PODS.path(namespace, pod)}/log", query, read=3600.0))

    def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: ApiObject | None = None, *,
        missing: ApiObject | None = None, accept: str = "application/json",
    ) -> ApiObject:  # fmt: skip
        """One call, tried again while the server is busy or away; `missing` is the answer that stands for 404."""
        try:
            with self._send(method, path, query or {}, body, read=_ANSWER, accept=accept) as response:
                content = response.read()
        except NotThere:
            if missing is None:
                raise
            return missing
        except OSError as error:  # urllib3's are, where the connection broke in mid-answer
            raise PlatformUnreachable(f"{self.where} stopped in mid-answer: {error}") from error
        if not (answer := _object_in(content)):  # a proxy's page, or nothing
            raise PlatformUnreachable(f"{self.where} answers with no JSON object but {one_line(repr(content[:200]))}")
        return answer

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: ApiObject | None = None, *, read: float,
        accept: str = "application/json",
    ) -> urllib3.HTTPResponse:  # fmt: skip
        import urllib3
        from kubernetes.client.exceptions import ApiException

        renewed = False
        for pause in (*_PAUSES, None):
            problem: LauncherError
            wait = pause or 0.0
            if (left := self._ends - time.monotonic()) <= 0:
                raise PlatformUnreachable(f"{self.where} has not answered in time")
            try:
                answer = self._call(method, path, query, body, accept, (min(_CONNECT, left), min(read, left)))
                if answer.status < 300:
                    return answer
                problem = self._problem(answer)
                # A date (RFC 9110, 10.2.3) counts as nothing: our own pauses are as good.
                after = str(answer.headers.get("Retry-After", "")).strip()
                wait = min(_LONGEST_PAUSE, max(wait, float(after) if after.isdecimal() else 0.0))
            except ApiException as error:  # of status 0: TLS
                told = one_line(str(error.reason))
                raise PlatformUnreachable(f"{self.where} cannot be trusted or reached: {told}") from None
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = PlatformUnreachable(f"{self.where} does not answer: {one_line(error)}")
            try:
                if isinstance(problem, LoginProblem) and self._renew is not None:
                    # New credentials may take a moment to be known everywhere; an API server that starts refuses all.
                    wait, renewed = (wait if renewed else 0.0), True
                    with self._renewing:
                        self._renew()
                elif isinstance(problem, ApiRefused | LoginProblem):
                    raise problem
                if pause is None or time.monotonic() + wait > self._ends:
                    raise problem
            finally:
                del problem  # else it keeps this frame alive, which keeps it, and all that asked
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _problem(self, answer: urllib3.HTTPResponse) -> LauncherError:
        """Return the error that an answer means. Made apart, because the answer's text may repeat the token."""
        text = answer.data.decode(errors="replace")
        told = _object_in(text)
        words = redacted(str(told.get("message") or text[:300]))
        if answer.status < 400:
            words = f"a redirect to {origin_of(answer.headers.get('Location', ''))}, where the token is not sent"
        if answer.status == 401:
            return LoginProblem(f"{self.where} refuses the credentials; log in again, or look at the account")
        if answer.status == 429 or answer.status >= 500:
            return PlatformUnreachable(f"{self.where} does not answer: {one_line(words)}")
        kind = AlreadyThere if told.get("reason") == "AlreadyExists" else _BY_STATUS.get(answer.status, ApiRefused)
        return kind(self.where, answer.status, words)

    def _call(
        self, method: str, path: str, query: Mapping[str, str], body: ApiObject | None, accept: str,
        timeout: tuple[float, float],
    ) -> urllib3.HTTPResponse:  # fmt: skip
        """Send one request. Its headers hold the token, so that no error leaves from here with a traceback of ours."""
        from urllib.parse import urlencode

        client = self._client
        asked = urlencode({name: value for name, value in query.items() if value})
        headers = {"Accept": accept, "Content-Type": "application/json", **client.default_headers}
        client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{client.configuration.host}{path}" + (f"?{asked}" if asked else "")
        answer: urllib3.HTTPResponse = client.call_api(method, url, headers, body, _request_timeout=timeout).response
        return answer


def _object_in(text: str | bytes) -> dict[str, Any]:
    """The object that the API answers with; empty where a proxy in between says something else."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


class Stream:
    """Lines of an answer that goes on, one by one; `close` may be called from another thread, and ends it."""

    def __init__(self, cluster: Cluster, response: urllib3.HTTPResponse) -> None:
        self._cluster, self._response = cluster, response
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """Whole lines, without their newline; what is left behind the last newline comes at the end.

        PlatformUnreachable says that the connection broke; the lines so far are good.
        """
        import urllib3

        rest = b""
        try:
            for chunk in self._response.stream(2**16):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                rest = rest[:_LONGEST]  # of a line that does not end, what goes on is dropped
            if rest:
                yield rest
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # The last two are what urllib3 raises where `close` has taken the connection away under it.
            if not self._closed:
                raise PlatformUnreachable(f"{self._cluster.where} broke off: {error}") from error
        finally:
            self._response.close()

    def events(self) -> Iterator[tuple[str, ApiObject]]:
        """A watch's events: ADDED, MODIFIED, DELETED, BOOKMARK, and the object. Expired: it fell too far behind."""
        for line in self:
            try:
                event = json.loads(line)
                kind, thing = str(event["type"]), dict(event["object"])
            except (ValueError, TypeError, KeyError) as error:  # the connection ended within a line, or a proxy spoke
                raise PlatformUnreachable(f"{self._cluster.where} broke off within an event") from error
            if kind != "ERROR":
                yield kind, thing
            elif thing.get("code") == 410:
                raise Expired(self._cluster.where, 410, thing.get("message", ""))
            else:
                raise PlatformUnreachable(f"{self._cluster.where} ends a watch: {thing.get('message')}")

    def close(self) -> None:
        """End it; a reader sees the end."""
        self._closed = True
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError):
            self._response.close()
