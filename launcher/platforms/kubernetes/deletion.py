"""Removing a job: everything that it was made of is deleted, and a listing proves that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from launcher.errors import PlatformRefused, PlatformUnreachable
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.cluster import ApiObject, Cluster, Forbidden, Resource
from launcher.platforms.kubernetes.informer import JobName
from launcher.platforms.kubernetes.reasons import advice
from launcher.platforms.kubernetes.states import silent_since, uid_of

Left = Mapping[Resource, Sequence[ApiObject]]

_NAMED = 4
"""Silent machines that are named."""


def remove(cluster: Cluster, job: JobName, kinds: Collection[Resource], *, limit: float) -> None:
    """Delete everything of the job and return when nothing is left.

    A kind that may not be listed or deleted keeps nothing else from being deleted; it is reported in the end.

    PlatformUnreachable names what is left and what holds it where something is not gone in time.

    Args:
        kinds: what the job can have been made of.
        limit: seconds that all of it may take.
    """
    ends, pause = time.monotonic() + limit, 0.1
    limited = cluster.within(limit)
    refused: dict[Resource, Forbidden] = {}
    left: Left = {}
    try:
        while left := _left(limited, job, kinds, refused):
            there = {uid_of(one) for things in left.values() for one in things}
            going = False
            for resource, things in left.items():
                staying = [one for one in things if not one["metadata"].get("deletionTimestamp")]
                going = going or len(staying) < len(things)
                # What has an owner goes with it, or a controller would put another in its place.
                owners = [{one["uid"] for one in thing["metadata"].get("ownerReferences", ())} for thing in staying]
                free = [one for one, by in zip(staying, owners, strict=True) if not by & there]
                if not free or resource in refused:
                    continue
                try:
                    if resource is api.SERVICES:  # of which there is one, maybe without our labels
                        limited.delete_one(resource, free[0])
                    else:
                        limited.delete(resource, job.namespace, labels=job.labels)
                    going = True
                except Forbidden as error:
                    refused[resource] = error
            if not going:
                break  # nothing of what is left may be deleted
            if time.monotonic() + pause > ends:
                raise PlatformUnreachable(f"it had {limit:.0f} s")
            time.sleep(pause)
            pause = min(2.0, pause * 1.5)
    except PlatformUnreachable as error:
        still = f"is not gone: {_told(left)}{_lost(left.get(api.PODS, ()))}" if left else "may not be gone"
        raise PlatformUnreachable(f"job {job} {still}; {error}; cancel it again") from error
    if refused:
        rest = f"still there: {_told(left)}" if left else "what may be seen of it is gone"
        words = "; ".join(error.message for error in refused.values())
        fixes = "; ".join(dict.fromkeys(advice(error.message) for error in refused.values()))
        raise PlatformRefused(f"job {job} is not proved to be gone: {words} ({rest}); {fixes}")


def listed(cluster: Cluster, job: JobName, kinds: Collection[Resource]) -> tuple[str, ...]:
    """Return what there is of the job, a line for each kind. One that may not be listed is PlatformRefused."""
    refused: dict[Resource, Forbidden] = {}
    left = _left(cluster, job, kinds, refused)
    if words := "; ".join(error.message for error in refused.values()):
        raise PlatformRefused(f"what is left of job {job} cannot be listed: {words}")
    return tuple(_told({resource: things}) for resource, things in left.items())


def _left(
    cluster: Cluster, job: JobName, kinds: Collection[Resource], refused: dict[Resource, Forbidden]
) -> dict[Resource, list[ApiObject]]:
    left = {}
    for resource in kinds:
        # JobSet does not hand our labels on to the Service that it makes.
        which = {"fields": f"metadata.name={job.name}"} if resource is api.SERVICES else {"labels": job.labels}
        try:
            found, _ = cluster.list(resource, job.namespace, **which)
        except api.NotThere:
            continue  # a cluster without that kind has nothing of it
        except Forbidden as error:
            refused[resource] = error
            continue
        if found:
            left[resource] = found
    return left


def _told(left: Left) -> str:
    """Return what is left, and what holds it: a finalizer that nobody serves, or the machine that a pod is on."""
    parts = []
    for resource, things in left.items():
        held = sorted({one for thing in things for one in thing["metadata"].get("finalizers", ())})
        some = []
        for thing in things[:3]:
            machine = thing.get("spec", {}).get("nodeName")
            some.append(f"{thing['metadata']['name']}" + (f" on {machine}" if machine else ""))
        parts.append(f"{len(things)} {resource} ({', '.join(some)}" + f"; held by {', '.join(held)}" * bool(held) + ")")
    return ", ".join(parts)


def _lost(pods: Sequence[ApiObject]) -> str:
    """Return which machines of pods do not answer; only they can say that a pod has ended."""
    lost = {str(pod["spec"]["nodeName"]): since for pod in pods if (since := silent_since(pod))}
    named = ", ".join(f"{machine} has not answered since {since}" for machine, since in sorted(lost.items())[:_NAMED])
    fix = "its pods go when it is back, or when its Node is deleted (`kubectl delete node`)"
    return f"; {named}: {fix}" if named else ""
