"""Proxies that the environment names: never for this machine, and refused in words where no client can use them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator
from corpora import large_vocabulary
from hub_server import Repository, running_hub
from refusing_proxy import refusing_proxy

from litgpt_demo.errors import UserError
from litgpt_demo.proxies import settle_proxies

# Every HTTP client of the nodes, each in the way that the project uses it, and another host.
CLIENTS = """
import os
from litgpt_demo.proxies import settle_proxies

settle_proxies(os.environ)
from litgpt_demo.storage import open_storage
storage = open_storage("gs://files/root")
storage.write("a.txt", b"in a bucket")
assert storage.read("a.txt") == b"in a bucket"

from litgpt_demo.config import HubTokenizer
from litgpt_demo.data.tokens import load_tokenizer
assert load_tokenizer(HubTokenizer(kind="hub", name="owner/model")).vocab_size == 300

from urllib.request import urlopen
import httpx
url = os.environ["HF_ENDPOINT"].replace("127.0.0.1", "localhost") + "/owner/model/resolve/main/tokenizer.json"
assert urlopen(url).status == httpx.get(url).status_code == 200
assert httpx.get("http://models.invalid/a").status_code == 403
"""


def test_clients_use_a_proxy_for_other_hosts_only(tmp_path: Path) -> None:
    repository = Repository({"tokenizer.json": large_vocabulary(tmp_path / "tokenizer").read_bytes()})
    served = running_hub({"owner/model": repository})
    with refusing_proxy() as proxy, bucket_emulator("files") as bucket, served as hub:
        variables = {"STORAGE_EMULATOR_HOST": bucket, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        environment = os.environ | proxy.environment | variables
        done = subprocess.run([sys.executable, "-c", CLIENTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert proxy.requests == ["GET http://models.invalid/a HTTP/1.1"]


def test_exempt_hosts_stay_exempt() -> None:
    for changes, exempt in (
        ({"NO_PROXY": "intern.example, 127.0.0.1"}, "intern.example,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, "a.example,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ):
        environ = {"HTTPS_PROXY": "proxy.example:3128", **changes}
        settle_proxies(environ)
        assert environ["no_proxy"] == environ["NO_PROXY"] == exempt


def test_unusable_proxy_is_refused_without_its_password() -> None:
    for address, message in (
        ("socks4://me:s3cret@127.0.0.1:1080", "ALL_PROXY is not a proxy's address.*socks5://.*unset ALL_PROXY"),
        # Clients say what they could not read as a port, and that is the password's beginning.
        ("http://me:s3cret#1@proxy.example:3128", r"ALL_PROXY is not a proxy's address.*%23"),
        ("socks5://me:s3cret@127.0.0.1:1080", "pip install socksio PySocks"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            settle_proxies({"ALL_PROXY": address})
        assert "s3cret" not in str(refused.value)
