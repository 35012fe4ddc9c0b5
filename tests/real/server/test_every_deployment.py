"""Every deployment for a platform elsewhere, started by Prefect's own command on a real server."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelling
from waiting import until

from deployments.bootstrap import PREFECT_FILE
from launcher.images.settings import PrebuiltImage
from launcher.yaml_files import read_yaml

sys.path.append(str(Path(__file__).parents[2] / "launcher" / "platforms"))
from test_platform_contract import Place, batch_place, kubernetes_place, runai_place

NAMES = sorted(
    f"{'run-torchrun' if 'run_torchrun' in deployment['entrypoint'] else 'train-litgpt'}/{deployment['name']}"
    for deployment in read_yaml(PREFECT_FILE)["deployments"]
    if {"gke", "kubernetes", "runai", "batch"} & set(deployment["tags"])
)


@contextlib.contextmanager
def place_of(name: str, folder: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The stand-in of the deployment's platform, and the settings by which it is found."""
    if "gke" in name or "kubernetes" in name:
        with kubernetes_place(folder) as place:
            found = {"kind": "kubernetes", "cluster": None, "location": None}
            found |= {"kubeconfig": place.platform._settings.kubeconfig}
            yield place, found | {"pvc": "scratch", "pvc_path": str(folder)}
    elif "batch" in name:
        with batch_place(folder) as place:
            yield place, {"nfs": "10.0.0.2:/data", "nfs_path": str(folder)}
    else:
        variant = {"runai": "rest", "runai-pi": "v1", "runai-benchmark": "v2"}[name.partition("/")[2]]
        with runai_place(folder, variant=variant) as place:
            url = place.platform._settings.url
            yield place, {"project": "team-a", "url": url, "pvcs": [{"name": "scratch", "path": str(folder)}]}


@pytest.mark.parametrize("name", NAMES)
def test_a_deployment_leads_to_its_platform(
    name: str, served: Any, client: SyncPrefectClient, pushed_image: PrebuiltImage, corpus: Path, tmp_path: Path
) -> None:
    """Its job is there, or the preflight has asked the platform, whose machines or queue are not the config's."""
    changes: dict[str, Any] = {"root": str(tmp_path), "image": pushed_image.model_dump(mode="json")}
    if name.startswith("train-litgpt"):
        changes |= {
            "data.corpus": {"kind": "files", "paths": [str(corpus)], "separator": "\n\n"},
            "data.tokenizer": {"kind": "train", "vocab_size": 300}, "data.validation_fraction": 0.2,
        }  # fmt: skip
    with place_of(name, tmp_path) as (place, found):
        changes |= {f"platform.{setting}": value for setting, value in found.items()}
        variables = f"env={json.dumps(dict(place.environment))}"
        parameters = ("-p", f"overrides={json.dumps(changes)}", "--job-variable", variables)
        output = served.python("prefect", "deployment", "run", name, *parameters)
        flow_run = UUID(output.partition("UUID: ")[2].split()[0])
        until(lambda: place.live_jobs() or client.read_flow_run(flow_run).state.is_final(), seconds=120)
        state = client.read_flow_run(flow_run).state
        assert place.live_jobs() or "[kubernetes." in str(state.message), state
        client.set_flow_run_state(flow_run, Cancelling())
        until(lambda: client.read_flow_run(flow_run).state.is_final(), seconds=120)
