"""The way of an object into the API server: defaults, its shape, and the plug-ins that fill in or refuse pods.

Stricter than the real thing in one way: unknown fields are always refused, where the API drops them with a warning
unless asked for `fieldValidation=Strict`. A field of ours that is dropped in silence is a fault of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .errors import already_exists, forbidden, invalid, not_found
from .pods import finished
from .quantities import amount
from .schemas import shape_troubles
from .store import KINDS, Object, Store, copied

NOT_READY_SECONDS = 300
"""How long a pod stays on a node that is not ready or unreachable, unless it says otherwise."""


class Admission:
    def __init__(self, store: Store) -> None:
        self.store = store

    def create(self, plural: str, sent: Mapping[str, Any]) -> Object:
        """The object as it will be stored.

        Raises:
            ApiError: It is refused.
        """
        thing = copied(dict(sent))
        kind, meta = KINDS[plural], thing["metadata"]
        if kind.namespaced and self.store.get("namespaces", None, meta["namespace"]) is None:
            raise not_found("namespaces", meta["namespace"])
        if troubles := shape_troubles(thing):
            raise invalid(kind.qualified_name, meta["name"], troubles)
        _fill_in(plural, thing)
        if troubles := list(_troubles(plural, thing)):
            raise invalid(kind.qualified_name, meta["name"], troubles)
        if plural == "pods":
            self.pod(thing)
        if self.store.get(plural, meta.get("namespace"), meta["name"]) is not None:
            raise already_exists(kind.qualified, meta["name"])
        return thing

    def pod(self, pod: Object) -> None:
        """What the plug-ins add to a pod, also to one that a controller makes.

        Raises:
            ApiError: One of them refuses it. The name is what it will be generated from.
        """
        meta, spec = pod["metadata"], pod["spec"]
        named, namespace = meta.get("generateName") or meta["name"], meta["namespace"]
        account = spec.setdefault("serviceAccountName", "default")
        if self.store.get("serviceaccounts", namespace, account) is None:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise forbidden("pods", named, why)
        priority = spec.get("priorityClassName")
        if priority and self.store.get("priorityclasses", None, priority) is None:
            raise forbidden("pods", named, f"no PriorityClass with name {priority} was found")
        spec.setdefault("tolerations", []).extend(
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NOT_READY_SECONDS}
            for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        )
        resources = {name for one in spec["containers"] for name in (one.get("resources") or {}).get("limits") or {}}
        spec["tolerations"] += [{"key": name, "operator": "Exists"} for name in sorted(resources) if "/" in name]
        self._count(pod)

    def _count(self, pod: Object) -> None:
        """A ResourceQuota on the number of pods; of other quotas, the tests tell the words."""
        namespace = pod["metadata"]["namespace"]
        used = sum(not finished(one) for one in self.store.all("pods", namespace))
        for quota in self.store.all("resourcequotas", namespace):
            most = quota["spec"].get("hard", {}).get("pods")
            if most is not None and used + 1 > amount(most):
                words = f"requested: pods=1, used: pods={used}, limited: pods={most}"
                why = f"exceeded quota: {quota['metadata']['name']}, {words}"
                raise forbidden("pods", pod["metadata"]["name"], why)


def _fill_in(plural: str, thing: Object) -> None:
    spec = thing.get("spec", {})
    if plural == "namespaces":
        thing["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = thing["metadata"]["name"]
    elif plural == "jobs":
        spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    elif plural == "jobsets":
        spec.setdefault("network", {}).setdefault("enableDNSHostnames", True)
        for replicated in spec["replicatedJobs"]:
            job = replicated["template"]["spec"]
            job.setdefault("completionMode", "Indexed")
            # The trap of JobSet: containers would restart in place, and no failure would be seen.
            job["template"]["spec"].setdefault("restartPolicy", "OnFailure")


def _troubles(plural: str, thing: Mapping[str, Any]) -> Iterator[str]:
    """A few of the rules of Jobs and pods. A JobSet's are found when its controller creates the Job."""
    if plural not in ("pods", "jobs"):
        return
    spec, where = (thing["spec"], "spec")
    if plural == "jobs":
        if spec.get("podFailurePolicy") and spec["template"]["spec"].get("restartPolicy") != "Never":
            given = spec["template"]["spec"].get("restartPolicy")
            yield (
                f'spec.template.spec.restartPolicy: Invalid value: "{given}": '
                'only "Never" is supported when podFailurePolicy is specified'
            )
        spec, where = spec["template"]["spec"], "spec.template.spec"
    volumes = [one["name"] for one in spec.get("volumes") or []]
    yield from (f'{where}.volumes: Duplicate value: "{one}"' for one in sorted(set(volumes)) if volumes.count(one) > 1)
    for container in (*(spec.get("initContainers") or []), *spec["containers"]):
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                yield f'{where}.containers.volumeMounts[{mount["name"]}].name: Not found: "{mount["name"]}"'
