"""The commands that are printed for a trained model work as they stand."""

from __future__ import annotations

import ast
import shlex

import pytest

from cli.usage import use_of


def test_a_model_in_a_bucket_is_copied_first_and_loaded_from_the_copy() -> None:
    copy, use = map(shlex.split, use_of("gs://bucket/runs/gpt-0f1e/final/litgpt", "gpt"))
    assert copy == ["gcloud", "storage", "cp", "-r", "gs://bucket/runs/gpt-0f1e/final/litgpt", "gpt"]
    assert 'LLM.load("gpt")' in use[-1]
    assert "gs://" not in use[-1]


@pytest.mark.parametrize("folder", ["output/runs/gpt-0f1e/final/litgpt", "/data/it's here/a \\ b"])
def test_a_model_in_a_folder_is_loaded_where_it_is_whatever_its_name(folder: str) -> None:
    [use] = map(shlex.split, use_of(folder, "gpt"))
    assert use[:2] == ["python", "-c"]
    constants = [node.value for node in ast.walk(ast.parse(use[2])) if isinstance(node, ast.Constant)]
    assert folder in constants
