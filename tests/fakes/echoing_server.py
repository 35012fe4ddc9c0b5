"""Servers that repeat every request in their answers, as proxies' error pages and some validation messages do."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from urllib.parse import urlencode

from serving_thread import Answering, served


@dataclass
class Echo:
    """A running server; how it answers can be changed while it runs."""

    host: str
    status: int = 400
    moved_to: str = ""
    """The origin that every request is redirected to, with the request in the query."""
    challenge: str = ""
    """`WWW-Authenticate` of the answer to a request without `Authorization`."""
    granted: str = ""
    """The path whose answer is a token; others repeat the request."""
    form: Callable[[str], object] = lambda request: {
        "message": request,
        "error": request,
        "errors": [{"message": request}],
    }
    """The JSON in which a request is repeated."""
    requests: list[str] = field(default_factory=list)
    """Every request as it came: line, headers and body."""

    @property
    def address(self) -> str:
        return f"http://{self.host}"


class _Handler(Answering):
    def repeat(self) -> None:
        echo: Echo = self.server.echo  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        request = f"{self.requestline}\n{self.headers}\n{body}"
        echo.requests.append(request)
        authorization = self.headers.get("Authorization", "")
        headers = {"X-Error-Message": f"{authorization} {body}", "X-Request-Id": authorization}
        status, document = echo.status, json.dumps(echo.form(request))
        if echo.challenge and not authorization and not self.path.startswith(echo.granted or "/token"):
            status, headers = 401, {"WWW-Authenticate": echo.challenge}
        elif echo.granted and self.path.startswith(echo.granted):
            status, document = 200, json.dumps({"token": "granted-s3cret-marker"})
        elif echo.moved_to:
            query = urlencode({"token": authorization, "body": body})
            status, headers = 307, {"Location": f"{echo.moved_to}/login?{query}"}
        lines = {name: value.replace("\n", " ") for name, value in headers.items()}
        self.answer(status, document.encode(), {**lines, "Content-Type": "application/json"})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = repeat


@contextmanager
def echoing_server(**how: object) -> Iterator[Echo]:
    """A server on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    echo = Echo(f"127.0.0.1:{server.server_port}", **how)  # type: ignore[arg-type]
    server.echo = echo  # type: ignore[attr-defined]
    with served(server):
        yield echo
