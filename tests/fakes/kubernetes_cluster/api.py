"""The API over HTTP. Nothing is changed by clients: they create, read, watch and delete."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from .control_plane import ControlPlane
from .kubelet import Kubelet, PodRun
from .store import KINDS, ApiError, Change, Kind, Object, copied, labels_of

Rule = Mapping[str, Sequence[str]]
"""As in a Role: apiGroups, resources and verbs."""
Test = Callable[[Object], bool]

USER = "tester"
FIELDS = {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase", "involvedObject.name"}
"""What the API indexes, for field selectors."""


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
    accept: str

    @property
    def what(self) -> str:
        return f"{self.kind.plural}/{self.subresource}".rstrip("/")


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


class Api:
    def __init__(self, plane: ControlPlane, kubelet: Kubelet, *, version: str, missing: set[str]) -> None:
        self.plane, self.store, self.kubelet = plane, plane.store, kubelet
        self.version, self.missing = version, missing
        self.token = secrets.token_urlsafe(12)
        self.rules: Sequence[Rule] | None = None
        """What the user may do; None is everything."""
        self.traffic = Traffic()
        self.troubles: list[Trouble] = []
        self.cut_logs_after: list[int] = []
        """Bytes after which each of the next log connections breaks."""
        self.down = False
        """Nothing is answered: the connection ends."""
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    def break_connections(self) -> None:
        """All of them end, without a word; watches and followed logs too."""
        for writer in self._connections:
            writer.transport.abort()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.get_running_loop().create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request by request."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
                headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:]}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = head[0].split(" ")
                await self._answer(writer, method, target, headers, json.loads(body) if body else {})
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            del self._connections[writer]
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: Mapping[str, str], body: Any
    ) -> None:
        path, _, query = target.partition("?")
        call = read_call(method, path, dict(parse_qsl(query)), body, headers.get("accept", ""))
        self.traffic.calls[(call.verb, call.what) if call else ("get", path)] += 1
        try:
            answer, status = self._answer_to(call, path, headers)
        except ApiError as error:
            answer, status = error.body, error.status
            headers = error.headers
        else:
            headers = {}
        if isinstance(answer, dict):
            content = json.dumps(answer).encode()
            writer.write(_head(status, {**headers, "Content-Length": str(len(content))}) + content)
        else:
            writer.write(_head(status, {"Transfer-Encoding": "chunked"}))
            await writer.drain()
            async for chunk in answer:
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _answer_to(
        self, call: Call | None, path: str, headers: Mapping[str, str]
    ) -> tuple[Object | AsyncIterator[bytes], int]:
        """What is said to a call; to none: who we are, and which kinds there are.

        Raises:
            ApiError: It is refused.
            ConnectionAbortedError: The connection is to break.
        """
        if self.down:
            raise ConnectionAbortedError
        if path == "/version":  # open to all, as clusters are set up by default
            return {"gitVersion": self.version}, 200
        if call is not None:
            self._trouble(call)
        if headers.get("authorization", "").partition(" ")[2] != self.token:
            raise ApiError(401, "Unauthorized")
        if call is None:
            there = [kind for kind in KINDS.values() if f"/apis/{kind.api_version}" == path.rstrip("/")]
            served = [{"name": kind.plural} for kind in there if kind.plural not in self.missing]
            return {"kind": "APIResourceList", "resources": served}, 200 if served else 404
        self._authorize(call)
        if (
            KINDS.get(call.kind.plural) != call.kind
            or call.kind.plural in self.missing
            or (call.subresource and call.what != "pods/log")
        ):
            raise ApiError(404, "the server could not find the requested resource")
        if call.verb == "watch":
            return self._watch(call, int(call.query["resourceVersion"])), 200
        if call.what == "pods/log":
            log = _log(self.kubelet.run_of(self._found(call)), call)
            return _cut(log, self.cut_logs_after.pop(0)) if self.cut_logs_after else log, 200
        answer = self._do(call)
        if call.verb in ("create", "delete", "deletecollection"):
            self.plane.settle()
        return answer, 201 if call.verb == "create" else 200

    def _trouble(self, call: Call) -> None:
        for trouble in self.troubles:
            if trouble.times > 0 and trouble.applies(call):
                trouble.times -= 1
                if not trouble.status:
                    raise ConnectionAbortedError
                error = ApiError(trouble.status, trouble.message)
                error.headers = trouble.headers
                raise error

    # --- who may ------------------------------------------------------------------------------------------------------

    def _allows(self, verb: str, group: str, what: str) -> bool:
        asked = (("apiGroups", group), ("resources", what), ("verbs", verb))
        return self.rules is None or any(
            all({"*", value} & {*rule.get(key, ())} for key, value in asked) for rule in self.rules
        )

    def _authorize(self, call: Call) -> None:
        kind = call.kind
        if kind.plural == "selfsubjectaccessreviews" or self._allows(call.verb, kind.group, call.what):
            return
        where = f'in the namespace "{call.namespace}"' if call.namespace else "at the cluster scope"
        raise ApiError(
            403,
            f'{kind.qualified}{f" {json.dumps(call.name)}" if call.name else ""} is forbidden: User "{USER}" cannot '
            f'{call.verb} resource "{call.what}" in API group "{kind.group}" {where}',
            kind.qualified, call.name,
        )  # fmt: skip

    # --- reading and writing ------------------------------------------------------------------------------------------

    def _do(self, call: Call) -> Object:
        plural = call.kind.plural
        match call.verb:
            case "list":
                return self._list(call)
            case "get":
                return _as_asked(self._found(call), call.accept)
            case "create" if plural == "selfsubjectaccessreviews":
                asked = call.body["spec"]["resourceAttributes"]
                what = f"{asked['resource']}/{asked.get('subresource', '')}".rstrip("/")
                return {**call.body, "status": {"allowed": self._allows(asked["verb"], asked["group"], what)}}
            case "create":
                made = copied(call.body)
                if call.kind.namespaced:
                    made["metadata"].setdefault("namespace", call.namespace)
                return self.plane.create(plural, made, dry_run=call.query.get("dryRun") == "All")
            case "delete":
                return self.plane.delete(plural, self._found(call), call.body)
            case "deletecollection":
                for thing in self._selected(call):
                    self.plane.delete(plural, thing, call.body)
                return self._list(call)
        raise ApiError(405, "the server does not allow this method on the requested resource")

    def _found(self, call: Call) -> Object:
        found = self.store.get(call.kind.plural, call.namespace, call.name or "")
        if found is None:
            qualified = call.kind.qualified
            raise ApiError(404, f'{qualified} "{call.name}" not found', qualified, call.name)
        return found

    def _selected(self, call: Call) -> list[Object]:
        test = _test(call)
        return [thing for thing in self.store.all(call.kind.plural, call.namespace) if test(thing)]

    def _list(self, call: Call) -> Object:
        items = self._selected(call)
        if not call.kind.custom:  # built-in kinds do not say in a list what they are
            items = [{key: thing[key] for key in thing.keys() - {"kind", "apiVersion"}} for thing in items]
        return {
            "kind": f"{call.kind.name}List", "apiVersion": call.kind.api_version,
            "metadata": {"resourceVersion": str(self.store.version)}, "items": items,
        }  # fmt: skip

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _watch(self, call: Call, seen: int) -> AsyncIterator[bytes]:
        test, kind, space = _test(call), call.kind.plural, call.namespace
        while seen >= self.store.forgotten:
            changed = self.store.changed
            for change in self.store.history[seen - self.store.forgotten :]:
                seen = change.version
                here = change.kind == kind and space in (None, change.last["metadata"].get("namespace"))
                if here and (event := _event(change, test)) is not None:
                    yield event
            await changed.wait()
        gone = ApiError(410, f"too old resource version: {seen} ({self.store.version})")
        yield json.dumps({"type": "ERROR", "object": gone.body}).encode() + b"\n"


def read_call(method: str, path: str, query: Mapping[str, str], body: Any, accept: str) -> Call | None:
    """The request as a verb on a kind; none where it is about something else (discovery, /version)."""
    parts = path.strip("/").split("/")
    begin = {"api": 2, "apis": 3}.get(parts[0], len(parts))
    api_version, rest = "/".join(parts[1:begin]), parts[begin:]
    if not rest:
        return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = rest[0], (rest[1] if len(rest) > 1 else None), "/".join(rest[2:])
    kind = KINDS.get(plural)
    if kind is None or kind.api_version != api_version:
        kind = Kind(api_version, plural, plural)
    named = {"GET": "get", "DELETE": "delete"}
    listing = "watch" if query.get("watch") == "true" else "list"
    unnamed = {"GET": listing, "POST": "create", "DELETE": "deletecollection"}
    verb = (named if name else unnamed).get(method, "")
    return Call(verb, kind, namespace, name, subresource, query, body, accept)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def _test(call: Call) -> Test:
    """The selectors of a query, of which each asks for equality.

    Raises:
        ApiError: A selector asks for a field that the API does not index.
    """
    labels, fields = (
        [one.partition("=")[::2] for one in call.query.get(f"{what}Selector", "").split(",") if one]
        for what in ("label", "field")
    )
    if unknown := {path for path, _ in fields} - FIELDS:
        raise ApiError(400, f'field label not supported: "{unknown.pop()}"')
    return lambda thing: (
        all(labels_of(thing).get(key) == value for key, value in labels)
        and all(_at(thing, path) == value for path, value in fields)
    )


def _at(thing: Any, path: str) -> str:
    for name in path.split("."):
        thing = thing.get(name, {})
    return thing or ""


def _as_asked(thing: Object, accept: str) -> Object:
    """The form of an object that the Accept header asks for: of a table, the columns that a secret has.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#alternate-representations-of-resources
    """
    if "as=PartialObjectMetadata" in accept:
        return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": thing["metadata"]}
    if "as=Table" in accept and thing["kind"] == "Secret":
        columns = [{"name": name, "type": "string"} for name in ("Name", "Type", "Data", "Age")]
        cells = [thing["metadata"]["name"], thing.get("type", "Opaque"), len(thing.get("data", {})), "1m"]
        return {"kind": "Table", "columnDefinitions": columns, "rows": [{"cells": cells, "object": None}]}
    return thing


def _event(change: Change, test: Test) -> bytes | None:
    """The change as a watch sees it: something that ceases to match its selector is deleted to it."""
    was, is_now = (thing is not None and test(thing) for thing in (change.before, change.after))
    if not was and not is_now:
        return None
    kind = "DELETED" if not is_now else "MODIFIED" if was else "ADDED"
    thing = {**change.last, "metadata": {**change.last["metadata"], "resourceVersion": str(change.version)}}
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


async def _log(run: PodRun, call: Call) -> AsyncIterator[bytes]:
    """As `GET …/log` asks: with the time before each line, from a moment on, to the end or beyond it."""
    at = 0
    if since := call.query.get("sinceTime"):
        # The API server hands it on to the kubelet in whole seconds: what came earlier in that second comes again.
        begin = datetime.fromisoformat(since).replace(microsecond=0)
        at = sum(when < begin for when, _ in run.lines)
    while True:
        changed = run.kubelet.store.changed
        while at < len(run.lines):
            when, line = run.lines[at]
            at += 1
            yield when.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode() + line
        if call.query.get("follow") != "true" or run.code is not None:
            return
        await changed.wait()


async def _cut(chunks: AsyncIterator[bytes], left: int) -> AsyncIterator[bytes]:
    """The log until the connection breaks, after so many bytes."""
    async for chunk in chunks:
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            raise ConnectionAbortedError
