"""The API over HTTP: kmock's server and discovery, with our store behind it. Nothing is changed by clients: they
create, read, watch and delete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kmock import KubernetesScaffold, ResourceInfo

from .access import Access
from .admission import Admission
from .errors import ApiError, not_found
from .pods import finished
from .processes import Log
from .selectors import Test, selected
from .store import KINDS, Change, Kind, Object, Store, copied, moment


@dataclass
class Call:
    """A request, read."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str | None
    subresource: str
    query: Mapping[str, str]
    body: Any
    served: bool = True
    """Whether this cluster knows the kind; whoever may not ask for it is not told."""

    @property
    def what(self) -> str:
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


@dataclass
class Traffic:
    """What clients asked for, by (verb, resource)."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def clear(self) -> None:
        self.calls.clear()


@dataclass
class Trouble:
    """An injected answer: as long as it lasts, or as often as it says."""

    status: int
    applies: Callable[[Call], bool]
    times: float
    message: str
    headers: dict[str, str]


LogSource = Callable[[Object, str], Log]


class ApiServer(KubernetesScaffold):
    """Serves what the store holds; `Cluster` makes and starts it."""

    def __init__(self, store: Store, admission: Admission, access: Access, logs: LogSource, *, version: str) -> None:
        super().__init__()
        self.store, self.admission, self.access, self.logs = store, admission, access, logs
        self.traffic = Traffic()
        self.troubles: list[Trouble] = []
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
        self["get /version"] << {"major": major, "minor": minor, "gitVersion": version}

    def declare(self) -> None:
        """Tell discovery what there is, which is all but what is missing."""
        self.resources.clear()
        for kind in KINDS.values():
            if kind.plural not in self.missing:
                for version in kind.versions:
                    self.resources[f"{kind.group}/{version}/{kind.plural}" if kind.group else f"v1/{kind.plural}"] = (
                        ResourceInfo(
                            kind=kind.name, singular=kind.name.lower(), namespaced=kind.namespaced,
                            verbs={"create", "delete", "deletecollection", "get", "list", "watch"},
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
        call = read_call(raw, body, self.missing)
        key = (call.verb, call.what) if call else ("get", raw.path)
        self.traffic.calls[key] += 1
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
                return await self._stream(raw, self._events(call), "application/json")
            if call.subresource == "log":
                chunks = self.logs(self._found(call), call.query["container"]).read(call.query)
                if self.cut_logs_after:
                    chunks = self._cut(raw, chunks, self.cut_logs_after.pop(0))
                return await self._stream(raw, chunks, "text/plain")
            answer, status = self._do(call)
            if call.verb == "get" and status == 200:
                answer = _as_asked(answer, raw.headers.get("Accept", ""))
        except ConnectionAbortedError:
            if raw.transport is not None:
                raw.transport.abort()
            return web.Response()
        except ApiError as error:
            return _answer(error.body(), error.status, error.headers)
        return _answer(answer, status)

    # --- reading and writing ------------------------------------------------------------------------------------------

    def _do(self, call: Call) -> tuple[Object, int]:
        match call.verb:
            case "list":
                return self._list(call), 200
            case "get":
                return self._found(call), 200
            case "create" if call.kind.plural == "selfsubjectaccessreviews":
                return self.access.review(_body_of(call)), 201
            case "create":
                return self._create(call), 201
            case "delete":
                return self.delete(call.kind.plural, self._found(call), call.body or {}), 200
            case "deletecollection":
                test = selected(call.query.get("labelSelector"), call.query.get("fieldSelector"))
                for thing in self.store.all(call.kind.plural, call.namespace):
                    if test(thing):
                        self.delete(call.kind.plural, thing, call.body or {})
                return self._list(call), 200
        raise ApiError(405, "the server does not allow this method on the requested resource")

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
        return {
            "kind": f"{call.kind.name}List", "apiVersion": call.kind.api_versions[0],
            "metadata": {"resourceVersion": str(self.store.version)},
            "items": [_listed(thing, call.kind) for thing in found],
        }  # fmt: skip

    def _create(self, call: Call) -> Object:
        thing = _body_of(call)
        meta = thing.setdefault("metadata", {})
        if call.kind.namespaced:
            meta.setdefault("namespace", call.namespace)
        admitted = self.admission.create(call.kind.plural, thing)
        if call.query.get("dryRun") == "All":
            return admitted
        return self.store.add(call.kind.plural, admitted)

    def delete(self, plural: str, thing: Object, options: Mapping[str, Any]) -> Object:
        """What a DELETE does at once; owned objects and graceful ends are the garbage collector's and the kubelet's."""
        uid = (options.get("preconditions") or {}).get("uid")
        name = thing["metadata"]["name"]
        if uid and uid != thing["metadata"]["uid"]:
            raise ApiError(
                409, f"Precondition failed: UID in precondition: {uid}, UID in object meta: {thing['metadata']['uid']}"
            )
        policy = options.get("propagationPolicy")
        grace = options.get("gracePeriodSeconds")

        def mark(gone: Object) -> None:
            meta = gone["metadata"]
            finalizers = meta.setdefault("finalizers", [])
            if policy == "Foreground" and "foregroundDeletion" not in finalizers:
                finalizers.append("foregroundDeletion")
            meta.setdefault("deletionTimestamp", moment())
            if plural == "pods":
                graceful = gone["spec"].get("nodeName") and not finished(gone)
                default = gone["spec"].get("terminationGracePeriodSeconds", 30)
                seconds = (default if grace is None else grace) if graceful else 0
                meta["deletionGracePeriodSeconds"] = min(seconds, meta.get("deletionGracePeriodSeconds", seconds))

        changed = self.store.change(plural, thing, mark)
        if changed is not None and self.store.get(plural, thing["metadata"].get("namespace"), name) is not None:
            return changed
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _stream(
        self, raw: web.BaseRequest, chunks: AsyncIterator[bytes], content_type: str
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
                    await response.write(chunk)
                await response.write_eof()
        finally:
            self._streams.discard(transport)
        return response

    async def _cut(self, raw: web.BaseRequest, chunks: AsyncIterator[bytes], left: int) -> AsyncIterator[bytes]:
        """The log until the connection breaks, after so many bytes."""
        async for chunk in chunks:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                assert raw.transport is not None
                raw.transport.abort()
                return

    async def _events(self, call: Call) -> AsyncIterator[bytes]:
        test = selected(call.query.get("labelSelector"), call.query.get("fieldSelector"))
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        since, wanted = self.store.version, int(call.query["resourceVersion"])
        self._watchers.add(queue)
        try:
            if wanted < self.store.forgotten:
                yield _event("ERROR", ApiError(410, f"too old resource version: {wanted} ({since})").body())
                return
            for change in [one for one in self.store.history if wanted < one.version <= since]:
                if (event := _seen(change, call, test)) is not None:
                    yield event
            while not self.closing and (change := await queue.get()) is not None:
                if change.version < 0:
                    gone = ApiError(410, "The resourceVersion for the provided watch is too old.")
                    yield _event("ERROR", gone.body())
                    return
                if change.version > since and (event := _seen(change, call, test)) is not None:
                    yield event
        finally:
            self._watchers.discard(queue)

    def _trouble(self, call: Call) -> None:
        for trouble in list(self.troubles):
            if trouble.times <= 0:
                self.troubles.remove(trouble)
            elif trouble.applies(call):
                trouble.times -= 1
                if not trouble.status:
                    raise ConnectionAbortedError
                raise ApiError(trouble.status, trouble.message, headers=trouble.headers)


def read_call(raw: web.BaseRequest, body: bytes, missing: set[str]) -> Call | None:
    """The request as a verb on a kind; none where it is about something else (discovery, /version)."""
    parts = [part for part in raw.path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = rest[0], (rest[1] if len(rest) > 1 else None), "/".join(rest[2:])
    kind = VIRTUAL.get(plural) or KINDS.get(plural)
    if kind is None or kind.group != group:
        kind = Kind(group, (), plural, plural)
    served = version in kind.versions and plural not in missing and subresource in ("", *kind.subresources)
    query = dict(raw.query)
    watching = query.get("watch", "").lower() in ("true", "1")
    named = {"GET": "get", "DELETE": "delete"}
    unnamed = {"GET": "watch" if watching else "list", "POST": "create", "DELETE": "deletecollection"}
    verb = (named if name else unnamed).get(raw.method, "")
    return Call(verb, kind, namespace, name, subresource, query, json.loads(body) if body else None, served)


# Answered, not stored.
VIRTUAL = {
    "selfsubjectaccessreviews": Kind(
        "authorization.k8s.io", ("v1",), "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
    )
}


def suffix() -> str:
    """Five characters, as generated names end in: without vowels and look-alikes."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def _answer(content: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=json.dumps(content).encode(), status=status, content_type="application/json", headers=headers
    )


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
    thing: Object = copied(call.body)
    thing.setdefault("kind", call.kind.name)
    thing.setdefault("apiVersion", call.kind.api_versions[0])
    return thing


def _listed(thing: Object, kind: Kind) -> Object:
    """As it stands in a list: built-in kinds do not say there what they are."""
    return thing if kind.custom else {key: value for key, value in thing.items() if key not in ("kind", "apiVersion")}
