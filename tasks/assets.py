"""The assets of a run in Prefect: its dataset, its checkpoints, its model, and what each was made from.

Prefect keeps their materializations as events, which its Cloud draws as lineage; a server of one's own shows the
events. A step that finds its work done materializes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Literal, TypeAlias

from prefect.assets import Asset, AssetProperties, materialize
from prefect.context import FlowRunContext
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS

from launcher.runs.run import Run
from litgpt_demo.pretrained import Pretrained
from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT
from litgpt_demo.storage import is_remote
from tasks.steps import ONCE

AssetKind: TypeAlias = Literal["dataset", "checkpoint", "model"]


def asset_key(address: str) -> str:
    """Return the key of what lies at an address: gs://bucket/path as it is, a path of this machine as file:///path.

    Prefect refuses some characters of a path, `%` among them: they become `~` and two hexadecimal digits, as does `~`.
    A key that would be too long ends with a hash of itself.
    """
    uri = address if is_remote(address) else f"file://{address}"
    key = "".join(one if _is_allowed(one) else f"~{ord(one):02x}" for one in uri)
    if len(key) <= MAX_ASSET_KEY_LENGTH:
        return key
    digest = sha256(key.encode()).hexdigest()[:16]
    return f"{key[: MAX_ASSET_KEY_LENGTH - len(digest) - 1]}-{digest}"


def _is_allowed(character: str) -> bool:
    return character.isprintable() and character != "~" and character not in RESTRICTED_ASSET_CHARACTERS


def dataset_key(run: Run) -> str:
    """Return the key of the dataset that a run trains on."""
    return asset_key(run.root.address(run.dataset.path))


def checkpoint_key(run: Run) -> str:
    """Return the key of a run's checkpoints: one asset, however many there are at a time."""
    return asset_key(run.storage.address("checkpoints"))


def model_key(run: Run) -> str:
    """Return the key of the model that is collected of a run."""
    return asset_key(run.storage.address(FINAL))


def weights_key(weights: Pretrained) -> str:
    """Return the key of weights to start from; of another run's model it is that model's own."""
    folder = weights.files[0].address.rpartition("/")[0]
    if folder.endswith((f"/{LITGPT}", f"/{HUGGINGFACE}")):
        folder = folder.rpartition("/")[0]
    return asset_key(folder)


def origins(run: Run) -> list[str]:
    """Return the keys of what a run trains from: its dataset and, where it has some, its start weights."""
    return [dataset_key(run), *([] if run.weights is None else [weights_key(run.weights)])]


async def materialized(kind: AssetKind, key: str, *, name: str, of: Sequence[str], facts: Mapping[str, object]) -> None:
    """Record in Prefect that an asset was made just now, by a task of its own; outside of a flow run do nothing.

    Args:
        key: the asset's key, as `asset_key` makes it.
        name: what people call the asset.
        of: the keys of the assets that it was made from.
        facts: figures of this materialization.
    """
    if FlowRunContext.get() is None:
        return
    asset = Asset(key=key, properties=AssetProperties(name=name, description=f"A {kind} of train-litgpt"))

    @materialize(asset, asset_deps=[*of], by="train-litgpt", name=f"materialize-{kind}", **ONCE)
    async def record() -> None:
        asset.add_metadata(dict(facts))

    await record()
