"""What the API server fills in and what it refuses of an object by itself: names, shapes of pods, Jobs and JobSets.

Rules and wording follow Kubernetes' validation and JobSet's `pkg/webhooks` as far as this project's objects meet them;
what is not checked here is not checked (probes' ports, security contexts, …).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import limits
from .quantities import amount
from .schemas import immutable_paths
from .store import Object, copied

LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
VARIABLE = re.compile(r"[ -<>-~]+")  # any printable ASCII but "=" (relaxed since 1.32)
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


def fill_in(plural: str, thing: Object) -> None:
    """Set the defaults of the kind."""
    _DEFAULTS.get(plural, lambda _: None)(thing)


def troubles(plural: str, thing: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a new object whose shape is right."""
    return _TROUBLES.get(plural, lambda _: iter(()))(thing)


def update_troubles(plural: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What of a change may not be."""
    return _UPDATES.get(plural, lambda *_: iter(()))(old, new)


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


def _namespace_defaults(namespace: Object) -> None:
    meta = namespace["metadata"]
    meta["labels"] = {**(meta.get("labels") or {}), "kubernetes.io/metadata.name": meta["name"]}
    namespace.setdefault("status", {}).setdefault("phase", "Active")


# --- pods -------------------------------------------------------------------------------------------------------------


def _pod_defaults(pod: Object) -> None:
    spec = pod["spec"]
    pod_spec_defaults(spec)
    for container in spec.get("containers", []) if spec.get("hostNetwork") else ():
        for port in container.get("ports") or []:
            port.setdefault("hostPort", port["containerPort"])


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
        # The pods' template is not looked at: a Job that cannot be is found out when the controller creates it.
        job, where = replicated["template"].get("spec") or {}, f"spec.replicatedJobs[{index}].name"
        longest = f"{name}-{replicated['name']}-{replicated['replicas'] - 1}"
        refused = f'{where}: Invalid value: "{longest}"'
        if len(longest) > 63:
            yield f"{refused}: JobSet name is too long, job names generated for this JobSet will exceed 63 characters"
        elif not LABEL_1035.fullmatch(longest):
            yield f"{refused}: a DNS-1035 label must consist of lower case alphanumeric characters …"
        if job.get("completions") and len(f"{longest}-{job['completions'] - 1}-abcde") > 63:
            yield f"{refused}: JobSet name is too long, pod names generated for this JobSet will exceed 63 characters"
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
    "pods": _pod_defaults, "jobs": _job_defaults, "jobsets": _jobset_defaults, "limitranges": limits.fill_in,
    "namespaces": _namespace_defaults,
}  # fmt: skip
_TROUBLES: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "pods": _pod_troubles, "jobs": _job_troubles, "jobsets": _jobset_troubles, "services": _service_troubles,
}  # fmt: skip
_UPDATES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[str]]] = {
    "pods": _pod_update_troubles, "jobs": _job_update_troubles, "jobsets": _jobset_update_troubles,
}  # fmt: skip
