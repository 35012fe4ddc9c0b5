"""gcp-storage-emulator in this process, taught what our tests need of GCS and it does not do:

preconditions on uploads (it ignores them), names with `?` or `%` (its links do not quote them), and an orderly answer
to a chunk of an upload that it no longer knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer
from io import BytesIO
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, quote, urlparse

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


@contextmanager
def bucket_emulator(*buckets: str) -> Iterator[str]:
    """The address of an emulator that holds the empty `buckets` in memory, as STORAGE_EMULATOR_HOST takes it."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    storage = _Storage(use_memory_fs=True)
    for name in buckets:
        create_bucket(name, storage)
    with HTTPServer(("127.0.0.1", 0), partial(_Handler, storage)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _PreconditionError(Exception):
    pass


class _Storage(Storage):
    condition: str | None = None
    """Generation that the request at hand asks for; "0" is none. One at a time: the server has one thread."""

    def create_file(self, bucket: str, name: str, content: bytes, resource: dict[str, Any], *rest: Any) -> None:
        there = self.objects.get(bucket, {}).get(name, {"generation": "0"})
        if self.condition not in {None, there["generation"]}:
            raise _PreconditionError
        # As in GCS the name is quoted; the client downloads from this link.
        resource["mediaLink"] = resource["mediaLink"].replace(f"/o/{name}?", f"/o/{quote(name, safe='')}?")
        super().create_file(bucket, name, content, resource, *rest)


class _Handler(RequestHandler):
    def do_POST(self) -> None:  # noqa: N802
        self._conditionally(super().do_POST)

    def do_PUT(self) -> None:  # noqa: N802
        self._conditionally(super().do_PUT)

    def _conditionally(self, handle: Callable[[], None]) -> None:
        # It answers an unknown upload without reading the body, and what is left unread resets the connection.
        self.rfile = BytesIO(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.storage.condition = parse_qs(urlparse(self.path).query).get("ifGenerationMatch", [None])[0]
        try:
            handle()
        except _PreconditionError:
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()
