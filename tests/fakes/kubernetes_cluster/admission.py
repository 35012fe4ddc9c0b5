"""The way of an object into the API server: defaults, shape, plug-ins that change it, validation, plug-ins that refuse.

Objects made by users and by controllers take the same way, and so does a dry run. The plug-ins are those of a cluster
as GKE sets it up: LimitRanger, ServiceAccount, Priority, DefaultTolerationSeconds, ExtendedResourceToleration,
PodSecurity and ResourceQuota, with the webhooks of JobSet and Kueue.
Stricter than the real thing in one way: unknown fields are always refused, where the API drops them with a warning
unless asked for `fieldValidation=Strict`. A field of ours that is dropped in silence is a fault of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import limits, podsecurity, validation
from .errors import ApiError, about, already_exists, forbidden, invalid, not_found
from .pods import requests_of
from .quotas import Quotas
from .schemas import Version, shape_troubles
from .store import KINDS, KUEUE, Kind, Object, Store, copied, labels_of

QUEUE = f"{KUEUE}/queue-name"
JOBSET_WEBHOOK = "vjobset.kb.io"
INVALID_SINCE: Version = (0, 12)
"""The first JobSet whose webhook refuses with 422 and fields; older ones do so with 403 and the bare text."""
NOT_READY_SECONDS = 300
"""How long a pod stays on a node that is not ready or unreachable, unless it says otherwise."""


class Admission:
    """`kueue` says whether its webhooks are installed, `jobset` which release of that is."""

    def __init__(self, store: Store, *, kueue: bool, jobset: Version) -> None:
        self.store, self.kueue, self.jobset = store, kueue, jobset
        self.quotas = Quotas(store)

    def create(self, plural: str, sent: Mapping[str, Any]) -> Object:
        """The object as it will be stored.

        Raises:
            ApiError: It is refused.
        """
        thing = copied(dict(sent))
        kind, meta = KINDS[plural], thing.setdefault("metadata", {})
        if kind.namespaced and self.store.get("namespaces", None, meta["namespace"]) is None:
            raise not_found("namespaces", meta["namespace"])
        validation.fill_in(plural, thing)
        if (
            self.kueue
            and plural in ("jobs", "jobsets")
            and QUEUE in labels_of(thing)
            and not meta.get("ownerReferences")
        ):
            thing["spec"]["suspend"] = True
        if troubles := [*shape_troubles(thing, self.jobset), *validation.metadata_troubles(meta)]:
            raise invalid(kind.qualified_name, meta["name"], troubles)  # what follows may count on the shape
        if plural == "pods":
            self._mutate(thing)
        if troubles := list(validation.troubles(plural, thing)):
            raise self._invalid(kind, meta["name"], troubles)
        if plural == "pods":
            self._validate(thing)
        self.quotas.admit(kind, thing)
        if self.store.get(plural, meta.get("namespace"), meta["name"]) is not None:
            raise already_exists(kind.qualified, meta["name"])
        return thing

    def pod(self, pod: Object) -> None:
        """A controller's pod, whose template has been validated: the plug-ins only.

        Raises:
            ApiError: One of them refuses the pod.
        """
        self._mutate(pod)
        self._validate(pod)
        self.quotas.admit(KINDS["pods"], pod)

    def warnings(self, plural: str, thing: Mapping[str, Any]) -> list[str]:
        """Return the warnings that the API sends in the Warning header with its answer to an object that it takes."""
        spec = {"pods": ("spec",), "jobs": ("spec", "template", "spec")}.get(plural)
        if spec is None:
            return []
        found: Any = thing
        for name in spec:
            found = found[name]
        return podsecurity.warnings(self._namespace(thing), found)

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
                details=about(kind.qualified, was["name"]),
            )
        for name in ("uid", "creationTimestamp", "resourceVersion", "generation", "deletionTimestamp"):
            if name in was:
                meta[name] = was[name]
        if "status" in kind.subresources:
            new.pop("status", None)
            new |= {"status": copied(old["status"])} if "status" in old else {}
        validation.fill_in(plural, new)
        if troubles := [*shape_troubles(new, self.jobset), *validation.metadata_troubles(meta)]:
            raise invalid(kind.qualified_name, was["name"], troubles)
        if troubles := list(validation.update_troubles(plural, old, new)):
            raise self._invalid(kind, was["name"], troubles)
        return new

    # --- plug-ins -----------------------------------------------------------------------------------------------------

    def _mutate(self, pod: Object) -> None:
        """Those that change a pod; its name is not generated yet, and refusals show what it is generated from."""
        meta, spec = pod["metadata"], pod["spec"]
        named, namespace = meta.get("generateName") or meta["name"], meta["namespace"]
        limits.apply_defaults(pod, list(self.store.all("limitranges", namespace)))
        account = spec.setdefault("serviceAccountName", "default")
        if self.store.get("serviceaccounts", namespace, account) is None:
            why = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise forbidden("pods", named, why)
        priority = spec.get("priorityClassName")
        if priority and self.store.get("priorityclasses", None, priority) is None:
            raise forbidden("pods", named, f"no PriorityClass with name {priority} was found")
        tolerations = spec.setdefault("tolerations", [])
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            if not any(_covers(one, key) for one in tolerations):
                tolerations.append(
                    {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NOT_READY_SECONDS}
                )
        # Off by default in Kubernetes, on in GKE.
        wanted = {name for name in requests_of(pod) if "/" in name}
        tolerations.extend({"key": name, "operator": "Exists"} for name in sorted(wanted))

    def _validate(self, pod: Object) -> None:
        meta = pod["metadata"]
        for one in self.store.all("limitranges", meta["namespace"]):
            if why := limits.trouble(pod, one):
                raise forbidden("pods", meta["name"], why)
        if why := podsecurity.refusal(self._namespace(pod), pod["spec"]):
            raise forbidden("pods", meta["name"], why)

    def _namespace(self, thing: Mapping[str, Any]) -> Object:
        found = self.store.get("namespaces", None, thing["metadata"]["namespace"])
        assert found is not None, thing["metadata"]["namespace"]
        return found

    def _invalid(self, kind: Kind, name: str, troubles: list[str]) -> ApiError:
        if kind.plural != "jobsets":
            return invalid(kind.qualified_name, name, troubles)
        if self.jobset < INVALID_SINCE:
            return ApiError(403, f'admission webhook "{JOBSET_WEBHOOK}" denied the request: ' + "\n".join(troubles))
        # What has no field of its own is an internal error of no field: apimachinery's wording.
        listed = [one if one.startswith("spec.") else f"<nil>: Internal error: {one}" for one in troubles]
        return invalid(kind.qualified_name, name, listed, webhook=JOBSET_WEBHOOK)


def _covers(toleration: Mapping[str, Any], key: str) -> bool:
    """Whether the pod says itself how long it stays on a node with that taint."""
    return toleration.get("key") in (None, "", key) and toleration.get("effect") in (None, "", "NoExecute")
