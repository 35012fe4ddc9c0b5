"""Servers of the tests: in a thread of their own for as long as a block runs, and what their answers have in common."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from types import MappingProxyType


class Answering(BaseHTTPRequestHandler):
    """Logs nothing: pytest shows what failed."""

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Send it; its length is said where no header says another."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None: ...


@contextmanager
def served(server: TCPServer) -> Iterator[None]:
    """Serve in a thread within this block. Behind it the port is closed, and so are connections that clients keep."""
    accepted: list[socket.socket] = []
    accept = server.get_request

    def remembering() -> tuple[socket.socket, object]:
        connection, address = accept()
        accepted.append(connection)
        return connection, address

    server.get_request = remembering  # type: ignore[method-assign]
    if isinstance(server, ThreadingMixIn):
        server.daemon_threads = False  # closing the server waits for them
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            for connection in accepted:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)
