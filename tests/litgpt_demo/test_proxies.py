"""Proxies that the environment names: never for this machine, and refused in words where no client can use them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models
from websockets.asyncio.server import ServerConnection, serve

from litgpt_demo import proxies
from litgpt_demo.errors import EXIT_CODES, Fault, UserError
from litgpt_demo.proxies import settle_proxies

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from hub_server import Repository, running_hub
from refusing_proxy import RefusingProxy, refusing_proxy

LOOPBACK = "localhost,127.0.0.1,::1"

# Every HTTP client of the project, each in the way that the project uses it.
CLIENTS = """
import asyncio, os, sys
import litgpt_demo.proxies

litgpt_demo.proxies.settle_proxies(os.environ)

def bucket():
    from litgpt_demo.storage import open_storage
    storage = open_storage("gs://files/root")
    storage.write("a.txt", b"in a bucket")
    assert storage.read("a.txt") == b"in a bucket"

def hub():
    from litgpt_demo.config import HubTokenizer
    from litgpt_demo.data.tokens import load_tokenizer
    assert load_tokenizer(HubTokenizer(kind="hub", name="owner/model")).vocab_size == 2

def standard_library():
    from urllib.request import urlopen
    assert urlopen(os.environ["HF_ENDPOINT"] + "/owner/model/resolve/main/tokenizer.json", timeout=20).status == 200

def httpx_by_name():
    import httpx
    url = os.environ["HF_ENDPOINT"].replace("127.0.0.1", "localhost")
    assert httpx.get(url + "/owner/model/resolve/main/tokenizer.json", timeout=20).status_code == 200

def events_of_prefect():
    from prefect._internal.websockets import websocket_connect
    async def greet():
        async with websocket_connect(os.environ["SOCKET"]) as connection:
            return await connection.recv()
    assert asyncio.run(greet()) == "hello"

for client in (bucket, hub, standard_library, httpx_by_name, events_of_prefect):
    try:
        client()
    except Exception as error:
        sys.exit(f"{client.__name__}: {error}")
print("all")
"""


@pytest.fixture
def proxy() -> object:
    with refusing_proxy() as running:
        yield running


class _Greeter(threading.Thread):
    """A websocket's other end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ready = threading.Event()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        async def greet(connection: ServerConnection) -> None:
            await connection.send("hello")

        self._over, self._loop = asyncio.Event(), asyncio.get_running_loop()
        async with serve(greet, "127.0.0.1", 0) as server:
            self.address = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            self.ready.set()
            await self._over.wait()

    def __enter__(self) -> _Greeter:
        self.start()
        self.ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join()


def tokenizer() -> bytes:
    return HfTokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[])).to_str().encode()


def test_no_client_goes_through_a_proxy_to_this_machine(proxy: RefusingProxy, tmp_path: Path) -> None:
    files = {"tokenizer.json": tokenizer()}
    with (
        bucket_emulator("files") as bucket,
        running_hub({"owner/model": Repository(files)}) as hub,
        _Greeter() as greeter,
    ):
        environment = os.environ | proxy.environment | {
            "STORAGE_EMULATOR_HOST": bucket, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path),
            "SOCKET": greeter.address,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.stdout.strip() == "all", done.stderr
    assert proxy.asked == []


def test_other_hosts_are_still_asked_for_through_the_proxy(
    proxy: RefusingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    settle_proxies(os.environ)
    assert httpx.get("http://models.invalid/a").status_code == 403
    assert proxy.asked == ["GET http://models.invalid/a HTTP/1.1"]


@pytest.mark.parametrize(
    ("given", "exempt"),
    [
        ({}, LOOPBACK),
        ({"NO_PROXY": ""}, LOOPBACK),
        ({"NO_PROXY": "intern.example, 127.0.0.1"}, "intern.example,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, f"a.example,{LOOPBACK}"),
        ({"no_proxy": LOOPBACK}, LOOPBACK),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_what_is_exempt_already_stays_exempt(given: dict[str, str], exempt: str) -> None:
    environ = {"HTTPS_PROXY": "proxy.example:3128", **given}
    settle_proxies(environ)
    assert environ["no_proxy"] == environ["NO_PROXY"] == exempt
    settle_proxies(environ)
    assert environ["no_proxy"] == exempt


def test_without_a_proxy_nothing_is_exempt_from_it() -> None:
    environ = {"HTTP_PROXY": "", "NO_PROXY": "intern.example"}
    settle_proxies(environ)
    assert environ == {"HTTP_PROXY": "", "NO_PROXY": "intern.example"}


@pytest.mark.parametrize("scheme", ["socks", "socks4", "ftp"])
def test_a_proxy_that_no_client_knows_is_refused_without_its_password(scheme: str) -> None:
    with pytest.raises(UserError, match=f"ALL_PROXY names a proxy by {scheme}://.*unset ALL_PROXY") as refused:
        settle_proxies({"ALL_PROXY": f"{scheme}://me:secret@127.0.0.1:1080"})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("password", ["s3cret#1", "s3cret/1", "s3cret?1"])
def test_a_password_that_ends_the_address_is_refused_with_how_to_write_it(password: str) -> None:
    """Clients say what they could not read as a port, and that is the password's beginning."""
    with pytest.raises(UserError, match=r"HTTPS_PROXY is no address of a proxy.*%23") as refused:
        settle_proxies({"HTTPS_PROXY": f"http://me:{password}@proxy.example:3128"})
    assert "s3cret" not in str(refused.value)
    settle_proxies({"HTTPS_PROXY": "http://me:s3cret%231@proxy.example:3128/"})


def test_a_socks_proxy_is_taken_where_its_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "_SOCKS_MODULES", ("json",))
    environ = {"all_proxy": "socks5h://127.0.0.1:1080"}
    settle_proxies(environ)
    assert environ["no_proxy"] == LOOPBACK


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "cli.main", "plan", "missing.yaml"],
        ["-m", "litgpt_demo", "verify", "missing"],
        ["-m", "deployments.bootstrap", "stop"],
    ],
    ids=lambda command: command[1],
)
def test_a_socks_proxy_without_its_packages_is_a_message_and_no_traceback(command: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"ALL_PROXY": "socks5://me:secret@127.0.0.1:1080", "PREFECT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "secret" not in said
    assert "ALL_PROXY names a SOCKS proxy" in said
    assert "pip install socksio PySocks" in " ".join(said.split())
    assert done.returncode in {1, EXIT_CODES[Fault.USER]}
