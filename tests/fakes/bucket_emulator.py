"""gcp-storage-emulator in this process, taught what our tests need of GCS and it does not do:

preconditions on uploads, compositions and deletes, and the generation of what is read (it ignores them); at most 32
sources in a composition; uploads in one request at more than 6 MB/s (it reads them as e-mail); a request's time that
does not grow with the objects there are (it writes down all it knows every time); names with `?` or `%` (its links do
not quote them); an orderly answer to a chunk of an upload that it no longer knows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, quote, urlparse

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage
from serving_thread import served


@contextmanager
def bucket_emulator(*buckets: str) -> Iterator[str]:
    """The address of an emulator that holds the empty `buckets` in memory, as STORAGE_EMULATOR_HOST takes it."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    storage = _Storage(use_memory_fs=True)
    for name in buckets:
        create_bucket(name, storage)
    service = _Server(("127.0.0.1", 0), partial(_Handler, storage))
    with served(service):
        yield f"http://127.0.0.1:{service.server_port}"


_read_as_e_mail = server._read_data


def _read_data(handler: RequestHandler, query: dict[str, list[str]]) -> Any:
    kind = handler.headers.get("Content-Type", "")
    if not kind.startswith("multipart/related"):
        return _read_as_e_mail(handler, query)
    boundary = b"--" + kind.partition("boundary=")[2].strip('"').encode()
    body: bytes = handler.rfile.read()
    meta, _, file = body.removeprefix(boundary).partition(boundary)
    head, _, content = file.removesuffix(boundary + b"--").removesuffix(b"\r\n").partition(b"\r\n\r\n")
    return {
        "meta": json.loads(meta.partition(b"\r\n\r\n")[2]),
        "content": content,
        "content-type": head.decode().partition(":")[2].strip(),
    }


server._read_data = _read_data


class _RefusedError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class _Server(HTTPServer):
    request_queue_size = 128  # connections that wait their turn; the default of 5 makes those of more threads try again


class _Storage(Storage):
    condition: str | None = None
    """Generation that the request at hand asks for; "0" is none. One at a time: the server has one thread."""

    generation: str | None = None
    """Generation that the request at hand is about."""

    def _write_config_to_file(self) -> None:
        """Nothing: all is in memory."""

    def create_file(self, bucket: str, name: str, content: bytes, resource: dict[str, Any], *rest: Any) -> None:
        self._check(bucket, name)
        # As in GCS the name is quoted; the client downloads from this link.
        resource["mediaLink"] = resource["mediaLink"].replace(f"/o/{name}?", f"/o/{quote(name, safe='')}?")
        super().create_file(bucket, name, content, resource, *rest)

    def delete_file(self, bucket: str, name: str) -> None:
        if name in self.objects.get(bucket, {}):
            self._check(bucket, name)
        super().delete_file(bucket, name)

    def get_file_obj(self, bucket: str, name: str) -> dict[str, Any]:
        there: dict[str, Any] = super().get_file_obj(bucket, name)
        if self.generation not in {None, there["generation"]}:
            raise NotFound
        return there

    def _check(self, bucket: str, name: str) -> None:
        there = self.objects.get(bucket, {}).get(name, {"generation": "0"})
        if self.condition not in {None, there["generation"]}:
            raise _RefusedError(412)


def _conditional(handle: Callable[[Any], None]) -> Callable[[_Handler], None]:
    def conditionally(handler: _Handler) -> None:
        # It answers an unknown upload without reading the body, and what is left unread resets the connection.
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.rfile = BytesIO(body)
        url = urlparse(handler.path)
        query = parse_qs(url.query)
        handler.storage.condition = query.get("ifGenerationMatch", [None])[0]
        handler.storage.generation = query.get("generation", [None])[0]
        try:
            if url.path.endswith("/compose"):
                handler.check_sources(url.path, json.loads(body)["sourceObjects"])
            handle(handler)
        except _RefusedError as refused:
            handler.send_response(refused.status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

    return conditionally


class _Handler(RequestHandler):
    do_GET, do_POST, do_PUT, do_DELETE = map(  # noqa: N815
        _conditional, (RequestHandler.do_GET, RequestHandler.do_POST, RequestHandler.do_PUT, RequestHandler.do_DELETE)
    )

    def check_sources(self, path: str, sources: list[dict[str, Any]]) -> None:
        """Refuse what GCS refuses as sources of a composition."""
        objects = self.storage.objects.get(path.split("/b/")[1].split("/")[0], {})
        known = [objects.get(source["name"], {}).get("generation") == str(source["generation"]) for source in sources]
        if not 1 <= len(sources) <= 32 or not all(known):
            raise _RefusedError(404 if 1 <= len(sources) <= 32 else 400)
