"""The commands that a card and a report show."""

from __future__ import annotations

from litgpt_demo.export.usage import usage


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
