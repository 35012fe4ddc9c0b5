"""What no user has sent: requests of pages elsewhere and of programs without the secret, a scheduler's greeting."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx


def require_refusals(address: str, body: dict[str, Any]) -> None:
    """Send a request as strangers would, and as a browser asks before a page elsewhere sends it; none may be let in."""
    page = {"Origin": "https://evil.example"}
    with httpx.Client(trust_env=False, timeout=None) as client:
        for headers in ({}, page, {"Authorization": "Basic bGl0Z3B0Omd1ZXNzZWQ="}):
            assert client.post(address, json=body, headers=headers).status_code == 401
        preflight = client.options(address, headers={**page, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code >= 400
    assert "Access-Control-Allow-Origin" not in preflight.headers


class _Runs:
    """What executes a program when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@contextmanager
def evil_scheduler(marker: Path) -> Iterator[str]:
    """Listen as a Dask scheduler whose greeting makes the marker: Dask unpickles every message, the first included."""
    from distributed.comm.tcp import _add_frames_header
    from distributed.protocol import ToPickle, dumps

    greeting = b"".join(_add_frames_header(list(dumps({"a": ToPickle(_Runs(marker))})))[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeter = Thread(target=lambda: server.accept()[0].sendall(greeting))
        greeter.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        greeter.join()
