"""What the API server, its admission plug-ins and JobSet's webhooks fill in, and what they refuse.

Rules and wording follow Kubernetes' validation and JobSet's `pkg/webhooks` as far as this project's objects meet them;
what is not checked here is not checked (probes' ports, security contexts, …).
Stricter than the real thing in one way: unknown fields are always refused, where the API drops them with a warning
unless asked for `fieldValidation=Strict`. A field of ours that is dropped in silence is a fault of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import ApiError, invalid, not_found
from .pods import requests_of
from .quantities import amount
from .schemas import Version, immutable_paths, shape_troubles
from .store import KINDS, KUEUE, Object, Store, copied, labels_of

LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
VARIABLE = re.compile(r"[ -<>-~]+")  # any printable ASCII but "=" (relaxed since 1.32)
QUEUE = f"{KUEUE}/queue-name"
LONGEST_ANNOTATIONS = 256 * 1024
"""Bytes of keys and values (apimachinery's TotalAnnotationSizeLimitB)."""
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
JOB_FAILURES = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}


class Admission:
    """Defaults, then refusals. `kueue` says whether its webhooks are installed, `jobset` which release of that is."""

    def __init__(self, store: Store, *, kueue: bool, jobset: Version) -> None:
        self.store, self.kueue, self.jobset = store, kueue, jobset

    def create(self, plural: str, sent: Mapping[str, Any]) -> Object:
        """The object as it will be stored.

        Raises:
            ApiError: It is refused.
        """
        thing = copied(dict(sent))
        kind, meta = KINDS[plural], thing.setdefault("metadata", {})
        if kind.namespaced:
            self._namespace(meta["namespace"])
        _DEFAULTS.get(plural, lambda _: None)(thing)
        if (
            self.kueue
            and plural in ("jobs", "jobsets")
            and QUEUE in labels_of(thing)
            and not meta.get("ownerReferences")
        ):
            thing["spec"]["suspend"] = True
        troubles = [*shape_troubles(thing, self.jobset), *metadata_troubles(meta)]
        if not troubles:  # what follows may count on the shape
            troubles = list(_TROUBLES.get(plural, lambda _: ())(thing))
        if troubles:
            raise invalid(kind.name, meta["name"], troubles)
        if self.store.get(plural, meta.get("namespace"), meta["name"]) is not None:
            raise ApiError(409, f'{kind.qualified} "{meta["name"]}" already exists', reason="AlreadyExists")
        if plural == "pods":
            self.pod(thing)
        return thing

    def update(self, plural: str, old: Mapping[str, Any], sent: Mapping[str, Any]) -> Object:
        """The new state, status aside, which only the subresource changes.

        Raises:
            ApiError: Something in it may not change, or it is not valid.
        """
        new = copied(dict(sent))
        kind, meta, was = KINDS[plural], new["metadata"], old["metadata"]
        if meta.get("resourceVersion", was["resourceVersion"]) != was["resourceVersion"]:
            raise ApiError(
                409,
                f'Operation cannot be fulfilled on {kind.qualified} "{was["name"]}": the object has been modified; '
                "please apply your changes to the latest version and try again",
            )
        for name in ("uid", "creationTimestamp", "resourceVersion", "generation", "deletionTimestamp"):
            if name in was:
                meta[name] = was[name]
        if "status" in kind.subresources:
            new.pop("status", None)
            new |= {"status": copied(old["status"])} if "status" in old else {}
        _DEFAULTS.get(plural, lambda _: None)(new)
        troubles = [
            *shape_troubles(new, self.jobset),
            *metadata_troubles(meta),
            *_UPDATES.get(plural, lambda *_: ())(old, new),
        ]
        if troubles:
            raise invalid(kind.name, was["name"], troubles)
        return new

    def pod(self, pod: Object) -> None:
        """The plug-ins that look at pods only: service account, priority, quota.

        Raises:
            ApiError: One of them refuses the pod.
        """
        meta, spec = pod["metadata"], pod["spec"]
        namespace, account = meta["namespace"], spec.setdefault("serviceAccountName", "default")
        if self.store.get("serviceaccounts", namespace, account) is None:
            raise _forbidden(
                meta, f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            )
        priority = spec.get("priorityClassName")
        if priority and self.store.get("priorityclasses", None, priority) is None:
            raise _forbidden(meta, f"no PriorityClass with name {priority} was found")
        # The admission plug-in ExtendedResourceToleration, which GKE has on.
        wanted = {name for name in requests_of(pod) if "/" in name}
        spec.setdefault("tolerations", []).extend({"key": name, "operator": "Exists"} for name in sorted(wanted))
        for quota in self.store.all("resourcequotas", namespace):
            self._quota(pod, quota)

    def _quota(self, pod: Object, quota: Mapping[str, Any]) -> None:
        hard = quota["spec"].get("hard", {})
        asked = {"pods": 1.0} | {f"requests.{name}": value for name, value in requests_of(pod).items()}
        live = [
            one
            for one in self.store.all("pods", pod["metadata"]["namespace"])
            if one.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        ]
        over = []
        for name in sorted(hard.keys() & asked.keys()):
            bare = name.removeprefix("requests.")
            used = float(len(live)) if name == "pods" else sum(requests_of(one).get(bare, 0.0) for one in live)
            if used + asked[name] > amount(hard[name]):
                over.append((name, asked[name], used, hard[name]))
        if over:
            lists = (",".join(f"{row[0]}={row[i]:g}" for row in over) for i in (1, 2))
            limited = ",".join(f"{row[0]}={row[3]}" for row in over)
            requested, used = lists
            raise _forbidden(
                pod["metadata"],
                f"exceeded quota: {quota['metadata']['name']}, "
                f"requested: {requested}, used: {used}, limited: {limited}",
            )

    def _namespace(self, name: str) -> None:
        found = self.store.get("namespaces", None, name)
        if found is None:
            raise not_found("namespaces", name)


def _forbidden(meta: Mapping[str, Any], why: str) -> ApiError:
    return ApiError(403, f'pods "{meta["name"]}" is forbidden: {why}')


# --- metadata ---------------------------------------------------------------------------------------------------------


def metadata_troubles(meta: Mapping[str, Any], where: str = "metadata") -> Iterator[str]:
    """Names, labels and annotations, as every object has them."""
    name = meta.get("name", "")
    if where == "metadata" and not (SUBDOMAIN.fullmatch(name) and len(name) <= 253):
        yield f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case …'
    for key, value in (meta.get("labels") or {}).items():
        yield from _key_troubles(key, f"{where}.labels")
        if not isinstance(value, str):
            yield f"{where}.labels: Invalid value: {value!r}: must be a string"
        elif len(value) > 63:
            yield f'{where}.labels: Invalid value: "{value}": must be no more than 63 bytes'
        elif value and not QUALIFIED.fullmatch(value):
            yield f'{where}.labels: Invalid value: "{value}": a valid label must be an empty string or consist of …'
    size = 0
    for key, value in (meta.get("annotations") or {}).items():
        yield from _key_troubles(key.lower(), f"{where}.annotations")
        if not isinstance(value, str):
            yield f"{where}.annotations: Invalid value: {value!r}: must be a string"
        size += len(key) + len(str(value))
    if size > LONGEST_ANNOTATIONS:
        yield f"{where}.annotations: Too long: may not be more than {LONGEST_ANNOTATIONS} bytes"


def _key_troubles(key: str, where: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not (QUALIFIED.fullmatch(name) and len(name) <= 63):
        yield f'{where}: Invalid value: "{key}": name part must consist of alphanumeric characters, … of at most 63'
    if slash and not (SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253):
        yield f'{where}: Invalid value: "{key}": prefix part a lowercase RFC 1123 subdomain must consist of …'


def _label_troubles(name: str, where: str, pattern: re.Pattern[str] = LABEL_1123) -> Iterator[str]:
    if len(name) > 63:
        yield f'{where}: Invalid value: "{name}": must be no more than 63 characters'
    if not pattern.fullmatch(name):
        number = 1035 if pattern is LABEL_1035 else 1123
        yield f'{where}: Invalid value: "{name}": a lowercase RFC {number} label must consist of lower case …'


# --- services and nodes -----------------------------------------------------------------------------------------------


def _service_troubles(service: Mapping[str, Any]) -> Iterator[str]:
    yield from _label_troubles(service["metadata"]["name"], "metadata.name", LABEL_1035)
    spec = service["spec"]
    if not spec.get("ports") and spec.get("clusterIP") != "None":
        yield "spec.ports: Required value"


# --- pods -------------------------------------------------------------------------------------------------------------


def _pod_defaults(pod: Object) -> None:
    pod_spec_defaults(pod["spec"])


def pod_spec_defaults(spec: Object) -> None:
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    for container in (*spec.get("containers", []), *spec.get("initContainers", [])):
        resources = container.get("resources", {})
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}


def _pod_troubles(pod: Mapping[str, Any]) -> Iterator[str]:
    yield from pod_spec_troubles(pod["spec"], "spec")
    if pod["spec"].get("hostname"):
        yield from _label_troubles(pod["spec"]["hostname"], "spec.hostname")


def pod_spec_troubles(spec: Mapping[str, Any], where: str) -> Iterator[str]:
    """What is wrong with the pods of a template, or with a pod."""
    containers, before = spec.get("containers") or [], spec.get("initContainers") or []
    if not containers:
        yield f"{where}.containers: Required value"
    names = [one["name"] for one in (*containers, *before)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f'{where}.containers: Duplicate value: "{name}"'
    volumes = [one["name"] for one in spec.get("volumes") or []]
    for name in sorted({name for name in volumes if volumes.count(name) > 1}):
        yield f'{where}.volumes: Duplicate value: "{name}"'
    for volume in spec.get("volumes") or []:
        if len(volume) != 2:
            yield f"{where}.volumes[{volume['name']}]: may not specify more than 1 volume type, and needs one"
    for field, group in (("containers", containers), ("initContainers", before)):
        for index, container in enumerate(group):
            at = f"{where}.{field}[{index}]"
            yield from _container_troubles(container, set(volumes), at, init=field == "initContainers")
    if spec.get("subdomain"):
        yield from _label_troubles(spec["subdomain"], f"{where}.subdomain")
    if spec.get("hostNetwork"):
        for container in containers:
            for port in container.get("ports") or []:
                if port.get("hostPort", port["containerPort"]) != port["containerPort"]:
                    yield f"{where}.containers.ports: Invalid value: must match `containerPort` with `hostNetwork`"
    for toleration in spec.get("tolerations") or []:
        if toleration.get("operator", "Equal") == "Exists" and toleration.get("value"):
            yield f"{where}.tolerations: Invalid value: value must be empty when `operator` is 'Exists'"


def _container_troubles(container: Mapping[str, Any], volumes: set[str], at: str, *, init: bool) -> Iterator[str]:
    yield from _label_troubles(container["name"], f"{at}.name")
    if not container.get("image"):
        yield f"{at}.image: Required value"
    always = container.get("restartPolicy") == "Always"
    if "restartPolicy" in container and not (init and always):
        yield f"{at}.restartPolicy: Forbidden: for init containers only, and Always"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle"):
        if init and not always and container.get(probe):
            yield f"{at}.{probe}: Forbidden: may not be set for init containers without restartPolicy=Always"
    paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield f'{at}.volumeMounts: Invalid value: "{path}": must be unique'
    for mount in container.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            yield f'{at}.volumeMounts[{mount["name"]}].name: Not found: "{mount["name"]}"'
    for variable in container.get("env") or []:
        if not VARIABLE.fullmatch(variable["name"]):
            yield f'{at}.env.name: Invalid value: "{variable["name"]}": a valid environment variable name must …'
        if variable.get("value") and variable.get("valueFrom"):
            yield f"{at}.env[{variable['name']}].valueFrom: Invalid value: not when `value` is not empty"
        if "value" in variable and not isinstance(variable["value"], str):
            yield f"{at}.env[{variable['name']}].value: must be a string"
    limits, wants = (container.get("resources", {}).get(name) or {} for name in ("limits", "requests"))
    for name, value in wants.items():
        if name in limits and amount(value) > amount(limits[name]):
            yield f'{at}.resources.requests: Invalid value: "{value}": must be less than or equal to {name} limit'
        if "/" in name and amount(value) != amount(limits.get(name, "0")):
            yield f"{at}.resources.limits: Required value: Limit must be set for non overcommitable resources"


# --- jobs -------------------------------------------------------------------------------------------------------------


def _job_defaults(job: Object) -> None:
    job_spec_defaults(job["spec"])


def job_spec_defaults(spec: Object) -> None:
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = spec["parallelism"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    policy = "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed"
    spec.setdefault("podReplacementPolicy", policy)
    pod_spec_defaults(spec.get("template", {}).get("spec", {}))


def _job_troubles(job: Mapping[str, Any]) -> Iterator[str]:
    name, spec = job["metadata"]["name"], job["spec"]
    yield from job_spec_troubles(spec, "spec")
    if spec["completionMode"] == "Indexed":
        hostname = f"{name}-{spec.get('completions', 1) - 1}"
        if len(hostname) > 63:
            yield f'metadata.name: Invalid value: "{name}": must be no more than 63 characters with the index appended'
        if not LABEL_1123.fullmatch(hostname):
            yield f'metadata.name: Invalid value: "{name}": must be a DNS label, for it becomes the pods\' hostname'
    elif len(name) > 63:
        yield f'metadata.name: Invalid value: "{name}": must be no more than 63 characters'
    if "selector" in spec and not spec.get("manualSelector"):
        yield "spec.selector: Invalid value: `selector` not auto-generated"


def job_spec_troubles(spec: Mapping[str, Any], where: str) -> Iterator[str]:
    template = spec.get("template") or {}
    pod = template.get("spec") or {}
    yield from metadata_troubles(template.get("metadata") or {}, f"{where}.template.metadata")
    yield from pod_spec_troubles(pod, f"{where}.template.spec")
    if pod.get("restartPolicy") not in ("OnFailure", "Never"):
        yield f'{where}.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    if spec.get("completionMode") == "Indexed" and "completions" not in spec:
        yield f"{where}.completions: Required value: when completion mode is Indexed"
    policy = spec.get("podFailurePolicy")
    if policy is None:
        return
    if pod.get("restartPolicy") != "Never":
        given = pod.get("restartPolicy")
        yield (
            f'{where}.template.spec.restartPolicy: Invalid value: "{given}": '
            'only "Never" is supported when podFailurePolicy is specified'
        )
    if spec.get("podReplacementPolicy") == "TerminatingOrFailed":
        yield f'{where}.podReplacementPolicy: Unsupported value: "TerminatingOrFailed": supported values: "Failed"'
    names = {one["name"] for one in (*pod.get("containers", []), *pod.get("initContainers", []))}
    for index, rule in enumerate(policy["rules"]):
        yield from _rule_troubles(rule, names, spec, f"{where}.podFailurePolicy.rules[{index}]")


def _rule_troubles(rule: Mapping[str, Any], names: set[str], spec: Mapping[str, Any], at: str) -> Iterator[str]:
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if bool(codes) == bool(conditions):
        yield f"{at}: Invalid value: specifying one of OnExitCodes and OnPodConditions is required, and not both"
    if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
        yield f'{at}.action: Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set'
    if codes:
        values = codes["values"]
        if codes["operator"] == "In" and 0 in values:
            yield f"{at}.onExitCodes.values: Invalid value: 0: must not be 0 for the In operator"
        if values != sorted(values) or len(set(values)) != len(values):
            yield f"{at}.onExitCodes.values: Invalid value: {values}: must be ordered and without duplicates"
        if not 1 <= len(values) <= 255:
            yield f"{at}.onExitCodes.values: must have 1 to 255 values"
        if codes.get("containerName") and codes["containerName"] not in names:
            yield (
                f'{at}.onExitCodes.containerName: Invalid value: "{codes["containerName"]}": '
                "must be one of the container or initContainer names"
            )
    for one in conditions or []:
        if one.get("status", "True") not in ("True", "False", "Unknown"):
            yield f"{at}.onPodConditions.status: Unsupported value"


def _job_update_troubles(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, after = old["spec"], new["spec"]
    fixed = ["completionMode", "podFailurePolicy", "backoffLimitPerIndex", "selector", "managedBy", "completions"]
    yield from (
        f"spec.{name}: Invalid value: field is immutable" for name in fixed if before.get(name) != after.get(name)
    )
    if _fixed_template(before, loose=before.get("suspend", False)) != _fixed_template(
        after, loose=before.get("suspend", False)
    ):
        yield "spec.template: Invalid value: field is immutable"


def _fixed_template(spec: Mapping[str, Any], *, loose: bool) -> Object:
    """The pod template without what Kueue may set on a suspended job."""
    template = copied(spec["template"])
    if loose:
        template.pop("metadata", None)
        for name in ("nodeSelector", "tolerations", "schedulingGates", "affinity"):
            template["spec"].pop(name, None)
    return template


# --- jobsets ----------------------------------------------------------------------------------------------------------


def _jobset_defaults(jobset: Object) -> None:
    spec = jobset["spec"]
    spec.setdefault("successPolicy", {"operator": "All"}).setdefault("operator", "All")
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    spec.setdefault("network", {}).setdefault("enableDNSHostnames", True)
    spec["network"].setdefault("publishNotReadyAddresses", True)
    for index, rule in enumerate(spec.get("failurePolicy", {}).get("rules", [])):
        rule.setdefault("name", f"failurePolicyRule{index}")
    if "failurePolicy" in spec:
        spec["failurePolicy"].setdefault("maxRestarts", 0)
        spec["failurePolicy"].setdefault("restartStrategy", "Recreate")
    for replicated in spec.get("replicatedJobs", []):
        replicated.setdefault("replicas", 1)
        replicated.setdefault("groupName", "default")
        job = replicated.get("template", {}).get("spec", {})
        job.setdefault("completionMode", "Indexed")
        # The trap of the facts: containers would restart in place, and no failure would be seen.
        job.get("template", {}).get("spec", {}).setdefault("restartPolicy", "OnFailure")


def _jobset_troubles(jobset: Mapping[str, Any]) -> Iterator[str]:
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    names = [one["name"] for one in spec.get("replicatedJobs", [])]
    if not names:
        yield "spec.replicatedJobs: Required value"
    yield from (
        f'spec.replicatedJobs: Duplicate value: "{one}"' for one in sorted({n for n in names if names.count(n) > 1})
    )
    for index, replicated in enumerate(spec.get("replicatedJobs", [])):
        job, where = copied(replicated["template"]["spec"]), f"spec.replicatedJobs[{index}].template.spec"
        longest = f"{name}-{replicated['name']}-{replicated['replicas'] - 1}"
        if len(longest) > 63:
            yield "JobSet name is too long, job names generated for this JobSet will exceed 63 characters"
        elif not LABEL_1035.fullmatch(longest):
            yield f'"{longest}": a DNS-1035 label must consist of lower case alphanumeric characters …'
        if job.get("completions") and len(f"{longest}-{job['completions'] - 1}-abcde") > 63:
            yield "JobSet name is too long, pod names generated for this JobSet will exceed 63 characters"
        # The real webhook leaves these to the creation of the child Jobs, which then fails for ever
        # (JobCreationFailed); here they are refused at once, so that no test waits for it.
        job_spec_defaults(job)
        yield from job_spec_troubles(job, where)
    subdomain = spec["network"].get("subdomain")
    if subdomain:
        yield from _label_troubles(subdomain, "spec.network.subdomain", LABEL_1035)
    for one in spec["successPolicy"].get("targetReplicatedJobs") or []:
        if one not in names:
            yield f"invalid replicatedJob name '{one}' does not appear in .spec.ReplicatedJobs"
    yield from _failure_policy_troubles(spec.get("failurePolicy") or {}, set(names))


def _failure_policy_troubles(policy: Mapping[str, Any], names: set[str]) -> Iterator[str]:
    rules = policy.get("rules", [])
    given = [rule["name"] for rule in rules]
    for name in sorted({one for one in given if given.count(one) > 1}):
        yield f"rule names are not unique, several rules have the same name '{name}'"
    for rule in rules:
        if not RULE_NAME.fullmatch(rule["name"]):
            yield f"invalid failure policy rule name '{rule['name']}', a failure policy rule name must start with …"
        for one in rule.get("targetReplicatedJobs") or []:
            if one not in names:
                yield f"invalid replicatedJob name '{one}' in failure policy does not appear in .spec.ReplicatedJobs"
        for reason in rule.get("onJobFailureReasons") or []:
            if reason not in JOB_FAILURES:
                yield f"invalid job failure reason '{reason}' in failure policy is not a recognized job failure reason"
        for pattern in rule.get("onJobFailureMessagePatterns") or []:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"invalid job failure message pattern '{pattern}': {error}"


def _jobset_update_troubles(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for path in immutable_paths():
        if _at(old, path) != _at(new, path):
            yield f"{'.'.join(path)}: Invalid value: Value is immutable"
    loose = old["spec"].get("suspend", False) or new["spec"].get("suspend", False)
    before, after = (_fixed_replicas(thing["spec"], loose=loose) for thing in (old, new))
    if before != after:
        yield "spec.replicatedJobs: Invalid value: field is immutable"


def _fixed_replicas(spec: Mapping[str, Any], *, loose: bool) -> list[Any]:
    return [
        {
            **one,
            "template": {**one["template"]["spec"], "template": _fixed_template(one["template"]["spec"], loose=loose)},
        }
        for one in spec["replicatedJobs"]
    ]


def _at(thing: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        thing = (thing or {}).get(name)
    return thing


def _pod_update_troubles(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    free = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "schedulingGates")
    before, after = ({k: v for k, v in thing["spec"].items() if k not in free} for thing in (old, new))
    if before != after:
        yield "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`, …"


_DEFAULTS: dict[str, Callable[[Object], None]] = {
    "pods": _pod_defaults, "jobs": _job_defaults, "jobsets": _jobset_defaults,
}  # fmt: skip
_TROUBLES: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "pods": _pod_troubles, "jobs": _job_troubles, "jobsets": _jobset_troubles, "services": _service_troubles,
}  # fmt: skip
_UPDATES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[str]]] = {
    "pods": _pod_update_troubles, "jobs": _job_update_troubles, "jobsets": _jobset_update_troubles,
}  # fmt: skip
