"""The API over HTTP. Nothing is changed by clients: they create, read, watch and delete."""

import asyncio
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from .control_plane import ControlPlane
from .kubelet import Kubelet, PodRun
from .store import KINDS, ApiError, Change, Kind, Object, copied

Rule = Mapping[str, Sequence[str]]
"""As in a Role: apiGroups, resources and verbs."""
Test = Callable[[Object], bool]
Answer = tuple[int, Object | AsyncIterator[bytes]]

PATH = re.compile(
    r"/apis?/(?P<version>([^/]+/)?v\w+)(/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(/(?P<name>[^/]+)(?P<subresource>/log)?)?"
)


@dataclass
class Call:
    """A request, read as a verb on a kind."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str | None
    what: str
    """The kind with its subresource: `pods/log`."""
    query: Mapping[str, str]
    body: Any
    accept: str


class Traffic:
    """What clients asked for, by (verb, resource)."""

    def __init__(self) -> None:
        self.calls = Counter[tuple[str, str]]()
        self.clear = self.calls.clear


@dataclass
class Trouble:
    """An injected answer to some calls, as often as it says."""

    error: Exception
    verb: str | None
    resource: str | None
    times: float


class Api:
    def __init__(self, plane: ControlPlane, kubelet: Kubelet, served: Mapping[str, Kind]) -> None:
        self.plane, self.store, self.kubelet, self.served = plane, plane.store, kubelet, served
        self.token = secrets.token_urlsafe(12)
        self.rules: Sequence[Rule] | None = None
        """What the user may do; None is everything."""
        self.traffic = Traffic()
        self.troubles: list[Trouble] = []
        self.cut_logs_after: list[int] = []
        """Bytes after which each of the next log connections breaks."""
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
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = first.split(" ")
                await self._answer(writer, method, target, headers, json.loads(body or "{}"))
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            del self._connections[writer]
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: Mapping[str, str], body: Any
    ) -> None:
        path, _, query = target.partition("?")
        call = read_call(method, path, dict(parse_qsl(query)), body, headers["accept"])
        self.traffic.calls[(call.verb, call.what) if call else ("get", path)] += 1
        more: Mapping[str, str] = {}
        try:
            status, answer = self._answer_to(call, path, headers.get("authorization", ""))
        except ApiError as error:
            status, answer, more = error.status, error.body, error.headers
        if isinstance(answer, dict):
            content = json.dumps(answer).encode()
            writer.write(_head(status, {**more, "Content-Length": str(len(content))}) + content)
        else:
            writer.write(_head(status, {"Transfer-Encoding": "chunked"}))
            async for chunk in answer:
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _answer_to(self, call: Call | None, path: str, authorization: str) -> Answer:
        """What is said to a call; to none: who we are, and which kinds there are. Refusals are ApiErrors."""
        if path == "/version":  # open to all, as clusters are set up by default
            return 200, {"gitVersion": "v1.36.2-gke.1034000"}
        if call is not None:
            self._trouble(call)
        if authorization.partition(" ")[2] != self.token:
            raise ApiError(401, "Unauthorized")
        if call is None:
            served = [{"name": kind.plural} for kind in self.served.values() if f"/apis/{kind.api_version}" == path]
            return 200 if served else 404, {"kind": "APIResourceList", "resources": served}
        self._authorize(call)
        if call.kind.plural not in self.served:
            raise ApiError(404, "the server could not find the requested resource")
        if call.verb == "watch":
            return 200, self._watch(call, int(call.query["resourceVersion"]))
        if call.what == "pods/log":
            log = _log(self.kubelet.run_of(self._found(call)), call)
            return 200, _cut(log, self.cut_logs_after.pop(0)) if self.cut_logs_after else log
        answer = self._do(call)
        if call.verb not in ("get", "list"):
            self.plane.settle()
        return 201 if call.verb == "create" else 200, answer

    def _trouble(self, call: Call) -> None:
        for trouble in self.troubles:
            if trouble.times > 0 and trouble.verb in (None, call.verb) and trouble.resource in (None, call.what):
                trouble.times -= 1
                raise trouble.error

    def _allows(self, verb: str, group: str, what: str) -> bool:
        right = {"apiGroups": group, "resources": what, "verbs": verb}
        return self.rules is None or any(
            all({"*", value} & {*rule[key]} for key, value in right.items()) for rule in self.rules
        )

    def _authorize(self, call: Call) -> None:
        kind = call.kind
        if kind.plural != "selfsubjectaccessreviews" and not self._allows(call.verb, kind.group, call.what):
            named = f' "{call.name}"' if call.name else ""
            where = f'in the namespace "{call.namespace}"' if call.namespace else "at the cluster scope"
            may = f'User "tester" cannot {call.verb} resource "{call.what}" in API group "{kind.group}" {where}'
            raise ApiError(403, f"{kind.qualified}{named} is forbidden: {may}")

    # --- reading and writing ------------------------------------------------------------------------------------------

    def _do(self, call: Call) -> Object:
        plural = call.kind.plural
        match call.verb:
            case "get":
                return _table(self._found(call)) if "as=Table" in call.accept else self._found(call)
            case "create" if plural == "selfsubjectaccessreviews":
                right = call.body["spec"]["resourceAttributes"]
                what = f"{right['resource']}/{right['subresource']}".rstrip("/")
                return {**call.body, "status": {"allowed": self._allows(right["verb"], right["group"], what)}}
            case "create":
                made = copied(call.body)
                made["metadata"] |= {"namespace": call.namespace} if call.kind.namespaced else {}
                return self.plane.create(plural, made, dry_run=call.query.get("dryRun") == "All")
            case "delete":
                return self.plane.delete(plural, self._found(call), call.body)
            case "deletecollection":
                for thing in filter(_test(call), self.store.all(plural, call.namespace)):
                    self.plane.delete(plural, thing, call.body)
        return self._list(call)

    def _found(self, call: Call) -> Object:
        found = self.store.get(call.kind.plural, call.namespace, str(call.name))
        if found is None:
            raise ApiError(404, f'{call.kind.qualified} "{call.name}" not found')
        return found

    def _list(self, call: Call) -> Object:
        found = filter(_test(call), self.store.all(call.kind.plural, call.namespace))
        # In a list, built-in kinds do not say what they are.
        items = [{key: thing[key] for key in thing.keys() - {"kind", "apiVersion"}} for thing in found]
        return {"kind": "List", "metadata": {"resourceVersion": str(self.store.version)}, "items": items}

    async def _watch(self, call: Call, seen: int) -> AsyncIterator[bytes]:
        test = _test(call)
        while seen >= self.store.forgotten:
            changed = self.store.changed
            for change in self.store.history[seen - self.store.forgotten :]:
                seen += 1
                is_listed = call.namespace in (None, change.now["metadata"].get("namespace"))
                if change.kind == call.kind.plural and is_listed and (kind := _seen(change, test)):
                    yield json.dumps({"type": kind, "object": change.now}).encode() + b"\n"
            await changed.wait()
        gone = ApiError(410, f"too old resource version: {seen} ({self.store.version})", reason="Expired")
        yield json.dumps({"type": "ERROR", "object": gone.body}).encode() + b"\n"


def read_call(method: str, path: str, query: Mapping[str, str], body: Any, accept: str) -> Call | None:
    """The request as a verb on a kind; none where it is about something else (discovery, /version)."""
    found = PATH.fullmatch(path)
    kind = KINDS.get(found["plural"]) if found else None
    if found is None or kind is None or kind.api_version != found["version"]:
        return None
    name, listing = found["name"], "watch" if query.get("watch") == "true" else "list"
    verbs = {"GET": "get" if name else listing, "POST": "create", "DELETE": "delete" if name else "deletecollection"}
    what = kind.plural + (found["subresource"] or "")
    return Call(verbs[method], kind, found["namespace"], name, what, query, body, accept)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def _test(call: Call) -> Test:
    """The selectors of a query, which ask for equality, and of fields for those that the API indexes."""
    labels, fields = (
        dict(pair.split("=") for pair in call.query.get(f"{what}Selector", "").split(",") if pair)
        for what in ("label", "field")
    )
    if unknown := fields.keys() - {"metadata.name", "involvedObject.name"}:
        raise ApiError(400, f'field label not supported: "{unknown.pop()}"')

    def test(thing: Object) -> bool:
        has = {path: thing[path.split(".")[0]].get("name") for path in fields}
        return labels.items() <= thing["metadata"].get("labels", {}).items() and has == fields

    return test


def _table(secret: Object) -> Object:
    """https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables"""
    columns = [{"name": name, "type": "string"} for name in ("Name", "Type", "Data", "Age")]
    cells = [secret["metadata"]["name"], secret.get("type", "Opaque"), len(secret["data"]), "1m"]
    return {"kind": "Table", "columnDefinitions": columns, "rows": [{"cells": cells, "object": None}]}


def _seen(change: Change, test: Test) -> str:
    """The change as a watch sees it, if at all: something that ceases to match its selector is deleted to it."""
    was, is_now = change.before is not None and test(change.before), not change.gone and test(change.now)
    return ("MODIFIED" if was else "ADDED") if is_now else "DELETED" if was else ""


async def _log(run: PodRun, call: Call) -> AsyncIterator[bytes]:
    """As `GET …/log` asks: with the time before each line, from a moment on, to the end or beyond it."""
    at = 0
    if since := call.query.get("sinceTime"):
        # The API server hands it on to the kubelet in whole seconds: what came earlier in that second comes again.
        begin = datetime.fromisoformat(since).replace(microsecond=0)
        at = sum(when < begin for when, _ in run.lines)
    while True:
        changed = run.kubelet.store.changed
        for when, line in run.lines[at:]:
            at += 1
            yield when.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode() + line
        if call.query.get("follow") != "true" or run.code is not None:
            return
        await changed.wait()


async def _cut(chunks: AsyncIterator[bytes], remaining: int) -> AsyncIterator[bytes]:
    """The log until the connection breaks, after so many bytes."""
    async for chunk in chunks:
        yield chunk[:remaining]
        remaining -= len(chunk)
        if remaining <= 0:
            raise ConnectionAbortedError
