"""The pipeline on a machine whose environment names a proxy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
from refusing_proxy import refusing_proxy

pytestmark = [pytest.mark.long, pytest.mark.prefect]

CONFIG = """
root: out
data:
  corpus: {kind: files, paths: [poem.txt], separator: "--"}
  tokenizer: {kind: train, vocab_size: 257}
"""


def test_a_dataset_is_prepared_without_a_word_to_the_proxy(tmp_path: Path) -> None:
    from prefect.settings import PREFECT_API_URL

    (tmp_path / "poem.txt").write_text("a rose--is a rose--is a rose")
    (tmp_path / "poem.yaml").write_text(CONFIG)
    with refusing_proxy() as proxy:
        environment = os.environ | proxy.environment | {"PREFECT_API_URL": str(PREFECT_API_URL.value())}
        done = subprocess.run(
            [Path(sys.executable).with_name("train-litgpt"), "prepare", "poem.yaml"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("out/datasets/*/manifest.json"))
    assert proxy.asked == []
