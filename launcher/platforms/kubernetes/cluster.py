"""A cluster's API over the official client: JSON objects in and out, and our own errors.

Answers stay JSON objects: a custom resource has no class in the client, and a class silently drops unknown fields.
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
    """A kind of objects by its names in the API's paths."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str = "") -> str:
        """Return the path of these objects, or of the named one; without a namespace, that of all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        space = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{space}/{self.plural}/{name}".removesuffix("/")

    def __str__(self) -> str:
        return ".".join(filter(None, (self.plural, self.group)))


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
PVCS = Resource("", "v1", "persistentvolumeclaims")
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

# The objects that a submission may contain, by kind.
SENT: Mapping[str, Resource] = {
    "JobSet": JOBSETS,
    "Job": JOBS,
    "Service": SERVICES,
    "ResourceClaimTemplate": CLAIM_TEMPLATES,
    "ComputeDomain": COMPUTE_DOMAINS,
    "NetworkPolicy": NETWORK_POLICIES,
}


class ApiRefused(PlatformRefused):
    """The API server refuses a request; `message` is its own text."""

    def __init__(self, where: str, status: int, message: str) -> None:
        super().__init__(f"{where} refuses it: {message}")
        self.status, self.message = status, message


class NotFound(ApiRefused):
    """404: the object, or the whole kind, does not exist."""


class AlreadyExists(ApiRefused):
    """409, because an object of that name exists."""


class Forbidden(ApiRefused):
    """403."""


class Expired(ApiRefused):
    """410: the requested version is too old. List again."""


_BY_STATUS: Mapping[int, type[ApiRefused]] = {403: Forbidden, 404: NotFound, 410: Expired}

_DELETE = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
_TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"
_CONNECT = 10.0
_ANSWER = 60.0
"""Seconds that the API server may take for an answer; its own limit is 60."""
_WATCH = 300
"""Seconds after which a watch is opened again. With TCP keepalive a dead connection is found earlier than that."""
_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between tries. The code above the platform waits for the end of longer outages."""
_LONGEST_PAUSE = 15.0


class Cluster:
    """One cluster, with one identity. Every call raises ApiRefused if the server refuses, LoginProblem if it rejects
    the credentials and those of `renew` too, and PlatformUnreachable if it does not answer after several tries."""

    def __init__(self, client: ApiClient, *, where: str, renew: Callable[[], None] | None = None) -> None:
        self.where = where
        self._client, self._renew = client, renew
        self._renewing = threading.Lock()
        self._ends = math.inf

    def with_deadline(self, seconds: float) -> Cluster:
        """Return the same cluster with a limit of N seconds, from now on, for all calls together."""
        limited = copy(self)
        limited._ends = time.monotonic() + seconds
        return limited

    @contextmanager
    def _malformed_as_unreachable(self) -> Iterator[None]:
        """Raise PlatformUnreachable if an answer has not the expected form. A proxy's {} is not an empty list."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise PlatformUnreachable(f"{self.where} answers in an unexpected form: {error!r}") from error

    def get(self, resource: Resource, namespace: str | None, name: str) -> ApiObject | None:
        return self.ask("GET", resource.path(namespace, name), missing={}) or None

    def has_secret(self, namespace: str, name: str) -> bool:
        """Return whether the Secret exists. It is requested as a table, which does not contain its values.

        https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables
        """
        path = SECRETS.path(namespace, name)
        return bool(self.ask("GET", path, {"includeObject": "None"}, missing={}, accept=_TABLE))

    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[ApiObject], str]:
        """Return the objects, and the version to watch from. NotFound says that the cluster has no such kind."""
        page = self.ask("GET", resource.path(namespace), {"labelSelector": labels, "fieldSelector": fields})
        with self._malformed_as_unreachable():
            version = str((page.get("metadata") or {}).get("resourceVersion") or "")
            return [item for item in page["items"] or () if isinstance(item, dict)], version

    def create(self, resource: Resource, namespace: str | None, body: ApiObject, *, dry_run: bool = False) -> ApiObject:
        """Create an object and return it as stored. The cluster refuses unknown fields instead of dropping them."""
        query = {"fieldValidation": "Strict", "dryRun": "All" if dry_run else ""}
        return self.ask("POST", resource.path(namespace), query, body)

    def delete(self, resource: Resource, namespace: str, *, labels: str) -> None:
        """Delete the objects with these labels and all that they own. Missing objects are not an error."""
        self.ask("DELETE", resource.path(namespace), {"labelSelector": labels}, _DELETE, missing={})

    def delete_one(self, resource: Resource, thing: ApiObject) -> None:
        """Delete this object, which may be gone, and all that it owns, but not a later object of the same name."""
        meta = thing["metadata"]
        body = {**_DELETE, "preconditions": {"uid": meta["uid"]}}
        try:
            self.ask("DELETE", resource.path(meta.get("namespace"), meta["name"]), None, body, missing={})
        except ApiRefused as error:
            if error.status != 409:  # 409: another object has its name, so this one is gone
                raise

    def serves(self, resource: Resource) -> bool:
        listed = self.ask("GET", f"/apis/{resource.group}/{resource.version}", missing={"resources": []})
        with self._malformed_as_unreachable():
            return any(served["name"] == resource.plural for served in listed["resources"])

    def version(self) -> str:
        """Return the version of the control plane, such as v1.33.5-gke.1080000."""
        answer = self.ask("GET", "/version")
        with self._malformed_as_unreachable():
            return str(answer["gitVersion"])

    def allows(self, verb: str, resource: Resource, namespace: str) -> bool:
        """Return whether we have this permission. The cluster knows the roles of Kubernetes and of Google Cloud."""
        plural, _, part = resource.plural.partition("/")
        right = {"verb": verb, "group": resource.group, "resource": plural, "subresource": part, "namespace": namespace}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = self.ask("POST", REVIEWS.path(None), None, {**review, "spec": {"resourceAttributes": right}})
        with self._malformed_as_unreachable():
            return bool(answer["status"]["allowed"])

    def watch(self, resource: Resource, namespace: str, version: str, *, labels: str) -> Stream:
        """Return the changes after that version, one event in a line. The stream ends after some minutes."""
        query = {
            "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH),
            "labelSelector": labels,
        }  # fmt: skip
        return Stream(self, self._send("GET", resource.path(namespace), query, read=_WATCH + 30))

    def log(self, namespace: str, pod: str, container: str, *, since: str = "", follow: bool) -> Stream:
        """Return a container's log with the time before each line, since a moment in whole seconds. NotFound says that
        the pod does not exist, another ApiRefused that the container has not started."""
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower(), "sinceTime": since}
        # A rank may print nothing for long; an hour without a line costs one more call.
        return Stream(self, self._send("GET", f"{PODS.path(namespace, pod)}/log", query, read=3600.0))

    def ask(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: ApiObject | None = None, *,
        missing: ApiObject | None = None, accept: str = "application/json",
    ) -> ApiObject:  # fmt: skip
        """Return the answer to a call, repeated while the server is busy or away. `missing` stands for a 404."""
        try:
            with self._send(method, path, query or {}, body, read=_ANSWER, accept=accept) as response:
                content = response.read()
        except NotFound:
            if missing is None:
                raise
            return missing
        except OSError as error:  # urllib3's are, where the connection broke in mid-answer
            raise PlatformUnreachable(f"{self.where} stopped in mid-answer: {error}") from error
        answer = _object_in(content)
        if not answer:  # a proxy's page, or nothing
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
            remaining = self._ends - time.monotonic()
            if remaining <= 0:
                raise PlatformUnreachable(f"{self.where} has not answered in time")
            timeout = (min(_CONNECT, remaining), min(read, remaining))
            try:
                answer = self._call(method, path, query, body, accept, timeout)
                if answer.status < 300:
                    return answer
                problem = self._problem(answer)
                after = str(answer.headers.get("Retry-After", "")).strip()
                if after.isdecimal():  # a date (RFC 9110, 10.2.3) is ignored: our own pauses are as good
                    wait = min(_LONGEST_PAUSE, max(wait, float(after)))
            except ApiException as error:  # of status 0: TLS
                reason = one_line(str(error.reason))
                raise PlatformUnreachable(f"{self.where} cannot be trusted or reached: {reason}") from None
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = PlatformUnreachable(f"{self.where} does not answer: {one_line(error)}")
            try:
                if isinstance(problem, LoginProblem) and self._renew is not None:
                    # New credentials may take a moment to be known everywhere. A starting API server rejects all.
                    if not renewed:
                        wait, renewed = 0.0, True
                    with self._renewing:
                        self._renew()
                elif isinstance(problem, ApiRefused | LoginProblem):
                    raise problem
                if pause is None or time.monotonic() + wait > self._ends:
                    raise problem
            finally:
                del problem  # otherwise it and this frame keep each other alive, and all frames of the callers
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _problem(self, answer: urllib3.HTTPResponse) -> LauncherError:
        """Return the error of an answer. It omits our traceback, because the answer's text may repeat the token."""
        text = answer.data.decode(errors="replace")
        content = _object_in(text)
        message = redacted(str(content.get("message") or text[:300]))
        if answer.status < 400:
            message = f"a redirect to {origin_of(answer.headers.get('Location', ''))}, where the token is not sent"
        if answer.status == 401:
            return LoginProblem(f"{self.where} refuses the credentials; log in again, or look at the account")
        if answer.status == 429 or answer.status >= 500:
            return PlatformUnreachable(f"{self.where} does not answer: {one_line(message)}")
        kind = _BY_STATUS.get(answer.status, ApiRefused)
        if content.get("reason") == "AlreadyExists":
            kind = AlreadyExists
        return kind(self.where, answer.status, message)

    def _call(
        self, method: str, path: str, query: Mapping[str, str], body: ApiObject | None, accept: str,
        timeout: tuple[float, float],
    ) -> urllib3.HTTPResponse:  # fmt: skip
        """Send one request. Its headers hold the token, so no error leaves this function with our traceback."""
        from urllib.parse import urlencode

        client = self._client
        parameters = urlencode({name: value for name, value in query.items() if value})
        headers = {"Accept": accept, "Content-Type": "application/json", **client.default_headers}
        client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{client.configuration.host}{path}?{parameters}".removesuffix("?")
        answer: urllib3.HTTPResponse = client.call_api(method, url, headers, body, _request_timeout=timeout).response
        return answer


def _object_in(text: str | bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class Stream:
    """The lines of an answer that does not end by itself. `close` ends it, also from another thread."""

    def __init__(self, cluster: Cluster, response: urllib3.HTTPResponse) -> None:
        self._cluster, self._response = cluster, response
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield complete lines without their newline, and at the end the rest. If the connection breaks, the lines
        before it are valid."""
        import urllib3

        rest = b""
        try:
            for chunk in self._response.stream(2**16):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                rest = rest[:_LONGEST]  # the remainder of an endless line is dropped
            if rest:
                yield rest
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # urllib3 raises the last two if `close` has removed its connection.
            if not self._closed:
                raise PlatformUnreachable(f"{self._cluster.where} broke off: {error}") from error
        finally:
            self._response.close()

    def events(self) -> Iterator[tuple[str, ApiObject]]:
        """Yield a watch's events (ADDED, MODIFIED, DELETED, BOOKMARK) with their objects. Expired: it is too late."""
        for line in self:
            try:
                event = json.loads(line)
                kind, thing = str(event["type"]), dict(event["object"])
            except (ValueError, TypeError, KeyError) as error:  # a line that was cut, or a proxy's
                raise PlatformUnreachable(f"{self._cluster.where} broke off within an event") from error
            if kind != "ERROR":
                yield kind, thing
            elif thing.get("code") == 410:
                raise Expired(self._cluster.where, 410, thing.get("message", ""))
            else:
                raise PlatformUnreachable(f"{self._cluster.where} ends a watch: {thing.get('message')}")

    def close(self) -> None:
        """End the stream, also for its reader."""
        self._closed = True
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError):
            self._response.close()
