"""The API over HTTP: kmock's server and discovery, with our store behind it.

From kmock come the HTTP server, discovery (`/apis`, `/api/v1`, `/version`) and its language for reactions of a test's
own (`cluster.api['get /healthz'] << b'ok'`); reading, writing and watching objects is ours (see store).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonpatch
from aiohttp import web
from kmock import KubernetesScaffold, ResourceInfo

from .access import Access
from .admission import Admission
from .disruption import Disruption
from .errors import ApiError, not_found
from .selectors import Test, selected
from .store import KINDS, Change, Kind, Object, Store, copied, moment

RETURNED = ("pods", "services", "serviceaccounts", "resourcequotas", "persistentvolumeclaims")
"""What a DELETE answers with the object; other kinds get a Status where they are gone at once."""
BIGGEST = 1_500_000
"""Bytes of one object: etcd's limit on requests, 1.5 MiB less what goes around it."""


@dataclass
class Call:
    """A request, read."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str | None
    subresource: str
    query: Mapping[str, str]
    content_type: str
    body: Any
    served: bool = True
    """Whether this cluster knows the kind; whoever may not ask for it is not told."""

    @property
    def what(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


@dataclass
class Traffic:
    """What clients asked for, by (verb, resource): the figures of the scale test."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of request bodies."""
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of answers, streams as they go."""

    def clear(self) -> None:
        for counter in (self.calls, self.received, self.sent):
            counter.clear()


@dataclass
class Trouble:
    """An injected answer: as long as it lasts, or as often as it says."""

    status: int
    applies: Callable[[Call], bool]
    times: float
    headers: dict[str, str] = field(default_factory=dict)


LogSource = Callable[[Object, Mapping[str, str]], AsyncIterator[bytes]]


class ApiServer(KubernetesScaffold):
    """Serves what the store holds; `Cluster` makes and starts it."""

    def __init__(
        self, store: Store, admission: Admission, access: Access, disruption: Disruption, logs: LogSource, *,
        version: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.store, self.admission, self.access, self.logs = store, admission, access, logs
        self.disruption = disruption
        self.traffic = Traffic()
        self.troubles: list[Trouble] = []
        self.bookmark_every = 5.0
        self.cut_logs_after: list[int] = []
        """Bytes after which each of the next log connections breaks."""
        self.missing: set[str] = set()
        """Kinds (plural) that this cluster has no CRD of."""
        self.closing = False
        self.down = False
        """Nothing is answered: the connection ends."""
        self._streams: set[asyncio.Transport] = set()
        self._watchers: set[asyncio.Queue[Change | None]] = set()
        store.listeners.append(self._tell)
        major, minor = version.lstrip("v").split(".")[:2]
        compatible = {"emulationMajor": major, "emulationMinor": minor,
                      "minCompatibilityMajor": major, "minCompatibilityMinor": str(int(minor) - 1)}  # fmt: skip
        self["get /version"] << {
            "major": major, "minor": minor, **(compatible if int(minor) >= 33 else {}), "gitVersion": version,
            "gitCommit": "", "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z", "goVersion": "go1.26",
            "compiler": "gc", "platform": "linux/amd64",
        }  # fmt: skip

    def declare(self) -> None:
        """Tell discovery what there is, which is all but what is missing."""
        self.resources.clear()
        for kind in KINDS.values():
            if kind.plural not in self.missing:
                for version in kind.versions:
                    self.resources[f"{kind.group}/{version}/{kind.plural}" if kind.group else f"v1/{kind.plural}"] = (
                        ResourceInfo(
                            kind=kind.name, singular=kind.name.lower(), namespaced=kind.namespaced,
                            verbs={"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"},
                            subresources=set(kind.subresources),
                        )
                    )  # fmt: skip

    def close_streams(self) -> None:
        self.closing = True
        for queue in self._watchers:
            queue.put_nowait(None)

    def expire_watches(self) -> None:
        """Every watch ends with 410, and none can be resumed from before now."""
        self.store.forget()
        gone = Change(-1, "", None, None)
        for queue in self._watchers:
            queue.put_nowait(gone)

    def break_streams(self) -> None:
        """All watches and followed logs lose their connection, without a word."""
        for transport in self._streams:
            transport.abort()

    def _tell(self, change: Change) -> None:
        for queue in self._watchers:
            queue.put_nowait(change)

    async def __call__(self, raw: web.BaseRequest) -> web.StreamResponse:
        if raw.path.endswith("/") and raw.path != "/":  # as clients ask for discovery, which kmock has without
            raw = raw.clone(rel_url=raw.rel_url.with_path(raw.path.rstrip("/")))
        body = await raw.read()
        if self.down:
            if raw.transport is not None:
                raw.transport.abort()
            return web.Response()
        try:
            call = read_call(raw, body, self.missing)
        except ApiError as error:
            return _answer(error.body(), error.status)
        key = (call.verb, call.what) if call else ("get", raw.path)
        self.traffic.calls[key] += 1
        self.traffic.received[key] += len(body)
        try:
            if call is None:
                if raw.path != "/version":  # open to all, as clusters are set up by default
                    self.access.authenticate(raw.headers)
                return await super().__call__(raw)
            self._trouble(call)
            self.access.authenticate(raw.headers)
            self.access.authorize(call.verb, call.kind, call.subresource, call.namespace, call.name)
            if not call.served:
                return web.Response(text="404 page not found\n", status=404)
            if call.verb == "watch":
                return await self._stream(raw, key, self._events(call), "application/json")
            if call.subresource == "log":
                return await self._log(raw, key, call)
            if len(body) > BIGGEST:
                raise ApiError(413, "etcdserver: request is too large", reason="RequestEntityTooLarge")
            answer, status = self._do(call)
            if call.verb == "get" and status == 200:
                answer = _as_asked(answer, raw.headers.get("Accept", ""))
        except ConnectionAbortedError:
            if raw.transport is not None:
                raw.transport.abort()
            return web.Response()
        except ApiError as error:
            answer, status = error.body(), error.status
            response = _answer(answer, status, error.headers)
        else:
            response = _answer(answer, status, warnings=self._warnings(call))
        self.traffic.sent[key] += len(response.body)  # type: ignore[arg-type]
        return response

    # --- reading and writing ------------------------------------------------------------------------------------------

    def _do(self, call: Call) -> tuple[Object, int]:
        match call.verb:
            case "list":
                return self._list(call), 200
            case "get":
                return self._found(call), 200
            case "create" if call.kind.plural == "selfsubjectaccessreviews":
                return self.access.review(_body_of(call)), 201
            case "create" if call.subresource == "eviction":
                return self._evict(call), 201
            case "create":
                return self._create(call), 201
            case "update" | "patch":
                return self._update(call), 200
            case "delete":
                return self.delete(call.kind.plural, self._found(call), _delete_options(call)), 200
            case "deletecollection":
                test = selected(call.query.get("labelSelector"), call.query.get("fieldSelector"))
                for thing in self.store.all(call.kind.plural, call.namespace):
                    if test(thing):
                        self.delete(call.kind.plural, thing, _delete_options(call))
                return self._list(call), 200
        raise ApiError(
            405, "the server does not allow this method on the requested resource", reason="MethodNotAllowed"
        )

    def _warnings(self, call: Call) -> list[str]:
        if call.verb != "create" or call.subresource or not call.kind.namespaced:
            return []
        return self.admission.warnings(call.kind.plural, {**_body_of(call), "metadata": {"namespace": call.namespace}})

    def _found(self, call: Call) -> Object:
        found = self.store.get(call.kind.plural, call.namespace, call.name or "")
        if found is None:
            raise not_found(call.kind.qualified, call.name or "")
        return found

    def _list(self, call: Call) -> Object:
        test = selected(call.query.get("labelSelector"), call.query.get("fieldSelector"))
        found = sorted(
            (thing for thing in self.store.all(call.kind.plural, call.namespace) if test(thing)),
            key=lambda thing: (thing["metadata"].get("namespace") or "", thing["metadata"]["name"]),
        )
        version, start = self.store.version, 0
        if token := call.query.get("continue"):
            version, start = json.loads(base64.urlsafe_b64decode(token))
            if version < self.store.forgotten:
                raise ApiError(410, "The provided continue parameter is too old to display a consistent list result.")
        limit = int(call.query.get("limit") or 0) or len(found)
        meta: Object = {"resourceVersion": str(version)}
        if start + limit < len(found):
            meta["continue"] = base64.urlsafe_b64encode(json.dumps([version, start + limit]).encode()).decode()
            meta["remainingItemCount"] = len(found) - start - limit
        return {
            "kind": f"{call.kind.name}List", "apiVersion": call.kind.api_versions[0], "metadata": meta,
            "items": [_listed(thing, call.kind) for thing in found[start : start + limit]],
        }  # fmt: skip

    def _create(self, call: Call) -> Object:
        thing = _body_of(call)
        meta = thing.setdefault("metadata", {})
        if "name" not in meta and meta.get("generateName"):
            meta["name"] = meta["generateName"] + suffix()
        if call.kind.namespaced and meta.setdefault("namespace", call.namespace) != call.namespace:
            raise ApiError(400, "the namespace of the provided object does not match the namespace sent on the request")
        if not meta.get("name"):
            raise ApiError(
                422, f'{call.kind.name} "" is invalid: metadata.name: Required value: name or generateName is required'
            )
        thing.pop("status", None) if "status" in call.kind.subresources and call.kind.plural != "nodes" else None
        for name in ("resourceVersion", "uid", "creationTimestamp", "deletionTimestamp"):
            meta.pop(name, None)
        admitted = self.admission.create(call.kind.plural, thing)
        if call.query.get("dryRun") == "All":
            return admitted
        return self.store.add(call.kind.plural, admitted)

    def _update(self, call: Call) -> Object:
        plural, old = call.kind.plural, self._found(call)
        new = _patched(old, call) if call.verb == "patch" else _body_of(call)
        if new["metadata"].get("name") != old["metadata"]["name"]:
            raise ApiError(400, "the name of the object does not match the name on the URL")
        if call.subresource == "status":
            status = new.get("status", {})
            return self.store.change(plural, old, lambda thing: thing.__setitem__("status", status)) or old
        admitted = self.admission.update(plural, old, new)
        if call.query.get("dryRun") == "All":
            return admitted

        def edit(thing: Object) -> None:
            thing.clear()
            thing.update(admitted)

        return self.store.change(plural, old, edit) or old

    def _evict(self, call: Call) -> Object:
        pod, asked = self._found(call), call.body or {}
        named = (asked.get("metadata") or {}).get("name")
        if named not in (None, pod["metadata"]["name"]):
            raise ApiError(400, "name in URL does not match name in Eviction object")
        options = asked.get("deleteOptions") or {}
        if call.query.get("dryRun"):
            options = {**options, "dryRun": [call.query["dryRun"]]}
        self.disruption.evict(pod, lambda one: self.delete("pods", one, options), dry_run=bool(options.get("dryRun")))
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def delete(self, plural: str, thing: Object, options: Mapping[str, Any]) -> Object:
        """What a DELETE does at once; owned objects and graceful ends are the garbage collector's and the kubelet's."""
        if options.get("dryRun"):
            return thing
        uid = (options.get("preconditions") or {}).get("uid")
        name = thing["metadata"]["name"]
        if uid and uid != thing["metadata"]["uid"]:
            raise ApiError(
                409, f"Precondition failed: UID in precondition: {uid}, UID in object meta: {thing['metadata']['uid']}"
            )
        policy = options.get("propagationPolicy")
        if policy not in (None, "Background", "Foreground", "Orphan"):
            raise ApiError(422, f'DeleteOptions "" is invalid: propagationPolicy: Unsupported value: "{policy}"')
        if policy is None and plural == "jobs":
            # The trap of batch/v1: a Job deleted without saying more leaves its pods behind
            # (kubernetes: pkg/registry/batch/job/strategy.go, DefaultGarbageCollectionPolicy).
            policy = "Orphan"
        grace = options.get("gracePeriodSeconds")

        def mark(gone: Object) -> None:
            meta = gone["metadata"]
            finalizers = meta.setdefault("finalizers", [])
            for wanted, finalizer in (("Foreground", "foregroundDeletion"), ("Orphan", "orphan")):
                if policy == wanted and finalizer not in finalizers:
                    finalizers.append(finalizer)
            meta.setdefault("deletionTimestamp", moment())
            if plural == "pods":
                graceful = gone["spec"].get("nodeName") and gone.get("status", {}).get("phase") in (
                    "Running",
                    "Pending",
                    None,
                )
                default = gone["spec"].get("terminationGracePeriodSeconds", 30)
                seconds = (default if grace is None else grace) if graceful else 0
                meta["deletionGracePeriodSeconds"] = min(seconds, meta.get("deletionGracePeriodSeconds", seconds))

        changed = self.store.change(plural, thing, mark)
        if changed is not None and self.store.get(plural, thing["metadata"].get("namespace"), name) is not None:
            return changed
        if plural in RETURNED:
            return thing
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
                "details": {"name": name, "kind": plural, "uid": thing["metadata"]["uid"]}}  # fmt: skip

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _stream(
        self, raw: web.BaseRequest, key: tuple[str, str], chunks: AsyncIterator[bytes], content_type: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        response.enable_chunked_encoding()
        transport = raw.transport
        assert isinstance(transport, asyncio.Transport)
        if self.closing:
            transport.abort()
            return response
        self._streams.add(transport)
        try:
            await response.prepare(raw)
            with contextlib.suppress(ConnectionError):
                async for chunk in chunks:
                    self.traffic.sent[key] += len(chunk)
                    await response.write(chunk)
                await response.write_eof()
        finally:
            self._streams.discard(transport)
        return response

    async def _log(self, raw: web.BaseRequest, key: tuple[str, str], call: Call) -> web.StreamResponse:
        chunks = self.logs(self._found(call), call.query)
        try:
            first = await anext(chunks)  # troubles are answers; what comes later is a stream
        except StopAsyncIteration:
            first = b""
        cut = self.cut_logs_after.pop(0) if self.cut_logs_after else None

        async def limited() -> AsyncIterator[bytes]:
            left = cut
            async for chunk in _after(first, chunks):
                if left is not None:
                    yield chunk[:left]
                    left -= len(chunk)
                    if left <= 0:
                        if raw.transport is not None:
                            raw.transport.abort()
                        return
                else:
                    yield chunk

        return await self._stream(raw, key, limited(), "text/plain")

    async def _events(self, call: Call) -> AsyncIterator[bytes]:
        test = selected(call.query.get("labelSelector"), call.query.get("fieldSelector"))
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        since, wanted = self.store.version, call.query.get("resourceVersion") or "0"
        self._watchers.add(queue)
        loop = asyncio.get_running_loop()
        # Real servers choose 30 to 60 minutes where the client does not say.
        ends = loop.time() + float(call.query.get("timeoutSeconds") or 1800)
        bookmarks = call.query.get("allowWatchBookmarks", "").lower() in ("true", "1")
        try:
            if wanted == "0":
                for thing in list(self.store.all(call.kind.plural, call.namespace)):
                    if test(thing) and call.name in (None, thing["metadata"]["name"]):
                        yield _event("ADDED", thing)
            elif int(wanted) < self.store.forgotten:
                yield _event(
                    "ERROR", ApiError(410, f"too old resource version: {wanted} ({self.store.version})").body()
                )
                return
            else:
                for change in [one for one in self.store.history if int(wanted) < one.version <= since]:
                    if (event := _seen(change, call, test)) is not None:
                        yield event
            while not self.closing:
                left = ends - loop.time()
                if left <= 0:
                    break
                try:
                    change = await asyncio.wait_for(queue.get(), min(left, self.bookmark_every))
                except TimeoutError:
                    if bookmarks:
                        yield _bookmark(call.kind, self.store.version)
                    continue
                if change is None:
                    return
                if change.version < 0:
                    yield _event(
                        "ERROR", ApiError(410, "The resourceVersion for the provided watch is too old.").body()
                    )
                    return
                if change.version > since and (event := _seen(change, call, test)) is not None:
                    yield event
            if bookmarks:
                yield _bookmark(call.kind, self.store.version)
        finally:
            self._watchers.discard(queue)

    def _trouble(self, call: Call) -> None:
        for trouble in list(self.troubles):
            if trouble.times <= 0:
                self.troubles.remove(trouble)
            elif trouble.applies(call):
                trouble.times -= 1
                text = {
                    429: "the server has received too many requests and has asked us to try again later",
                    500: "Internal error occurred: etcdserver: leader changed",
                    503: "the server is currently unable to handle the request",
                }
                if not trouble.status:
                    raise ConnectionAbortedError
                raise ApiError(trouble.status, text.get(trouble.status, "injected"), headers=trouble.headers)


def read_call(raw: web.BaseRequest, body: bytes, missing: set[str]) -> Call | None:
    """The request as a verb on a kind; none where it is about something else (discovery, /version).

    Raises:
        ApiError: Its method is none, or its body is no JSON.
    """
    parts = [part for part in raw.path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = rest[0], (rest[1] if len(rest) > 1 else None), "/".join(rest[2:])
    kind = VIRTUAL.get(plural) or KINDS.get(plural)
    if kind is None or kind.group != group:
        kind = Kind(group, (), plural, plural)
    served = version in kind.versions and plural not in missing and subresource in ("", *kind.subresources)
    query = dict(raw.query)
    watching = query.get("watch", "").lower() in ("true", "1")
    named = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "POST": "create"}
    unnamed = {"GET": "watch" if watching else "list", "POST": "create", "DELETE": "deletecollection"}
    verb = (named if name else unnamed).get(raw.method)
    if verb is None or (verb == "create" and name and subresource != "eviction"):
        raise ApiError(405, "the server does not allow this method on the requested resource")
    try:
        content = json.loads(body) if body else None
    except ValueError as error:
        raise ApiError(400, f"the object provided is unrecognized: {error}") from None
    return Call(verb, kind, namespace, name, subresource, query, raw.content_type, content, served)


# Answered, not stored.
VIRTUAL = {
    "selfsubjectaccessreviews": Kind(
        "authorization.k8s.io", ("v1",), "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
    )
}


def suffix() -> str:
    """Five characters, as generated names end in: without vowels and look-alikes."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def _answer(
    content: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None, *, warnings: Sequence[str] = ()
) -> web.Response:
    response = web.Response(
        body=json.dumps(content).encode(), status=status, content_type="application/json", headers=headers
    )
    for text in warnings:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{escaped}"')
    return response


def _as_asked(thing: Object, accept: str) -> Object:
    """The form of an object that the Accept header asks for: of a table, the columns that a secret has.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#alternate-representations-of-resources
    """
    if "as=PartialObjectMetadata" in accept:
        return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": thing["metadata"]}
    if "as=Table" in accept and thing["kind"] == "Secret":
        cells = [thing["metadata"]["name"], thing.get("type", "Opaque"), len(thing.get("data", {})), "1m"]
        columns = [{"name": name, "type": "string"} for name in ("Name", "Type", "Data", "Age")]
        return {
            "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {}, "columnDefinitions": columns,
            "rows": [{"cells": cells, "object": None}],
        }  # fmt: skip
    return thing


def _event(kind: str, thing: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _bookmark(kind: Kind, version: int) -> bytes:
    meta = {"resourceVersion": str(version), "creationTimestamp": None}
    return _event("BOOKMARK", {"kind": kind.name, "apiVersion": kind.api_versions[0], "metadata": meta})


def _seen(change: Change, call: Call, test: Test) -> bytes | None:
    """The change as this watch sees it: something that ceases to match its selector is deleted to it."""
    if change.kind != call.kind.plural:
        return None
    some = change.after or change.before
    assert some is not None
    meta = some["metadata"]
    if call.namespace not in (None, meta.get("namespace")) or call.name not in (None, meta["name"]):
        return None
    was, is_now = (thing is not None and test(thing) for thing in (change.before, change.after))
    if is_now:
        assert change.after is not None
        return _event("MODIFIED" if was else "ADDED", change.after)
    if not was:
        return None
    last = change.after or change.before
    assert last is not None
    return _event("DELETED", {**last, "metadata": {**last["metadata"], "resourceVersion": str(change.version)}})


def _body_of(call: Call) -> Object:
    thing = call.body
    if not isinstance(thing, dict):
        raise ApiError(400, "the object provided is unrecognized (must be of type …)")
    if thing.setdefault("kind", call.kind.name) != call.kind.name or (
        thing.setdefault("apiVersion", call.kind.api_versions[0]) not in call.kind.api_versions
    ):
        raise ApiError(
            400,
            f'{thing["kind"]} in version "{thing["apiVersion"]}" cannot be handled as a {call.kind.name}: '
            "the API version in the data does not match the expected API version",
        )
    return copied(thing)


def _delete_options(call: Call) -> dict[str, Any]:
    options = dict(call.body or {})
    for name in ("propagationPolicy", "gracePeriodSeconds"):
        if name in call.query:
            value = call.query[name]
            options[name] = int(value) if name == "gracePeriodSeconds" else value
    return options


def _patched(old: Object, call: Call) -> Object:
    """The object with the patch applied.

    Raises:
        ApiError: The kind of patch does not fit the object, or the patch is no good.
    """
    match call.content_type:
        case "application/json-patch+json":
            try:
                return jsonpatch.apply_patch(copied(old), call.body)
            except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
                raise ApiError(
                    422, f"the server rejected our request due to an error in our request: {error}"
                ) from None
        case "application/merge-patch+json":
            return _merged(old, call.body)
        case "application/strategic-merge-patch+json":
            if call.kind.custom or _has_list(call.body):
                # Lists merge by keys there, which this stand-in does not know.
                raise ApiError(415, f"the body of the request was in an unknown format: {call.content_type}")
            return _merged(old, call.body)
    raise ApiError(
        415, f"the body of the request was in an unknown format - accepted media types include: {call.content_type}"
    )


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copied(patch)
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


def _has_list(thing: Any) -> bool:
    return isinstance(thing, list) or (isinstance(thing, dict) and any(_has_list(value) for value in thing.values()))


def _listed(thing: Object, kind: Kind) -> Object:
    """As it stands in a list: built-in kinds do not say there what they are."""
    return thing if kind.custom else {key: value for key, value in thing.items() if key not in ("kind", "apiVersion")}


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
