"""A mixture of two small sources, which several tests of provenance read."""

from pathlib import Path
from typing import Any, TypeAlias

import pytest

from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.storage import open_storage

Mixed: TypeAlias = tuple[dict[str, Any], Path]


@pytest.fixture
def mixed(tmp_path: Path, tiny_dataset: Path) -> Mixed:
    """The section `data` of a config, and the finished dataset; each source has 9 documents."""
    sources = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for number in range(9):
            (tmp_path / name / f"{number}.txt").write_text(f"text {number} of the {name} source " * 20)
        files = {"kind": "files", "paths": [f"{tmp_path}/{name}/*.txt"]}
        sources.append({"corpus": files, "weight": 1, "name": name})
    tokenizer = {"kind": "litgpt", "path": f"{tiny_dataset}/tokenizer"}
    data = {"mixture": sources, "tokenizer": tokenizer, "validation_fraction": 0.2}
    planned = plan_dataset(DataConfig.model_validate(data))
    prepare(planned, open_storage(str(tmp_path / "root")))
    return data, tmp_path / "root" / planned.path
