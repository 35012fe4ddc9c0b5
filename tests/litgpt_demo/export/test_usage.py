"""The commands that are shown for a trained model work as they stand."""

from __future__ import annotations

import ast
import shlex

import pytest

from litgpt_demo.export.usage import usage, use_of


def test_a_model_on_this_machine_is_opened_from_any_folder() -> None:
    shown = usage("/data/runs/gpt-0f1e", huggingface=True)
    assert "LLM.load('/data/runs/gpt-0f1e/final/litgpt')" in shown
    assert "AutoModelForCausalLM.from_pretrained('/data/runs/gpt-0f1e/final/huggingface')" in shown
    assert "gcloud" not in shown


def test_a_model_in_a_bucket_is_copied_before_it_is_opened() -> None:
    first, *then = usage("gs://bucket/runs/gpt-0f1e", huggingface=True).splitlines()
    assert first == "# first, in a shell: gcloud storage cp --recursive gs://bucket/runs/gpt-0f1e/final ."
    assert "LLM.load('final/litgpt')" in "".join(then)
    assert "from_pretrained('final/huggingface')" in "".join(then)
    assert "gs://" not in "".join(then)


def test_a_model_that_transformers_cannot_open_is_not_opened_with_it() -> None:
    assert "transformers" not in usage("/data/runs/gpt-0f1e", huggingface=False)


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
