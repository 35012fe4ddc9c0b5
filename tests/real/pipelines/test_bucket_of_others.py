"""A whole pipeline has its root in a bucket of a public emulator."""

import logging
from collections.abc import Callable
from functools import partial
from http.server import HTTPServer
from typing import Any

import pytest
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage
from serving_thread import served

from launcher.config import RunConfig
from launcher.runs.run import plan_run

pytestmark = pytest.mark.prefect


def test_pipeline_in_a_bucket_of_a_third_party_emulator(
    tiny: Callable[..., RunConfig], run_again: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text becomes a verified model."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    create_bucket("theirs", storage := Storage(use_memory_fs=True))
    with served(service := HTTPServer(("127.0.0.1", 0), partial(RequestHandler, storage))):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{service.server_port}")
        config = tiny({"root": "gs://theirs/ours"})
        done = run_again(config)
        assert done.final.step == config.train.max_steps
        assert "final/litgpt/lit_model.pth" in plan_run(config).storage.list()
        assert run_again(config).final == done.final
