"""Run:ai by its REST API, as an application: tokens, the body of a training, and what became of it.

https://docs.nvidia.com/run-ai/self-hosted/reference/rest-api and https://github.com/runai-professional-services/runapy
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, PlatformRefused, PlatformUnreachable
from launcher.findings import finding_of
from launcher.platforms.runai.flags import preemptibility
from launcher.platforms.runai.render import Workload
from launcher.platforms.runai.settings import RunaiPlatformConfig
from litgpt_demo.findings import Finding
from litgpt_demo.secrets import Grant, origin_of, protected_client, redacted

TRAININGS = "/api/v1/workloads/distributed"
WORKLOADS = "/api/v1/workloads"
PROJECTS = "/api/v1/org-unit/projects"
CLUSTERS = "/api/v1/clusters"
TOKEN = "/api/v1/token"

PROJECT_ID = "(id of project {})"
CLUSTER_ID = "(id of its cluster)"
"""Stand in what is rendered for ids that only the server knows; `submit` fills them in."""

# Seconds for one answer, and how often a request that nobody answered is sent again.
_TIMEOUT = 30.0
_TRIES = 4
# Refusals that say nothing about the request: nobody waited for it, or it came too early or too often.
_UNCLEAR = {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS}
# Seconds before its end that a token is renewed.
_EARLY = 60.0


@dataclass(frozen=True)
class Credentials:
    """The secret of an application that an administrator has made in Run:ai. It is held in memory only."""

    client_id: str
    client_secret: str = field(repr=False)


def credentials_of(name: str, environ: Mapping[str, str]) -> Credentials | None:
    """The two halves that the environment has under a name, or in files that it names; None where one is missing.

    Raises:
        LoginProblem: a named file cannot be read.
    """
    client_id, secret = (_credential(f"{name}_{half}", environ) for half in ("CLIENT_ID", "CLIENT_SECRET"))
    return Credentials(client_id, secret) if client_id and secret else None


def _credential(variable: str, environ: Mapping[str, str]) -> str:
    if value := environ.get(variable):
        return value
    if not (path := environ.get(f"{variable}_FILE")):
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise LoginProblem(f"{variable}_FILE={path} cannot be read ({error.strerror}); fix the path") from error


def uses_rest(settings: RunaiPlatformConfig, environ: Mapping[str, str]) -> bool:
    """Return whether Run:ai is asked by REST, as the settings and, with `auto`, the credentials say."""
    if settings.api == "auto":
        return settings.url is not None and credentials_of(settings.credentials, environ) is not None
    return settings.api == "rest"


def require_known(recorded: RunaiPlatformConfig, given: RunaiPlatformConfig | None, environ: Mapping[str, str]) -> None:
    """Refuse to send credentials to a control plane that neither the user's config nor the environment names.

    Raises:
        ConfigProblem: only the record of a job does, which nodes can write.
    """
    if not uses_rest(recorded, environ):
        return
    name, there = recorded.credentials, origin_of(recorded.url or "")
    if given is not None and (given.credentials, origin_of(given.url or "")) == (name, there):
        return
    variable = f"{name}_URL"
    known = origin_of(environ.get(variable, ""))
    if known and known == there:
        return
    raise ConfigProblem(
        f"the record of the job names the control plane {there} for the credentials {name}, and {variable} is "
        f"{known or 'not set to a URL'}: everybody who may write to the root can write "
        f"records, so that credentials are not sent where only a record says; if {there} is yours, export "
        f"{variable}={there}, or give the verb the config instead of the name"
    )


class Rest:
    """The API of one control plane."""

    def __init__(
        self, settings: RunaiPlatformConfig, environ: Mapping[str, str] | None = None, *, pause: float = 1.0
    ) -> None:
        """
        Args:
            environ: where the credentials are; this process's own by default.
            pause: seconds before a request that nobody answered is sent again; each time twice as long.
        """
        self._settings, self._pause = settings, pause
        known_to = os.environ if environ is None else environ
        # A function, because a traceback may show the attributes of an object.
        self._credentials: Callable[[], Credentials | None] = lambda: credentials_of(settings.credentials, known_to)
        self._token, self._until = SecretStr(""), 0.0
        self._grants = [_client_credentials, _app_token]
        self.name, self.excludes = "rest", True
        ids = f"{PROJECT_ID.format(settings.project)}, {CLUSTER_ID}"
        self.unknown: tuple[str, ...] = (
            f"{ids}: the control plane says which they are when the training is submitted",
        )

    @cached_property
    def _client(self) -> httpx.Client:
        return protected_client(base_url=self._settings.url or "", timeout=_TIMEOUT)

    # --- what every way to Run:ai has ---

    def render(self, work: Workload) -> Mapping[str, Any]:
        """The request; ids of project and cluster are filled in when it is sent."""
        return {"method": "POST", "url": f"{self._settings.url}{TRAININGS}", "json": body(work)}

    def check(self, _sent: Mapping[str, Any]) -> Iterator[Finding]:
        """Check that the credentials work, and that project and cluster are there."""
        try:
            self._place()
        except LoginProblem as error:
            yield finding_of(error, "runai.login")
        except ConfigProblem as error:
            yield Finding("error", "runai.project", str(error))
        except (PlatformRefused, PlatformUnreachable) as error:
            fix = "see that platform.url is the control plane's, and that this machine reaches it"
            yield Finding(finding_of(error, "runai.api").severity, "runai.api", str(error), fix)

    def check_access(self) -> None:
        """Log in, and find project and cluster."""
        self._place()

    def submit(self, sent: Mapping[str, Any]) -> None:
        """Post the training, once; one of that name that is there already is left as it is."""
        project, cluster = self._place()
        training = {**sent["json"], "projectId": project, "clusterId": cluster}
        answer = self._ask("POST", TRAININGS, tries=1, json=training)
        if answer.status_code != httpx.codes.CONFLICT:
            self._document(answer)

    def phase(self, name: str) -> str | None:
        """The training's phase in Run:ai's word, None where there is none of that name."""
        found = self._find(name)
        if found is None:
            return None
        return str(found.get("phase") or found.get("actualPhase") or "Unknown")

    def delete(self, name: str) -> None:
        """Ask for it to be gone; already gone is success."""
        found = self._find(name)
        if found is None:
            return
        answer = self._ask("DELETE", f"{TRAININGS}/{found['id']}")
        if answer.status_code != httpx.codes.NOT_FOUND:
            self._require(answer)

    # --- looking things up ---

    def _find(self, name: str) -> Mapping[str, Any] | None:
        """The workload of this name in the project; filters match more than they say, so all is compared here."""
        project, _ = self._place()
        filters = [f"name=={name}", f"projectId=={project}"]
        found = self._get(WORKLOADS, params={"filterBy": filters, "deleted": "false", "limit": 500})
        alike: list[Mapping[str, Any]] = found.get("workloads") or []
        mine = [one for one in alike if one.get("name") == name and str(one.get("projectId")) == project]
        return next((one for one in mine if one.get("phase") != "Deleted"), None)

    def _place(self) -> tuple[str, str]:
        """Ids of the project and of its cluster.

        Raises:
            ConfigProblem: there is no such project or cluster, or more than one.
        """
        return self._ids

    @cached_property
    def _ids(self) -> tuple[str, str]:
        wanted, where = self._settings.project, self._settings.cluster
        cluster = self._cluster_id(where) if where is not None else None
        found = self._get(PROJECTS, params={"filterBy": [f"name=={wanted}"], "limit": 500})
        projects = [one for one in found.get("projects") or [] if one.get("name") == wanted]
        here = [one for one in projects if cluster is None or one.get("clusterId") == cluster]
        if len(here) == 1:
            return str(here[0]["id"]), str(here[0]["clusterId"])
        if not projects:
            raise ConfigProblem(
                f"platform.project={wanted} is no project that this application may see; give its name as Run:ai shows "
                "it, or have an administrator give the application a role in it"
            )
        on = ", ".join(sorted(str(one.get("clusterId")) for one in projects))
        raise ConfigProblem(
            f"platform.project={wanted} is on the clusters {on}"
            + (f", not on platform.cluster={where}" if where else "; say which one in platform.cluster")
        )

    def _cluster_id(self, wanted: str) -> str:
        found = self._get(CLUSTERS)
        clusters = found if isinstance(found, list) else found.get("clusters") or []
        ids = {str(one.get("uuid") or one.get("id")): str(one.get("name")) for one in clusters}
        match = [one for one, name in ids.items() if wanted in {one, name}]
        if len(match) != 1:
            there = ", ".join(sorted(ids.values())) or "none"
            raise ConfigProblem(f"platform.cluster={wanted} is no cluster of {self._settings.url}; there are: {there}")
        return match[0]

    # --- requests: secrets are in no variable here, since a traceback may show those ---

    def _get(self, path: str, **content: Any) -> Any:
        """The document at a path.

        Raises:
            PlatformRefused: with the server's words.
            PlatformUnreachable: nobody answers, or somebody else does.
        """
        return self._document(self._ask("GET", path, **content))

    def _document(self, answer: httpx.Response) -> Any:
        """The document that a good answer holds; what answers without one is not the control plane.

        Raises:
            PlatformRefused: with the server's words.
            PlatformUnreachable: there is none.
        """
        try:
            return self._require(answer).json()
        except ValueError:
            what = f"{answer.request.method} {self._settings.url}{answer.request.url.path}"
            raise PlatformUnreachable(
                f"{what} is answered without JSON; see that platform.url is the control plane's"
            ) from None

    def _ask(self, method: str, path: str, *, tries: int = _TRIES, **content: Any) -> httpx.Response:
        """One request with a valid token. A token that the server has ended before its time is renewed once.

        Args:
            tries: how often it is sent where nobody answers.

        Raises:
            LoginProblem: the application is not let in.
            PlatformUnreachable: nobody answers.
        """
        answer = self._send(self._with_token(method, path, **content), tries=tries)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            self._until = 0.0
            answer = self._send(self._with_token(method, path, **content), tries=tries)
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise LoginProblem(
                f"{method} {path} is refused ({answer.status_code}: {self._words(answer)}); have an administrator give "
                f"the application of platform.credentials={self._settings.credentials} a role in the project that may "
                "create trainings (ML engineer, L1 researcher)"
            )
        return answer

    def _with_token(self, method: str, path: str, **content: Any) -> httpx.Request:
        if time.monotonic() > self._until - _EARLY:
            self._log_in()
        bearer = {"Authorization": f"Bearer {self._token.get_secret_value()}"}
        return self._client.build_request(method, path, headers=bearer, **content)

    def _log_in(self) -> None:
        """A token for the application, by whichever of the two grants this version knows.

        Raises:
            LoginProblem: no credentials, or they are refused.
        """
        name = self._settings.credentials
        known = self._credentials()
        if known is None:
            raise NoCredentials(
                f"there are no credentials for {self._settings.url}: export {name}_CLIENT_ID and {name}_CLIENT_SECRET "
                "of an application made under Run:ai's Access settings, or take platform.api=cli"
            )
        status = "no answer"
        for grant in list(self._grants):
            answer = self._send(self._client.build_request("POST", TOKEN, json=grant(known)))
            status = str(answer.status_code)
            if answer.status_code == httpx.codes.OK:
                if granted := Grant.read(answer.content):
                    self._grants = [grant]
                    self._token = granted.token
                    self._until = time.monotonic() + (granted.expires or 300 + _EARLY)
                    return
                raise LoginProblem(
                    f"{self._settings.url}{TOKEN} answers without a token; see that platform.url is the control plane's"
                )
            if answer.status_code not in {httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY}:
                break
        # The answer's text is left out: it may repeat what was sent.
        raise LoginProblem(
            f"{self._settings.url} refuses the credentials {name}_CLIENT_ID, {name}_CLIENT_SECRET ({status}); make new "
            "ones for the application, and export them"
        )

    def _send(self, request: httpx.Request, *, tries: int = _TRIES) -> httpx.Response:
        """One request, again where nobody answers: what looks or deletes is safe to repeat.

        Raises:
            PlatformRefused: it is to be sent elsewhere, which a secret is not.
            PlatformUnreachable: nobody answers for some seconds.
        """
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
                there = origin_of(answer.headers["location"]) or "another path"
                raise PlatformRefused(
                    f"{what} is redirected to {there} ({answer.status_code}), where credentials are not sent unasked; "
                    "write the control plane's own address in platform.url"
                )
            if answer.status_code < 500 and answer.status_code not in _UNCLEAR:
                return answer
            problem = f"{answer.status_code}: {self._words(answer)}"
        raise PlatformUnreachable(f"{what}: {problem}")

    def _require(self, answer: httpx.Response) -> httpx.Response:
        """The answer, if it is a good one.

        Raises:
            PlatformRefused: with the server's words.
        """
        if answer.is_success:
            return answer
        what = f"{answer.request.method} {answer.request.url.path} is refused ({answer.status_code})"
        raise PlatformRefused(f"{what}: {self._words(answer)}; fix what it names in the platform section")

    def _words(self, answer: httpx.Response) -> str:
        """Return what the server says, but nothing of what it says to a request for a token, which held the secret."""
        if answer.request.url.path == TOKEN:
            return answer.reason_phrase
        return self._without_secrets(_message(answer))[:300]

    def _without_secrets(self, text: str) -> str:
        known = None
        with suppress(LoginProblem):  # their file is gone since; the text is what is to be told
            known = self._credentials()
        return redacted(text, self._token.get_secret_value(), known.client_secret if known else "")


def _client_credentials(known: Credentials) -> dict[str, str]:
    return {"grantType": "client_credentials", "clientId": known.client_id, "clientSecret": known.client_secret}


def _app_token(known: Credentials) -> dict[str, str]:
    """Up to 2.20 or so; that the newer one is refused with 400 there is INFERRED."""
    return {"grantType": "app_token", "AppId": known.client_id, "AppSecret": known.client_secret}


def _message(answer: httpx.Response) -> str:
    try:
        told = answer.json()
    except ValueError:
        return answer.text
    if not isinstance(told, Mapping):
        return str(told)
    return "; ".join(str(told[key]) for key in ("message", "details", "error") if told.get(key)) or str(told)


# --- the body ---------------------------------------------------------------------------------------------------------


def body(work: Workload) -> dict[str, Any]:
    """A distributed training as the API has it. The server splits `args` at blanks, of which our words have none."""
    settings = work.settings
    return {
        "name": work.name,
        "projectId": PROJECT_ID.format(settings.project),
        "clusterId": CLUSTER_ID,
        "masterSpecSameAsWorker": True,
        "spec": {
            "distributedFramework": "PyTorch",
            "numWorkers": work.workers,
            "image": work.image,
            "imagePullPolicy": "IfNotPresent",
            "command": work.words[0],
            "args": " ".join(work.words[1:]),
            "environmentVariables": list(_variables(work)),
            "labels": [{"name": name, "value": value} for name, value in work.labels.items()],
            "annotations": [{"name": name, "value": value} for name, value in work.annotations.items()],
            "compute": _compute(work),
            **_storage(work),
            **_security(settings),
            **_placement(work),
            # A gang cannot heal pod by pod: a new attempt is ours to make.
            "backoffLimit": 0,
            "restartPolicy": "Never",
            "cleanPodPolicy": "Running",
            "terminationGracePeriodSeconds": settings.grace + 20,
        },
    }


def _variables(work: Workload) -> Iterator[dict[str, Any]]:
    yield from ({"name": name, "value": value} for name, value in work.variables.items())
    # Which machine a pod is on, for verdicts.
    yield {"name": "LITGPT_HOST", "podFieldRef": {"path": "spec.nodeName"}}
    for name, entry in work.settings.secrets.items():
        secret, _, key = entry.partition("/")
        yield {"name": name, "secret": {"name": secret, "key": key}}


def _compute(work: Workload) -> dict[str, Any]:
    settings = work.settings
    asked: dict[str, Any] = {"largeShmRequest": settings.large_shm}
    if settings.gpus >= 1:
        asked["gpuDevicesRequest"] = int(settings.gpus)
    elif settings.gpus:
        asked |= {"gpuDevicesRequest": 1, "gpuRequestType": "portion", "gpuPortionRequest": settings.gpus}
    if settings.cpus is not None:
        asked["cpuCoreRequest"] = settings.cpus
    if settings.memory is not None:
        asked["cpuMemoryRequest"] = settings.memory
    if work.resources:
        asked["extendedResources"] = [
            {"resource": name, "quantity": str(count)} for name, count in work.resources.items()
        ]
    return asked


def _storage(work: Workload) -> dict[str, Any]:
    claims = [
        {"path": claim.path, "existingPvc": True, "claimName": claim.name, "readOnly": False}
        for claim in work.settings.claims
    ]
    return {"storage": {"pvc": claims}} if claims else {}


def _security(settings: RunaiPlatformConfig) -> dict[str, Any]:
    """Return what pods may do. Without a uid they are the image's user, which is 1000 in ours.

    Whether that is root is not demanded: Kubernetes refuses images whose user has a name for it.
    """
    ids = {"runAsUid": settings.uid, "runAsGid": settings.gid}
    given: dict[str, Any] = {name: value for name, value in ids.items() if value is not None}
    if given:
        given = {"uidGidSource": "custom", **given, "runAsNonRoot": True}
    elif settings.run_as_user:
        given = {"uidGidSource": "fromIdpToken"}
    return {"security": {**given, "allowPrivilegeEscalation": False, "seccompProfileType": "RuntimeDefault"}}


def _placement(work: Workload) -> dict[str, Any]:
    settings = work.settings
    placed: dict[str, Any] = {}
    if work.exclude_nodes:
        # https://docs.nvidia.com/run-ai/self-hosted/reference/rest-api/api-guides/using-node-affinity-via-api shows it
        # of a workspace; that a training of several pods takes it for all of them is INFERRED.
        rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(work.exclude_nodes)}
        placed["nodeAffinityRequired"] = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    if settings.node_pools:
        placed["nodePools"] = list(settings.node_pools)
    if settings.node_type is not None:
        placed["nodeType"] = settings.node_type
    if settings.topology is not None:
        placed["podAffinity"] = {
            "type": "Required" if settings.topology_required else "Preferred",
            "key": settings.topology,
        }
    if settings.priority is not None:
        placed["priorityClass"] = settings.priority
    if settings.preemptible is not None:
        placed["preemptibility"] = preemptibility(settings.preemptible)
    return placed
