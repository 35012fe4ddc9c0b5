"""Run:ai by its REST API, as an application: tokens, the body of a training, and what became of it.

https://docs.nvidia.com/run-ai/self-hosted/reference/rest-api and https://github.com/runai-professional-services/runapy
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import httpx
from pydantic import SecretStr

from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, PlatformRefused, PlatformUnreachable
from launcher.job import UNBUILT, drop_empty
from launcher.platforms.runai.render import PREEMPTIBILITY, Workload
from launcher.platforms.runai.settings import Credentials, RunaiPlatformConfig, credentials_of
from litgpt_demo.grants import Grant
from litgpt_demo.secrets import origin_of, protected_client, redacted

TRAININGS = "/api/v1/workloads/distributed"
WORKLOADS = "/api/v1/workloads"
PROJECTS = "/api/v1/org-unit/projects"
CLUSTERS = "/api/v1/clusters"
TOKEN = "/api/v1/token"

PROJECT_ID = "(id of project {})"
CLUSTER_ID = "(id of its cluster)"
"""Stand in what is rendered for ids that only the server knows; `submit` fills them in."""

# Seconds for one answer, and how often a request without an answer is sent again.
_TIMEOUT = 30.0
_TRIES = 4
# Refusals that do not depend on the request: the server did not wait for it, or it came too early or too often.
_UNCLEAR = {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS}
# Seconds before its end that a token is renewed.
_EARLY = 60.0


_GRANTS: tuple[Callable[[Credentials], dict[str, str]], ...] = (
    lambda known: {
        "grantType": "client_credentials", "clientId": known.client_id, "clientSecret": known.client_secret,
    },
    # Up to 2.20 or so; that the newer one is refused with 400 there is INFERRED.
    lambda known: {"grantType": "app_token", "AppId": known.client_id, "AppSecret": known.client_secret},
)  # fmt: skip


class Rest:
    def __init__(self, settings: RunaiPlatformConfig, environ: Mapping[str, str], *, pause: float = 1.0) -> None:
        """Take the credentials from `environ`. The pause before a request is repeated begins with `pause` seconds, and
        doubles each time."""
        self._settings, self._pause = settings, pause
        self._client = protected_client(base_url=settings.url or "", timeout=_TIMEOUT)
        # A function, because a traceback may show the attributes of an object.
        self._credentials: Callable[[], Credentials | None] = lambda: credentials_of(settings.credentials, environ)
        self._token, self._until = SecretStr(""), 0.0
        self._grants = _GRANTS
        self.name, self.error_code, self.excludes = "rest", "runai.api", True
        ids = f"{PROJECT_ID.format(settings.project)}, {CLUSTER_ID}"
        self.unknown = (f"{ids}: the control plane says which they are when the training is submitted",)

    def render(self, work: Workload) -> Mapping[str, Any]:
        return {"method": "POST", "url": f"{self._settings.url}{TRAININGS}", "json": body(work)}

    def check_access(self, _sent: Mapping[str, Any] | None = None) -> None:
        """Prove that the credentials work, and that project and cluster are there."""
        _ = self._ids

    def submit(self, sent: Mapping[str, Any]) -> None:
        project, cluster = self._ids
        training = {**sent["json"], "projectId": project, "clusterId": cluster}
        self._ask("POST", TRAININGS, tries=1, ignore_status=httpx.codes.CONFLICT, json=training)

    def phase(self, name: str) -> str | None:
        workload = self._find(name)
        if workload is None:
            return None
        return str(workload.get("phase") or workload.get("actualPhase") or "Unknown")

    def delete(self, name: str) -> None:
        workload = self._find(name)
        if workload is not None:
            self._ask("DELETE", f"{TRAININGS}/{workload['id']}", ignore_status=httpx.codes.NOT_FOUND)

    def _find(self, name: str) -> Mapping[str, Any] | None:
        project, _ = self._ids
        filters = [f"name=={name}", f"projectId=={project}"]
        listed = self._ask("GET", WORKLOADS, params={"filterBy": filters, "deleted": "false", "limit": 500})
        workloads: list[Mapping[str, Any]] = listed.get("workloads") or []
        for workload in workloads:
            # The server's filters match similar values too.
            exact = workload.get("name") == name and str(workload.get("projectId")) == project
            if exact and workload.get("phase") != "Deleted":
                return workload
        return None

    @cached_property
    def _ids(self) -> tuple[str, str]:
        wanted, wanted_cluster = self._settings.project, self._settings.cluster
        listed = self._ask("GET", PROJECTS, params={"filterBy": [f"name=={wanted}"], "limit": 500})
        projects = {  # by the id of their cluster
            str(project.get("clusterId")): str(project["id"])
            for project in listed.get("projects") or []
            if project.get("name") == wanted
        }
        if not projects:
            what = f"platform.project={wanted} is not a project that this application may see"
            raise ConfigProblem(what, fix="give its name as Run:ai shows it, or get the application a role in it")
        names = {cluster: cluster for cluster in projects}
        if wanted_cluster is not None:
            clusters = self._ask("GET", CLUSTERS)
            if not isinstance(clusters, list):
                clusters = clusters.get("clusters") or []
            names |= {str(cluster.get("uuid") or cluster.get("id")): str(cluster.get("name")) for cluster in clusters}
        matching = [cluster for cluster in projects if wanted_cluster in {None, cluster, names[cluster]}]
        if len(matching) != 1:
            what = f"platform.cluster={wanted_cluster} is not the one cluster of platform.project={wanted}"
            raise ConfigProblem(f"{what}; there are: {', '.join(sorted(names[cluster] for cluster in projects))}")
        return projects[matching[0]], matching[0]

    # No variable from here on holds a secret, because a traceback may show variables.
    def _ask(
        self, method: str, path: str, *, tries: int = _TRIES, ignore_status: int | None = None, **content: Any
    ) -> Any:
        """A refusal with `ignore_status` counts as success without a document. A token that the server has ended early
        is renewed once."""
        for _ in range(2):
            if time.monotonic() > self._until - _EARLY:
                self._log_in()
            request = self._client.build_request(
                method, path, headers={"Authorization": f"Bearer {self._token.get_secret_value()}"}, **content
            )
            answer = self._send(request, tries=tries)
            if answer.status_code != httpx.codes.UNAUTHORIZED:
                break
            self._until = 0.0
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            fix = "get the application of platform.credentials a role that may create trainings, as ML engineer"
            raise LoginProblem(
                f"{method} {path} is refused ({answer.status_code}: {self._message_of(answer)})", fix=fix
            )
        if answer.status_code == ignore_status or (answer.is_success and method == "DELETE"):
            return None
        if not answer.is_success:
            what = f"{method} {path} is refused ({answer.status_code}): {self._message_of(answer)}"
            raise PlatformRefused(what, fix="fix what it names in the platform section")
        try:
            return answer.json()
        except ValueError:
            what = f"{method} {self._settings.url}{path} is answered without JSON"
            raise PlatformUnreachable(what, fix="see that platform.url is the control plane's") from None

    def _log_in(self) -> None:
        name = self._settings.credentials
        credentials = self._credentials()
        if credentials is None:
            fix = f"export {name}_CLIENT_ID and {name}_CLIENT_SECRET of an application, or take platform.api=cli"
            raise NoCredentials(f"there are no credentials for {self._settings.url}", fix=fix)
        for grant in self._grants:
            answer = self._send(self._client.build_request("POST", TOKEN, json=grant(credentials)))
            status = answer.status_code
            granted = Grant.read(answer.content) if status == httpx.codes.OK else None
            if granted:
                self._grants, self._token = (grant,), granted.token
                self._until = time.monotonic() + (granted.expires or 300 + _EARLY)
                return
            if status not in {httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY}:
                break
        # The answer's text is left out: it may repeat what was sent.
        what = f"{self._settings.url} refuses the credentials {name}_CLIENT_ID, {name}_CLIENT_SECRET ({status})"
        fix = "see that platform.url is the control plane's; make new ones for the application, and export them"
        raise LoginProblem(what, fix=fix)

    def _send(self, request: httpx.Request, *, tries: int = _TRIES) -> httpx.Response:
        """Send a request, and repeat it if there is no answer: queries and deletions are safe to repeat."""
        what, problem = f"{request.method} {self._settings.url}{request.url.path}", ""
        for number in range(tries):
            if number:
                time.sleep(self._pause * 2 ** (number - 1))
            try:
                answer = self._client.send(request)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {self._without_secrets(str(error))}"
                continue
            if answer.has_redirect_location:
                target = origin_of(answer.headers["location"]) or "another path"
                what = f"{what} is redirected to {target} ({answer.status_code}), and credentials are not sent there"
                raise PlatformRefused(what, fix="write the control plane's own address in platform.url")
            if answer.status_code < 500 and answer.status_code not in _UNCLEAR:
                return answer
            problem = f"{answer.status_code}: {self._message_of(answer)}"
        raise PlatformUnreachable(f"{what}: {problem}", fix="check that this machine reaches platform.url")

    def _message_of(self, answer: httpx.Response) -> str:
        """Return the server's message, except for a request for a token, whose answer may repeat the secret."""
        if answer.request.url.path == TOKEN:
            return answer.reason_phrase
        try:
            document = answer.json()
        except ValueError:
            document = answer.text
        parts = []
        if isinstance(document, Mapping):
            parts = [str(document[key]) for key in ("message", "details", "error") if document.get(key)]
        return self._without_secrets("; ".join(parts) or str(document))[:300]

    def _without_secrets(self, text: str) -> str:
        # No variable holds a secret, because a traceback may show variables.
        with suppress(LoginProblem):  # the file of the credentials has disappeared
            credentials = self._credentials()
            if credentials is not None:
                text = redacted(text, credentials.client_secret)
        return redacted(text, self._token.get_secret_value())


def body(work: Workload) -> dict[str, Any]:
    """Return a distributed training for the API. The server splits `args` at blanks, and no argument has one."""
    settings, job = work.settings, work.job
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in work.variables.items()]
    # The machine of a pod, for diagnoses.
    variables.append({"name": "LITGPT_HOST", "podFieldRef": {"path": "spec.nodeName"}})
    for name, entry in settings.secrets.items():
        secret, _, key = entry.partition("/")
        variables.append({"name": name, "secret": {"name": secret, "key": key}})

    gpus = drop_empty(gpuDevicesRequest=settings.node_gpus)
    if 0 < settings.gpus < 1:
        gpus |= {"gpuRequestType": "portion", "gpuPortionRequest": settings.gpus}
    extended = [{"resource": name, "quantity": str(count)} for name, count in work.network.resources.items()]
    pvcs = [{"path": pvc.path, "existingPvc": True, "claimName": pvc.name, "readOnly": False} for pvc in settings.pvcs]
    # Without a uid pods run as the image's user, which is 1000 in our images. runAsNonRoot is not set then, because
    # Kubernetes refuses it for images whose user has a name.
    user = drop_empty(uidGidSource=settings.run_as_user and "fromIdpToken")
    if settings.uid is not None:
        user = {
            "uidGidSource": "custom",
            **drop_empty(runAsUid=settings.uid, runAsGid=settings.gid),
            "runAsNonRoot": True,
        }
    # https://docs.nvidia.com/run-ai/self-hosted/reference/rest-api/api-guides/using-node-affinity-via-api shows it of a
    # workspace; that a training of several pods takes it for all of them is INFERRED.
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(job.exclude_nodes)}
    topology = {"type": "Required" if settings.topology_required else "Preferred", "key": settings.topology}
    spec = {
        "distributedFramework": "PyTorch",
        "numWorkers": job.nodes - 1,
        "image": job.image or UNBUILT,
        "imagePullPolicy": "IfNotPresent",
        "command": work.command[0],
        "args": " ".join(work.command[1:]),
        "environmentVariables": variables,
        "labels": [{"name": name, "value": value} for name, value in job.all_labels.items()],
        "annotations": [{"name": name, "value": value} for name, value in work.network.annotations.items()],
        "compute": {
            "largeShmRequest": settings.large_shm,
            **gpus,
            **drop_empty(cpuCoreRequest=settings.cpus, cpuMemoryRequest=settings.memory, extendedResources=extended),
        },
        **drop_empty(storage=drop_empty(pvc=pvcs)),
        "security": {**user, "allowPrivilegeEscalation": False, "seccompProfileType": "RuntimeDefault"},
        **drop_empty(
            nodeAffinityRequired=job.exclude_nodes and {"nodeSelectorTerms": [{"matchExpressions": [rule]}]},
            nodePools=list(settings.node_pools),
            nodeType=settings.node_type,
            podAffinity=settings.topology and topology,
            priorityClass=settings.priority,
            preemptibility=PREEMPTIBILITY[settings.preemptible],
        ),
        # A gang cannot recover pod by pod: the launcher makes a new attempt.
        "backoffLimit": 0,
        "restartPolicy": "Never",
        "cleanPodPolicy": "Running",
        "terminationGracePeriodSeconds": settings.grace_period + 20,
    }
    return {
        "name": job.attempt_name,
        "projectId": PROJECT_ID.format(settings.project),
        "clusterId": CLUSTER_ID,
        "masterSpecSameAsWorker": True,
        "spec": spec,
    }
