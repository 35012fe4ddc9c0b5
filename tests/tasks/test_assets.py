"""The keys of assets: good for every address that a root can have."""

from __future__ import annotations

import pytest
from prefect.assets import Asset

from litgpt_demo.data.corpus.source import Source
from litgpt_demo.pretrained import Pretrained
from tasks.assets import asset_key, weights_key


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("gs://bucket/llm/datasets/stdlib-a1", "gs://bucket/llm/datasets/stdlib-a1"),
        ("/data/llm/runs/demo", "file:///data/llm/runs/demo"),
        ("/home/me/my runs/100%~/[a]", "file:///home/me/my~20runs/100~25~7e/~5ba~5d"),
        ("/data/\N{LATIN SMALL LETTER E WITH ACUTE}t\udce9", "file:///data/\N{LATIN SMALL LETTER E WITH ACUTE}t~dce9"),
    ],
)
def test_the_key_of_an_address_is_one_that_prefect_takes(address: str, key: str) -> None:
    assert asset_key(address) == Asset(key=asset_key(address)).key == key


def test_different_addresses_have_different_keys_though_they_are_long_or_look_alike() -> None:
    addresses = ["/a b", "/a~20b", *(f"/{'deep/' * 200}{name}" for name in "xy")]
    keys = {Asset(key=asset_key(address)).key for address in addresses}
    assert len(keys) == len(addresses)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("gs://bucket/runs/before-k/final/litgpt/model_config.yaml", "gs://bucket/runs/before-k/final"),
        ("/runs/before-k/final/huggingface/config.json", "file:///runs/before-k/final"),
        ("/models/pythia/config.json", "file:///models/pythia"),
        ("hf://models/EleutherAI/pythia-14m@0ff/config.json", "hf://models/EleutherAI/pythia-14m@0ff"),
    ],
)
def test_start_weights_of_another_run_are_that_runs_model(file: str, key: str) -> None:
    weights = Pretrained(
        address="as the user wrote it", kind="litgpt", fields={}, tokenizer=None, use_tokenizer="",
        files=(Source(address=file, name="model_config.yaml", size=1, version="crc32c:0"),),
    )  # fmt: skip
    assert Asset(key=weights_key(weights)).key == key
