"""What no user has sent: requests of pages elsewhere and of programs without the secret, a scheduler's greeting."""

from __future__ import annotations

import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

EVIL = "https://evil.example"
REFUSED = {400, 401, 403}


def basic(secret: str) -> dict[str, str]:
    """Return the header of whoever knows the secret."""
    return {"Authorization": f"Basic {b64encode(secret.encode()).decode()}"}


def visits(secret: str) -> dict[str, dict[str, str]]:
    """Return the headers of each stranger by who it is."""
    return {
        "a page elsewhere": {"Origin": EVIL},
        "a page elsewhere that got hold of the secret": {"Origin": EVIL, **basic(secret)},
        "a page without an address": {"Origin": "null", **basic(secret)},
        "a page of another server here": {"Origin": "http://127.0.0.1:1", **basic(secret)},
        "a page whose name was made to resolve to this machine": {"Host": "evil.example", **basic(secret)},
        "the same at the server's port": {"Host": "evil.example:4200", **basic(secret)},
        "a name that begins as this machine's address": {"Host": "127.0.0.1.evil.example", **basic(secret)},
        "a program without the secret": {},
        "a program with another secret": basic("litgpt:guessed"),
    }


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
        said = Thread(target=lambda: server.accept()[0].sendall(greeting))
        said.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        said.join()


def require_refusals(api: str, path: str, body: dict[str, Any], secret: str) -> None:
    """Send the request as each stranger would, and as a browser asks beforehand; none may be let in."""
    answers = dict(_answers(f"{api}{path}", body, secret))
    assert {who: answer.status_code for who, answer in answers.items() if answer.status_code not in REFUSED} == {}
    shared = {who: answer.headers.get("Access-Control-Allow-Origin") for who, answer in answers.items()}
    assert set(shared.values()) == {None}
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{api.replace('http', 'ws', 1)}/events/in", origin=Origin(EVIL), subprotocols=[Subprotocol("prefect")])
    assert refused.value.response.status_code == 403


def _answers(address: str, body: dict[str, Any], secret: str) -> Iterator[tuple[str, httpx.Response]]:
    with httpx.Client(trust_env=False, timeout=None) as client:
        for who, headers in visits(secret).items():
            yield who, client.post(address, json=body, headers=headers)
        asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
        yield "a browser, before it sends the request of a page elsewhere", client.options(address, headers=asked)
