"""A server of the tests in a thread of its own, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from threading import Thread


@contextmanager
def served(server: BaseServer) -> Iterator[None]:
    """Serve in a thread within this block. The thread is gone and the port closed behind it."""
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
