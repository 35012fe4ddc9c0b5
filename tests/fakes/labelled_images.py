"""Images with labels and without layers, in a registry that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

REGISTRY = Path(__file__).with_name("registry_server.py")
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Running:
    """A registry that serves, by its address."""

    host: str

    def push(self, name: str, labels: dict[str, str], *, architectures: tuple[str, ...] = ()) -> str:
        """Put an image there, for several processors by an index; returns its reference by tag, `…:1`."""
        kinds = architectures or ("amd64",)
        manifests = [self._manifest(name, labels, architecture, tag=f"1-{architecture}") for architecture in kinds]
        if architectures:
            body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
            self.put(name, "1", body)
        else:
            self._manifest(name, labels, "amd64", tag="1")
        return f"{self.host}/{name}:1"

    def _manifest(self, name: str, labels: dict[str, str], architecture: str, *, tag: str) -> dict[str, Any]:
        config = json.dumps({"architecture": architecture, "os": "linux", "config": {"Labels": labels}}).encode()
        digest = f"sha256:{sha256(config).hexdigest()}"
        uploads = f"http://{self.host}/v2/{name}/blobs/uploads/"
        httpx.post(uploads, params={"digest": digest}, content=config, trust_env=False).raise_for_status()
        described = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest, "size": len(config)}
        body = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": []}
        manifest = self.put(name, tag, body)
        return {"digest": manifest, "platform": {"os": "linux", "architecture": architecture}}

    def put(self, name: str, tag: str, body: dict[str, Any]) -> str:
        """Put a manifest there, whatever it says; returns its digest."""
        url, headers = f"http://{self.host}/v2/{name}/manifests/{tag}", {"Content-Type": body["mediaType"]}
        done = httpx.put(url, content=json.dumps(body).encode(), headers=headers, trust_env=False).raise_for_status()
        return done.headers["Docker-Content-Digest"]


@contextmanager
def registry(folder: Path, *options: str) -> Iterator[Running]:
    """Run registry_server.py with these options; its log is in the folder."""
    command = [sys.executable, str(REGISTRY), *options]
    with (
        (folder / "registry.log").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            yield Running(process.stdout.readline().strip())
        finally:
            process.terminate()
