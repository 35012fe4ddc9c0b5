"""An HTTP proxy that lets nobody through, and remembers who asked for what."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from serving_thread import served


@dataclass(frozen=True)
class RefusingProxy:
    """A running proxy."""

    address: str
    requests: list[str] = field(default_factory=list)
    """The request lines that reached it."""

    @property
    def environment(self) -> dict[str, str]:
        """Every variable that names a proxy, pointing here, and none that exempts a host."""
        kinds = {"http_proxy": self.address, "https_proxy": self.address, "all_proxy": self.address, "no_proxy": ""}
        return kinds | {kind.upper(): value for kind, value in kinds.items()}


class _Handler(BaseHTTPRequestHandler):
    def handle_one_request(self) -> None:
        self.close_connection = True
        if line := self.rfile.readline(65_537).decode(errors="replace").strip():
            self.server.proxy.requests.append(line)  # type: ignore[attr-defined]
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@contextmanager
def refusing_proxy() -> Iterator[RefusingProxy]:
    """A proxy on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    proxy = RefusingProxy(f"http://127.0.0.1:{server.server_port}")
    server.proxy = proxy  # type: ignore[attr-defined]
    with served(server):
        yield proxy
