"""The tutorial of GKE, followed on an emulated cluster: its files are written and its commands typed.

What `gcloud` and `kubectl` make in the page is made here by hand. Pods are processes on CPUs, and the image is one that
its registry has.
"""

import base64
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated_gke
import pytest
from bucket_emulator import bucket_emulator
from google.cloud.container_v1.types import Cluster as GoogleCluster
from google.cloud.container_v1.types import NodeConfig, NodePool, NodePoolAutoscaling
from google_cloud import google_cloud
from kubernetes_cluster import running_cluster

from launcher.images.settings import PrebuiltImage

PAGE = Path(__file__).parents[3] / "docs" / "start" / "gke.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
KNOWN = {"gcloud", "kubectl", "NUMBER=$(gcloud"}


@pytest.fixture
def environment(tmp_path: Path, prefect_home: Callable[[], Path]) -> Iterator[dict[str, str]]:
    """The project of the page at its fourth step: bucket, cluster with a pool that can grow, service account."""
    with bucket_emulator("my-bucket") as bucket, running_cluster() as cluster, google_cloud(tmp_path) as cloud:
        # The run of the page has one name and one root, and so would have one scratch folder in all suites.
        cluster.image_environment |= {"STORAGE_EMULATOR_HOST": bucket, "TMPDIR": str(tmp_path)}
        cluster.apply("serviceaccounts", {"metadata": {"name": "trainer"}})
        cloud.token = lambda: cluster.token
        address, certificate = cluster.tls()
        made = GoogleCluster(name="my-cluster", endpoint=address.removeprefix("https://"))
        made.master_auth.cluster_ca_certificate = base64.b64encode(certificate.encode()).decode()
        scaling = NodePoolAutoscaling(enabled=True, total_max_node_count=2)
        made.node_pools.append(
            NodePool(name="l4", config=NodeConfig(machine_type="g2-standard-8"), autoscaling=scaling)
        )
        cloud.add(made, "europe-west4-a")
        yield {
            **os.environ,
            "PREFECT_HOME": str(prefect_home()),
            "COLUMNS": "120",
            "GKE_API": cloud.address,
            "GOOGLE_APPLICATION_CREDENTIALS": str(cloud.key),
            "STORAGE_EMULATOR_HOST": bucket,
            "TMPDIR": str(tmp_path),
        }


def test_tutorial_of_gke_ends_with_a_model_and_no_job(
    tmp_path: Path, environment: dict[str, str], pushed_image: PrebuiltImage
) -> None:
    """Only `run` gets other settings here: no GPUs, and an image that exists."""
    elsewhere = ("platform.machine=null", "platform.network_test=0", f"image={pushed_image.model_dump_json()}")
    outputs = dict[str, list[str]]()
    for kind, name, block in BLOCK.findall(PAGE.read_text("utf-8")):
        if name:
            (tmp_path / name).write_text(block)
        for typed in (shlex.split(line) for line in block.splitlines() if kind == "sh"):
            _, verb, *arguments = typed
            command = [sys.executable, emulated_gke.__file__, verb, *arguments, *(elsewhere if verb == "run" else ())]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            outputs.setdefault(verb, []).append(done.stdout + done.stderr)
    assert "the node pools can grow to it (l4: 2 at most)" in outputs["doctor"][0]
    assert outputs["plan"][0].endswith("nothing blocks it\n")
    first, again = outputs["run"]
    assert "JobSet runs on 2 nodes" in first
    assert "step 40/40" in first
    assert "submitted" not in again
    assert "JobSet Completed" in outputs["status"][0]
    assert "import " in outputs["generate"][0]
    assert "every attempt has ended" in outputs["cancel"][0]


def test_commands_of_google_in_the_tutorial_are_written_well() -> None:
    """They are not run: that each is one command with closed quotes is all that can be seen here."""
    consoles = [block for kind, _, block in BLOCK.findall(PAGE.read_text("utf-8")) if kind == "console"]
    lines = "".join(consoles).replace("\\\n", " ").splitlines()
    programs = {shlex.split(line.removeprefix("$ "))[0] for line in lines}
    assert len(lines) > 15
    assert programs == KNOWN
